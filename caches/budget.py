"""Sizes as people write and read them; the KV budget: bytes, or a share of free device memory."""

import math
import re

MIN_BYTES = 2**20
_UNITS = {
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB")
_TEXT = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]i?B)", re.IGNORECASE | re.ASCII)
ALLOWED_SIZES = 'bytes from 1 MiB on (1073741824, "8GiB", "512MiB")'
ALLOWED_BUDGETS = f"{ALLOWED_SIZES} or a fraction above 0 up to 1 (0.6)"


def check_budget(value: str | int | float) -> None:
    """Raises ValueError for a bad value; the text follows the setting's name ("is ...; it must be ...")."""
    if isinstance(value, float):
        good = math.isfinite(value) and 0 < value <= 1
    else:
        size = _size_bytes(value)
        good = size is not None and size >= MIN_BYTES
    if not good:
        raise ValueError(f"is {value!r}; it must be {ALLOWED_BUDGETS}")


def parse_budget(value: str | int | float, device_free_bytes: int) -> int:
    """Bytes the KV pages may take together.

    Args:
        value: an int is bytes, text is bytes with a unit, a float is a share of `device_free_bytes`.
        device_free_bytes: device memory left once the weights are loaded.

    Raises:
        ValueError: a bad value, or one that gives less than 1 MiB or more than is free.
    """
    check_budget(value)
    size = int(value * device_free_bytes) if isinstance(value, float) else _size_bytes(value)
    assert size is not None
    if not MIN_BYTES <= size <= device_free_bytes:
        raise ValueError(
            f"is {value!r}, {size} bytes; it must be from {MIN_BYTES} bytes "
            f"to the {device_free_bytes} bytes that are free after the weights"
        )
    return size


def parse_size(value: str | int) -> int:
    """Bytes; raises ValueError for less than 1 MiB or what is no size."""
    size = _size_bytes(value)
    if size is None or size < MIN_BYTES:
        raise ValueError(f"is {value!r}; it must be {ALLOWED_SIZES}")
    return size


def show_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_SHOWN) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_SHOWN[unit]}"


def _size_bytes(value: str | int) -> int | None:
    """Bytes meant by an int or by text with a unit; None where it is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    match = _TEXT.fullmatch(value)
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None
