"""Identity of caches: a string that is compared, never guessed."""

from collections.abc import Sequence
from itertools import groupby


class SignatureError(Exception):
    """A cache has no signature, an unknown one, or one that two kinds claim: nothing may be routed by it."""


def signature_of(cache: object) -> str:
    """The cache's signature; anything that cannot say it is refused.

    Raises:
        SignatureError: no method, not a string, empty, or "unknown".
    """
    method = getattr(cache, "signature", None)
    value = method() if callable(method) else None
    if not isinstance(value, str) or not value or value == "unknown":
        raise SignatureError(f"{type(cache).__name__} has no signature (got {value!r})")
    return value


def check_claims(caches: Sequence[object]) -> None:
    """Raises SignatureError where caches of two classes give one signature: it could not tell them apart."""
    claimed: dict[str, type] = {}
    for cache in caches:
        signature = signature_of(cache)
        first = claimed.setdefault(signature, type(cache))
        if first is not type(cache):
            raise SignatureError(
                f"{first.__name__} and {type(cache).__name__} both claim signature {signature!r}"
            )


def join_signatures(signatures: Sequence[str]) -> str:
    """Identity of a whole model's state, in layer order, runs shortened: "kv:paged:64*30"."""
    runs = [(signature, len(list(run))) for signature, run in groupby(signatures)]
    return ",".join(signature if count == 1 else f"{signature}*{count}" for signature, count in runs)
