"""Whose request is next."""

from collections.abc import Iterable
from typing import Protocol

from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.tenant import Tenant


class Policy(Protocol):
    """Orders tenants that have a queue and whose next requests are of one class."""

    def rank(self, tenant: Tenant) -> tuple[float, ...]:
        """Smallest is next, ties by name. Changes with its service, its rows and its queue alone."""
        ...

    def counter(self, tenant: Tenant) -> float:
        """Its service, as if all prompt tokens of its rows had been computed."""
        ...

    def activate(self, tenant: Tenant, others: Iterable[Tenant]) -> None:
        """`tenant` competes from now on, which it did not for a while; `others` do already.

        Of these, whoever has the lowest counter suffices.
        """
        ...

    def entered(self, tenant: Tenant) -> None:
        """A request of `tenant` got a row."""
        ...

    def charge(self, tenant: Tenant, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> None:
        """Work was done for `tenant`: adds to its `service`. `cached_tokens`: found instead of computed."""
        ...

    def is_ahead(self, tenant: Tenant, other: Tenant, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether `tenant` was served more than `other` by more than this work is worth."""
        ...


class _Metered:
    """Counts service in weighted tokens over the tenant's weight."""

    def __init__(self, prompt_weight: float, output_weight: float, cached_weight: float) -> None:
        """`cached_weight`: of a prompt token that was found, as a part of one that was computed."""
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._cached_weight = cached_weight
        self._last_entered: Tenant | None = None

    def counter(self, tenant: Tenant) -> float:
        return tenant.service + self._prompt_weight * tenant.prefill_left / tenant.weight

    def entered(self, tenant: Tenant) -> None:
        self._last_entered = tenant

    def charge(self, tenant: Tenant, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> None:
        prompt = prompt_tokens + self._cached_weight * cached_tokens
        work = self._prompt_weight * prompt + self._output_weight * output_tokens
        cost = work / tenant.weight
        tenant.work += work
        tenant.service += cost
        tenant.received += cost


class FcfsPolicy(_Metered):
    """First come, first served, over all tenants. Service is counted for the metrics and orders nothing."""

    def rank(self, tenant: Tenant) -> tuple[float, ...]:
        return (tenant.head.number,)

    def activate(self, tenant: Tenant, others: Iterable[Tenant]) -> None:
        pass

    def is_ahead(self, tenant: Tenant, other: Tenant, prompt_tokens: int, output_tokens: int) -> bool:
        return False


class FairPolicy(_Metered):
    """Virtual token counters: the tenant that was served least for its weight is next.

    Of equals, as whoever returns is with the lowest, it is the one that has fewer rows for its weight.

    A tenant is charged as its work is done, and nothing is given back. Prompt tokens of its rows that are
    still to be computed count for its rank, so that one step does not admit many requests on one low counter.

    A queue that was empty, or held by a cap of its tenant, earns no credit: on return it starts at the
    smallest counter of those that compete; where none does, at that of the tenant whose request entered last.
    Source: Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588.
    """

    def rank(self, tenant: Tenant) -> tuple[float, ...]:
        return (self.counter(tenant), tenant.num_running / tenant.weight)

    def activate(self, tenant: Tenant, others: Iterable[Tenant]) -> None:
        last = self.counter(self._last_entered) if self._last_entered is not None else 0.0
        floor = min(map(self.counter, others), default=last)
        tenant.service += max(0.0, floor - self.counter(tenant))

    def is_ahead(self, tenant: Tenant, other: Tenant, prompt_tokens: int, output_tokens: int) -> bool:
        work = self._prompt_weight * prompt_tokens + self._output_weight * output_tokens
        return tenant.service > self.counter(other) + work / tenant.weight


def make_policy(config: SchedulerConfig) -> Policy:
    kinds: dict[str, type[FcfsPolicy] | type[FairPolicy]] = {"fcfs": FcfsPolicy, "fair": FairPolicy}
    return kinds[config.policy](config.prompt_weight, config.output_weight, config.cached_weight)
