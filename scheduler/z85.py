"""Z85, ZeroMQ's text form of keys: five printable characters stand for four bytes (ZeroMQ RFC 32)."""

import string

KEY_LENGTH = 40

_DIGITS = {
    character: value
    for value, character in enumerate(
        string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
    )
}


def is_key(text: str) -> bool:
    """Whether `text` stands for the 32 bytes of a key."""
    return len(text) == KEY_LENGTH and all(_is_group(text[at : at + 5]) for at in range(0, KEY_LENGTH, 5))


def _is_group(characters: str) -> bool:
    value = 0
    for character in characters:
        if character not in _DIGITS:
            return False
        value = 85 * value + _DIGITS[character]
    return value < 2**32
