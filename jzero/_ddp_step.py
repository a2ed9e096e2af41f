"""One device's part of a replicated step: loss, gradient, and what all devices must agree on.

[Note: what is communicated]
Per synchronised call, whatever the model: one all-reduce a gradient bucket (or one reduce-scatter
a bucket, for a sharded optimizer), and, joined by XLA to each other or to a bucket, everything
small: the loss, scalar ``aux``, and buffers whose new value depends on the device's part of the
batch. Buffers that do not (counters, the counts of random streams) are equal already, which the
program shows. Under ``no_sync`` nothing is communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jzero._batch import batch_specs, check_loss
from jzero._codec import codec_of
from jzero._collectives import divide, vary
from jzero._config import ZeroConfig, config_and_groups
from jzero._layout import Layout
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._plans import plan_params
from jzero._program import analyze
from jzero._replicate import (
    Options,
    agree,
    all_reduced,
    bucket_layout,
    is_key,
    own_key,
    production_order,
    wide,
)
from jzero._state import GradShards
from jzero._step import reduce_gradients

__all__ = [
    "Job",
    "LocalGrads",
    "Outcome",
    "checked_grads",
    "reduce_local",
    "run_job",
    "sharding_of",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LocalGrads:
    """Gradients that no device has shared yet: what a call under ``no_sync`` returns.

    They add and scale like any pytree (``a + b``, ``jax.tree.map``), without communication, in
    float32 or wider. ``ddp.reduce(grads)``, or ``accumulated=grads`` at the next synchronised call,
    turns them into a gradient. An optimizer refuses them.

    Attributes:
      leaves: per trainable parameter (devices, *shape), dim 0 split over the mesh; inside a
        ``shard_map`` (1, *shape).
      paths: their paths (static).
    """

    leaves: tuple[Array, ...]
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __add__(self, other: LocalGrads) -> LocalGrads:
        if not isinstance(other, LocalGrads):
            raise TypeError(
                f"cannot add {type(other).__name__} to gradients that are not reduced yet; reduce "
                "them with ddp.reduce(grads) first, or take both under no_sync"
            )
        return jax.tree.map(jnp.add, self, other)

    def __repr__(self) -> str:
        return f"LocalGrads({len(self.paths)} leaves, not reduced)"


class Job(NamedTuple):
    """A loss and a model in parts, ready to be run on every device.

    Attributes:
      loss_fn, has_aux: the user's.
      options: of the wrapper.
      axes: the resolved mesh axes.
      sync: whether to communicate.
      look: whether unused parameters are to be named, whatever the options.
      shards: buckets and precision of a sharded optimizer that gets the gradients; None: they are
        all-reduced.
      merge: from trained and other leaves to a model.
      changed: from a model, and the other leaves that it was merged from, to those that it has
        replaced, by index.
      static: hashable; all that ``merge`` and ``changed`` depend on.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    options: Options
    axes: Axes
    sync: bool
    look: bool
    shards: tuple[Layout, ZeroConfig] | None
    merge: Callable[[dict[str, Array], Sequence[Any]], Any]
    changed: Callable[[Any, Sequence[Any]], dict[int, Array]]
    static: Any


class Outcome(NamedTuple):
    """Results of a job.

    Attributes:
      loss: scalar; under ``no_sync`` (devices,).
      aux: the user's, merged.
      grads: by path, or :class:`GradShards`, or :class:`LocalGrads`.
      buffers: new values of other leaves, by index.
      layout: the buckets that were all-reduced; None where there were none.
      unused: paths of parameters that the loss does not use; empty where nobody asked.
    """

    loss: Array
    aux: Any
    grads: Any
    buffers: dict[int, Array]
    layout: Layout | None
    unused: tuple[str, ...]


class _Seen(NamedTuple):
    """What only a trace shows."""

    aux: Any
    layout: Layout | None
    unused: tuple[str, ...]


