"""Global norms of gradients, for logging and for control outside of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jzero._collectives import typed, vary
from jzero._config import ZeroConfig
from jzero._layout import Bucket, Layout, path_string
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import leaf_paths
from jzero._state import GradShards, partition_specs
from jzero_kernels import adam

__all__ = ["global_norm"]

Paths = Sequence[str] | Callable[[str], bool] | None


def global_norm(
    tree: Any, paths: Paths = None, *, ord: float = 2, zero: ZeroConfig | None = None
) -> Array:
    """Norm of a gradient over all its elements, in float32; the same on all devices.

    Every element counts once: padding is zero, and shards on replicas are equal. Neither very
    large nor very small finite elements overflow or vanish (scaled sums, as LAPACK's nrm2).

    Args:
      tree: :class:`GradShards`; or a pytree of arrays. Outside of a ``shard_map`` these are
        global arrays. Inside one (``check_vma=True``), an array that varies over the axis is a
        shard, of which each device has another part, and one that does not is replicated. A
        partial sum is neither: reduce it first (``jzero.value_and_grad``).
      paths: path strings, or a predicate of one: the leaves that count. None: all.
      ord: 2, or ``math.inf`` for the largest magnitude.
      zero: only its axis and mesh are used, and those only for shards. None: the ambient mesh.

    Returns:
      float32 scalar; inf or nan where the tree has such an element. One all-reduce of at most
      four scalars where something is sharded.

    Raises:
      ValueError: an ``ord`` other than these; a path that no leaf has; plain arrays inside a
        ``shard_map(check_vma=False)``, where JAX cannot tell shards from replicas.
    """
    if ord not in (2, math.inf):
        raise ValueError(f"ord={ord!r}: use 2 or math.inf")
    if isinstance(tree, GradShards):
        config = zero or ZeroConfig(axis=tree.axis)
        axes = resolve_axes(config)
        chosen = _chosen(list(tree.layout.by_path), paths)
        return on_mesh(
            axes,
            lambda shards: _norm(
                [
                    _masked(x, bucket, tree.layout, chosen, axes)
                    for x, bucket in zip(shards.buckets, tree.layout.buckets, strict=True)
                ],
                [],
                axes,
                ord,
            ),
            (partition_specs(tree),),
            P(),
            tree,
        )
    leaves = {path_string(path): x for path, x in leaf_paths(tree) if _is_float(x)}
    chosen = _chosen(list(leaves), paths)
    arrays = [jnp.asarray(leaves[path]).reshape(-1) for path in leaves if path in chosen]
    config = zero or ZeroConfig()
    if config.axis not in jax.sharding.get_abstract_mesh().manual_axes:
        return _norm([], arrays, None, ord)
    axes = resolve_axes(config)
    if not typed(axes.shard):
        raise ValueError(
            "inside shard_map(check_vma=False) global_norm cannot tell a shard from a replicated "
            "array; pass the GradShards of jzero.value_and_grad, or use check_vma=True"
        )
    varies = [axes.shard in jax.typeof(x).manual_axis_type.varying for x in arrays]
    return _norm(
        [x for x, v in zip(arrays, varies, strict=True) if v],
        [x for x, v in zip(arrays, varies, strict=True) if not v],
        axes,
        ord,
    )


def _norm(shards: list[Array], whole: list[Array], axes: Axes | None, ord: float) -> Array:
    if ord == 2:
        stats = [adam.grad_stats(x) for x in whole]
        if shards:
            assert axes is not None
            parts = sum((adam.grad_stats(x) for x in shards), jnp.zeros(4, jnp.float32))
            stats.append(lax.psum(vary(parts, axes, (axes.shard,)), axes.shard))
        return adam.norm_from_stats(sum(stats, jnp.zeros(4, jnp.float32)))
    peaks = [_peak(x) for x in whole]
    if shards:
        assert axes is not None
        part = jnp.stack([_peak(x) for x in shards]).max()
        # The maximum over devices may lose a NaN (XLA's does on CPU), so it is sent as a flag.
        flagged = jnp.stack([part, jnp.isnan(part).astype(part.dtype)])
        part, nan = lax.pmax(vary(flagged, axes, (axes.shard,)), axes.shard)
        peaks.append(jnp.where(nan > 0, jnp.full_like(part, jnp.nan), part))
    return jnp.stack(peaks).max() if peaks else jnp.float32(0)


def _peak(x: Array) -> Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0)


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _chosen(known: list[str], paths: Paths) -> frozenset[str]:
    if paths is None:
        return frozenset(known)
    if callable(paths):
        return frozenset(path for path in known if paths(path))
    unknown = sorted(set(paths) - set(known))
    if unknown:
        raise ValueError(f"paths {unknown} name no gradient; it has {sorted(known)[:10]}")
    return frozenset(paths)


def _masked(
    shard: Array, bucket: Bucket, layout: Layout, chosen: frozenset[str], axes: Axes
) -> Array:
    """A shard with zeros in place of the elements of leaves that do not count."""
    if all(slot.path in chosen for slot in bucket.slots):
        return shard
    here, count = lax.axis_index(axes.shard), bucket.row_shard
    position = lax.iota(jnp.int32, bucket.shard)
    if bucket.layers:  # each layer is cut by itself
        position = position % count

    def edge(offset: int) -> Array:
        """How many of this shard's elements lie before an offset in a row, within int32."""
        device, column = divmod(offset, count)
        return jnp.where(here < device, count, jnp.where(here == device, column, 0))

    counts = jnp.zeros(bucket.shard, bool)
    for slot in bucket.slots:
        if slot.path in chosen and slot.size:
            inside = (position >= edge(slot.offset)) & (position < edge(slot.offset + slot.size))
            counts = counts | inside
    return jnp.where(counts, shard, jnp.zeros_like(shard))
