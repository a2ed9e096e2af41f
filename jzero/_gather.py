"""Gathering a bucket inside the loss, so that its transpose is the bucket's reduce-scatter.

[Note: gathered in the loss]
Forward: a device's shard of a bucket → one all-gather, in the dtype of ``param_sync`` → leaves.
Backward, placed by autodiff where it has finished with these leaves: their gradients, each
device's own partial sum → one reduce-scatter, in the dtype of ``grad_sync`` → a shard of the sum
(and, over the replica axis, one all-reduce of that shard).

JAX wants a cotangent in the dtype of its primal, and a bfloat16 shard would round the float32 sum.
So ``jzero.value_and_grad`` differentiates by a *probe* beside the shard: float32, of its shape,
read by nobody, so that it compiles to nothing. Without a probe (``jax.grad`` by the user)
the cotangent is the shard's, divided as ``average`` says, rounded to the parameters' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jzero._codec import Codec
from jzero._collectives import divide, reduce_scatter, shaped, vary
from jzero._layout import Bucket
from jzero._mesh import Axes
from jzero._pack import unpack

__all__ = [
    "GATHERED",
    "Gather",
    "backward",
    "gather",
    "save_except_gathered",
    "save_gathered",
    "weighed",
]

GATHERED = "jzero_gathered"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of every gathered parameter."""


class Gather(NamedTuple):
    """Static choices of one gather.

    Attributes:
      bucket: the bucket.
      codec: its dtypes on the wire.
      axes: the mesh axes, inside a ``shard_map`` over them.
      average: whether a gradient without a probe is divided by the number of devices.
      weighted: the probe's elements are the weight of this device's gradient.
      trains: False: no gradient, and no reduction.
    """

    bucket: Bucket
    codec: Codec
    axes: Axes
    average: bool = True
    weighted: bool = False
    trains: bool = True


