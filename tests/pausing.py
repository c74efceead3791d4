"""Worlds whose requests are paused and go on."""

from scheduling import VOCAB, World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.scheduler.events import Finished, RequestKey, Submission, Tokens
from mlxd.scheduler.request import Request

PAGE = 16


def world_of(*tenants: object, pages: int | None = None, **scheduler: object) -> World:
    names = tenants or [make_tenant(name, max_priority="interactive") for name in "ab"]
    settings: dict[str, object] = {"max_rows": 1, "slice_tokens": None} | scheduler
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=PAGE, page_size=PAGE, num_pages=pages)
    return World(make_config(*names, **settings), FakeRunner(memory, vocab_size=VOCAB))  # type: ignore[arg-type]


def request(name: str, tenant: str = "a", num_prompt: int = 3, max_tokens: int = 40) -> Submission:
    return submission(name, (1,) * num_prompt, tenant=tenant, max_tokens=max_tokens)


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.turn()


def pause(world: World, name: str, tenant: str = "a") -> Request:
    key = RequestKey(tenant, name)
    world.scheduler.paused.pause(key)
    return world.scheduler._open[key]


def unpause(world: World, name: str, tenant: str = "a") -> None:
    world.scheduler.paused.unpause(RequestKey(tenant, name))


def outcome(world: World, name: str, tenant: str = "a") -> str:
    [end] = [e for e in world.events if isinstance(e, Finished) and e.key == (tenant, name)]
    return end.outcome


def tokens(world: World, name: str, tenant: str = "a") -> list[int]:
    told = [e.token_ids for e in world.events if isinstance(e, Tokens) and e.key == (tenant, name)]
    return [token for ids in told for token in ids]


def check_text(world: World, made: Submission) -> None:
    """It has the tokens of a run alone."""
    assert outcome(world, made.key.request_id, made.key.tenant) == "length"
    alone = fake_completion(made.prompt, 7, made.sampling.max_tokens, VOCAB)
    assert tokens(world, made.key.request_id, made.key.tenant) == alone
