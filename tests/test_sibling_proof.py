"""A row's chunk ends, the position at which it is packed and its tokens are those of a run of its own.

Whatever joins, leaves, is cancelled or goes wrong beside it, for every way to keep state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kind_rigs import BOUNDARY, KINDS, rig_of
from scheduling import World, make_config, submission
from tiny_models import CHUNK, Rig, prompt_of

from mlxd.batching.plan import StepPlan
from mlxd.batching.row import Row
from mlxd.batching.runner import PendingStep, RunnerInfo
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.page_table import PageTable
from mlxd.scheduler.events import Finished, Tokens

LENGTHS = (1, 2, 4, 5, CHUNK, CHUNK + 1, BOUNDARY - 6, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, BOUNDARY + 2, 50)


@dataclass(frozen=True, slots=True)
class Guest:
    """A request of a cohort.

    Attributes:
        length, max_tokens: of its prompt and of its answer.
        gap: turns until the next one arrives.
        fate: what befalls it, `after` turns from its arrival.
    """

    length: int
    max_tokens: int
    gap: int = 0
    fate: str = "ends"
    after: int = 0


GUESTS = st.builds(
    Guest,
    length=st.sampled_from(LENGTHS),
    max_tokens=st.integers(1, 12),
    gap=st.sampled_from((0, 0, 1, 3)),
    fate=st.sampled_from(("ends", "ends", "cancelled", "faulty")),
    after=st.integers(0, 9),
)


@dataclass(slots=True)
class Life:
    """What became of a row.

    Attributes:
        drawn: tokens with their log-probabilities.
        chunk_ends: of its prefill, in order.
        packed_at: its positions when it was packed, once a layer.
    """

    outcome: str = ""
    drawn: list[object] = field(default_factory=list)
    chunk_ends: list[int] = field(default_factory=list)
    packed_at: list[int] = field(default_factory=list)


class Watch:
    """A runner that notes what its rows go through. Rows are told apart by their prompts."""

    def __init__(self, rig: Rig) -> None:
        self._runner = rig.runner
        self.export_pages = rig.runner.export_pages
        self.rows: dict[tuple[int, ...], Row] = {}
        self.lives: dict[tuple[int, ...], Life] = {}
        self._just_packed: list[PageTable] = []
        for layer in self._delayed_layers():
            layer._pack = self._noting(layer)  # type: ignore[method-assign]

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def _delayed_layers(self) -> Iterator[DelayedRows]:
        return (layer for layer in self._runner._caches if isinstance(layer, DelayedRows))

    def _noting(self, layer: DelayedRows) -> Callable[[Sequence[PageTable]], None]:
        def pack(tables: Sequence[PageTable]) -> None:
            self._just_packed += tables
            DelayedRows._pack(layer, tables)

        return pack

    def launch(self, plan: StepPlan) -> PendingStep:
        reached = [(chunk.row, chunk.end) for chunk in plan.prefill]
        for row, end in reached:
            self._life(row).chunk_ends.append(end)
        reached += [(entry.row, entry.position + 1) for entry in plan.decode]
        self._just_packed.clear()
        launched = self._runner.launch(plan)
        for row, end in reached:
            times = sum(table in row.tables for table in self._just_packed)
            self._life(row).packed_at += [end] * times
        return launched

    def _life(self, row: Row) -> Life:
        self.rows[tuple(row.prompt)] = row
        return self.lives.setdefault(tuple(row.prompt), Life())

    def spoil(self, row: Row) -> None:
        """Make NaN of everything the row holds."""
        for layer, group in zip(self._runner._caches, self._runner._layer_groups, strict=True):
            table: PageTable | None = row.tables[group]
            for storage in layer.storages:
                assert table is not None
                for array in storage.state():  # type: ignore[attr-defined]
                    if table.pages and mx.issubdtype(array.dtype, mx.floating):
                        array[mx.array(table.pages)] = mx.array(float("nan"))
                table = table.successor


def prompt_for(number: int, length: int) -> tuple[int, ...]:
    """No two numbers have one prompt, nor a page in common."""
    return (number, *prompt_of(length - 1, seed=number)) if length > 1 else (number,)


def live_through(rig: Rig, guests: Sequence[tuple[int, Guest]]) -> dict[int, Life]:
    """Serve these numbered requests; what became of each."""
    rig.runner.reset()
    watch = Watch(rig)
    world = World(make_config(max_rows=5), watch)  # type: ignore[arg-type]
    prompts = {number: prompt_for(number, guest.length) for number, guest in guests}
    due: dict[int, list[tuple[int, str]]] = {}
    turn = 0

    def pass_turn() -> None:
        nonlocal turn
        for number, fate in due.pop(turn, ()):
            row = watch.rows.get(prompts[number])
            if fate == "cancelled":
                world.cancel(submission(str(number)).key)
            elif row is not None:
                watch.spoil(row)
        world.turn()
        turn += 1

    for number, guest in guests:
        wanted = {
            "max_tokens": guest.max_tokens,
            "temperature": 0.0,
            "top_logprobs": 20,
            "ignore_eos": True,
        }
        world.submit(submission(str(number), prompts[number], **wanted))
        if guest.fate != "ends":
            due.setdefault(turn + guest.after, []).append((number, guest.fate))
        for _ in range(guest.gap):
            pass_turn()
    while not world.is_idle:
        pass_turn()
    world.run()
    lives = {number: watch.lives.get(prompts[number], Life()) for number in prompts}
    for event in world.events:
        if isinstance(event, Tokens):
            lives[int(event.key.request_id)].drawn += zip(event.token_ids, event.logprobs, strict=True)
        elif isinstance(event, Finished):
            lives[int(event.key.request_id)].outcome = event.outcome
    return lives


@cache
def life_alone(kind: str, number: int, length: int, max_tokens: int) -> Life:
    return live_through(rig_of(kind), [(number, Guest(length, max_tokens))])[number]


def assert_each_as_alone(kind: str, guests: Sequence[Guest]) -> None:
    lives = live_through(rig_of(kind), list(enumerate(guests)))
    for number, guest in enumerate(guests):
        life, alone = lives[number], life_alone(kind, number, guest.length, guest.max_tokens)
        if life.outcome == "length":
            assert life == alone, guest
        else:
            assert guest.fate == {"cancelled": "cancelled", "failed": "faulty"}[life.outcome]
            for found, whole in (
                (life.drawn, alone.drawn),
                (life.chunk_ends, alone.chunk_ends),
                (life.packed_at, alone.packed_at),
            ):
                assert found == whole[: len(found)], guest


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(guests=st.lists(GUESTS, min_size=2, max_size=6))
def test_whatever_happens_beside_a_row_it_lives_as_if_alone(kind: str, guests: list[Guest]) -> None:
    assert_each_as_alone(kind, guests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(guests=st.lists(GUESTS, min_size=2, max_size=9))
def test_whatever_happens_in_many_more_cohorts(kind: str, guests: list[Guest]) -> None:
    assert_each_as_alone(kind, guests)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_seen_and_ends_its_row_alone(kind: str) -> None:
    """Guards the tests above: what is done to a row shows, and rows are packed where they should be."""
    guests = [
        Guest(BOUNDARY - 6, 10),
        Guest(BOUNDARY + 1, 10, fate="faulty", after=5),
        Guest(50, 10, gap=1),
        Guest(5, 10),
    ]
    assert_each_as_alone(kind, guests)
    lives = live_through(rig_of(kind), list(enumerate(guests)))
    assert [life.outcome for life in lives.values()] == ["length", "failed", "length", "length"]
    assert lives[2].chunk_ends == [16, 32, 48, 49]
    num_layers = sum(isinstance(layer, DelayedRows) for layer in rig_of(kind).runner._caches)
    assert [len(life.packed_at) for life in lives.values()] == [num_layers] * 3 + [0]
    assert {at for life in lives.values() for at in life.packed_at} <= {BOUNDARY}
    assert bool(num_layers) == ("delayed" in kind)
