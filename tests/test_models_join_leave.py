"""Rows of models with every way of keeping state come and go in random order; each is as if it were alone."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
from models_table import Bench
from tiny_zoo import VOCAB, zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import GREEDY
from mlxd.caches.kinds import inspect_layers

ATTENTION = {
    "qwen3_next": "in_place",
    "mamba2": "in_place",
    "falcon_h1": "in_place",
    "nemotron_h": "in_place",
    "bailing_moe_linear": "in_place",
    "longcat_flash_ngram": "gathered",
    "deepseek_v32": "gathered",
    "gemma3n": "in_place",
    "gemma2": "grouped",
}
_MOST_TOKENS = 8


@cache
def bench(name: str) -> Bench:
    model = zoo_model(name)
    made = Bench(model, inspect_layers(model))
    made.runner.set_attention(ATTENTION[name])
    made.runner.step.enabled = False
    return made


def prompt_of(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(VOCAB) for _ in range(chance.choice((1, 2, 7, 8, 9, 15, 16, 17, 40))))


def tokens_alone(name: str, prompt: Sequence[int], count: int) -> list[int]:
    driver = Driver(bench(name).runner, bench(name).memory)
    row = driver.join(prompt, GREEDY)
    driver.prefill()
    for _ in range(count):
        driver.decode()
    tokens = list(row.output)
    driver.leave(row)
    bench(name).runner.reset()
    return tokens


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ATTENTION)
def test_rows_that_come_and_go_are_as_if_alone(name: str, seed: int) -> None:
    chance = random.Random(f"{name}{seed}")
    rig = bench(name)
    rig.runner.reset()
    driver = Driver(rig.runner, rig.memory, pipelined=True)
    gone: list[Row] = []
    for _ in range(20):
        full = len(driver.rows) == rig.runner.info.max_batch
        if not driver.rows or (not full and chance.random() < 0.4):
            driver.join(prompt_of(chance), GREEDY)
            driver.prefill()
        driver.decode()
        for row in list(driver.rows):
            if len(row.output) >= _MOST_TOKENS or chance.random() < 0.1:
                driver.flush()
                driver.leave(row)
                gone.append(row)
    driver.flush()
    left = list(driver.rows)
    for row in left:
        driver.leave(row)
    for pool in driver.pools:
        pool.check_integrity()
        assert pool.num_held == 0
    rig.runner.reset()
    for row in [*gone, *left]:
        assert row.output == tokens_alone(name, row.prompt, len(row.output))
