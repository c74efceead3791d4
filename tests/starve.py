"""Memory of a real GPU runs out in a step: `python tests/starve.py`. Needs a GPU that MLX computes on.

Three rows of a random Llama run to their end, once undisturbed. Then all memory but `--spare` MiB is taken,
and as they run again, a long prompt comes whose prefill needs more than is left. It must end as
"out_of_memory", the three must run to their end, and so must one that comes later. Prints one JSON line; ends
with 1 where it is not so.
"""

import argparse
import json
import queue
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from scheduling import make_config, submission

from mlxd.batching.device import device_name
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, Runner, RunnerInfo
from mlxd.caches.kinds import group_specs, inspect_layers
from mlxd.caches.sizing import plan_memory
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished, Tokens

PAGE, CHUNK, MAX_LEN, VOCAB = 64, 8192, 16384, 4096
INTERMEDIATE = 32768
"""Wide, so that the long prompt's one chunk takes twice 512 MiB for a layer's gate and up."""
NUM_ROWS, MAX_TOKENS = 3, 200
WAIT_S = 120.0
MIB = 2**20


class Starved:
    """An engine over a random model, and what it told."""

    def __init__(self) -> None:
        self.engine = Engine(make_config(), runner_factory=self._make_runner, seed=0)
        self.told: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self.tokens: dict[str, list[int]] = {}
        self.outcomes: dict[str, str] = {}
        self.engine.start(self.told.put)
        self.engine.wait_ready(WAIT_S)

    def _make_runner(self, config: Config, progress: Progress) -> Runner:
        model = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=1024,
                num_hidden_layers=2,
                intermediate_size=INTERMEDIATE,
                num_attention_heads=8,
                num_key_value_heads=4,
                rms_norm_eps=1e-5,
                vocab_size=VOCAB,
            )
        )
        model.set_dtype(mx.bfloat16)
        mx.eval(model.parameters())
        layers = inspect_layers(model)
        memory = plan_memory(
            group_specs(layers, PAGE, CHUNK),
            budget_bytes=256 * MIB,
            weights_bytes=mx.get_active_memory(),
            max_rows=8,
            max_model_len=MAX_LEN,
            chunk=CHUNK,
        )
        info = RunnerInfo("random", VOCAB, memory, 8, frozenset(), mx.default_device().type.name, True)
        return MlxRunner(model, layers, memory, info)

    def send(self, name: str, num_prompt: int, max_tokens: int = MAX_TOKENS) -> None:
        prompt = [(7919 * (i + sum(name.encode()))) % VOCAB for i in range(num_prompt)]
        at = self.engine.clock()
        self.engine.submit(submission(name, prompt, at=at, max_tokens=max_tokens, temperature=0.0))

    def listen(self) -> None:
        for event in self.told.get(timeout=WAIT_S):
            match event:
                case Tokens():
                    self.tokens.setdefault(event.key.request_id, []).extend(event.token_ids)
                case Finished():
                    self.outcomes[event.key.request_id] = event.error_code or event.outcome

    def serve_rows(self, *, beside: int = 0) -> dict[str, list[int]]:
        """Tokens of the three rows; `beside`: a prompt so long comes once they have begun."""
        names = [f"row {number}" for number in range(NUM_ROWS)]
        for name in names:
            self.tokens.pop(name, None)
            self.outcomes.pop(name, None)
            self.send(name, 100)
        while len(self.tokens.get(names[-1], ())) < MAX_TOKENS // 4:
            self.listen()
        if beside:
            self.send("long", beside)
        while not {*names, *(("long",) if beside else ())} <= set(self.outcomes):
            self.listen()
        return {name: self.tokens[name] for name in names}


def take_all_but(spare_mib: int) -> list[mx.array]:
    mx.clear_cache()
    num_mib = int(mx.device_info()["free_memory"]) // MIB - spare_mib
    parts = [mx.zeros((min(1024, num_mib - at), MIB), mx.uint8) for at in range(0, num_mib, 1024)]
    mx.eval(parts)
    return parts


def main(arguments: argparse.Namespace) -> int:
    if device_name() != "gpu":
        print("MLX has no GPU here, and its CPU build does not tell that memory ran out", file=sys.stderr)
        return 2
    starved = Starved()
    expected = starved.serve_rows()
    ballast = take_all_but(arguments.spare)
    found = starved.serve_rows(beside=CHUNK + 1)
    starved.send("late", 100)
    while "late" not in starved.outcomes:
        starved.listen()
    snapshot = starved.engine.snapshot
    equal = [sum(a == b for a, b in zip(found[name], expected[name], strict=True)) for name in expected]
    is_right = (
        starved.outcomes == {"long": "out_of_memory", "late": "length"} | dict.fromkeys(expected, "length")
        and snapshot.out_of_memory == 1
    )
    figures: dict[str, Any] = {
        "device": str(mx.device_info().get("device_name", "")),
        "outcomes": starved.outcomes,
        "out_of_memory": snapshot.out_of_memory,
        "equal_tokens": equal,
        "active_mib": snapshot.runner.memory_active_bytes // MIB,
        "taken_mib": sum(part.nbytes for part in ballast) // MIB,
    }
    print(json.dumps(figures))
    starved.engine.stop(WAIT_S)
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spare", type=int, default=256, help="MiB of the GPU that are left")
    sys.exit(main(parser.parse_args()))
