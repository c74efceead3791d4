"""Decode attention over pages: the variants, and the one seam through which a model reaches them."""

import sys
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.activation import install_activations
from mlxd.batching.attention_kernel import KernelCase, attend_by_kernel, is_supported
from mlxd.batching.attention_quantized import attend_packed_pages
from mlxd.batching.chunk_kernel import KernelWriter
from mlxd.batching.page_softmax import softmax_over_pages
from mlxd.batching.rotation import Rotations, Turns
from mlxd.caches.delayed_step import DelayedStandIn
from mlxd.caches.packed import Packed
from mlxd.caches.paged import PagedStandIn
from mlxd.caches.paged_view import ChunkWriter, PagedView
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedPrefill, QuantizedStandIn

_SEAM = "scaled_dot_product_attention"


class _Variant:
    """What a variant is unless it says otherwise.

    Attributes:
        keeps_pools: whether the pools stay the same arrays through a step, which MLX then holds until it ran.
        writer: how prefill beside such steps writes without replacing them, where it can.
    """

    keeps_pools = False
    writer: ChunkWriter | None = None

    def writes(self, keys: mx.array | Packed, values: mx.array | Packed) -> bool:
        return False

    def knowing(self, rotations: Rotations) -> Self:
        """This variant for a step whose rotations are known."""
        return self


class Gathered(_Variant):
    """Copies each row's pages out and leaves the rest to the model's own fused attention.

    Needs no seam, so it serves every model whose attention takes a boolean mask.
    """

    name = "gathered"

    def fetch(self, keys: mx.array, values: mx.array, view: PagedView) -> tuple[mx.array, mx.array]:
        """Returns [B, n_kv_heads, T * page_size, head_dim] of each, a copy of all columns, valid or not."""
        rows = view.page_rows(keys.shape[1]).swapaxes(1, 2)
        return _gather(keys, rows), _gather(values, rows)

    def mask(self, view: PagedView) -> mx.array | None:
        return view.valid[:, None, None, :]


class Grouped(Gathered):
    """Gathered, for models that compute scores [B, n_kv_heads, group, L, S] themselves (gemma2)."""

    name = "grouped"

    def mask(self, view: PagedView) -> mx.array | None:
        return view.valid[:, None, None, None, :]


def _gather(pool: mx.array, rows: mx.array) -> mx.array:
    num_pages, heads, size, head_dim = pool.shape
    batch, _, width = rows.shape
    return pool.reshape(num_pages * heads, size, head_dim)[rows].reshape(batch, heads, width * size, head_dim)


