"""Pytrees to flat buckets and back. Nothing else in jzero flattens a tree or an array.

[Note: which leaves train]
A leaf of a floating dtype trains: it has a slot. Integer, bool, PRNG-key and ``None`` leaves, and
leaves labelled frozen, pass through: they are in no bucket, own no state and come back as the
very same arrays. Where parameters are kept as shards (``param_sync="lazy"``), frozen floating
leaves are sharded too, in buckets of a layout of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jzero._layout import Bucket, Layout, Leaf, PathKey, Slot, path_string, plan_layout

__all__ = [
    "Plan",
    "Stacks",
    "block_of",
    "leaf_paths",
    "pack",
    "plan_tree",
    "unboxed",
    "unpack",
    "unpack_all",
]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout together with the tree that it was made from.

    Attributes:
      layout: the buckets.
      treedef: structure of the parameters, ``None`` leaves included.
      paths: path string of every leaf, in leaf order.
      trains: whether the leaf has a slot, in leaf order.
      frozen: buckets of frozen leaves; without any where parameters are not sharded.
      stacks: of which stack the leaf is part, or None, in leaf order.
    """

    layout: Layout
    treedef: Any
    paths: tuple[str, ...]
    trains: tuple[bool, ...]
    frozen: Layout
    stacks: tuple[str | None, ...]

    def leaves(self, params: Any) -> dict[str, Any]:
        """The leaves of a tree of the planned structure, by path."""
        return dict(zip(self.paths, _flat(params), strict=True))

    def rebuild(self, by_path: dict[str, Any]) -> Any:
        """The tree whose leaves :meth:`leaves` returned."""
        return jax.tree.unflatten(self.treedef, [by_path[path] for path in self.paths])

    def gradients(self, grads: Any) -> dict[str, Array]:
        """The gradient of each trainable leaf, by path, checked against the layout.

        Raises:
          ValueError: another structure, a missing gradient, or a shape that differs from the
            parameter's, naming the path.
        """
        leaves, treedef = jax.tree.flatten(grads, is_leaf=_is_none)
        if treedef != self.treedef:
            have = {path for path, _ in leaf_paths(grads)}
            missing, extra = (
                sorted(set(self.paths) - {path_string(p) for p in have}),
                sorted({path_string(p) for p in have} - set(self.paths)),
            )
            raise ValueError(
                "grads must have the structure of params; "
                + (
                    f"grads lack {missing[:5]} and have {extra[:5]} that params lack"
                    if missing or extra
                    else f"got {treedef}, expected {self.treedef}"
                )
            )
        result: dict[str, Array] = {}
        for path, trains, grad in zip(self.paths, self.trains, leaves, strict=True):
            if not trains:
                continue
            slot = self.layout.by_path[path]
            if grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0:
                raise ValueError(
                    f"grads[{path!r}] is missing, but this parameter trains; label it 'frozen' "
                    "with param_labels, or pass zeros"
                )
            grad = jnp.asarray(grad)
            if grad.shape != slot.shape:
                raise ValueError(
                    f"grads[{path!r}] has shape {grad.shape}, its parameter {slot.shape}"
                )
            if not jnp.issubdtype(grad.dtype, jnp.floating):
                raise ValueError(
                    f"grads[{path!r}] has dtype {grad.dtype}; a gradient must be floating"
                )
            result[path] = grad
        return result


Stacks = Callable[[str, Any], str | None]
"""From a leaf's path and the leaf to the stack that it is part of, or None."""


