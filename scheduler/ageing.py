"""Lower classes do not starve."""

from mlxd.scheduler.priority import Priority


class Ageing:
    """For how long tenants' lanes have waited, each since it got a row last or was empty.

    Those that began to wait later come later, so only the first of a class has to be looked at.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: tuple[dict[str, float], ...] = tuple({} for _ in Priority)

    def begin(self, name: str, level: int, now: float) -> None:
        """Tenant `name`'s lane of class `level` waits from now on."""
        self._since[level].pop(name, None)
        self._since[level][name] = now

    def end(self, name: str, level: int) -> None:
        self._since[level].pop(name, None)

    def due(self, level: int, now: float) -> list[str]:
        """Tenants whose lane of this class has waited long enough."""
        found: list[str] = []
        for name, since in self._since[level].items():
            if now - since < self._after_s:
                break
            found.append(name)
        return found
