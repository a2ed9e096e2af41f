"""Lazy parameter sync: shards as the training state, gathered inside the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jzero._collectives import own_shard, whole_bucket
from jzero._config import ZeroConfig, config_and_groups
from jzero._layout import Bucket
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import pack, plan_tree, unpack_all
from jzero._plans import stacks_of
from jzero._shards import ParamShards, bucket_spec, gather_local, param_specs

__all__ = ["gather_params", "shard_params"]


def shard_params(
    params: Any, *, zero: Any = None, stacked: str | Sequence[str] | None = None
) -> ParamShards:
    """Cut parameters into flat shards: the training state of lazy parameter sync (ZeRO-3).

    Each device keeps 1/shards of every bucket, in the parameters' dtype. The shards go to
    ``tx.init``, ``tx.step`` and ``tx.update`` where parameters would, and to
    ``jzero.value_and_grad``, whose loss gathers them with :func:`gather_params`. A bucket holds
    leaves of one block only, such as one layer: the path up to the first key that is or ends in a
    number, else up to its first key; so that a layer is gathered without its neighbours.

    Frozen leaves are sharded too, and gathered, but never reduced. Integers, bools, PRNG keys and
    ``None`` stay as they are.

    Args:
      params: a pytree of arrays. Of numpy arrays (memory-mapped ones too) each device is sent its
        shards alone, so that they need not fit on one; those on devices are replicated first.
      zero: a :class:`ZeroConfig`, or the transformation that will step, which is needed where it
        has labels or a mask, for they shape the buckets too. None: ``ZeroConfig()``.
      stacked: path prefixes such as ``"layers"`` (or ``"decoder/layers"``) of subtrees whose leaves
        have one leading dim of layers, to be scanned: each layer is padded and sharded by itself,
        and a scan over that part of the shards gathers one layer at a time. None: those of
        ``ZeroConfig.stacked``.

    Returns:
      :class:`ParamShards`. No communication.

    Raises:
      ValueError: a prefix without leaves; leaves below it whose leading dims differ, by path;
        shards instead of parameters; no mesh.
    """
    if isinstance(params, ParamShards):
        raise ValueError("shard_params got shards; pass the parameters, or use the shards as are")
    config, groups = config_and_groups(zero, ZeroConfig(param_sync="lazy"))
    axes = resolve_axes(config)
    plan = plan_tree(
        params,
        shards=axes.shards,
        cap_bytes=config.cap_bytes,
        groups=groups,
        stacks=stacks_of(params, config.stacked if stacked is None else stacked),
        apart=True,
        policy=config.precision.policy,
    )
    slotted = plan.layout.by_path.keys() | plan.frozen.by_path.keys()
    leaves = plan.leaves(params)
    others = tuple(x for path, x in leaves.items() if path not in slotted)
    on_host = all(isinstance(leaves[path], np.ndarray) for path in slotted)
    if on_host and isinstance(axes.mesh, jax.sharding.Mesh):
        buckets, frozen = (
            tuple(_from_host(leaves, bucket, axes.shard, axes.mesh) for bucket in each.buckets)
            for each in (plan.layout, plan.frozen)
        )
        return ParamShards(buckets, frozen, others, None, plan, config)
    floats = {path: jnp.asarray(x) for path, x in leaves.items() if path in slotted}

    def body(floats: dict[str, Array], others: tuple[Any, ...]) -> ParamShards:
        def cut(buckets: Sequence[Bucket]) -> tuple[Array, ...]:
            return tuple(_cut(floats, bucket, axes) for bucket in buckets)

        buckets, frozen = cut(plan.layout.buckets), cut(plan.frozen.buckets)
        return ParamShards(buckets, frozen, others, None, plan, config)

    like = ParamShards(
        (jnp.zeros(0),) * len(plan.layout.buckets),
        (jnp.zeros(0),) * len(plan.frozen.buckets),
        others,
        None,
        plan,
        config,
    )
    return on_mesh(axes, body, (jax.P(), jax.P()), param_specs(like), floats, others)


def gather_params(shards: ParamShards) -> Any:
    """The parameters that shards (or a part of them: ``shards["layers"]``) stand for.

    Inside the loss of ``jzero.value_and_grad``, or inside the user's ``shard_map``: one all-gather
    a bucket over the axis, in the dtype of ``Precision.param_sync`` (frozen leaves: their own).
    Its transpose is one reduce-scatter a bucket in the dtype of ``grad_sync``, and one all-reduce
    of the shard over the replica axis, wherever autodiff has finished with the bucket: inside the
    backward loop of a scan. There the gradient is divided by the number of devices if ``average``;
    differentiated by the user (``jax.grad`` by shards), it comes back in the parameters' dtype,
    where ``jzero.value_and_grad`` keeps float32. Call it once for a subtree, where it is used: two
    calls gather and reduce twice.

    What lives until the backward pass is decided by ``jax.checkpoint`` around the function that
    gathers: without a policy, or with :func:`save_except_gathered`, it gathers again; with
    :func:`save_gathered` it keeps the gathered parameters. Without ``jax.checkpoint`` they are
    kept.

    Outside of a ``shard_map``: the whole parameters, replicated, for evaluation and export.

    Args:
      shards: of :func:`shard_params`; in the body of a scan, those of one layer.

    Returns:
      The tree that was cut, or the part of it: same structure, shapes and dtypes.
    """
    if not isinstance(shards, ParamShards):
        raise ValueError(
            f"gather_params needs what shard_params returned, got {type(shards).__name__}"
        )
    axes = resolve_axes(shards.config)
    return gather_local(shards, axes) if axes.manual else _whole(shards)


@jax.jit
def _whole(shards: ParamShards) -> Any:
    axes = resolve_axes(shards.config)
    plan = shards.plan

    def body(shards: ParamShards) -> dict[str, Array]:
        leaves: dict[str, Array] = {}
        for layout, arrays in ((plan.layout, shards.buckets), (plan.frozen, shards.frozen)):
            for bucket, shard in zip(layout.buckets, arrays, strict=True):
                leaves |= unpack_all(whole_bucket(shard, bucket, axes), bucket)
        return leaves

    return shards.rebuilt(on_mesh(axes, body, (param_specs(shards),), jax.P(), shards))


def _cut(leaves: dict[str, Array], bucket: Bucket, axes: Axes) -> Array:
    packed = pack(leaves, bucket, bucket.dtype)
    shard = own_shard(packed, axes, 1 if bucket.layers else 0)
    return shard.reshape(bucket.form(shard.size))


def _from_host(leaves: dict[str, Any], bucket: Bucket, axis: str, mesh: jax.sharding.Mesh) -> Array:
    """A bucket, of which each device gets its part from arrays on the host."""
    shape = bucket.form(bucket.padded)

    def part(index: Any) -> np.ndarray:
        if bucket.layers:
            lo, hi, _ = (n * shape[2] for n in index[1].indices(shape[1]))
        else:
            lo, hi, _ = index[0].indices(bucket.row)
        out = np.zeros((bucket.rows, hi - lo), jnp.dtype(bucket.dtype))
        for slot in bucket.slots:
            a, b = max(lo, slot.offset), min(hi, slot.offset + slot.size)
            if a < b:
                rows = leaves[slot.path].reshape(bucket.rows, -1)
                out[:, a - lo : b - lo] = rows[:, a - slot.offset : b - slot.offset]
        return out.reshape(shape[0], -1, shape[2]) if bucket.layers else out[0]

    sharding = NamedSharding(mesh, bucket_spec(bucket, axis))
    return jax.make_array_from_callback(shape, sharding, part)
