"""Names that prefixes are kept under, and who had them before."""

import errno
from collections import Counter
from collections.abc import Set
from pathlib import Path

import msgspec

from mlxd.caches.files import read_file, replace_file

_MOST_BYTES = 2**24


class _State(msgspec.Struct, forbid_unknown_fields=True):
    """`given_up`: how often, by name."""

    in_use: set[str]
    given_up: dict[str, int]


class Namespaces:
    """Tells those apart who had a name one after another, where there is a file also over restarts.

    What was kept for who has given a name up is found by nobody any more, and goes as room runs out.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises OSError: the file is there, and cannot be read."""
        self._path = path
        self._in_use: Set[str] = frozenset()
        self._given_up: Counter[str] = Counter()
        if path is not None and path.exists():
            state = _read(path)
            self._in_use = state.in_use
            self._given_up.update(state.given_up)

    def __getitem__(self, name: str) -> str:
        """The namespace of who has the name now. A name has no null character."""
        times = self._given_up[name]
        return f"{name}\0{times}" if times else name

    def keep(self, names: Set[str]) -> None:
        """These are in use from now on, and all others given up.

        Raises:
            OSError: that cannot be written, so it holds in this process alone.
        """
        if names == self._in_use:
            return
        self._given_up.update(self._in_use - names)
        self._in_use = frozenset(names)
        if self._path is not None:
            state = _State(set(names), dict(self._given_up))
            replace_file(self._path, msgspec.json.encode(state, order="sorted"))


def _read(path: Path) -> _State:
    try:
        return msgspec.json.decode(read_file(path, _MOST_BYTES), type=_State)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = f"{path} is damaged; remove its folder to begin a new one"
        raise OSError(errno.EINVAL, text) from None
