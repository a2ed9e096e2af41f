"""Is an optax transformation elementwise? Read from its program, before it runs on shards.

A transformation that mixes elements (a norm, a trust ratio, a factored moment, a finite flag)
gives another answer on each device's shard than on whole leaves, silently. So its jaxpr is
traced on small arrays, and any step in which a shard's elements meet each other is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["sharded_leaves"]

# Small arrays to trace with; no other dim in an optimizer's state is likely to have these sizes.
# A flat one, as a shard is; and a matrix, since some treat matrices differently (muon, sm3).
_FLAT = (384,)
_MATRIX = (41, 53)

_MIXES = frozenset(
    {
        *("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "fft"),
        *("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"),
        *("concatenate", "conv_general_dilated", "dot_general", "top_k", "approx_top_k"),
    }
)
_DRAWS = frozenset(["random_bits", "rng_bit_generator", "threefry2x32", "rng_uniform"])


def sharded_leaves(
    inner: optax.GradientTransformationExtraArgs, dtypes: Sequence[Any], extra: Mapping[str, Any]
) -> Any:
    """Which leaves of the transformation's state follow the shards.

    Args:
      inner: the transformation.
      dtypes: one per bucket.
      extra: extra arguments that ``update`` will get.

    Returns:
      A tree like the state: True for a leaf of a shard's shape, False for one whose shape does
      not depend on the parameters.

    Raises:
      ValueError: a state leaf of another shape, or an update that is not elementwise, naming
        the primitive.
    """

    flags = None
    for probe in (_MATRIX, _FLAT):
        larger = tuple(2 * dim for dim in probe)
        small, large = (
            tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes)
            for shape in (probe, larger)
        )
        state = jax.eval_shape(inner.init, small)
        flags = jax.tree.map(
            functools.partial(_follows, probe, larger), state, jax.eval_shape(inner.init, large)
        )
        _check_update(inner, probe, small, state, flags, extra)
    return flags


def _follows(probe: tuple[int, ...], larger: tuple[int, ...], a: Any, b: Any) -> bool:
    if a.shape == b.shape:
        return False
    if (a.shape, b.shape) == (probe, larger):
        return True
    raise ValueError(
        "jzero.zero(inner) needs an elementwise transformation; for a parameter of shape "
        f"{probe} the state of inner has a leaf of shape {a.shape}, which cannot be sharded with it"
    )


def _check_update(
    inner: optax.GradientTransformationExtraArgs,
    probe: tuple[int, ...],
    params: tuple[jax.ShapeDtypeStruct, ...],
    state: Any,
    flags: Any,
    extra: Mapping[str, Any],
) -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return inner.update(grads, state, params, **extra)

    closed, out = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    updates, new_state = out
    for u, p in zip(updates, params, strict=True):
        if u.shape != p.shape:
            raise ValueError(
                f"jzero.zero(inner): inner turns a gradient of shape {p.shape} into an update of "
                f"shape {u.shape}; it must be elementwise"
            )
    before, after = (
        jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype) if not _is_key(x) else x.dtype), t)
        for t in (state, new_state)
    )
    if before != after:
        raise ValueError(
            "jzero.zero(inner): the state of inner changes its structure, shapes or dtypes in "
            f"update, so every step would recompile: {before} became {after}"
        )
    tainted = [True] * len(params) + jax.tree.leaves(flags) + [True] * len(params)
    for name in _mixing(closed.jaxpr, tainted, probe):
        why = (
            "draws random numbers of a shard's shape, which would be equal on all devices"
            if name in _DRAWS
            else "combines elements of a shard, which are only a part of the parameters"
        )
        raise ValueError(
            f"jzero.zero(inner) needs an elementwise transformation, but inner {why} (primitive "
            f"{name!r}). For a global norm use clip_norm=, for skipping skip_nonfinite=; put "
            "other such transformations outside, in optax.chain around jzero.zero"
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _mixing(jaxpr: Jaxpr, tainted_in: Sequence[bool], probe: tuple[int, ...]) -> Iterator[str]:
    """Names of primitives through which elements of one tainted array meet."""
    tainted = {v for v, t in zip(jaxpr.invars, tainted_in, strict=True) if t}
    for eqn in jaxpr.eqns:
        inputs = [not isinstance(v, Literal) and v in tainted for v in eqn.invars]
        name = eqn.primitive.name
        if name in _DRAWS and any(_shape(v)[-1:] == probe[-1:] for v in eqn.outvars):
            yield name
        if not any(inputs):
            for inner in _subjaxprs(eqn.params):
                yield from _mixing(inner, [False] * len(inner.invars), probe)
            continue
        subs = list(_subjaxprs(eqn.params))
        for inner in subs:
            # Calls map operands one to one; control flow puts its own first. Where the counts
            # differ, every array of a shard's shape is taken as a shard.
            if len(inner.invars) == len(inputs):
                flags = inputs
            else:
                flags = [_shape(v) == probe for v in inner.invars]
            yield from _mixing(inner, flags, probe)
        shapes = {_shape(v) for v in eqn.outvars}
        if not subs and (name in _MIXES or shapes != {probe}):
            yield name
        tainted.update(v for v in eqn.outvars if _shape(v) == probe)


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _subjaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
