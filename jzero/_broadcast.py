"""Making all devices and processes start from the same values, and finding where they do not.

Values travel as bits, packed into buckets of one dtype: whatever the dtype, NaN payloads and the
sign of zero included, what arrives is what the first device had.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._collectives import after
from jzero._config import ZeroConfig
from jzero._layout import Layout, Leaf, path_string, plan_layout
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import leaf_paths, pack, unpack
from jzero._processes import agree_on_layout

__all__ = ["broadcast", "first_difference"]


def broadcast(tree: Any, *, zero: ZeroConfig | None = None) -> Any:
    """Give every device, of every process, the first device's values.

    What a training script calls on parameters that each process has made for itself;
    ``jzero.DistributedDataParallel`` does it when it is built. One all-reduce of integers a
    bucket (``bucket_mb``, one dtype). Inside ``shard_map`` it acts on local arrays.

    Args:
      tree: any pytree; every array in it is sent, trainable or not: floats of any width,
        integers, bools, complex numbers, PRNG keys. ``None`` and what is not an array stay.
      zero: a :class:`ZeroConfig` that names mesh, axes and bucket size; None: ``ZeroConfig()``.

    Returns:
      The same tree; arrays replicated over the mesh, with their dtypes and bits.

    Raises:
      ValueError: no mesh; processes whose trees differ in a path, shape or dtype.
    """
    config = ZeroConfig() if zero is None else zero
    axes = resolve_axes(config)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    chosen, layout = _plan(tree, config.cap_bytes)
    dtypes = {path: x.dtype for path, (_, x) in chosen.items()}
    agree_on_layout("the tree to broadcast", layout, axes.mesh, dtypes)
    impls = {path: _key_impl(x) for path, (_, x) in chosen.items()}

    def body(local: dict[str, Array]) -> dict[str, Array]:
        received: dict[str, Array] = {}
        before: dict[str, Array] = {}
        for bucket in layout.buckets:
            dtype = jnp.dtype(bucket.dtype)
            words = _to_words(pack(local, bucket, dtype))
            words = jnp.where(_is_first(axes), words, jnp.zeros_like(words))
            before = lax.psum(after({"words": words}, before), axes.names)
            received |= unpack(_from_words(before["words"], dtype), bucket)
        return received

    def run(local: dict[str, Array]) -> dict[str, Array]:
        originals = {path: x for path, (_, x) in chosen.items()}
        sent = on_mesh(axes, body, (P(),), P(), local, check=axes.manual)
        return {p: _restored(x, originals[p].dtype, impls[p]) for p, x in sent.items()}

    plain = {path: _placed(_plain(x), axes) for path, (_, x) in chosen.items()}
    received = run(plain) if axes.manual else jax.jit(run)(plain)
    for path, (i, _) in chosen.items():
        leaves[i] = received[path]
    return jax.tree.unflatten(treedef, leaves)


def first_difference(tree: Any, *, zero: ZeroConfig | None = None) -> str | None:
    """The path of the first array that is not the same, bit by bit, on all devices.

    Each device hashes what it holds, 64 bits an array; only the hashes travel, in one
    all-gather. Not for use under ``jit`` or ``shard_map``: the answer is a Python string.

    Args:
      tree: any pytree, as for :func:`broadcast`.
      zero: as for :func:`broadcast`.

    Returns:
      A path such as ``"layers/0/kernel"`` (first in the order of the tree), or None where all
      are the same.

    Raises:
      ValueError: under a trace; no mesh; processes whose trees differ in a path, shape or dtype.
    """
    config = ZeroConfig() if zero is None else zero
    axes = resolve_axes(config)
    chosen, layout = _plan(tree, config.cap_bytes)
    if axes.manual or any(isinstance(x, Tracer) for _, x in chosen.values()):
        raise ValueError(
            "first_difference compares hashes on the host; call it outside of jit and shard_map"
        )
    dtypes = {path: x.dtype for path, (_, x) in chosen.items()}
    agree_on_layout("the tree to compare", layout, axes.mesh, dtypes)
    if not chosen:
        return None

    def body(local: dict[str, Array]) -> Array:
        hashes = jnp.stack([_hash(local[path]) for path in chosen])
        return lax.all_gather(hashes, axes.names)

    def run(local: dict[str, Array]) -> Array:
        return on_mesh(axes, body, (P(),), P(), local, check=False)

    hashes = np.asarray(jax.jit(run)({p: _placed(_plain(x), axes) for p, (_, x) in chosen.items()}))
    hashes = hashes.reshape(axes.size, len(chosen), 2)
    differs = (hashes != hashes[:1]).any(axis=(0, 2))
    return next((path for path, bad in zip(chosen, differs, strict=True) if bad), None)


def _plan(tree: Any, cap_bytes: int) -> tuple[dict[str, tuple[int, Any]], Layout]:
    """The arrays of a tree by path, each with its place among the leaves, and their buckets."""
    chosen: dict[str, tuple[int, Any]] = {}
    leaves: list[Leaf] = []
    for i, (path, x) in enumerate(leaf_paths(tree)):
        if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
            continue
        chosen[path_string(path)] = i, x
        plain = jax.eval_shape(_plain, x)
        leaves.append(Leaf(path, plain.shape, plain.dtype.name, plain.dtype.itemsize))
    # Four elements of one byte are a word.
    return chosen, plan_layout(leaves, shards=1, cap_bytes=cap_bytes, alignment=4)


def _placed(x: Any, axes: Axes) -> Any:
    """A process's own array as one that claims to be replicated over the mesh, whatever the other
    processes hold: nothing is sent or compared."""
    if isinstance(x, Tracer) or not isinstance(axes.mesh, jax.sharding.Mesh):
        return x
    devices = set(axes.mesh.devices.flat)
    if isinstance(x, jax.Array) and x.sharding.device_set == devices:
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"an array lies on {len(x.sharding.device_set)} devices of several processes, which "
            f"are not the {len(devices)} of the mesh; make it from local data or on this mesh"
        )
    local = [d for d in axes.mesh.devices.flat if d.process_index == jax.process_index()]
    copies = [jax.device_put(x, d) for d in local]
    return jax.make_array_from_single_device_arrays(
        np.shape(x), NamedSharding(axes.mesh, P()), copies
    )


def _is_first(axes: Axes) -> Array:
    index = jnp.int32(0)
    for axis in axes.names:
        index = index + lax.axis_index(axis)
    return index == 0


# ---------------------------------------------------------------- bits


def _key_impl(x: Any) -> Any:
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def _plain(x: Any) -> Array:
    """An array of any dtype as one of integers of 8, 16, 32 or 64 bits.

    Integers from the start: a CPU or GPU may widen small floats to move them, which would not keep
    the payload of a NaN.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _plain(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.floating):
        if jnp.finfo(x.dtype).bits < 8:
            x = x.astype(jnp.float32)
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return x