def gather(how: Gather, shard: Array, probe: Array | None) -> dict[str, Array]:
    """The bucket's leaves by path, equal on all devices and typed as varying over them.

    Args:
      shard: (shard,); of a stacked bucket in its form (``Bucket.form``), or one layer of that.
      probe: float32, like ``shard``; or None.
    """
    if not how.trains:
        return _gathered(how, lax.stop_gradient(shard))
    return _differentiable(how, shard, probe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(how: Gather, shard: Array, probe: Array | None) -> dict[str, Array]:
    return _gathered(how, shard)


def _forward(how: Gather, shard: Array, probe: Array | None) -> tuple[dict[str, Array], Any]:
    weight = probe.reshape(-1)[0] if how.weighted and probe is not None else None
    return _gathered(how, shard), (weight, None if probe is None else ())


def _backward(how: Gather, residuals: Any, grads: dict[str, Array]) -> tuple[Any, Any]:
    weight, probed = residuals
    shard = backward(how, grads, weight, probed is not None)
    return (None, shard) if probed is not None else (shard, None)


def backward(how: Gather, grads: dict[str, Array], weight: Array | None, probed: bool) -> Array:
    """The transpose of a gather: the bucket's gradients, one partial sum a device, as the
    cotangent of the probe, or of the shard."""
    owed = frozenset(how.axes.names)
    if weight is not None:
        # The weights of replicas differ, so by its type the probe's cotangent may differ too:
        # value_and_grad adds them up.
        owed = frozenset((how.axes.shard,))
        grads = {slot.path: weighed(grads[slot.path], weight) for slot in how.bucket.slots}
    shard = reduce_scatter(grads, how.bucket, how.axes, how.codec, owed).astype(how.codec.state)
    if how.bucket.layers:
        form = how.bucket.form(how.bucket.shard)
        shard = shard.reshape(form if shard.ndim > 1 else form[1:])
    if probed:
        return shard
    if how.average and how.axes.size > 1:
        shard = divide(shard, how.axes.size)
    return shard.astype(how.codec.leaf)


_differentiable.defvjp(_forward, _backward)


def weighed(grad: Array, weight: Array) -> Array:
    """``grad * weight`` in float32; zeros where the weight is 0, whatever ``grad`` is."""
    grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    return jnp.where(weight > 0, grad * weight.astype(grad.dtype), jnp.zeros_like(grad))


def _gathered(how: Gather, shard: Array) -> dict[str, Array]:
    bucket, axes = how.bucket, how.axes
    codec = how.codec if how.trains else dataclasses.replace(how.codec, sync=how.codec.leaf)
    wire = vary(shard.astype(codec.out), axes)
    whole = bucket.layers > 0 and wire.ndim == 3  # all layers of a stacked bucket at once
    wire = wire.reshape(bucket.layers, -1) if whole else wire.reshape(-1)
    bytewise = codec.out != codec.sync
    if bytewise:
        wire = codec.sent(wire)
    elif not whole:
        wire = shaped(wire, bucket)
    if axes.shards > 1:
        wire = lax.all_gather(wire, axes.shard, axis=1 if whole else 0, tiled=True)
    leaves = _unpack_p.bind(
        wire,
        bucket=bucket,
        leaf=how.codec.leaf,
        whole=whole,
        received=(codec, axes.shards) if bytewise else None,
    )
    return {
        slot.path: checkpoint_name(leaf, GATHERED)
        for slot, leaf in zip(bucket.slots, leaves, strict=True)
    }


# A primitive of its own, and not the slices and reshapes that it lowers to, so that a checkpoint
# policy can tell them from the model's: what is saved must be the parameters or their shards.
_unpack_p = Primitive("jzero_unpack")
_unpack_p.multiple_results = True


def _unpack(
    wire: Array, *, bucket: Bucket, leaf: Any, whole: bool, received: tuple[Codec, int] | None
) -> list[Array]:
    if received is not None:
        codec, shards = received
        wire = codec.received(wire, shards)
    one = functools.partial(unpack, bucket=bucket)
    leaves = jax.vmap(one)(wire) if whole else one(wire)
    return [leaves[slot.path].astype(leaf) for slot in bucket.slots]


@_unpack_p.def_abstract_eval
def _(wire: Any, **how: Any) -> list[Any]:
    shape = jax.eval_shape(functools.partial(_unpack, **how), _struct(wire.shape, wire.dtype))
    return [_like(wire, out.shape, out.dtype) for out in shape]


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An aval of another shape, with the manual type (and mesh) of ``aval``."""
    sharding = aval.sharding.update(spec=jax.P(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, sharding=sharding)


_unpack_p.def_impl(lambda wire, **how: _unpack(wire, **how))
mlir.register_lowering(_unpack_p, mlir.lower_fun(_unpack, multiple_results=True))


def _batched(args: Any, dims: Any, **how: Any) -> Any:
    out = jax.vmap(functools.partial(_unpack, **how), in_axes=dims)(*args)
    return out, [0] * len(out)


def _jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    out = _unpack_p.bind(*primals, **how)
    return out, _unpack(ad.instantiate_zeros(tangents[0]), **how)


batching.primitive_batchers[_unpack_p] = _batched
ad.primitive_jvps[_unpack_p] = _jvp


def save_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A ``jax.checkpoint`` policy: keep gathered parameters for the backward pass, recompute the
    rest. One all-gather a step and bucket (the traffic of ZeRO-2); a full copy of the parameters
    that the checkpointed functions gather lives until the backward pass has used them.

    ``jax.checkpoint`` without a policy gathers again in the backward pass (ZeRO-3's memory).
    ``jax.checkpoint_policies.save_from_both_policies`` combines it with others.
    """
    return prim.name == "name" and params.get("name") == GATHERED


def save_except_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A ``jax.checkpoint`` policy: keep what the backward pass needs, but gather parameters again
    (ZeRO-3's memory without recomputing activations)."""
    if prim is _unpack_p or prim.name == "all_gather":
        return False
    return not (prim.name == "name" and params.get("name") == GATHERED)
