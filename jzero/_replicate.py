"""What makes replicas of a model equal: all-reduced buckets, and means of what is small."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jzero._collectives import after, divide, last_after, total, vary
from jzero._config import ZeroConfig
from jzero._layout import Bucket, Layout, Leaf, PathKey, plan_layout
from jzero._mesh import Axes
from jzero._program import Fact

__all__ = [
    "Options",
    "Record",
    "Static",
    "agree",
    "all_reduced",
    "argument_error",
    "bucket_layout",
    "is_key",
    "make_options",
    "own_key",
    "production_order",
    "wide",
]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a wrapper was built with; hashable.

    Attributes:
      config: mesh, axes, bucket size, mean or sum.
      first_cap_bytes: cap of the first bucket of a dtype.
      average_in_collective: sum, then divide; False: divide, then sum.
      find_unused: leave parameters that the loss does not use out of the buckets.
      static_graph: buckets follow the order in which the backward pass produces gradients.
      wire: dtype of the all-reduce; None: each leaf's own.
      buffers: "mean" over the devices, or the "first" device's.
    """

    config: ZeroConfig
    first_cap_bytes: int = 2**20
    average_in_collective: bool = False
    find_unused: bool = False
    static_graph: bool = False
    wire: Any = None
    buffers: Literal["mean", "first"] = "mean"


class Record:
    """What a wrapper and its copies inside of traces share: compiled programs, and the buckets of
    the last synchronised call, for ``ddp.buckets``. No result depends on it."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.programs: dict[Any, Any] = {}


@dataclasses.dataclass(frozen=True)
class Static:
    """All of a wrapper but its arrays. Hashable: a part of every compiled program's key."""

    options: Options
    wrt: Any
    linen: Any  # the linen module; None for nnx
    no_sync: bool
    record: Record


def make_options(
    *,
    mesh: Any,
    axis: str,
    replica_axis: str | None,
    bucket_cap_mb: float,
    first_bucket_mb: float,
    find_unused_parameters: bool,
    average_in_collective: bool,
    static_graph: bool,
    average: bool,
    grad_reduce_dtype: Any,
    buffers: Any,
) -> Options:
    """The arguments of ``DistributedDataParallel``, checked.

    Raises:
      ValueError: an argument that does not fit, by name.
    """
    for name, value in {
        "find_unused_parameters": find_unused_parameters,
        "average_in_collective": average_in_collective,
        "static_graph": static_graph,
        "average": average,
    }.items():
        if not isinstance(value, bool):
            raise ValueError(argument_error(name, f"got {value!r}, expected True or False"))
    if buffers not in ("mean", "first"):
        raise ValueError(argument_error("buffers", f"got {buffers!r}, expected 'mean' or 'first'"))
    caps = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": first_bucket_mb}
    for name, cap in caps.items():
        number = isinstance(cap, (int, float)) and not isinstance(cap, bool)
        if not (number and cap > 0 and math.isfinite(cap)):
            text = f"got {cap!r}, expected a positive number of MiB"
            raise ValueError(argument_error(name, text))
    try:
        config = ZeroConfig(
            axis=axis,
            replica_axis=replica_axis,
            mesh=mesh,
            bucket_mb=bucket_cap_mb,
            average=average,
        )
    except ValueError as error:
        text = str(error).replace("ZeroConfig(", "DistributedDataParallel(")
        raise ValueError(text) from None
    return Options(
        config=config,
        first_cap_bytes=max(1, int(first_bucket_mb * 2**20)),
        average_in_collective=average_in_collective,
        find_unused=find_unused_parameters,
        static_graph=static_graph,
        wire=_wire(grad_reduce_dtype),
        buffers=buffers,
    )


def argument_error(name: str, text: str) -> str:
    """The beginning of every message about an argument of the wrapper."""
    return f"DistributedDataParallel({name}=...): {text}"


