"""Rows of models with every way of keeping state come and go in random order; each is as if it were alone."""

import random
from functools import cache

import pytest
from come_and_go import come_and_go, tokens_alone
from models_table import Bench
from tiny_zoo import VOCAB, zoo_model

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


@cache
def bench(name: str) -> Bench:
    model = zoo_model(name)
    made = Bench(model, inspect_layers(model))
    made.runner.set_attention(ATTENTION[name])
    made.runner.step.enabled = False
    return made


def prompt_of(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(VOCAB) for _ in range(chance.choice((1, 2, 7, 8, 9, 15, 16, 17, 40))))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ATTENTION)
def test_rows_that_come_and_go_are_as_if_alone(name: str, seed: int) -> None:
    chance, runner = random.Random(f"{name}{seed}"), bench(name).runner
    for row in come_and_go(runner, chance, lambda: prompt_of(chance)):
        assert row.output == tokens_alone(runner, row.prompt, len(row.output))
