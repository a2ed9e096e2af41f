"""One training step on one device's arrays: the path of a gradient, each verb once.

Everything that could differ (dtypes, topology, update rule, what to emit) is a value in
:class:`Run`, chosen before tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jzero._codec import Codec, Noise
from jzero._collectives import own_shard, reduce_scatter, whole_bucket
from jzero._homes import Home
from jzero._layout import Bucket, Layout
from jzero._measure import Measured, measure
from jzero._mesh import Axes
from jzero._pack import unpack_all
from jzero._state import GradShards, ZeroState
from jzero._update import Emit, Rule, Scaling
from jzero_kernels.adam import Random
from jzero_kernels.adam.forms import random_bits

__all__ = [
    "Operands",
    "Run",
    "init_state",
    "reduce_gradients",
    "reduced",
    "state_specs",
    "zero_shards",
    "zero_step",
]


class Operands(NamedTuple):
    """Replicated scalars of one step. None: not asked for, which costs nothing.

    Attributes:
      rule: what ``rule.operands`` returned.
      clip_norm: largest 2-norm of the gradient.
      grad_scale: gradients are that many times too large.
    """

    rule: Any
    clip_norm: Array | None = None
    grad_scale: Array | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """All static choices of a step.

    Attributes:
      layout: the buckets, equal to the state's.
      home: where parameters live between steps.
      axes: the resolved mesh axes.
      rule: the update rule.
      codecs: a codec per bucket.
      emit: per bucket, whether parameters or changes to them are gathered.
      divisor: what the reduced gradient is divided by.
      skip_nonfinite: whether a non-finite gradient skips the step.
    """

    layout: Layout
    home: Home
    axes: Axes
    rule: Rule
    codecs: tuple[Codec, ...]
    emit: tuple[Emit, ...]
    divisor: int
    skip_nonfinite: bool


def zero_step(
    grads: dict[str, Array] | GradShards,
    state: ZeroState,
    params: dict[Any, Array],
    operands: Operands,
    run: Run,
) -> tuple[dict[Any, Array], ZeroState]:
    """Reduce, measure, update, gather.

    Args:
      grads: a gradient per trainable path, or shards that are reduced already.
      state: this device's state.
      params: parameters, as ``run.home`` has them: a replicated one per trainable path, or shards.
      operands: replicated scalars.
      run: the static choices.

    Returns:
      What was emitted, keyed like ``params``, and the new state. Collectives: one reduce-scatter
      and one all-gather a bucket over the shard axis, one all-reduce of a shard a bucket over the
      replica axis, one all-reduce of four scalars; only the last where gradients and parameters
      are shards.
    """
    buckets, axes = run.layout.buckets, run.axes
    grad_shards = reduced(grads, run)
    measured = measure(grad_shards, axes)
    scaling, norm = _scaling(measured, operands, run)
    kept = tuple(
        codec.operand(stored, run.home.take(params, bucket, codec, axes))
        for bucket, codec, stored in zip(buckets, run.codecs, state.master, strict=True)
    )
    updated = run.rule.apply(
        kept,
        grad_shards,
        state.inner,
        operands.rule,
        scaling,
        _noises(state.step, run),
        run.layout,
        run.codecs,
        run.emit,
    )
    emitted: dict[Any, Array] = {}
    for bucket, codec, how, shard in zip(buckets, run.codecs, run.emit, updated.out, strict=True):
        emitted |= run.home.give(shard, bucket, codec, axes, how)
    advance = scaling.finite.astype(jnp.int32)
    return emitted, ZeroState(
        step=state.step + advance,
        grad_norm=norm,
        skipped=state.skipped + (1 - advance),
        finite=measured.finite,
        master=updated.master,
        inner=updated.inner,
        layout=state.layout,
        axis=state.axis,
        sharded=state.sharded,
    )


def _noises(step: Array, run: Run) -> tuple[Noise, ...]:
    """Random bits for each bucket: of the seed, the step, the bucket and the element's place."""

    def noise(bucket: Bucket, codec: Codec) -> Noise:
        if codec.seed is None:
            return Noise(None)
        key = random_bits(step, jnp.int32(np.uint32(codec.seed & 0xFFFFFFFF).astype(np.int32)))
        key = random_bits(key, jnp.int32(bucket.number))
        first = jnp.int32(0) if run.axes.shards == 1 else lax.axis_index(run.axes.shard)
        return Noise(Random(key, first * jnp.int32(bucket.shard)))

    return tuple(noise(b, c) for b, c in zip(run.layout.buckets, run.codecs, strict=True))


