"""Rows that join and leave by chance, and what each of them draws alone."""

import random
from collections.abc import Callable, Sequence

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.row import Row

_NUM_STEPS = 20
_MOST_TOKENS = 8


def come_and_go(runner: MlxRunner, chance: random.Random, prompt: Callable[[], Sequence[int]]) -> list[Row]:
    """All rows that there were, the last ones gone, too; no page is held any more."""
    runner.reset()
    driver = Driver(runner, runner.info.memory, pipelined=True)
    rows: list[Row] = []
    for _ in range(_NUM_STEPS):
        has_room = len(driver.rows) < runner.info.max_batch
        if not driver.rows or (has_room and chance.random() < 0.4):
            rows.append(driver.join(prompt()))
            driver.prefill()
        driver.decode()
        for row in list(driver.rows):
            if len(row.output) >= _MOST_TOKENS or chance.random() < 0.1:
                driver.flush()
                driver.leave(row)
    driver.flush()
    for row in list(driver.rows):
        driver.leave(row)
    for pool in driver.pools:
        pool.check_integrity()
        assert pool.num_held == 0
    return rows


def tokens_alone(runner: MlxRunner, prompt: Sequence[int], count: int) -> list[int]:
    runner.reset()
    driver = Driver(runner, runner.info.memory)
    row = driver.join(prompt)
    driver.prefill()
    for _ in range(count):
        driver.decode()
    driver.leave(row)
    return row.output
