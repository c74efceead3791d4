"""A world whose plans are kept."""

from scheduling import VOCAB, World, make_config

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.plan import StepPlan
from mlxd.scheduler.events import Finished, Tokens

CHUNK = 16


class PlanTape(FakeRunner):
    """Keeps every plan."""

    def __init__(self, **memory: int | None) -> None:
        defaults = {"max_rows": 8, "max_model_len": 256, "chunk": CHUNK, "page_size": 8}
        self.plans: list[StepPlan] = []
        super().__init__(fake_memory(**(defaults | memory)), vocab_size=VOCAB)  # type: ignore[arg-type]

    def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        self.plans.append(plan)
        return super().launch(plan)


def make_world(*, memory: dict[str, int | None] | None = None, **scheduler: object) -> tuple[World, PlanTape]:
    runner = PlanTape(**(memory or {}))
    return World(make_config(**scheduler), runner), runner  # type: ignore[arg-type]


def finished(world: World) -> dict[str, Finished]:
    return {e.key.request_id: e for e in world.events if isinstance(e, Finished)}


def tokens_of(world: World, request_id: str) -> list[int]:
    found = [e.token_ids for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id]
    return [token for ids in found for token in ids]
