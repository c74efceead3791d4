"""Operations of a decode step: what MLX would run, counted from the graph that it built.

python benchmarks/operations.py --model tiny --rows 8 --context 256 --join
"""

import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import entry
from figures import record
from options import VARIANTS, Parser, add_out, model, number_from

from mlxd.batching.blas import ensure_blas

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxd.batching.mlx_runner import MlxRunner

VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Depends",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unflatten",
    }
)
"""Primitives that, as a rule, only say how an array is looked at: nothing is launched for them."""
_NODE = re.compile(r'\[label ="(\w+)", shape=rectangle\]')


def operations(outputs: Sequence["mx.array"]) -> Counter[str]:
    """Primitives that lie between these arrays and those that are evaluated, by name."""
    import mlx.core as mx

    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return Counter(_NODE.findall(graph.getvalue()))


def of_step(runner: "MlxRunner", num_rows: int, widths: Sequence[int]) -> Counter[str]:
    """Of a greedy decode step of so many rows, whose page tables are so wide."""
    from mlxd.batching.sampling_params import GREEDY

    # What pools still wait for, such as scrubbing, is no part of the step that is counted.
    runner.trace(num_rows, widths, GREEDY)
    counts: Counter[str] = Counter()
    run = runner.step.run

    def counted(*arguments: object, **options: object) -> object:
        drawn, is_compiled = run(*arguments, **options)  # type: ignore[arg-type]
        counts.update(operations(drawn))
        return drawn, is_compiled

    runner.step.run = counted  # type: ignore[assignment]
    try:
        runner.trace(num_rows, widths, GREEDY)
    finally:
        runner.step.run = run  # type: ignore[method-assign]
    return counts


def by_layer(counts: Counter[str], num_layers: int) -> dict[str, object]:
    """Launches and views, of each layer and of the rest of the step; primitives of each layer by name."""
    each = {name: count // num_layers for name, count in counts.items() if count >= num_layers}
    rest = {name: count % num_layers for name, count in counts.items() if count % num_layers}
    figures: dict[str, object] = {}
    for part, names in (("layer", each), ("rest", rest)):
        figures[f"launches_{part}"] = sum(count for name, count in names.items() if name not in VIEWS)
        figures[f"views_{part}"] = sum(count for name, count in names.items() if name in VIEWS)
    return figures | {"layer": dict(sorted(each.items())), "rest": dict(sorted(rest.items()))}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=model, default="tiny", help="as of benchmarks/decode.py")
    parser.add_argument("--rows", type=number_from(1), default=8)
    parser.add_argument("--context", type=number_from(1), default=256)
    parser.add_argument("--attention", choices=VARIANTS, default="in_place", help="decode attention variant")
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--join", action="store_true", help="join projections that share their input")
    parser.add_argument("--multiply", action="store_true", help="products of our own, on CUDA")
    add_out(parser, "operations")
    options = parser.options()
    ensure_blas()
    from models import load, make_runner

    from mlxd.batching.tuning import typical_widths

    bench = load(options.model)
    runner = make_runner(
        bench,
        max_rows=options.rows,
        max_model_len=2 * options.context,
        page_size=64,
        attention=options.attention,
        compile=options.compile,
        join=options.join,
        multiply=options.multiply,
    )
    record({"kind": "choices", **runner.info.notes}, options.out)
    counts = of_step(runner, options.rows, typical_widths(runner.info.memory, options.rows))
    record({"kind": "operations", **by_layer(counts, len(bench.model.layers))}, options.out)


if __name__ == "__main__":
    entry.run(main)