def _restored(x: Array, dtype: Any, impl: Any) -> Array:
    """Inverse of :func:`_plain`."""
    if impl is not None:
        return jax.random.wrap_key_data(x, impl=impl)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(x, f"float{4 * dtype.itemsize}")
        return lax.complex(parts[..., 0], parts[..., 1])
    if jnp.issubdtype(dtype, jnp.floating):
        small = jnp.finfo(dtype).bits < 8
        return lax.bitcast_convert_type(x, jnp.float32 if small else dtype).astype(dtype)
    return x.astype(dtype)


def _to_words(flat: Array) -> Array:
    """Bits of a flat array, its length a multiple of four, as uint32."""
    size = flat.dtype.itemsize
    if size < 4:
        flat = flat.reshape(-1, 4 // size)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _from_words(words: Array, dtype: Any) -> Array:
    """Inverse of :func:`_to_words`."""
    if dtype.itemsize == 8:
        words = words.reshape(-1, 2)
    return lax.bitcast_convert_type(words, dtype).reshape(-1)


def _hash(x: Array) -> Array:
    """(2,) uint32 that depends on every bit of ``x`` and on where it is."""
    flat = x.reshape(-1)
    flat = jnp.concatenate([flat, jnp.zeros(-flat.size % 4, flat.dtype)])
    words = _to_words(flat)
    place = lax.iota(jnp.uint32, words.size)
    return jnp.stack([_mixed(words, place, seed) for seed in (0x9E3779B1, 0x85EBCA77)])


def _mixed(words: Array, place: Array, seed: int) -> Array:
    x = (words ^ jnp.uint32(seed)) * jnp.uint32(0xCC9E2D51) + place * jnp.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> jnp.uint32(16)), dtype=jnp.uint32)
