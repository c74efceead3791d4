"""Classes of requests. A higher one goes first, whatever the tenants' shares."""

from enum import IntEnum
from typing import Literal

PriorityName = Literal["interactive", "normal", "batch"]


class Priority(IntEnum):
    """Smaller goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def of(cls, name: PriorityName) -> "Priority":
        return cls[name.upper()]