def run_job(
    job: Job,
    trained: dict[str, Array],
    others: Sequence[Any],
    args: tuple[Any, ...],
    held: LocalGrads | None,
    cache: dict[Any, Any],
) -> Outcome:
    """Run a job on the mesh, or on local arrays inside of a ``shard_map``."""
    axes, seen = job.axes, list[_Seen]()
    eager = not axes.manual and not any(
        isinstance(x, Tracer) for x in jax.tree.leaves((trained, others, args, held))
    )
    specs = tuple(batch_specs(arg, axes, f"argument {i + 1}", 0) for i, arg in enumerate(args))
    split = P() if axes.manual else P(axes.batch)

    def body(*local: Any) -> Any:
        result, found = _device_part(job, specs, *local)
        seen[:] = [found]
        return result

    per_device = P() if job.sync else split
    if not job.sync:
        grad_specs: Any = split
    elif job.shards is not None:
        layout = job.shards[0]
        grad_specs = GradShards(
            tuple(P(axes.shard) for _ in layout.buckets),  # pyright: ignore[reportArgumentType]
            layout,
            axes.shard,
        )
    else:
        grad_specs = P()
    key = None
    if eager:
        shapes = [(jnp.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(args)]
        structure = jax.tree.structure((args, held))
        key = (job.static, job.options, job.shards, axes, job.sync, structure, tuple(shapes))
        # A compiled program runs no Python: what its trace saw is kept beside it.
        seen = cache.setdefault(("seen", key), seen)
    loss, scalars, arrays, buffers, grads = on_mesh(
        axes,
        body,
        (P(), P(), specs, split),
        (per_device, per_device, split, P(), grad_specs),
        trained,
        tuple(others),
        args,
        held,
        cache=cache,
        key=key,
        check=False,
    )
    found = seen[0]
    flat, treedef = jax.tree.flatten(found.aux)
    parts = iter(scalars), iter(arrays)
    aux = treedef.unflatten([next(parts[kind]) for kind in flat])
    return Outcome(loss, aux, grads, buffers, found.layout, found.unused)


def _device_part(
    job: Job,
    specs: Any,
    trained: dict[str, Array],
    others: tuple[Any, ...],
    args: tuple[Any, ...],
    held: LocalGrads | None,
) -> tuple[Any, _Seen]:
    axes = job.axes
    # Varying parameters: autodiff then leaves the partial sum alone, to be reduced once.
    trained = vary(trained, axes)
    own = tuple(own_key(x, axes) for x in others)
    mine = jax.tree.map(lambda x: own_key(x, axes) if jnp.ndim(x) == 0 else x, args)

    def local(trained: dict[str, Array], others: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        def loss_of(trained: dict[str, Array]) -> tuple[Array, Any]:
            model = job.merge(trained, others)
            result = job.loss_fn(model, *args)
            loss, aux = result if job.has_aux else (result, None)
            check_loss(loss, job.has_aux)
            return loss, (aux, job.changed(model, others))

        (loss, (aux, buffers)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return loss, aux, buffers, grads

    unused: tuple[str, ...] = ()
    buffer_facts: Any = {}
    grad_facts: Any = {}
    # Where nothing is asked of the program, tracing is all that it costs.
    if job.look or job.options.find_unused or job.options.static_graph or others:
        # Traced once: `trace` shows the program, the call below finds it in JAX's cache.
        jitted = jax.jit(local)
        program = jitted.trace(trained, own, mine).jaxpr
        result = jitted(trained, own, mine)
        differing = _differing(trained, others, own, mine, specs, axes)
        facts = analyze(program, differing, axes.names, axes.manual)
        facts_of = jax.tree.unflatten(jax.tree.structure(result), facts)
        loss_fact, _, buffer_facts, grad_facts = facts_of
        unused = tuple(
            path
            for i, path in enumerate(sorted(trained))  # the order in which JAX flattens a dict
            if not loss_fact.depends_on(i) or grad_facts[path].zero
        )
    else:
        result = local(trained, own, mine)
    loss, aux, buffers, grads = result
    flat_aux, aux_tree = jax.tree.flatten(aux)
    flat_aux = [jnp.asarray(x) for x in flat_aux]
    kinds = aux_tree.unflatten([int(x.ndim > 0) for x in flat_aux])
    scalars = [x for x in flat_aux if x.ndim == 0]
    arrays = [x if axes.manual else vary(x, axes) for x in flat_aux if x.ndim > 0]
    varying = {i: x for i, x in buffers.items() if buffer_facts[i].varies}
    equal = {i: x for i, x in buffers.items() if i not in varying}
    if not job.sync:
        sums = {path: wide(g)[None] for path, g in grads.items()}
        new = LocalGrads(tuple(sums[path] for path in sorted(sums)), tuple(sorted(sums)))
        if held is not None:
            new = held + new
        each = [x[None] for x in (loss, *scalars)]
        # No device may tell the others of its statistics, so all keep the old ones.
        return (each[0], each[1:], arrays, equal, new), _Seen(kinds, None, unused)
    loss, scalars, varying = agree(loss, scalars, varying, job.options, axes)
    if held is not None:
        kept = dict(zip(held.paths, held.leaves, strict=True))
        grads = {path: wide(g) + kept[path][0] for path, g in grads.items()}
    layout = None
    if job.shards is not None:
        synced: Any = _scattered(grads, job)
    else:
        # An accumulated gradient may be non-zero where this micro-batch has none.
        silent = set(unused) if job.options.find_unused and held is None else set[str]()
        order = production_order(grad_facts) if job.options.static_graph else None
        layout = bucket_layout(trained, job.options, order, silent)
        synced = all_reduced(grads, trained, layout, job.options, axes)
    return (loss, scalars, arrays, {**equal, **varying}, synced), _Seen(kinds, layout, unused)


def reduce_local(
    job: Job, trained: Mapping[str, Any], grads: LocalGrads, layout: Layout
) -> dict[str, Array] | GradShards:
    """All-reduce (or reduce-scatter) accumulated gradients."""
    axes = job.axes

    def body(held: LocalGrads) -> Any:
        local = {path: x[0] for path, x in zip(held.paths, held.leaves, strict=True)}
        if job.shards is not None:
            return _scattered(local, job)
        return all_reduced(local, trained, layout, job.options, axes)

    out: Any = P()
    if job.shards is not None:
        shards = job.shards[0]
        out = GradShards(tuple(P(axes.shard) for _ in shards.buckets), shards, axes.shard)  # pyright: ignore[reportArgumentType]
    return on_mesh(axes, body, (P(axes.batch),), out, grads, check=False)


def _scattered(grads: dict[str, Array], job: Job) -> GradShards:
    assert job.shards is not None
    layout, config = job.shards
    codecs = [codec_of(bucket, config.precision) for bucket in layout.buckets]
    shards = reduce_gradients(grads, layout, job.axes, codecs, frozenset(job.axes.names))
    count = job.axes.size if job.options.config.average else 1
    wide = [s.astype(codec.state) for s, codec in zip(shards, codecs, strict=True)]
    if count > 1:
        wide = [divide(s, count) for s in wide]
    return GradShards(tuple(wide), layout, job.axes.shard)


def _differing(
    trained: dict[str, Array],
    others: tuple[Any, ...],
    own: tuple[Any, ...],
    args: tuple[Any, ...],
    specs: Any,
    axes: Axes,
) -> set[int]:
    """Which inputs, counted as JAX flattens them, may differ between devices."""
    flags = [False] * len(trained)
    pairs = zip(jax.tree.leaves(others), jax.tree.leaves(own), strict=True)
    flags += [common is not mine for common, mine in pairs]
    split = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    for x, spec in zip(jax.tree.leaves(args), split, strict=True):
        key = isinstance(x, jax.Array) and is_key(x)
        flags.append(axes.manual or key or spec != P())
    return {i for i, differs in enumerate(flags) if differs}


def checked_grads(grads: Any, trained: Mapping[str, Any]) -> LocalGrads | None:
    """``grads`` if they are still to be reduced, and of this model."""
    if grads is None:
        return None
    if not isinstance(grads, LocalGrads):
        raise TypeError(
            f"these gradients ({type(grads).__name__}) are reduced already; only the LocalGrads "
            "of calls under ddp.no_sync() are to be reduced"
        )
    if grads.paths != tuple(sorted(trained)):
        odd = sorted(set(grads.paths) ^ set(trained))
        raise ValueError(f"these gradients belong to another model; it differs at {odd[:5]}")
    return grads


def sharding_of(
    zero: Any, axes: Axes, options: Options, params: Any, trained: Mapping[str, Any]
) -> tuple[Layout, ZeroConfig] | None:
    """Layout and config of the sharded optimizer that gets the gradients."""
    if zero is None:
        return None
    config, groups = config_and_groups(zero, options.config)
    if options.wire is not None:
        raise ValueError(
            "grad_reduce_dtype is for all-reduced gradients; for shards, set "
            "Precision(grad_sync=...) of the optimizer's ZeroConfig"
        )
    if config.mesh is None:
        config = dataclasses.replace(config, mesh=options.config.mesh)
    theirs = resolve_axes(config)
    if theirs != axes:
        raise ValueError(
            f"zero= shards over {theirs.names} of {theirs.mesh}, this wrapper over {axes.names} of "
            f"{axes.mesh}; give both the same mesh, axis and replica_axis"
        )
    plan = plan_params(params, axes, config, groups)
    if frozen := trained.keys() ^ plan.layout.by_path.keys():
        raise ValueError(
            f"zero= and the wrapper train different parameters: {sorted(frozen)[:5]}; use wrt= of "
            "the wrapper and of nnx.Optimizer to freeze"
        )
    return plan.layout, config
