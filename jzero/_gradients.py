"""Losses and gradients of a data-parallel batch, reduce-scattered once.

[Note: means and weights]
``loss_fn`` returns the mean over the part of the batch that it is given. Parts of equal size
are averaged. Parts of unequal size (token counts, a padded last batch) need their weight: with
``weighted=True`` ``loss_fn`` returns ``(loss, weight)``, and loss and gradient are the sums of
``weight * ...`` over all parts, divided by the sum of the weights. A part of weight 0 contributes
nothing, even if its own mean is 0/0; if all weights are 0 the gradient is 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jzero._batch import batch_specs, check_loss, merged
from jzero._codec import Codec, codec_of
from jzero._collectives import divide, psum_replicas, reduce_scatter, total, vary
from jzero._config import ZeroConfig, config_and_groups
from jzero._gather import weighed
from jzero._layout import Bucket, path_string
from jzero._loops import reduce_in_loops
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import Plan, leaf_paths
from jzero._plans import plan_params
from jzero._shards import ParamShards
from jzero._state import GradShards, partition_specs

__all__ = ["accumulate", "value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int = 0,
    has_aux: bool = False,
    *,
    weighted: bool = False,
    zero: Any = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for a loss that is a mean over a batch split over the mesh.

    ``loss_fn`` runs on each device with the replicated parameters and its part of the batch. The
    gradient leaves as :class:`GradShards`: summed over all devices by one reduce-scatter a bucket
    (and one all-reduce of the shard a bucket over the replica axis), divided by their number if
    ``average``, and scattered: 4/shards bytes a parameter and device, plus padding. It is never
    reduced to full size. Pass it to ``tx.update`` or ``tx.step`` of a transformation with the
    same ``zero``; it adds and scales like any pytree.

    Works under ``jit`` and without, and inside a ``shard_map`` over the axis (then on local
    arrays), with ``check_vma`` on or off.

    Args:
      loss_fn: ``loss_fn(params, batch, ...) -> loss`` (or ``(loss, aux)``), a scalar mean over
        the part of the batch it is given.
      argnums: position of the parameters, an integer.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      weighted: whether the loss is a pair ``(loss, weight)``; see [Note: means and weights].
        The result is then a weighted mean, whatever ``average`` says.
      zero: a :class:`ZeroConfig`, or the transformation that will get the gradients, whose
        labels and masks then shape the buckets too. With a plain config, a transformation with
        labels or a mask re-cuts the shards at the cost of an all-gather of the gradient.

    Returns:
      A function of the same arguments that returns ``(loss, grads)`` or ``((loss, aux), grads)``.
      Of the other arguments, each array is split along dim 0 over the axis (and the replica
      axis); scalars (and scalar PRNG keys) are given to every device as they are. ``loss`` is
      the mean over all devices. Of ``aux``, floating scalars are averaged, integer scalars
      summed, and arrays concatenated along dim 0.

    Raises:
      ValueError: a batch dim that the devices do not divide, by path; a loss that is not a
        scalar; ``argnums`` that is not one position; no mesh.
    """
    if isinstance(argnums, bool) or not isinstance(argnums, int) or argnums < 0:
        raise ValueError(
            f"argnums={argnums!r} must be the position of the parameters, one integer from 0; "
            "put several trees into one"
        )

    def body(args: tuple[Any, ...], work: _Work) -> Any:
        params, others = args[argnums], (*args[:argnums], *args[argnums + 1 :])
        local = work.local(params)(others, argnums)
        return _finish(local, work.scatter(local.grads, local.shards), 1, work)

    return _faced(body, argnums, _Loss(loss_fn, has_aux, weighted), zero, batch_dim=0)


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    steps: int,
    sync: Literal["last", "every"] = "last",
    has_aux: bool = False,
    weighted: bool = False,
    zero: Any = None,
) -> Callable[..., Any]:
    """:func:`value_and_grad` of a batch too large to run at once, in ``steps`` micro-batches.

    A ``lax.scan`` over micro-batches; the gradient is accumulated in float32 whatever the dtype of
    the parameters, and equals that of the whole batch.

    Args:
      loss_fn: as for :func:`value_and_grad`; gets one micro-batch of one device at a time.
      steps: micro-batches.
      sync: "last": no communication in the loop and one reduce-scatter a bucket after it; the
        accumulator is a full-size float32 gradient on each device. "every": a reduce-scatter a
        bucket in each iteration, into a float32 accumulator of a shard; the only one that
        parameter shards (lazy sync) have.
      has_aux: as for :func:`value_and_grad`; ``aux`` gains a leading dim of ``steps``, and its
        arrays are concatenated along dim 1.
      weighted: as for :func:`value_and_grad`; weights may differ between micro-batches too.
      zero: as for :func:`value_and_grad`.

    Returns:
      ``f(params, batches) -> (loss, grads)``. Every array in ``batches`` is (steps, batch, ...)
      and is split along dim 1; an array with less than two dims is given whole to each device,
      one element a step.

    Raises:
      ValueError: ``steps`` below 1, another ``sync``, a leading dim other than ``steps``, by
        path, and what :func:`value_and_grad` raises.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be the number of micro-batches, at least 1")
    if sync not in ("last", "every"):
        raise ValueError(f"sync={sync!r}: use 'last' or 'every'")

    def body(args: tuple[Any, ...], work: _Work) -> Any:
        params, batches = args
        run = work.local(params, early=sync == "every")

        def part(batch: Any) -> tuple[Any, Any]:
            local = run((batch,), 0)
            grads: Any = local.grads
            if sync == "every":
                grads = work.scatter(local.grads, local.shards)
            return (local.loss, local.weight, grads), local.aux

        def micro(sums: Any, batch: Any) -> tuple[Any, Any]:
            new, aux = part(batch)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), aux

        def zero_like(x: Any) -> Array:
            wide = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
            kind = x.manual_axis_type  # None where shard_map does not track types
            varying = tuple(a for a in work.axes.names if kind and a in kind.varying)
            return vary(wide, work.axes, varying)

        like, _ = jax.eval_shape(part, jax.tree.map(lambda x: x[0], batches))
        zeros = jax.tree.map(zero_like, like)
        (loss, weight, grads), aux = lax.scan(micro, zeros, batches)
        shards = work.scatter(grads, {}) if sync == "last" else grads
        return _finish(_Local(loss, weight, aux, {}, {}), shards, steps, work)

    faced = _faced(body, 0, _Loss(loss_fn, has_aux, weighted), zero, batch_dim=1)

    def accumulated(params: Any, batches: Any) -> Any:
        if isinstance(params, ParamShards) and sync == "last":
            raise ValueError(
                "sync='last' needs whole parameters: those gathered inside the loss are reduced "
                "inside it too; pass sync='every'"
            )
        for path, x in leaf_paths(batches):
            if x is not None and jnp.shape(x)[:1] != (steps,):
                raise ValueError(
                    f"batches[{path_string(path)!r}] has shape {jnp.shape(x)}; its leading dim "
                    f"must be steps={steps}"
                )
        return faced(params, batches)

    return accumulated


class _Loss(NamedTuple):
    fn: Callable[..., Any]
    has_aux: bool
    weighted: bool


class _Local(NamedTuple):
    """One device's part: weighted loss, weight, aux, and weighted gradient: partial by path, and,
    by number of the bucket, shards of its sum over all devices."""

    loss: Array
    weight: Array
    aux: Any
    grads: dict[str, Array]
    shards: dict[int, Array]


class _Work(NamedTuple):
    """What a body needs beside its arguments."""

    loss: _Loss
    plan: Plan
    axes: Axes
    config: ZeroConfig
    batch_dim: int

    @property
    def codecs(self) -> list[Codec]:
        return [codec_of(bucket, self.config.precision) for bucket in self.plan.layout.buckets]

    def local(self, params: Any, *, early: bool = True) -> Callable[[tuple[Any, ...], int], _Local]:
        """A function of the other arguments and the position of params among them. ``early``:
        stacked buckets are reduced in the loops that compute their gradients, where possible."""
        if isinstance(params, ParamShards):
            return functools.partial(self._local_of_shards, params)
        leaves = self.plan.leaves(params)
        trained = {
            path: leaves[path]
            for path, trains in zip(self.plan.paths, self.plan.trains, strict=True)
            if trains
        }
        # Varying parameters: autodiff then leaves the partial sum alone, to be scattered once.
        trained = vary(trained, self.axes)

        buckets = self.plan.layout.buckets
        stacked = early and any(bucket.layers for bucket in buckets)

        def run(others: tuple[Any, ...], position: int) -> _Local:
            def loss_of(trained: dict[str, Array]) -> tuple[Array, Any]:
                rebuilt = self.plan.rebuild({**leaves, **trained})
                return self._call(rebuilt, others, position)

            def unreduced(trained: dict[str, Array]) -> Any:
                (loss, (weight, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
                if weight is not None:
                    weight = vary(jnp.asarray(weight, jnp.float32), self.axes)
                return (loss, weight, aux), grads

            if stacked:
                (loss, weight, aux), grads, shards = reduce_in_loops(
                    unreduced, trained, buckets, self._shard, self.axes, lambda rest: rest[1]
                )
            else:
                ((loss, weight, aux), grads), shards = unreduced(trained), {}
            loss = vary(loss, self.axes)
            if weight is None:
                return _Local(loss, vary(jnp.float32(1), self.axes), aux, grads, shards)
            grads = jax.tree.map(lambda g: weighed(g, weight), grads)
            return _Local(weighed(loss, weight), weight, aux, grads, shards)

        return run

    def _shard(self, bucket: Bucket, leaves: dict[str, Array], weight: Array | None) -> Array:
        """A bucket's local gradients, of all layers or of one, as a shard of their sum, as it came
        from the wire: a loop that stacks it holds no wider one."""
        if weight is not None:
            leaves = {slot.path: weighed(leaves[slot.path], weight) for slot in bucket.slots}
        codec, owed = self.codecs[bucket.number], frozenset(self.axes.names)
        return reduce_scatter(leaves, bucket, self.axes, codec, owed)

    def _call(
        self, params: Any, others: tuple[Any, ...], position: int
    ) -> tuple[Array, tuple[Any, Any]]:
        result = self.loss.fn(*others[:position], params, *others[position:])
        value, aux = result if self.loss.has_aux else (result, None)
        loss, weight = value if self.loss.weighted else (value, None)
        check_loss(loss, self.loss.has_aux)
        return loss, (weight, aux)

    def _local_of_shards(
        self, shards: ParamShards, others: tuple[Any, ...], position: int
    ) -> _Local:
        """By probes beside the shards, see [Note: gathered in the loss]."""
        weight = jnp.float32(1)
        if self.loss.weighted:
            # The backward pass needs the weight before the forward pass is done: it is computed
            # apart, by a copy of the loss of which the compiler keeps only what the weight needs.
            _, (weight, _) = self._call(shards, others, position)
            weight = jnp.asarray(weight, jnp.float32)
        weight = vary(weight, self.axes)

        def probe(shard: Array, codec: Codec) -> Array:
            zeros = vary(jnp.zeros(shard.shape, codec.state), self.axes, (self.axes.shard,))
            return zeros + weight.astype(codec.state) if self.loss.weighted else zeros

        probes = tuple(probe(x, c) for x, c in zip(shards.buckets, self.codecs, strict=True))

        def loss_of(probes: tuple[Array, ...]) -> tuple[Array, Any]:
            probed = dataclasses.replace(shards, probes=probes, weighted=self.loss.weighted)
            return self._call(probed, others, position)

        (loss, (_, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(probes)
        loss = vary(loss, self.axes)
        if self.loss.weighted:
            loss = weighed(loss, weight)
            grads = tuple(psum_replicas(g, self.axes) for g in grads)
        return _Local(loss, weight, aux, {}, dict(enumerate(grads)))

    def scatter(self, grads: dict[str, Array], shards: dict[int, Array]) -> GradShards:
        """Reduce-scatter what is not reduced yet: float32 shards of the sum."""
        buckets = self.plan.layout.buckets
        flat = tuple(
            (shards[i] if i in shards else self._shard(bucket, grads, None)).reshape(-1)
            for i, bucket in enumerate(buckets)
        )
        wide = tuple(x.astype(c.state) for x, c in zip(flat, self.codecs, strict=True))
        return GradShards(wide, self.plan.layout, self.axes.shard)


def _finish(local: _Local, shards: GradShards, steps: int, work: _Work) -> Any:
    """Sums to means, and this device's results to everyone's."""
    axes = work.axes
    if work.loss.weighted:
        loss, weight = total(local.loss, axes), total(local.weight, axes)
        divisor = jnp.where(weight > 0, weight, jnp.ones_like(weight))
        loss = loss / divisor.astype(loss.dtype)
    else:
        loss = total(local.loss, axes)
        loss = loss / jnp.asarray(axes.size * steps, loss.dtype)
        count = steps * (axes.size if work.config.average else 1)
        divisor = jnp.float32(count) if count > 1 else None
    if divisor is not None:
        shards = jax.tree.map(lambda s: divide(s, divisor), shards)
    aux = jax.tree.map(lambda x: merged(x, axes, work.batch_dim), local.aux)
    return loss, aux, shards


def _faced(
    body: Callable[[tuple[Any, ...], _Work], Any],
    argnums: int,
    loss: _Loss,
    zero: Any,
    batch_dim: int,
) -> Callable[..., Any]:
    """``body`` on the arguments of the user, on the mesh."""
    config, groups = config_and_groups(zero, ZeroConfig())
    compiled: dict[Any, Callable[..., Any]] = {}

    def wrapped(*args: Any) -> Any:
        if argnums >= len(args):
            raise ValueError(f"argnums={argnums}, but the function was called with {len(args)}")
        params, chosen = args[argnums], config
        if zero is None and isinstance(params, ParamShards):
            chosen = params.config
        axes = resolve_axes(chosen)
        plan = plan_params(params, axes, chosen, groups)
        work = _Work(loss, plan, axes, chosen, batch_dim)
        specs = tuple(
            partition_specs(params)
            if i == argnums and isinstance(params, ParamShards)
            else P()
            if i == argnums
            else batch_specs(arg, axes, f"argument {i}", batch_dim)
            for i, arg in enumerate(args)
        )

        def local(*local_args: Any) -> Any:
            return body(local_args, work)

        grad_specs = GradShards(
            cast("Any", (P(axes.shard),) * len(plan.layout.buckets)), plan.layout, axes.shard
        )
        aux_specs = _aux_specs(local, args, specs, work) if loss.has_aux else None
        value, aux, grads = on_mesh(
            axes,
            local,
            specs,
            (P(), aux_specs, grad_specs),
            *args,
            cache=compiled,
            key=(plan, axes, jax.tree.structure(args), repr(specs), repr(aux_specs)),
        )
        return ((value, aux), grads) if loss.has_aux else (value, grads)

    return wrapped


def _aux_specs(body: Any, args: tuple[Any, ...], specs: tuple[Any, ...], work: _Work) -> Any:
    """How aux comes out of the shard_map; its shapes are known only inside of it."""
    axes, dim = work.axes, work.batch_dim
    if axes.manual:
        return None
    found: list[Any] = []

    def record(*local: Any) -> None:
        _, aux, _ = jax.eval_shape(body, *local)
        batch = P(*[None] * dim, axes.batch)
        found.append(jax.tree.map(lambda x: batch if x.ndim > dim else P(), aux))

    jax.eval_shape(lambda *a: on_mesh(axes, record, specs, None, *a), *args)
    return found[0]