def reduce_gradients(
    grads: dict[str, Array],
    layout: Layout,
    axes: Axes,
    codecs: Sequence[Codec],
    owed: frozenset[str] | None = None,
) -> tuple[Array, ...]:
    """A (shard,) per bucket of the sum over devices; see ``reduce_scatter``."""
    return tuple(
        reduce_scatter(grads, bucket, axes, codec, owed).reshape(-1)
        for bucket, codec in zip(layout.buckets, codecs, strict=True)
    )


def reduced(grads: dict[str, Array] | GradShards, run: Run) -> tuple[Array, ...]:
    """Shards of the sum, in the buckets of this run, of gradients however they came."""
    if not isinstance(grads, GradShards):
        return reduce_gradients(grads, run.layout, run.axes, run.codecs)
    if grads.layout == run.layout:
        return grads.buckets
    # Shards in other buckets (made without this optimizer's labels): gather one after the other
    # and cut anew. Costs an all-gather of the gradient; the transformation as zero= avoids it.
    leaves: dict[str, Array] = {}
    for bucket, shard in zip(grads.layout.buckets, grads.buckets, strict=True):
        leaves |= unpack_all(whole_bucket(shard, bucket, run.axes), bucket)
    exact = [dataclasses.replace(codec, grad=codec.state, wide=False) for codec in run.codecs]
    return reduce_gradients(leaves, run.layout, run.axes, exact, owed=frozenset())


def _scaling(measured: Measured, operands: Operands, run: Run) -> tuple[Scaling, Array]:
    """Average, unscale and clip as one deferred factor, and the true norm before clipping."""
    norm = measured.norm / jnp.float32(run.divisor)
    factor = None
    if operands.grad_scale is not None:
        factor = 1 / operands.grad_scale
        norm = norm * factor
    if operands.clip_norm is not None:
        # Apex's and torch's coefficient: at most 1, with 1e-6 against a zero norm.
        clip = jnp.minimum(jnp.float32(1), operands.clip_norm / (norm + jnp.float32(1e-6)))
        factor = clip if factor is None else factor * clip
    finite = measured.finite if run.skip_nonfinite else jnp.bool_(True)
    return Scaling(run.divisor, factor, finite), norm


def init_state(params: dict[Any, Array], run: Run) -> ZeroState:
    """The state before the first step. No communication."""
    shards = tuple(
        run.home.take(params, bucket, codec, run.axes)
        for bucket, codec in zip(run.layout.buckets, run.codecs, strict=True)
    )
    master = tuple(codec.init(shard) for codec, shard in zip(run.codecs, shards, strict=True))
    full = tuple(c.decode(m, s) for c, m, s in zip(run.codecs, master, shards, strict=True))
    return _state(
        run,
        jnp.int32(0),
        jnp.float32(0),
        jnp.bool_(True),
        master,
        run.rule.init(full, run.layout, run.codecs),
    )


def zero_shards(run: Run) -> tuple[Array, ...]:
    """A (shard,) of zeros per bucket, typed as shards are."""
    return tuple(
        own_shard(jnp.zeros(bucket.padded, codec.state), run.axes)
        for bucket, codec in zip(run.layout.buckets, run.codecs, strict=True)
    )


def state_specs(run: Run) -> ZeroState:
    """The state's PartitionSpecs, before there is one."""
    shard = P(run.axes.shard)
    return _state(
        run,
        P(),
        P(),
        P(),
        tuple(None if c.master is None else c.master.like(shard) for c in run.codecs),
        jax.tree.map(lambda s: shard if s else P(), run.rule.sharded(run.layout, run.codecs)),
    )


def _state(run: Run, count: Any, norm: Any, finite: Any, master: Any, inner: Any) -> ZeroState:
    return ZeroState(
        step=count,
        grad_norm=norm,
        skipped=count,
        finite=finite,
        master=master,
        inner=inner,
        layout=run.layout,
        axis=run.axes.shard,
        sharded=tuple(jax.tree.leaves(run.rule.sharded(run.layout, run.codecs))),
    )
