"""How keys and values are packed, where the configuration asks for it."""

from typing import Annotated, Literal

import msgspec


class Quantization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Affine: each `group_size` numbers of a head share a scale and a bias; each becomes a code of `bits`.

    `start`: a row is dense until its first whole prefill chunk that ends here or later; 0: packed at once.
    """

    bits: Literal[4, 8]
    group_size: Literal[32, 64] = 64
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
