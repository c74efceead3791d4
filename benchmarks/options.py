"""Options of benchmarks: what they take, and what is looked at before anything is measured."""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from entry import BenchmarkError, require
from shapes import PACKED, SHAPES

from mlxd.batching.builtin import BUILTIN
from mlxd.batching.text import Tokenizer

Check = Callable[[argparse.Namespace], str | None]
"""What is wrong with all options together, or None."""

PAGE_SIZES = (16, 32, 64, 128, 256)
VARIANTS = ("in_place", "gathered", "kernel")
"""Of decode attention."""
SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Parser(argparse.ArgumentParser):
    """Its help is the script's docstring."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.checks: list[Check] = []

    def error(self, message: str) -> NoReturn:
        """One line: the usage is in the help."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def options(self) -> argparse.Namespace:
        """Of the command line; where they cannot be, the process ends with one line and status 2."""
        options = self.parse_args()
        try:
            problem = next(filter(None, (check(options) for check in self.checks)), None)
        except BenchmarkError as error:
            problem = str(error)
        if problem:
            self.error(problem)
        return options


def number_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} up, as {max(least, 8)}")
        return int(text)

    return number


def numbers(text: str) -> list[int]:
    """ "1,8,32" as an option's value."""
    try:
        return [number_from(1)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers from 1 up, as 1,8,32") from None


def page_sizes(text: str) -> list[int]:
    """ "16,64" as an option's value."""
    if not set(found := numbers(text)) <= set(PAGE_SIZES):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(map(str, PAGE_SIZES))}, as 16,64")
    return found


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, as 0.5")
    return value


def amounts(text: str) -> list[float]:
    """ "0.7,1.3" as an option's value."""
    try:
        return [amount(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers above 0, as 0.7,1.3") from None


def some_of(*names: str) -> Callable[[str], list[str]]:
    def chosen(text: str) -> list[str]:
        if not set(found := text.split(",")) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(names)}, as {','.join(names)}")
        return found

    return chosen


def served(text: str) -> str:
    """What `mlxd serve` takes as a model; whether the hub has one of that name, the hub alone knows."""
    if text in BUILTIN or os.path.isdir(os.path.expanduser(text)) or _HUB_NAME.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is no model folder, hub name or built-in model ({', '.join(BUILTIN)})"
    )


def model(text: str) -> str:
    """A shape of SHAPES, packed ones too, the built-in model by its short name, or what `served` takes."""
    if text.removesuffix(PACKED) in SHAPES or text == SMOLLM2:
        return text
    try:
        return served(text)
    except argparse.ArgumentTypeError as error:
        shapes = f"{', '.join(SHAPES)}; with {PACKED}: packed"
        raise argparse.ArgumentTypeError(f"{error}, nor {SMOLLM2} or a random one ({shapes})") from None


def models(text: str) -> list[str]:
    """ "smollm2,1b" as an option's value."""
    return [model(part) for part in text.split(",")]


def input_file(text: str) -> Path:
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    return path


def tokenizer_folder(text: str) -> Path:
    """Raises ModelError: its files are damaged."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        input_file(os.path.join(text, name))
    Tokenizer.load(Path(text))
    return Path(text)


def add_page_size(parser: Parser) -> None:
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="cache.page_size")


def add_prefill(parser: Parser, *, chunk: int, prefill_ms: float) -> None:
    """`--page-size`, `--chunk` and `--prefill-ms`, with these defaults."""

    def check(options: argparse.Namespace) -> str | None:
        if options.chunk % options.page_size:
            return f"--chunk is {options.chunk}; it must be a multiple of --page-size, {options.page_size}"
        return None

    add_page_size(parser)
    parser.add_argument("--chunk", type=number_from(1), default=chunk, help="scheduler.prefill_chunk")
    parser.add_argument("--prefill-ms", type=amount, default=prefill_ms, help="scheduler.prefill_ms")
    parser.checks.append(check)


def add_out(parser: Parser, name: str) -> None:
    """`--out`, in $OUT where that is set."""
    folder = os.environ.get("OUT")
    default = Path(folder) / f"{name}.jsonl" if folder else None
    help = f"file to append the JSON lines to; by default {name}.jsonl in $OUT, where that is set"
    parser.add_argument("--out", type=Path, default=default, help=help)
    parser.checks.append(_check_out)


def add_plot(parser: Parser) -> None:
    parser.add_argument("--plot", type=Path, help="draw the lines: writes this path with .png and .svg")
    parser.checks.append(_check_plot)


def add_output(parser: Parser, name: str, *also_shown_by: str) -> None:
    """`--out`, `--plot` and `--plot-from`. `also_shown_by`: options that show lines as well as `--plot`."""

    def check(options: argparse.Namespace) -> str | None:
        ways = ("plot", *also_shown_by)
        if options.plot_from and not any(vars(options)[way] for way in ways):
            return f"--plot-from draws lines: it needs {' or '.join(f'--{way}' for way in ways)}"
        return None

    parser.add_argument(
        "--plot-from", type=input_file, nargs="+", help="measure nothing: take the lines of these files"
    )
    add_plot(parser)
    parser.checks.append(check)
    add_out(parser, name)


def _check_out(options: argparse.Namespace) -> str | None:
    if options.out is None or vars(options).get("plot_from"):
        return None
    try:
        options.out.open("ab").close()
    except OSError as error:
        return f"--out {options.out}: {error.strerror}"
    return None


def _check_plot(options: argparse.Namespace) -> str | None:
    if options.plot is None:
        return None
    require("matplotlib")
    folder = options.plot.parent
    if not options.plot.name or not folder.is_dir() or not os.access(folder, os.W_OK):
        return f"--plot {options.plot}: {folder} is no folder that can be written to"
    return None
