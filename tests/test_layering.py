"""Who may import whom, read from the source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("metrics", "caches", "batching", "scheduler")
"""Each may import itself and those before it."""

MLX = {"mlx", "mlx_lm"}
MLX_OWNERS = {
    "batching": {
        "activation",
        "allocation",
        "attention",
        "attention_kernel",
        "attention_quantized",
        "batch",
        "chunk_check",
        "chunk_kernel",
        "cuda_kernel",
        "decode",
        "device",
        "fast_exp",
        "few_rows",
        "few_rows_rewrite",
        "gguf",
        "joined",
        "kernel_check",
        "load",
        "memory",
        "mlx_runner",
        "mlx_step",
        "model",
        "packed_products",
        "page_softmax",
        "parameters",
        "prefill",
        "preview",
        "product_kernel",
        "products",
        "rewriting",
        "rotation",
        "sampler",
        "sampler_state",
        "selftest",
        "trials",
        "tuning",
    },
    "caches": {
        "conformance",
        "conformance_rows",
        "delayed",
        "delayed_step",
        "donor",
        "mlx_lm_import",
        "packed",
        "page_io",
        "paged",
        "paged_view",
        "pooled",
        "quantized",
        "recurrent",
        "rotating",
        "row_group",
        "row_offsets",
    },
    "metrics": set(),
    "scheduler": set(),
}
OWNERS = {
    "zmq": {
        "scheduler.connections",
        "scheduler.door",
        "scheduler.doors",
        "scheduler.keys",
        "scheduler.transport",
        "scheduler.zap",
    },
    "yaml": {"scheduler.document"},
    "prometheus_client": {"metrics.exporter", "metrics.prometheus"},
    "time": {
        "batching.mlx_runner",
        "batching.mlx_step",
        "batching.timing",
        "batching.tuning",
        "metrics.exporter",
        "metrics.prometheus",
        "scheduler.client_verbs",
        "scheduler.engine",
        "scheduler.journal",
        "scheduler.server",
    },
}
PURE = (
    *("admission", "ageing", "backfill", "batch", "deadlines", "fairness", "kv_space", "lane", "pace"),
    *("policy", "preemption", "prefill", "priority", "quota", "request", "reserves", "scheduler", "step"),
    *("cost_model", "simulation", "tenants"),
)
"""Scheduler modules that are told the time and do no input or output."""

EFFECTS = {
    "asyncio",
    "datetime",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
}

MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).glob("*.py"))


def name_of(path: Path) -> str:
    return f"{path.parent.name}.{path.stem}"


def imports_in(node: ast.AST, *, typing_only: bool) -> Iterator[str]:
    """Absolute names of imported modules, and of what is imported from them; nested ones included."""
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if is_typing and not typing_only:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports_in(child, typing_only=typing_only)


@cache
def imports_of(path: Path, *, typing_only: bool = True) -> frozenset[str]:
    return frozenset(imports_in(ast.parse(path.read_text()), typing_only=typing_only))


def may_import_mlx(path: Path) -> bool:
    """Owners may, and so may each file that defines a kind of cache."""
    return path.stem in MLX_OWNERS[path.parent.name] or "mlxd.caches.kind.Kind" in imports_of(path)


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path, typing_only=False)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_its_own_layer_and_those_below(path: Path) -> None:
    allowed = LAYERS[: LAYERS.index(path.parent.name) + 1]
    layers = {name.split(".")[1] for name in imports_of(path) if name.startswith("mlxd.")}
    assert layers <= set(allowed)
    assert not {name.split(".")[0] for name in imports_of(path)} & set(LAYERS), "import mlxd.<layer>"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_owners_import_mlx(path: Path) -> None:
    if not may_import_mlx(path):
        assert not top_level(path) & MLX


@pytest.mark.parametrize("library", OWNERS)
def test_only_the_owners_import(library: str) -> None:
    users = {name_of(path) for path in MODULES if library in top_level(path)}
    assert users <= OWNERS[library]


@pytest.mark.parametrize("name", PURE)
def test_the_scheduler_is_pure(name: str) -> None:
    assert not top_level(ROOT / "scheduler" / f"{name}.py") & EFFECTS


def test_no_owner_is_named_that_does_not_exist() -> None:
    named = {f"{layer}.{stem}" for layer, stems in MLX_OWNERS.items() for stem in stems}
    named |= set().union(*OWNERS.values())
    assert named <= {name_of(path) for path in MODULES}


@pytest.mark.parametrize("layer", LAYERS)
def test_folders_are_flat(layer: str) -> None:
    nested = {path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py") if path.parent.name != layer}
    assert not nested


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b", {"a", "a.b"}),
        ("def f():\n    import a", {"a"}),
        ("if TYPE_CHECKING:\n    import a\nimport b", {"b"}),
        ("try:\n    import a\nexcept ImportError:\n    pass", {"a"}),
    ],
)
def test_the_reader_of_imports_finds(source: str, found: set[str]) -> None:
    assert set(imports_in(ast.parse(source), typing_only=False)) == found
