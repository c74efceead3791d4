"""Identity: a kind that cannot say what it is, or that is not served, is refused by name."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from tiny_models import FAMILIES, PAGE, make_rig, tiny_model

from mlxd.batching.mlx_runner import MlxRunner
from mlxd.caches.contract import has_spec_round, is_compiled_decode, is_row_batch
from mlxd.caches.kinds import UnsupportedCacheError, group_specs, inspect_layers
from mlxd.caches.paged import PagedRows
from mlxd.caches.signatures import SignatureError, join_signatures, signature_of


class Named:
    def __init__(self, signature: object) -> None:
        self._signature = signature

    def signature(self) -> object:
        return self._signature


@pytest.mark.parametrize("cache", [object(), KVCache(), *map(Named, ("", "unknown", None, 7))])
def test_without_a_signature_nothing_is_routed(cache: object) -> None:
    with pytest.raises(SignatureError, match="has no signature"):
        signature_of(cache)


class MuteRows(PagedRows):
    """A kind whose author forgot its signature."""

    def signature(self) -> str:
        return "unknown"


def test_a_runner_of_a_kind_without_a_signature_is_never_made() -> None:
    rig = make_rig("llama")
    first, *rest = inspect_layers(rig.model)
    mute = replace(first, kind=replace(first.kind, make=MuteRows))
    with pytest.raises(SignatureError, match="MuteRows has no signature"):
        MlxRunner(rig.model, [mute, *rest], rig.memory, rig.runner.info)


class Impostor(PagedRows):
    """A kind of its own under the signature of another."""


def test_a_signature_that_two_kinds_claim_is_refused_before_any_row_runs() -> None:
    rig = make_rig("llama")
    first, *rest = inspect_layers(rig.model)
    impostor = replace(first, kind=replace(first.kind, make=Impostor))
    with pytest.raises(SignatureError, match="Impostor and PagedRows both claim signature 'kv:paged"):
        MlxRunner(rig.model, [impostor, *rest], rig.memory, rig.runner.info)


def test_a_models_identity_is_that_of_its_layers_in_order() -> None:
    assert join_signatures(["a", "a", "b", "a"]) == "a*2,b,a"
    assert make_rig("llama").runner.signature == f"kv:paged:{PAGE}*2"
    assert make_rig("gemma3_text").runner.signature == ",".join(
        [f"kv:paged-rotating:8:{PAGE}", f"kv:paged:{PAGE}"] * 2
    )


def test_mlx_lms_own_caches_are_neither_rows_nor_compilable() -> None:
    for cache in (KVCache(), RotatingKVCache(8)):
        assert not is_row_batch(cache)
        assert not is_compiled_decode(cache)
        assert not has_spec_round(cache)


def test_half_a_spec_round_is_an_error() -> None:
    class Half:
        def spec_round_begin(self) -> None: ...

    with pytest.raises(SignatureError, match=r"Half has \['spec_round_begin'\] but not all"):
        has_spec_round(Half())


class Keeping(nn.Module):
    """A model that wants the given caches and would be llama otherwise."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._caches = caches
        self._model = tiny_model("llama")

    def make_cache(self) -> list[Any]:
        return self._caches

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (RotatingKVCache(max_size=8, keep=4), "layer 1 keeps 4 attention sinks in a RotatingKVCache"),
        (
            QuantizedKVCache(),
            "layer 1 needs QuantizedKVCache; supported are KVCache, RotatingKVCache, ArraysCache",
        ),
        (ChunkedKVCache(8), "layer 1 needs ChunkedKVCache"),
        (CacheList(KVCache(), QuantizedKVCache()), "layer 1 needs QuantizedKVCache"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kind_that_is_not_served_is_refused_by_name(cache: Any, message: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=message):
        inspect_layers(Keeping([KVCache(), cache]))


def test_a_cache_that_no_layer_writes_is_refused() -> None:
    with pytest.raises(UnsupportedCacheError, match="layer 2 stores nothing in its KVCache"):
        inspect_layers(Keeping([KVCache(), KVCache(), KVCache()]))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_group_by_window(family: str) -> None:
    specs = group_specs(inspect_layers(tiny_model(family)), PAGE)
    window = FAMILIES[family].window
    expected = {None} if window is None else {None, window}
    assert {spec.window for spec in specs} == expected
    covered = sorted(index for spec in specs for index in spec.layers)
    assert covered == list(range(len(tiny_model(family).layers)))