def _wire(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        wire = jnp.dtype(dtype)
    except TypeError:
        wire = None
    if wire is None or not jnp.issubdtype(wire, jnp.floating) or wire.itemsize < 2:
        text = f"got {dtype!r}, expected a float of 16 to 64 bits"
        raise ValueError(argument_error("grad_reduce_dtype", text))
    return wire.name


def bucket_layout(
    trained: Mapping[str, Any],
    options: Options,
    order: Sequence[str] | None = None,
    without: set[str] | None = None,
) -> Layout:
    """The buckets of a model's gradients: reverse order, or the one given. A bucket that is
    complete earlier comes first: small leaves between large ones, or those of a rare dtype, may be
    of all the model."""
    leaves: list[Leaf] = []
    for name, x in trained.items():
        if without and name in without:
            continue
        leaves.append(Leaf(_keys(name), tuple(x.shape), x.dtype.name, x.dtype.itemsize))
    return plan_layout(
        leaves,
        shards=1,
        cap_bytes=options.config.cap_bytes,
        alignment=1,
        order=None if order is None else [p for p in order if not without or p not in without],
        first_cap_bytes=options.first_cap_bytes,
        by_last=True,  # each waits for the one before it
    )


def _keys(path: str) -> tuple[PathKey, ...]:
    """``"layers/0/kernel"`` as ``("layers", 0, "kernel")``, so that numbers sort as numbers."""
    keys = path.split("/")
    return tuple(int(k) if k.isdecimal() and str(int(k)) == k else k for k in keys)


def production_order(facts: Mapping[str, Fact]) -> list[str]:
    """Paths by when their gradients are there; those of one moment, as of one loop, in reverse.
    Zeros, for which nobody waits, come last."""
    canonical = [
        [(0, key, "") if isinstance(key, int) else (1, 0, key) for key in _keys(path)]
        for path in facts
    ]
    by_path = [path for _, path in sorted(zip(canonical, facts, strict=True), reverse=True)]
    return sorted(by_path, key=lambda p: (True, ()) if facts[p].zero else (False, facts[p].when))


def all_reduced(
    grads: dict[str, Array],
    trained: Mapping[str, Any],
    layout: Layout,
    options: Options,
    axes: Axes,
) -> dict[str, Array]:
    """The mean (or sum) over all devices, in the leaves' dtypes; zero where there is no bucket."""
    result = {
        path: jnp.zeros(x.shape, x.dtype)
        for path, x in trained.items()
        if path not in layout.by_path
    }
    count = axes.size if options.config.average else 1
    owed: set[str] = set()
    sums: dict[str, Array] = {}
    before: list[str] = []
    for bucket in layout.buckets:
        empty = [slot for slot in bucket.slots if not slot.size]
        result |= {slot.path: jnp.zeros(slot.shape, bucket.dtype) for slot in empty}
    filled = [bucket for bucket in layout.buckets if bucket.size]
    for bucket in filled:
        parts = _sent(grads, bucket, options, count)
        if axes.size > 1 and bucket is filled[-1]:
            parts, sums = last_after(parts, sums)
        elif axes.size > 1:
            parts = after(parts, {path: sums[path] for path in before})
        sums |= total(parts, axes)
        before = list(parts)
        if count > 1 and not _divides_first(bucket, options):
            owed |= parts.keys()
    result |= {path: divide(x, count) if path in owed else x for path, x in sums.items()}
    return {path: x.astype(trained[path].dtype) for path, x in result.items()}


def _sent(
    grads: dict[str, Array], bucket: Bucket, options: Options, count: int
) -> dict[str, Array]:
    """[Note: one all-reduce a bucket] A bucket's leaves are handed to the collective one by one,
    which costs no copy into a flat array and back. They do not depend on each other, so XLA makes
    one all-reduce of them, with one operand a leaf; they depend on the bucket before, so it makes
    no more than that.

    Dividing first costs a pass over the gradient. It is done where it matters: in float16. Of
    float32 and bfloat16, whose range is that of the gradient's terms, the sum is divided, which
    the update can take in the same pass. So the next bucket waits for the sum: a mean that it
    waited for would be written to memory for that."""
    wire = _wire_of(bucket, options)
    parts = {slot.path: grads[slot.path].astype(wire) for slot in bucket.slots if slot.size}
    if count > 1 and _divides_first(bucket, options):
        parts = {path: divide(x, count) for path, x in parts.items()}
    return parts


def _wire_of(bucket: Bucket, options: Options) -> Any:
    return jnp.dtype(bucket.dtype if options.wire is None else options.wire)


def _divides_first(bucket: Bucket, options: Options) -> bool:
    return _wire_of(bucket, options) == jnp.float16 and not options.average_in_collective


# ---------------------------------------------------------------- everything small


def agree(
    loss: Array,
    scalars: list[Array],
    buffers: dict[int, Array],
    options: Options,
    axes: Axes,
) -> tuple[Array, list[Array], dict[int, Array]]:
    """Loss and floating scalars as means, integer scalars as sums, buffers by their rule. These
    sums depend on nothing, so XLA joins them to each other or to a bucket."""
    jobs: list[tuple[Array, Literal["mean", "sum", "first"]]] = [(loss, "mean")]
    for x in scalars:
        if not jnp.issubdtype(x.dtype, jnp.number):
            raise ValueError(
                f"aux holds a scalar of dtype {x.dtype}, which has no sum over devices; return it "
                "as an array with a leading batch dim, or as a number"
            )
        jobs.append((x, "sum" if jnp.issubdtype(x.dtype, jnp.integer) else "mean"))
    for x in buffers.values():
        mean = options.buffers == "mean" and jnp.issubdtype(x.dtype, jnp.inexact)
        jobs.append((x, "mean" if mean else "first"))
    parts: list[Array] = []
    for x, how in jobs:
        part = x.astype(jnp.int32) if x.dtype == bool else x
        if how == "mean" and jnp.issubdtype(x.dtype, jnp.floating):
            part = wide(part)
        if how == "first":
            part = jnp.where(_device_index(axes) == 0, part, jnp.zeros_like(part))
        parts.append(vary(part, axes))
    sums = total(parts, axes)
    results: list[Array] = []
    for (x, how), s in zip(jobs, sums, strict=True):
        mean = divide(s, axes.size) if how == "mean" and axes.size > 1 else s
        results.append(mean.astype(x.dtype))
    count = 1 + len(scalars)
    return results[0], results[1:count], dict(zip(buffers, results[count:], strict=True))


def _device_index(axes: Axes) -> Array:
    index = jnp.int32(0)
    for axis, size in axes.sizes:
        index = index * size + lax.axis_index(axis)
    return index


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def own_key(x: Any, axes: Axes) -> Any:
    """A PRNG key of this device's own, made from the common one; anything else as it is."""
    if not (isinstance(x, jax.Array) and is_key(x)):
        return x
    index = _device_index(axes)
    if x.ndim == 0:
        return jax.random.fold_in(x, index)
    folded = jax.vmap(jax.random.fold_in, (0, None))(x.reshape(-1), index)
    return folded.reshape(x.shape)


def wide(x: Array) -> Array:
    """In float32, if it was narrower."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