class InPlace(_Variant):
    """Reads pages where they lie: `mx.gather_mm` takes each row's pages by index, for scores and for values.

    The softmax runs over pages and columns together; partial value sums are added over pages.
    """

    name = "in_place"

    def fetch(self, keys: mx.array, values: mx.array, view: PagedView) -> tuple[mx.array, mx.array]:
        return keys, values

    def mask(self, view: PagedView) -> mx.array | None:
        return None

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        stand_in: PagedStandIn,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of one position a row.

        Args:
            queries: [B, n_heads, 1, key_dim], rotated.
            keys, values: what `fetch` gave, the pools [num_pages, n_kv_heads, page_size, dim].
            sinks: [n_heads] extra logits that take weight and give no value, or None.
        Returns:
            [B, n_heads, 1, value_dim] in the queries' dtype.
        """
        view = stand_in.view
        num_pages, heads, size, value_dim = values.shape
        batch, query_heads, _, key_dim = queries.shape
        group, width = query_heads // heads, view.width
        pages = view.page_rows(heads)
        query = mx.arange(batch * heads, dtype=mx.int32).reshape(batch, 1, heads)
        scores = mx.gather_mm(
            (queries * scale).reshape(batch * heads, group, key_dim),
            keys.reshape(num_pages * heads, size, key_dim).swapaxes(-1, -2),
            lhs_indices=mx.broadcast_to(query, pages.shape),
            rhs_indices=pages,
        )  # [B, T, heads, group, size]
        weights, total = softmax_over_pages(scores, view.bias, sinks)
        partial = mx.gather_mm(
            weights.astype(values.dtype).reshape(-1, group, size),
            values.reshape(num_pages * heads, size, value_dim),
            lhs_indices=mx.arange(batch * heads * width, dtype=mx.int32).reshape(pages.shape),
            rhs_indices=pages,
        )  # [B, T, heads, group, value_dim]
        out = partial.astype(mx.float32).sum(axis=1) / total[..., None]
        return out.astype(queries.dtype).reshape(batch, query_heads, 1, value_dim)


class Kernel(InPlace):
    """Rotates and writes the new position and reads pages where they lie, by one CUDA kernel of our own.

    The pools stay the arrays they are: the kernel writes into its inputs. MLX holds what a step reads until
    the step has run, so a pool that is replaced while one still runs would be copied whole (`keeps_pools`).
    Layers whose heads the kernel does not serve are written and read as by `InPlace`.

    Attributes:
        cases: what the kernel was asked for so far.
    """

    name = "kernel"
    keeps_pools = True

    def __init__(self, cases: set[KernelCase] | None = None, rotations: Rotations | None = None) -> None:
        self.cases: set[KernelCase] = set() if cases is None else cases
        self.writer: KernelWriter = KernelWriter()
        self._rotations = rotations or Rotations()

    def knowing(self, rotations: Rotations) -> Self:
        return type(self)(self.cases, rotations)

    def writes(self, keys: mx.array | Packed, values: mx.array | Packed) -> bool:
        dtype, quantization = _format(keys)
        return is_supported(keys.shape[-1], values.shape[-1], dtype, keys.shape[-2], quantization)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        stand_in: PagedStandIn,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """As `InPlace.attend`. Raises ValueError where a model changed what it fetched."""
        if not self.writes(keys, values):
            return super().attend(queries, keys, values, stand_in, scale, sinks)
        fetched_keys, fetched_values = stand_in.keys_and_values()
        if keys is not fetched_keys or values is not fetched_values or stand_in.new is None:
            raise ValueError("the model changes its keys or values on their way to attention")
        new_keys, new_values = stand_in.new
        (queries, new_keys), turns = self._unrotated([queries, new_keys])
        case, table = self._case(queries, keys, values, stand_in.view, scale, sinks, turns)
        new = new_keys, new_values
        return attend_by_kernel(case, queries, new, (keys, values), stand_in.view, sinks, table)

    def attend_packed(
        self, stand_in: QuantizedStandIn, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """As `attend_packed_pages`."""
        keys, values = stand_in.pools
        if not self.writes(keys, values):
            return attend_packed_pages(stand_in, queries, scale, sinks)
        (queries,), turns = self._unrotated([queries])
        case, table = self._case(queries, keys, values, stand_in.view, scale, sinks, turns)
        planes = *keys.planes, *values.planes
        return attend_by_kernel(case, queries, stand_in.new, planes, stand_in.view, sinks, table)

    def _unrotated(self, rotated: Sequence[mx.array]) -> tuple[list[mx.array], Turns | None]:
        """What the kernel can rotate itself, all of it in one way; else the arrays as they are."""
        known = [found for array in rotated if (found := self._rotations.origin(array)) is not None]
        if len(known) < len(rotated) or len({id(turns) for _, turns in known}) > 1:
            return list(rotated), None
        return [array for array, _ in known], known[0][1]

    def _case(
        self,
        queries: mx.array,
        keys: mx.array | Packed,
        values: mx.array | Packed,
        view: PagedView,
        scale: float,
        sinks: mx.array | None,
        turns: Turns | None,
    ) -> tuple[KernelCase, mx.array | None]:
        _, heads, size, key_dim = keys.shape
        dtype, quantization = _format(keys)
        case = KernelCase(
            kv_heads=heads,
            group=queries.shape[1] // heads,
            key_dim=key_dim,
            value_dim=values.shape[-1],
            dtype=dtype,
            page_size=size,
            window=view.spec.window,
            scale=float(scale),
            sinks=None if sinks is None else sinks.dtype,
            quantization=quantization,
            rotary=None if turns is None else turns.rotary,
        )
        self.cases.add(case)
        return case, None if turns is None else turns.table


def _format(pool: mx.array | Packed) -> tuple[mx.Dtype, Quantization | None]:
    return (pool.scales.dtype, pool.quantization) if isinstance(pool, Packed) else (pool.dtype, None)


DecodeVariant = Gathered | InPlace

_VARIANTS: dict[str, type[DecodeVariant]] = {kind.name: kind for kind in (Gathered, Grouped, InPlace, Kernel)}


def variant(name: str) -> DecodeVariant:
    """Raises KeyError for a name that is no variant."""
    return _VARIANTS[name]()


def install_seam(model: nn.Module) -> None:
    """Send the model's attention calls on one of our stand-ins where it says, all others where they went.

    Here names of mlx-lm are replaced, in the modules that define the model's layers:
    `scaled_dot_product_attention`, and activations on the CPU. They stay so for the life of the process;
    installing them again changes nothing.
    """
    names = {type(layer).__module__ for layer in model.modules()}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    for module in modules:
        original = getattr(module, _SEAM, None)
        if original is not None and not isinstance(original, _Redirect):
            setattr(module, _SEAM, _Redirect(original))
    install_activations(modules)


def _attend_mixed(
    stand_in: DelayedStandIn, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of rows of both sorts: all rows read both pools, and each keeps what it read of its own."""
    dense = stand_in.dense
    return stand_in.choose(
        InPlace().attend(queries, dense.keys, dense.values, dense, scale, sinks),
        attend_packed_pages(stand_in.packed, queries, scale, sinks),
    )


class _Redirect:
    """mlx-lm's attention function, but for stand-ins whose variant attends by itself, or whose numbers are
    packed.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        **extra: Any,
    ) -> mx.array:
        if isinstance(cache, PagedStandIn):
            chosen = cache.view.attention
            if isinstance(chosen, InPlace):
                return chosen.attend(queries, keys, values, cache, scale, extra.get("sinks"))
        if isinstance(cache, DelayedStandIn):
            return _attend_mixed(cache, queries, scale, extra.get("sinks"))
        if isinstance(cache, QuantizedStandIn):
            if isinstance(cache.view.attention, Kernel):
                return cache.view.attention.attend_packed(cache, queries, scale, extra.get("sinks"))
            return attend_packed_pages(cache, queries, scale, extra.get("sinks"))
        if isinstance(cache, QuantizedPrefill):
            return cache.attend(queries, scale, mask, extra.get("sinks"))
        result: mx.array = self._original(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)
        return result
