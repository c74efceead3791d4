"""Tokens a tenant may use in a time."""

import math
from dataclasses import dataclass

from mlxd.metrics.stats import QuotaGauges

_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class TokenBucket:
    """A bucket of one minute's tokens that fills steadily.

    So at most `per_minute * (1 + t / 60)` tokens are used in any t seconds. Rows hold what they may still
    use, so that it is there when they do.

    Attributes:
        level: tokens in it at `at`, in seconds.
        held: those of them that rows may still use.
    """

    per_minute: int
    level: float
    at: float = 0.0
    held: int = 0

    @classmethod
    def full(cls, per_minute: int) -> "TokenBucket":
        return cls(per_minute, per_minute)

    @classmethod
    def of(cls, gauges: QuotaGauges) -> "TokenBucket":
        """The bucket that has these gauges."""
        return cls(gauges.per_minute, gauges.level, gauges.at, gauges.held)

    def gauges(self) -> QuotaGauges:
        return QuotaGauges(self.per_minute, self.level, self.at, self.held)

    def left_at(self, now: float) -> int:
        """Tokens that may be held as well."""
        return max(0, int(self.level_at(now) - self.held + _ROUNDING))

    def level_at(self, now: float) -> float:
        return min(self.per_minute, self.level + max(0.0, now - self.at) * self.per_minute / 60)

    def ready_at(self, num_tokens: int, now: float) -> float:
        """When so many may be held as well; infinite where others have to be used or released first."""
        if num_tokens + self.held > self.per_minute:
            return math.inf
        lacking = num_tokens + self.held - self.level_at(now)
        return now if lacking <= _ROUNDING else now + 60 * lacking / self.per_minute

    def hold(self, num_tokens: int) -> None:
        """The caller has asked `ready_at` first."""
        self.held += num_tokens

    def use(self, num_tokens: int, now: float) -> None:
        """Of those that are held."""
        self.level = self.level_at(now) - num_tokens
        self.at = max(self.at, now)
        self.held -= num_tokens

    def release(self, num_tokens: int) -> None:
        """Held ones that nobody will use."""
        self.held -= num_tokens


def rated(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """One of this rate with what is in `bucket`, nothing of it held; full where there was none."""
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket.full(per_minute)
    return TokenBucket(per_minute, min(per_minute, bucket.level_at(now)), max(bucket.at, now))