def plan_tree(
    params: Any,
    *,
    shards: int,
    cap_bytes: int,
    groups: Callable[[Any], dict[str, str | None]] | None = None,
    stacks: Stacks | None = None,
    apart: bool = False,
    policy: Callable[[str], str] = lambda _: "",
) -> Plan:
    """Plan the buckets of a parameter tree.

    Args:
      params: arrays, ``ShapeDtypeStruct`` or tracers; only shapes and dtypes are read.
      shards: devices on the shard axis.
      cap_bytes: see :func:`jzero._layout.plan_layout`.
      groups: from ``params`` to a group for every path; None freezes the leaf.
      stacks: which leaves are stacked.
      apart: for parameters that are kept as shards: no bucket holds leaves of two blocks
        (:func:`block_of`), and frozen leaves are planned too.
      policy: from a path to its precision policy.

    Raises:
      ValueError: a complex leaf, by path; whatever ``groups`` and ``plan_layout`` raise.
      TypeError: a leaf that is not an array, by path.
    """
    group_of = None if groups is None else groups(params)
    trained: list[Leaf] = []
    frozen: list[Leaf] = []
    found = leaf_paths(params)
    paths = tuple(path_string(path) for path, _ in found)
    trains: list[bool] = []
    stacked: list[str | None] = []
    root = _common([path for path, _ in found])
    for (path, leaf), name in zip(found, paths, strict=True):
        group = "" if group_of is None else group_of[name]
        floating = (group is not None or apart) and _is_trainable(name, leaf)
        trains.append(floating and group is not None)
        stack = None if stacks is None else stacks(name, leaf)
        stacked.append(stack)
        if floating:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # numpy's float64 is float32 to JAX
            shape = tuple(leaf.shape)
            new = Leaf(path, shape, dtype.name, dtype.itemsize, group or "", policy=policy(name))
            if stack is not None:
                new = new._replace(block=stack, layers=leaf.shape[0])
            elif apart:
                new = new._replace(block=block_of(path, root))
            (frozen if group is None else trained).append(new)
    return Plan(
        plan_layout(trained, shards=shards, cap_bytes=cap_bytes, whole_stacks=not apart),
        jax.tree.structure(params, is_leaf=_is_none),
        paths,
        tuple(trains),
        plan_layout(frozen, shards=shards, cap_bytes=cap_bytes),
        tuple(stacked),
    )


def block_of(path: Sequence[PathKey], root: int) -> str:
    """The part of a model that a leaf belongs to, such as one layer: the path up to the first key
    that is or ends in a number (``layers/3``, ``Block_3``), else up to the first key; ``root``
    keys, which all paths share, do not count. Buckets of two blocks are gathered apart."""
    for end, key in enumerate(path[root:-1], root + 1):
        if isinstance(key, int) or key[-1:].isdigit():
            return path_string(path[:end])
    return path_string(path[: root + 1])


def _common(paths: Sequence[Sequence[PathKey]]) -> int:
    """How many keys all paths begin with, the last one of each left out."""
    count = 0
    for keys in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(map(str, keys))) > 1:
            break
        count += 1
    return count


def pack(leaves: dict[str, Array], bucket: Bucket, dtype: Any) -> Array:
    """Leaves of one bucket, cast and laid end to end, zeros after the last: (padded,); one leaf
    that is its whole bucket as ``bucket.dims``.

    Of a stacked bucket: that of one layer, or, of all layers, (layers, ...) of them.
    """
    if is_whole(leaves, bucket):
        return jax.vmap(lambda row: _pack_row(row, bucket, dtype))(
            {slot.path: leaves[slot.path] for slot in bucket.slots}
        )
    return _pack_row(leaves, bucket, dtype)


def is_whole(leaves: dict[str, Array], bucket: Bucket) -> bool:
    """Whether these leaves of a stacked bucket are all layers of it."""
    first = bucket.slots[0]
    return bool(bucket.layers) and leaves[first.path].ndim == len(first.shape)


