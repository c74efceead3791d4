"""How long a request takes at least, from what the machine did lately."""

import math

from mlxd.scheduler.prefill import PrefillBudget
from mlxd.scheduler.request import Request

_DECAY = 0.8


class Pace:
    """The measured speed of prefill and of decode.

    Attributes:
        step_s: seconds a decode step takes; 0 until one was seen.
    """

    def __init__(self, prefill: PrefillBudget) -> None:
        self._prefill = prefill
        self.step_s = 0.0

    def observe(self, decode_s: float) -> None:
        """A step's decode part took so long; 0 where it had none, or one that tells nothing."""
        if decode_s > 0:
            self.step_s = _DECAY * self.step_s + (1 - _DECAY) * decode_s if self.step_s else decode_s

    def least_s(self, request: Request, num_found: int = 0) -> float:
        """Seconds the request takes at that speed if it waits for nobody; what was not measured counts as 0.

        It draws one token, or all of them where nothing can end it sooner.

        Args:
            num_found: positions of those it would prefill that need not be computed.
        """
        token_s = self._prefill.least_token_s
        prefill_s = (request.prefill_left - num_found) * token_s if math.isfinite(token_s) else 0.0
        return prefill_s + request.fewest_left * self.step_s

    def is_hopeless(self, request: Request, now: float, num_found: int = 0) -> bool:
        """Whether its deadline comes before it can end. `num_found`: as for `least_s`."""
        return request.deadline is not None and now + self.least_s(request, num_found) > request.deadline
