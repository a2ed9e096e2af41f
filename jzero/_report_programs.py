"""The training steps that a report compiles: jzero's, the user's, and optax's beside them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._config import ZeroConfig
from jzero._gradients import value_and_grad
from jzero._lazy import shard_params
from jzero._state import partition_specs
from jzero._transform import ZeroTransformation

__all__ = ["Program", "mesh_axes", "moved", "optax_programs", "user_program", "zero_program"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to compile.

    Attributes:
      name: of the way to train.
      step: a function of ``args``.
      args: ShapeDtypeStructs with shardings: parameters, then state, then the rest.
      out_shardings: of the result, or None where the compiler may choose.
      gradients: bytes of gradient that a device holds at once, by the plan; see ``Memory``.
      donate: positions of arguments that the step may overwrite.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    out_shardings: Any
    gradients: int
    donate: tuple[int, ...] = (0, 1)


def mesh_axes(
    config: ZeroConfig | None, devices: int, mesh_shape: Mapping[str, int] | None
) -> dict[str, int]:
    """Names and sizes of the axes to lay the devices out in."""
    if mesh_shape is not None:
        return dict(mesh_shape)
    if config is None:
        return {"data": devices}
    if config.replica_axis is None:
        return {config.axis: devices}
    if config.mesh is None:
        raise ValueError(
            f"the transformation has replica_axis={config.replica_axis!r} and no mesh to tell its "
            f"size: give mesh_shape={{{config.replica_axis!r}: R, {config.axis!r}: S}} with "
            f"R x S = {devices}"
        )
    replicas = config.mesh.shape[config.replica_axis]
    sizes = {config.replica_axis: replicas, config.axis: devices // replicas}
    return {name: sizes[name] for name in config.mesh.axis_names if name in sizes}


def moved(tx: ZeroTransformation, mesh: jax.sharding.Mesh) -> ZeroTransformation:
    """The same transformation on another mesh."""
    machine = tx._machine
    config = dataclasses.replace(machine.config, mesh=mesh)
    return ZeroTransformation(dataclasses.replace(machine, config=config, compiled={}))


def zero_program(
    tx: ZeroTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
    loss: Callable[..., Any] | None,
    batch: Any,
    stacked: Any,
) -> Program:
    """jzero's step: loss, gradient and update, or, without a loss, reduction, update, gather."""
    tx = moved(tx, mesh)
    lazy = tx.config.param_sync == "lazy"
    shapes = _shapes(params)
    held = jax.eval_shape(lambda p: shard_params(p, zero=tx, stacked=stacked), shapes)
    held = held if lazy else shapes
    param_specs = partition_specs(held) if lazy else jax.tree.map(lambda _: P(), held)
    state = jax.eval_shape(tx.init, held)
    state_specs = partition_specs(state)
    reduced = jax.eval_shape(tx.zero_gradients, held)
    shards = local_bytes(reduced, partition_specs(reduced), mesh)
    arguments = (
        _placed(held, param_specs, mesh),
        _placed(state, state_specs, mesh),
    )
    outs = (_named(param_specs, mesh), _named(state_specs, mesh))
    name = "jzero lazy" if lazy else "jzero"
    if loss is not None:
        grad = value_and_grad(loss, zero=tx)

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = grad(params, batch)
            params, state = tx.step(grads, state, params)
            return params, state, value

        specs = _batch_specs(batch, _batch_axes(tx.config, mesh))
        # Of stacked layers, one at a time.
        rows = [b.size // b.rows * b.itemsize for b in tx.layout(shapes).buckets]
        whole = 0 if lazy else sum(rows)
        return Program(
            name,
            step,
            (*arguments, _placed(_shapes(batch), specs, mesh)),
            (*outs, NamedSharding(mesh, P())),
            shards + whole,
        )

    if lazy:

        def step_shards(shards: Any, state: Any, grads: Any) -> Any:
            return tx.step(grads, state, shards)

        grads = _placed(reduced, partition_specs(reduced), mesh)
        return Program(f"{name}, update", step_shards, (*arguments, grads), outs, shards)

    names = tuple(tx.config.axes.values())

    def local(params: Any, state: Any, grads: Any) -> Any:
        return tx.step(grads, state, params)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), state_specs, P()),
        out_specs=(P(), state_specs),
        axis_names=set(names),
        check_vma=False,  # the gradient is a partial sum, which no type says
    )
    grads = _placed(held, param_specs, mesh)
    return Program(f"{name}, update", mapped, (*arguments, grads), outs, shards)


