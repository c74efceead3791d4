"""Which options a script takes, without running it."""

from pathlib import Path

_ADDED = {
    "add_output(": ("--out", "--plot", "--plot-from"),
    "add_out(": ("--out",),
    "add_plot(": ("--plot",),
    "add_page_size(": ("--page-size",),
    "add_prefill(": ("--page-size", "--chunk", "--prefill-ms"),
}
"""By the functions of benchmarks/options.py."""


def takes(script: Path, option: str) -> bool:
    """Whether its source names the option, or calls a function that adds it."""
    source = script.read_text()
    return f'"{option}"' in source or any(
        function in source and option in added for function, added in _ADDED.items()
    )
