"""Tokens a tenant may use in a time."""

from dataclasses import dataclass

_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class TokenBucket:
    """A bucket of one minute's tokens that fills steadily.

    So at most `per_minute * (1 + t / 60)` tokens are used in any t seconds. What may be used is taken before,
    what was not is given back.

    Attributes:
        level: tokens in it at `at`, in seconds.
    """

    per_minute: int
    level: float
    at: float = 0.0

    @classmethod
    def full(cls, per_minute: int) -> "TokenBucket":
        return cls(per_minute, per_minute)

    def level_at(self, now: float) -> float:
        return min(self.per_minute, self.level + max(0.0, now - self.at) * self.per_minute / 60)

    def ready_at(self, num_tokens: int, now: float) -> float:
        """When it will hold so many, at most `per_minute`, if nobody takes any; `now` where it does."""
        lacking = num_tokens - self.level_at(now)
        return now if lacking <= _ROUNDING else now + 60 * lacking / self.per_minute

    def take(self, num_tokens: int, now: float) -> None:
        """The caller has asked `ready_at` first."""
        self.level = self.level_at(now) - num_tokens
        self.at = max(self.at, now)

    def give_back(self, num_tokens: int) -> None:
        """Never more than was taken."""
        self.level = min(self.per_minute, self.level + num_tokens)
