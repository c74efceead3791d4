"""Tenants that use a rule to get more than their share, or that a rule would forget."""

from scheduling import VOCAB, World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.plan import DecodeEntry
from mlxd.scheduler.events import Finished, Submission, Tokens
from mlxd.scheduler.priority import Priority

NORMAL, BATCH, INTERACTIVE = Priority.NORMAL, Priority.BATCH, Priority.INTERACTIVE
NUM_LATER = 40


def world_of(*tenants: object, runner: FakeRunner | None = None, **scheduler: object) -> World:
    settings: dict[str, object] = {"max_rows": 1, "slice_tokens": None} | scheduler
    runner = runner or FakeRunner(fake_memory(max_rows=8, max_model_len=256, chunk=16), vocab_size=VOCAB)
    return World(make_config(*tenants, **settings), runner)  # type: ignore[arg-type]


def any_class(name: str, **fields: object) -> object:
    return make_tenant(name, max_priority="interactive", max_waiting=500, **fields)


def request(name: str, tenant: str, priority: Priority = NORMAL, **sampling: object) -> Submission:
    made = submission(name, tenant=tenant, **sampling)
    return Submission(made.key, made.prompt, made.sampling, 0.0, priority)


def ended(world: World) -> list[str]:
    return [e.key.request_id for e in world.events if isinstance(e, Finished)]


def part_of(world: World, tenant: str) -> float:
    """What part of the next twenty requests to end is the tenant's, of those that were sent later."""
    before = len(ended(world))
    while len(ended(world)) < before + 20:
        world.turn()
    names = [name for name in ended(world)[before:] if name.startswith("later")]
    return sum(name.startswith(f"later {tenant}") for name in names) / len(names)


def send_later(world: World, *tenants: str) -> None:
    for tenant in tenants:
        for number in range(NUM_LATER):
            world.submit(request(f"later {tenant} {number}", tenant))


def test_a_row_that_makes_way_brings_back_no_credit_of_the_time_its_tenant_had_no_queue() -> None:
    world = world_of(any_class("busy"), any_class("saver"), any_class("boss"), max_rows=2)
    world.submit(request("long", "saver", max_tokens=250))
    world.scheduler.book["busy"].service = 10_000.0
    send_later(world, "busy")
    for _ in range(5):
        world.turn()
    for number in range(2):
        world.submit(request(f"boss {number}", "boss", INTERACTIVE))
    while not any(step.preemptions for step in world.tape.steps):
        world.turn()
    send_later(world, "saver")
    assert part_of(world, "saver") <= 0.6


def test_a_request_of_a_lower_class_that_waits_all_the_time_saves_up_nothing() -> None:
    world = world_of(any_class("busy"), any_class("saver"), ageing_s=1000)
    world.submit(request("waits", "saver", BATCH))
    world.scheduler.book["busy"].service = 10_000.0
    send_later(world, "busy")
    for _ in range(5):
        world.turn()
    send_later(world, "saver")
    assert part_of(world, "saver") <= 0.6


def test_a_raised_request_keeps_no_other_of_its_tenant_from_rising() -> None:
    """The batch request rises behind an older normal one, which is due later as its lane had a row."""
    world = world_of(any_class("flood"), any_class("low"), ageing_s=30)
    for number in range(2):
        world.submit(request(f"low {number}", "low"))
    world.submit(request("low batch", "low", BATCH))
    while len(world.scheduler.batch) == 0:
        world.turn()
    for number in range(400):
        world.submit(request(f"flood {number}", "flood", INTERACTIVE))
    for _ in range(400):
        world.turn()
    assert {"low 0", "low 1", "low batch"} <= set(ended(world))


def test_weights_far_apart_starve_no_equal_tenant() -> None:
    """Half a billion tokens of the lightest tenant, and a token of the heaviest still counts beside them."""
    heavy = [any_class(name, weight=1e3) for name in ("a", "b")]
    world = world_of(any_class("light", weight=1e-3), *heavy)
    for number in range(100):
        world.submit(request(f"light {number}", "light", max_tokens=100))
    world.scheduler.book["light"].service = 2 * 5e8 / 1e-3
    while len(ended(world)) < 2:
        world.turn()
    send_later(world, "a", "b")
    assert 0.4 <= part_of(world, "b") <= 0.6


def test_a_token_that_went_wrong_after_its_row_made_way_is_released() -> None:
    def fault(entry: DecodeEntry) -> str | None:
        return "bad" if entry.row.row_id == 1 and entry.output_index == 20 else None

    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16)
    runner = FakeRunner(memory, vocab_size=VOCAB, decode_fault=fault)
    world = world_of(any_class("low", tokens_per_minute=1000), any_class("boss"), runner=runner)
    low = request("low", "low", max_tokens=100)
    world.submit(low)
    row = world.scheduler._open[low.key]
    while len(row.output) + row.num_inflight < 21:
        world.turn()
    world.submit(request("boss", "boss", INTERACTIVE))
    world.run()
    ends = {e.key.request_id: e.outcome for e in world.events if isinstance(e, Finished)}
    assert ends == {"low": "failed", "boss": "length"}
    bucket = world.scheduler.book["low"].bucket
    assert bucket is not None
    assert bucket.held == 0


def test_a_storm_of_cancels_is_charged_for_all_that_was_drawn() -> None:
    """Each is cancelled with two tokens in flight, which nobody will read."""
    world = world_of(any_class("storm", tokens_per_minute=10_000))
    for number in range(20):
        sent = request(str(number), "storm", max_tokens=50)
        world.submit(sent)
        while not world.scheduler._open[sent.key].output:
            world.turn()
        world.cancel(sent.key)
    world.run()
    drawn = sum(kind == "decode" for plan in world.plans for kind, *_ in plan)
    told = sum(len(event.token_ids) for event in world.events if isinstance(event, Tokens))
    storm = world.scheduler.book["storm"]
    assert drawn > told >= 20
    assert storm.received == 20 * len(sent.prompt) + 2 * drawn
    assert storm.bucket is not None
    assert storm.bucket.held == 0
