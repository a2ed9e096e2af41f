"""The collectives of a step, each in one place, and the decision whether one is still owed.

[Note: reduced exactly once]
A gradient inside ``shard_map`` has one of three types, and JAX says which:

- *varying* over an axis: this device's partial sum; the reduction is owed;
- *unreduced* (Explicit meshes): likewise a partial sum, by its type;
- *invariant*: autodiff with respect to a replicated parameter has summed it already; it is
  only sliced.

``shard_map(check_vma=False)`` has no types; there a gradient is taken as a partial sum, which is
what autodiff gives. A bucket that mixes types is made varying: an invariant leaf is kept on the
first device and zeroed on the others, so that the sum is exact.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import ad, batching, mlir

from jzero._codec import Codec, from_bytes, to_bytes
from jzero._layout import ALIGNMENT, Bucket
from jzero._mesh import Axes
from jzero._pack import is_whole, pack
from jzero_kernels.adam.math import opaque, runtime_zero

__all__ = [
    "after",
    "all_gather",
    "divide",
    "last_after",
    "mean",
    "own_shard",
    "psum",
    "psum_replicas",
    "reduce_scatter",
    "settled",
    "shaped",
    "total",
    "vary",
    "whole_bucket",
]

Tree = TypeVar("Tree")


def typed(axis: str) -> bool:
    """Whether this ``shard_map`` tracks types: an axis index varies unless it does not."""
    return axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying


def owed_axes(x: Any, axes: Axes) -> frozenset[str]:
    """The axes over which ``x`` is a partial sum."""
    kind = jax.typeof(x).manual_axis_type
    if not typed(axes.shard):
        return frozenset(axes.names)
    return frozenset(axes.names) & (kind.varying | kind.unreduced)


def reduce_scatter(
    leaves: dict[str, Array],
    bucket: Bucket,
    axes: Axes,
    codec: Codec,
    owed: frozenset[str] | None = None,
) -> Array:
    """Pack one bucket of gradients and sum it over all devices; keep this device's shard.

    One ``psum_scatter`` over the shard axis (an ``all_to_all`` where the codec adds in float32),
    then one ``psum`` of the shard over the replica axis, each only if owed.

    Args:
      leaves: the bucket's local gradients by path.
      codec: ``codec.grad`` is the dtype on the wire.
      owed: the axes over which a sum is owed, where types cannot say; None: ask them.

    Returns:
      (shard,) in ``codec.grad``, or float32 where the codec adds in float32. Of a stacked bucket:
      (layers, row_shard), or (row_shard,) of the gradients of one layer.
    """
    grads = {slot.path: leaves[slot.path] for slot in bucket.slots}
    kinds = {path: owed_axes(grad, axes) if owed is None else owed for path, grad in grads.items()}
    owed = frozenset[str]().union(*kinds.values())
    if len(set(kinds.values())) > 1:
        grads = {path: _as_partial(g, owed - kinds[path], axes) for path, g in grads.items()}
    narrow = codec.wide and codec.grad.itemsize == 1
    flat = pack(grads, bucket, codec.state if narrow else codec.grad)
    at = 1 if is_whole(grads, bucket) else 0  # 1: all rows of a stacked bucket
    if narrow:
        flat = flat.reshape(*flat.shape[:at], -1)
    if axes.shard not in owed or axes.shards == 1:
        shard = own_shard(flat, axes, at)
    elif codec.wide:
        split = (axes.shards, flat.shape[at] // axes.shards)
        rows = flat.reshape(*flat.shape[:at], *split, *flat.shape[at + 1 :])
        rows = to_bytes(rows, codec.grad) if narrow else rows
        rows = lax.all_to_all(rows, axes.shard, split_axis=at, concat_axis=at, tiled=True)
        rows = from_bytes(rows, codec.grad) if narrow else rows
        shard = jnp.sum(rows, axis=at, dtype=jnp.float32)
    else:
        flat = _in_rows(flat, at, axes)
        shard = lax.psum_scatter(flat, axes.shard, scatter_dimension=at, tiled=True)
        # TPU: XLA may make this an all-reduce and a slice. Without the barrier it fuses the slice
        # into each consumer, and the whole reduced bucket lives until the last of them.
        shard = lax.optimization_barrier(shard)
    if axes.replica in owed:
        shard = psum_replicas(shard, axes)
    return shard.reshape(*shard.shape[:at], -1)


def _in_rows(flat: Array, at: int, axes: Axes) -> Array:
    """A flat bucket (its dim ``at``) as rows of ALIGNMENT, which lie in memory as it does. TPU's
    compiler makes an all-reduce, of twice the bytes, of every reduce-scatter of a flat array."""
    if flat.ndim > at + 1 or flat.shape[at] % (axes.shards * ALIGNMENT):
        return flat
    return flat.reshape(*flat.shape[:at], -1, ALIGNMENT)


def _as_partial(x: Array, missing: frozenset[str], axes: Axes) -> Array:
    """``x``, summed already over ``missing``, as a partial sum over them: itself on one device,
    zero on the others."""
    unreduced = jax.typeof(x).manual_axis_type.unreduced
    if unreduced:  # neither arithmetic nor a cast to varying is defined for this type
        x = lax.psum(x, tuple(unreduced))
        missing = missing | unreduced
    for axis in sorted(missing & set(axes.names)):
        x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return x


def own_shard(packed: Array, axes: Axes, at: int = 0) -> Array:
    """This device's slice of a replicated bucket as ``pack`` gives it, (shard,). No communication.

    Of all layers of a stacked bucket, ``at=1``: (layers, row_shard).
    """
    flat = (*packed.shape[:at], -1)
    if axes.shards == 1:  # a shard varies over its axis, of any size
        return vary(packed.reshape(flat), axes, (axes.shard,))
    index, count = lax.axis_index(axes.shard), packed.shape[at] // axes.shards
    if packed.shape[at] < 2**31:
        return lax.dynamic_slice_in_dim(packed, index * count, count, at).reshape(flat)
    # An element offset would exceed int32. Rows do not, but TPU copies the whole bucket to them.
    rows = packed.reshape(*packed.shape[:at], axes.shards, count)
    return lax.dynamic_index_in_dim(rows, index, at, keepdims=False)


def all_gather(wire: Array, axes: Axes, at: int = 0) -> Array:
    """What each device has a part of along dim ``at``, 0 or 1, equal on all devices."""
    if axes.shards == 1:
        return _alone(wire, axes.shard)
    gather = functools.partial(lax.all_gather, axis_name=axes.shard, tiled=True, to="invarying")
    if at == 0:
        return gather(wire)

    def apart(wire: Array) -> Array:
        # Where dim 0 is the only one to gather along, XLA moves dim 1 there first: in the kernel
        # that makes ``wire``, which could then not write its other results in place.
        rows = gather(wire[None])
        return jnp.moveaxis(rows, 0, 1).reshape(wire.shape[0], -1, *wire.shape[2:])

    return lax.platform_dependent(wire, tpu=functools.partial(gather, axis=1), default=apart)


def whole_bucket(shard: Array, bucket: Bucket, axes: Axes) -> Array:
    """The bucket of which each device has a (shard,), all layers, as ``unpack_all`` takes it; equal
    on all devices. One all-gather."""
    at = 1 if bucket.layers else 0
    return all_gather(shaped(shard, bucket, all_layers=True), axes, at)


def settled(gathered: Array, shard: Array, axes: Axes) -> Array:
    """What was gathered of ``shard``, as the result of arithmetic.

    On TPU an all-gather does not write into the memory of a donated argument: where its result is
    the program's, XLA copies the old parameter at the start, to have room, and the new one at the
    end. A result of arithmetic goes there as it is computed, and the old one stays where it is.
    """

    def through(x: Array, shard: Array) -> Array:
        # Any number that is known only at run time will do, and zero is the same on all devices.
        return opaque(x, _alone(runtime_zero(shard[(0,) * shard.ndim]), axes.shard))

    return lax.platform_dependent(gathered, shard, tpu=through, default=lambda x, _: x)


def shaped(shard: Array, bucket: Bucket, *, all_layers: bool = False) -> Array:
    """A (shard,) in the shape in which it travels; see ``Bucket.dims``. Of a stacked bucket: one
    layer, or ``all_layers``, which are then the first dim."""
    lead = (bucket.layers,) if all_layers and bucket.layers else ()
    return shard.reshape(*lead, -1, *(bucket.dims or ())[1:])


def psum(x: Array, axes: Axes) -> Array:
    """Sum over the shard axis: replicas hold the same shards, so they are not counted again."""
    return _psum(x, axes.shard, axes.shards)


def psum_replicas(x: Array, axes: Axes) -> Array:
    """Sum over the replica axis, if there is one."""
    return x if axes.replica is None else _psum(x, axes.replica, axes.replicas)


def mean(x: Array, axes: Axes) -> Array:
    """Mean over every device of the step (shard and replica axis)."""
    return total(x, axes) / jnp.asarray(axes.size, x.dtype)


def divide(x: Array, n: Array | int) -> Array:
    """``x / n``, correctly rounded: 6 / 3 is 2.

    XLA makes of a division by one scalar a product with its reciprocal, which is off by a rounding
    unless ``n`` is a power of two. A divisor that depends on the element, if only where ``x`` is
    NaN, stays a division.
    """
    if isinstance(n, int) and n & (n - 1) == 0:
        return lax.div(x, x.dtype.type(n))  # its reciprocal is exact
    divisor = jnp.asarray(n, x.dtype)
    return x / jnp.where(jnp.isnan(x), jnp.ones_like(x), divisor)


def after(xs: dict[str, Array], before: dict[str, Array]) -> dict[str, Array]:
    """``xs``, which the compiler must believe to depend on all of ``before``.

    [Note: buckets in order] XLA merges all-reduces that do not depend on each other; on CPU it
    makes one of all of them, after the backward pass. A bucket that depends on the one before it
    stays apart, and the two leave in order. A barrier alone does not last: XLA for CPU (jax 0.10),
    TPU and GPU drops it before it merges all-reduces. A function that may not be inlined does, and
    moves no data: its results are its operands.
    """
    return _tied(xs, before, both=False)[0]


def last_after(
    xs: dict[str, Array], before: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """``xs``, the last to be reduced, after ``before``, the sums of all earlier buckets; and these
    sums, which on CPU may be used only when ``xs`` are there.

    Nothing runs beside a collective on CPU. There, XLA copies a donated parameter of which it
    cannot tell that its update waits for the backward pass, and compiles one update for every way
    in which others share memory. On TPU and GPU, updates run beside the last reductions.
    """
    return _tied(xs, before, both=True)


def _tied(
    xs: dict[str, Array], to: dict[str, Array], both: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    if not xs or not to:
        return xs, to
    flat = _tied_p.bind(*xs.values(), *to.values(), count=len(xs), both=both)
    tied = dict(zip(xs, flat[: len(xs)], strict=True))
    return tied, dict(zip(to, flat[len(xs) :], strict=True)) if both else to


def total(x: Tree, axes: Axes) -> Tree:
    """Sum of each leaf over every device of the step (shard and replica axis)."""
    for axis, size in axes.sizes:
        if size == 1:
            x = jax.tree.map(lambda leaf, axis=axis: _alone(leaf, axis), x)
    names = tuple(axis for axis, size in axes.sizes if size > 1)
    return lax.psum(x, names) if names else x


def _psum(x: Array, axis: str, size: int) -> Array:
    return _alone(x, axis) if size == 1 else lax.psum(x, axis)


def vary(tree: Any, axes: Axes, names: tuple[str, ...] | None = None) -> Any:
    """Replicated arrays as varying ones, so that autodiff leaves their gradient unreduced."""
    wanted = axes.names if names is None else names

    def cast(x: Any) -> Any:
        kind = jax.typeof(x).manual_axis_type
        missing = tuple(axis for axis in wanted if axis not in kind.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


# [Note: an axis of one device]
# A value that varies over an axis of size one is equal on all its devices. JAX can be told so only
# by a collective, which XLA keeps on CPU (an all-gather or all-reduce that copies). This primitive
# changes the type and compiles to nothing.
_alone_p = Primitive("jzero_alone")


def _alone(x: Array, axis: str) -> Array:
    if axis not in jax.typeof(x).manual_axis_type.varying:
        return x
    return _alone_p.bind(x, axis=axis)


@_alone_p.def_abstract_eval
def _(x: Any, *, axis: str) -> Any:
    kind = x.manual_axis_type
    invariant = type(kind)(
        varying=kind.varying - {axis}, unreduced=kind.unreduced, reduced=kind.reduced
    )
    return x.update(manual_axis_type=invariant)


_alone_p.def_impl(lambda x, *, axis: x)
mlir.register_lowering(_alone_p, lambda ctx, x, *, axis: [x])
batching.primitive_batchers[_alone_p] = lambda args, dims, *, axis: (
    _alone_p.bind(*args, axis=axis),
    dims[0],
)


# [Note: tied] A primitive, since a jitted function would be traced anew for each bucket, and a
# choice by platform for each of its branches. Its operands are ``count`` values, and what these
# are made to depend on; its results are the former, or both.
_tied_p = Primitive("jzero_tied")
_tied_p.multiple_results = True
_tied_p.def_abstract_eval(lambda *avals, count, both: list(avals if both else avals[:count]))
_tied_p.def_impl(lambda *xs, count, both: list(xs if both else xs[:count]))


def _call(ctx: mlir.LoweringRuleContext, *xs: Any, count: int, both: bool) -> list[Any]:
    """A call of a function that XLA may not inline, and that returns its first arguments."""
    module, types = ctx.module_context, [x.type for x in xs]
    if both:
        count = len(xs)
    with ir.InsertionPoint(module.module.body):
        function = func.FuncOp("jzero_tied", (types, types[:count]), visibility="private")
    module.symbol_table.insert(function)
    with ir.InsertionPoint(function.add_entry_block()):
        func.ReturnOp(list(function.arguments)[:count])
    call = func.CallOp(function, list(xs))
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"inlineable": ir.StringAttr.get("false")}
    )
    return list(call.results)


def _call_one_way(ctx: mlir.LoweringRuleContext, *xs: Any, count: int, both: bool) -> list[Any]:
    return _call(ctx, *xs, count=count, both=False) + list(xs[count:] if both else ())


mlir.register_lowering(_tied_p, _call, platform="cpu")
mlir.register_lowering(_tied_p, _call_one_way)
batching.primitive_batchers[_tied_p] = lambda args, dims, *, count, both: (
    _tied_p.bind(*args, count=count, both=both),
    dims if both else dims[:count],
)
ad.primitive_jvps[_tied_p] = lambda primals, tangents, *, count, both: (
    _tied_p.bind(*primals, count=count, both=both),
    list(tangents if both else tangents[:count]),
)
