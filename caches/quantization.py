"""How keys and values are packed, where the configuration asks for it."""

from typing import Literal

import msgspec


class Quantization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Affine: each `group_size` numbers of a head share a scale and a bias; each becomes a code of `bits`."""

    bits: Literal[4, 8]
    group_size: Literal[32, 64] = 64