def user_program(
    fn: Callable[..., Any], params: Any, args: Any, mesh: jax.sharding.Mesh, in_specs: Any
) -> Program:
    """The user's own step, traced with ``mesh`` as the ambient mesh."""
    given: tuple[Any, ...] = tuple(cast("Any", args)(mesh) if callable(args) else args)
    everything = (params, *given)

    def spec(x: Any, planned: P) -> P:
        sharding = getattr(x, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else planned

    shapes = tuple(_shapes(x) for x in everything)
    if in_specs is None:
        planned = partition_specs(everything)
        specs = jax.tree.map(spec, everything, planned)
    else:
        if not isinstance(in_specs, tuple) or len(in_specs) != len(everything):
            raise ValueError(
                f"in_specs={in_specs!r} must be a tuple of one entry for params and each of args, "
                f"{len(everything)} in all"
            )
        specs = tuple(_each(s, x) for s, x in zip(in_specs, shapes, strict=True))
    placed = tuple(_placed(x, s, mesh) for x, s in zip(shapes, specs, strict=True))
    donate = tuple(range(min(2, len(placed))))
    return Program("step", fn, placed, None, 0, donate)


def optax_programs(
    inner: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
    loss: Callable[..., Any],
    batch: Any,
    axis: str,
) -> list[Program]:
    """The same training without jzero: replicated, and sharded by annotation.

    Parameters below float32 have a float32 master copy, as in jzero. The gradient is reduced in
    float32. Devices of all mesh axes share the batch; annotations shard over ``axis``.
    """
    shapes = _shapes(params)
    names = tuple(mesh.axis_names)
    init = functools.partial(_optax_init, inner)
    state = jax.eval_shape(init, shapes)
    everywhere = jax.tree.map(lambda _: P(), shapes)
    placed = _placed(shapes, everywhere, mesh)
    batch_specs = _batch_specs(batch, names)
    abstract_batch = _placed(_shapes(batch), batch_specs, mesh)
    wide = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(shapes))
    whole = local_bytes(shapes, everywhere, mesh)

    def local(params: Any, state: Any, batch: Any) -> Any:
        mine = jax.lax.pcast(params, names, to="varying")  # the gradient stays a partial sum
        value, grads = jax.value_and_grad(loss)(mine, batch)
        grads = jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), names)
        return *_optax_step(inner, grads, state, params), jax.lax.pmean(value, names)

    def replicated(params: Any, state: Any, batch: Any) -> Any:
        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(), batch_specs), out_specs=(P(), P(), P())
        )(params, state, batch)

    size = mesh.shape[axis]

    def spec(x: Any) -> P:
        """Over the largest dim that the devices divide."""
        fits = [(n, dim) for dim, n in enumerate(x.shape) if n and n % size == 0]
        return P(*[None] * max(fits)[1], axis) if fits else P()

    def annotated(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.with_sharding_constraint(
            grads, jax.tree.map(lambda g: NamedSharding(mesh, spec(g)), grads)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return *_optax_step(inner, grads, state, params), value

    programs: list[Program] = []
    for name, step, specs, gradients in (
        ("optax replicated", replicated, jax.tree.map(lambda _: P(), state), wide),
        ("optax annotated", annotated, jax.tree.map(spec, state), whole + wide // size),
    ):
        outs = (_named(everywhere, mesh), _named(specs, mesh), NamedSharding(mesh, P()))
        arguments = (placed, _placed(state, specs, mesh), abstract_batch)
        programs.append(Program(name, step, arguments, outs, gradients))
    return programs


def local_bytes(tree: Any, specs: Any, mesh: jax.sharding.Mesh) -> int:
    """Bytes of a tree's arrays on one device."""
    total = 0
    shapes, flat = jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=_is_spec)
    for x, spec in zip(shapes, flat, strict=True):
        shape = NamedSharding(mesh, spec).shard_shape(tuple(x.shape))
        total += math.prod(shape) * x.dtype.itemsize
    return total


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _each(spec: Any, tree: Any) -> Any:
    """A spec for every array of ``tree``, of a prefix."""
    return jax.tree.map(lambda s, sub: jax.tree.map(lambda _: s, sub), spec, tree, is_leaf=_is_spec)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _placed(tree: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        tree,
        specs,
    )


def _named(specs: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=_is_spec)


def _batch_axes(config: ZeroConfig, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.axis_names if name in config.axes.values())


def _batch_specs(batch: Any, names: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda x: P(names) if jnp.ndim(x) else P(), batch)


def _optax_init(inner: optax.GradientTransformation, params: Any) -> Any:
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    is_wide = all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
    return (None if is_wide else wide), inner.init(wide)


def _optax_step(
    inner: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    master, kept = state
    old = params if master is None else master
    updates, kept = inner.update(grads, kept, old)
    new: Any = optax.apply_updates(old, updates)
    if master is None:
        return new, (None, kept)
    return jax.tree.map(lambda m, p: m.astype(p.dtype), new, params), (new, kept)
