"""Figures of the benchmarks, drawn from their JSON lines: no measurement happens here."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from entry import BenchmarkError
from figures import Line
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_OURS, _THEIRS, _FLOOR = "tab:blue", "tab:orange", "0.35"
_COLOURS = {"mlxd": _OURS, "mlx-lm": _THEIRS, "mlx_lm.server": _THEIRS}
_ENGINES, _SERVERS = ("mlxd", "mlx-lm"), ("mlxd", "mlx_lm.server")
_PANEL = 3.4
_MOST_COLUMNS = 3


def draw_decode(lines: Sequence[Line], path: Path) -> None:
    """Milliseconds a step by rows, a panel for each model and context; the floor beside them."""
    steady = _cases(lines, "steady")
    panels = _distinct((line["model"], line["context"]) for line in steady)
    figure, all_axes = _panels(len(panels))
    for axes, (model, context) in zip(all_axes, panels, strict=False):
        own = [line for line in steady if (line["model"], line["context"]) == (model, context)]
        for lengths, style in (("aligned", "-"), ("ragged", "--")):
            for side in _ENGINES:
                found = [line for line in own if (line["side"], line["lengths"]) == (side, lengths)]
                if found:
                    rows, ms = _columns(found, "rows", "ms_per_step")
                    axes.plot(rows, ms, style, marker="o", color=_COLOURS[side], label=f"{side}, {lengths}")
        rows, floor = _columns([line for line in own if line["side"] == "mlxd"], "rows", "floor_ms")
        axes.scatter(rows, floor, marker="_", s=200, color=_FLOOR, label="floor", zorder=3)
        axes.set(title=f"{model}, {context} tokens", xlabel="rows", xscale="log")
        axes.set_xticks(sorted(set(rows)), [str(row) for row in sorted(set(rows))])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        _log_y(axes)
    all_axes[0].set_ylabel("milliseconds a step")
    all_axes[0].legend(fontsize="x-small")
    _save(figure, path)


def draw_arrivals(lines: Sequence[Line], path: Path) -> None:
    """Throughput of waves and of Poisson arrivals, gaps between tokens, and joins and leaves."""
    costs = _of_kind(lines, "join_leave")
    figure, (speeds, gaps, *moves) = _panels(3 if costs else 2)
    runs = _cases(lines, "waves", "poisson")
    names = _distinct((line["model"], line["rows"], line.get("load")) for line in runs)
    labels = [f"{model} x {rows}\n{f'load {load}' if load else 'waves'}" for model, rows, load in names]

    def values(side: str, name: str) -> list[float]:
        return [_median(runs, name, side=side, model=m, rows=rows, load=load) for m, rows, load in names]

    _bars(speeds, labels, {side: values(side, "tokens_per_s") for side in _ENGINES})
    speeds.set(title="tokens a second")
    for place, side in enumerate(_ENGINES):
        at = np.arange(len(names)) + 0.2 * (place - 0.5)
        low, high = values(side, "gap_p50_ms"), values(side, "gap_p99_ms")
        gaps.vlines(at, low, high, color=_COLOURS[side], label=side)
        gaps.plot(at, low, "o", color=_COLOURS[side])
        gaps.plot(at, high, "_", markersize=12, color=_COLOURS[side])
    gaps.set(title="gap between tokens, ms: p50 and p99")
    _log_y(gaps)
    gaps.set_xticks(range(len(names)), labels, fontsize="x-small")
    gaps.legend(fontsize="x-small")
    for axes in moves:
        _draw_moves(axes, costs)
    _save(figure, path)


def _draw_moves(axes: Axes, costs: Sequence[Line]) -> None:
    for model, side in _distinct((line["model"], line["side"]) for line in costs):
        for name, style in (("join_ms", "-"), ("leave_ms", "--")):
            found = [line for line in costs if (line["model"], line["side"]) == (model, side)]
            lengths, ms = _columns(found, "length", name)
            label = f"{model}, {side}, {name.removesuffix('_ms')}"
            axes.plot(lengths, ms, style, marker="o", color=_COLOURS[str(side)], label=label)
    axes.set(title="a join, a leave, ms over a step", xlabel="tokens of the rows beside it")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def draw_serve(lines: Sequence[Line], path: Path) -> None:
    """Both servers under each load: medians over rounds."""
    loads = _cases(lines, "load")
    names = _distinct((line["model"], line["load"]) for line in loads)
    labels = [f"{model}\n{load}" for model, load in names]
    figure, all_axes = _panels(3)
    panels = (
        ("tokens a second", ("tokens_per_s",)),
        ("first token, s: p50 and p99", ("ttft_p50_s", "ttft_p99_s")),
        ("gap between pieces, ms: p50 and p99", ("itl_p50_ms", "itl_p99_ms")),
    )
    for axes, (title, keys) in zip(all_axes, panels, strict=True):
        for alpha, key in zip((1.0, 0.35), keys, strict=False):
            sides = {
                side: [_median(loads, key, side=side, model=model, load=load) for model, load in names]
                for side in _SERVERS
            }
            _bars(axes, labels, sides, alpha=alpha)
        axes.set(title=title)
        if len(keys) > 1:
            _log_y(axes)
    all_axes[0].legend(fontsize="x-small")
    _save(figure, path)


def draw_breakdown(lines: Sequence[Line], path: Path) -> None:
    """Device time by part and, where a step is one graph, host time beside it."""
    # The host's parts are measured last: a case without them was broken off.
    hosts = {(line["model"], line["rows"]): line for line in _cases(lines, "host")}
    found = {(line["model"], line["rows"]): line for line in _cases(lines, "whole")}
    wholes = {case: line for case, line in found.items() if case in hosts}
    is_apart = all(line["one_graph"] for line in wholes.values())
    labels = [f"{model}\nx {rows}" for model, rows in wholes]
    figure, all_axes = _panels(2 if is_apart else 1)
    parts = _of_kind(lines, "part")
    shown = {
        name: [
            next(_device_ms(p) for p in parts if (p["model"], p["rows"], p["part"]) == (*case, name))
            for case in wholes
        ]
        for name in ("products", "attention", "sampling, greedy")
    }
    known = [sum(values) for values in zip(*shown.values(), strict=True)]
    whole = [_device_ms(line) for line in wholes.values()]
    shown["rest"] = [max(0.0, all_ms - part_ms) for all_ms, part_ms in zip(whole, known, strict=True)]
    _stack(all_axes[0], labels, shown)
    all_axes[0].set(title="device, ms a step" if is_apart else "processor time, ms a step")
    if is_apart:
        host = {
            "schedule": [hosts[case]["schedule_ms"] for case in wholes],
            "build": [line["build_ms"] for line in wholes.values()],
            "launch": [line["launch_ms"] for line in wholes.values()],
            "text (another thread)": [hosts[case]["text_ms"] for case in wholes],
        }
        _stack(all_axes[1], labels, host)
        all_axes[1].set(title="host, ms a step")
    _save(figure, path)


def _device_ms(line: Line) -> float:
    """Where a step is not one graph, launching goes on while the device computes: processor time then."""
    return float(line["wait_ms"] if line["one_graph"] else line["cpu_ms"])


def _of_kind(lines: Sequence[Line], *kinds: str) -> list[Line]:
    return [line for line in lines if line["kind"] in kinds]


def _cases(lines: Sequence[Line], *kinds: str) -> list[Line]:
    """Those of the kinds. Raises BenchmarkError: there are none."""
    if found := _of_kind(lines, *kinds):
        return found
    raise BenchmarkError(f"there is nothing to draw: no line of kind {' or '.join(kinds)} was measured")


def _median(lines: Sequence[Line], name: str, **case: object) -> float:
    """Of the lines of this case. Raises BenchmarkError: there are none, as where a run was broken off."""
    own = [line for line in lines if all(line.get(key) == value for key, value in case.items())]
    if not own:
        raise BenchmarkError(f"there is no line of {', '.join(f'{key} {case[key]}' for key in case)} to draw")
    return statistics.median(float(line[name]) for line in own)


def _distinct(values: Iterable[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return list(dict.fromkeys(values))


def _columns(lines: Sequence[Line], *names: str) -> list[list[float]]:
    ordered = sorted(lines, key=lambda line: line[names[0]])
    return [[line[name] for line in ordered] for name in names]


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    mpl.rcParams["svg.hashsalt"] = "mlxd"  # the same figures give the same file
    columns = min(number, _MOST_COLUMNS)
    rows = -(-number // columns)
    figure = Figure(figsize=(1.2 * _PANEL * columns, _PANEL * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in all_axes[number:]:
        unused.remove()
    return figure, all_axes[:number]


def _bars(axes: Axes, labels: Sequence[str], sides: dict[str, list[float]], *, alpha: float = 1.0) -> None:
    for place, (side, values) in enumerate(sides.items()):
        at = np.arange(len(labels)) + 0.4 * (place - 0.5)
        label = side if alpha == 1.0 else None
        axes.bar(at, values, width=0.38, color=_COLOURS[side], alpha=alpha, label=label)
    axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
    axes.grid(axis="y", alpha=0.3)


def _log_y(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _stack(axes: Axes, labels: Sequence[str], parts: dict[str, list[float]]) -> None:
    bottom = np.zeros(len(labels))
    for name, values in parts.items():
        axes.bar(range(len(labels)), values, bottom=bottom, label=name)
        bottom += np.array(values)
    axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
    axes.legend(fontsize="x-small")
    axes.grid(axis="y", alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    """Writes `path` with .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