def _pack_row(leaves: dict[str, Array], bucket: Bucket, dtype: Any) -> Array:
    if bucket.dims is not None:
        return leaves[bucket.slots[0].path].reshape(bucket.dims).astype(dtype)
    flat = [leaves[slot.path].reshape(-1) for slot in bucket.slots if slot.size]
    # Laid out in the narrower of the two dtypes: flattening and joining move memory, a cast fuses.
    found = {part.dtype for part in flat}
    own = found.pop() if len(found) == 1 else jnp.dtype(dtype)
    through = own if own.itemsize < jnp.dtype(dtype).itemsize else dtype
    parts = [part.astype(through) for part in flat]
    padding = (bucket.padded - bucket.size) // bucket.rows
    if padding:
        parts.append(jnp.zeros(padding, through))
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).astype(dtype)


def unpack(flat: Array, bucket: Bucket) -> dict[str, Array]:
    """Inverse of :func:`pack` for one row (flat, or as ``bucket.dims``): leaves by path, padding
    dropped."""
    if bucket.dims is not None:
        slot = bucket.slots[0]
        return {slot.path: flat.reshape(slot.row_shape)}
    return {
        slot.path: jax.lax.slice(flat, (slot.offset,), (slot.offset + slot.size,)).reshape(
            slot.row_shape
        )
        for slot in bucket.slots
    }


def unpack_all(flat: Array, bucket: Bucket) -> dict[str, Array]:
    """:func:`unpack`, for all layers of a stacked bucket: (layers, ...) of rows."""
    one = functools.partial(unpack, bucket=bucket)
    return jax.vmap(one)(flat) if bucket.layers else one(flat)


def differing_slot(have: Layout, want: Layout) -> str:
    """One sentence about the first place where two layouts differ, for error messages."""
    if have.shards != want.shards:
        return f"it was made for {have.shards} shards, and the mesh axis has {want.shards}"
    ours, theirs = have.by_path, want.by_path
    for path in [*theirs, *ours]:
        a, b = ours.get(path), theirs.get(path)
        if a != b:
            return f"{path!r} is {_describe(a)} there and {_describe(b)} here"
    return "their padding differs"


def leaf_paths(tree: Any) -> list[tuple[tuple[PathKey, ...], Any]]:
    """Every leaf, ``None`` included, with the keys that lead to it.

    A flax ``nnx.Variable`` is a box around a leaf and adds no key: ``nnx.Optimizer`` hands
    parameters over with their boxes at ``init`` and without at ``update``.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None or _is_box(x))
    paths: list[tuple[tuple[PathKey, ...], Any]] = []
    for path, leaf in flat:
        keys = tuple(_key(key) for key in path)
        if _is_box(leaf):
            inner, _ = jax.tree_util.tree_flatten_with_path(leaf, is_leaf=_is_none)
            paths += [(keys + tuple(_key(key) for key in sub[1:]), x) for sub, x in inner]
        else:
            paths.append((keys, leaf))
    return paths


def _is_box(x: Any) -> bool:
    return hasattr(x, "get_raw_value") and hasattr(x, "get_metadata")


def unboxed(tree: Any) -> Any:
    """The tree with the array itself in place of each box around one."""

    def open_box(x: Any) -> Any:
        inner = jax.tree.leaves(x)
        return inner[0] if _is_box(x) and len(inner) == 1 else x

    return jax.tree.map(open_box, tree, is_leaf=_is_box)


def _key(key: Any) -> PathKey:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            value = getattr(key, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            return value if is_int else str(value)
    return str(key)


def _flat(tree: Any) -> Sequence[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _is_trainable(path: str, leaf: Any) -> bool:
    if leaf is None:
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        raise TypeError(
            f"params[{path!r}] is a {type(leaf).__name__}, not an array; convert it with "
            "jnp.asarray, or keep it out of params"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"params[{path!r}] is complex ({dtype}), which jzero does not update; keep its real "
            "and imaginary parts as two real leaves"
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _describe(slot: Slot | None) -> str:
    if slot is None:
        return "absent"
    stacked = f" ({slot.layers} stacked layers)" if slot.layers else ""
    return f"{slot.dtype}{list(slot.shape)}{stacked} in bucket {slot.bucket} at {slot.offset}"
