"""The ways to train that the benchmarks compare: same model, batch, AdamW and state dtypes.

Parameters below float32 have a float32 master copy and float32 moments in every way. jzero also
measures the gradient's norm and skips a non-finite step; the others do neither.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import _models
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

AXIS = "data"
WHOLE = P()
ADAMW: dict[str, Any] = {
    "learning_rate": 1e-3,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A way to train. ``step(params, state, tokens) -> params, state, loss`` is jitted and donates
    params and state; ``specs`` are the state's. ``prepare`` turns parameters into what the step
    takes, of which ``param_specs`` are the specs."""

    step: Any
    init: Callable[[Any], Any]
    specs: Any
    prepare: Callable[[Any], Any] = lambda params: params
    param_specs: Any = WHOLE


def jzero_jit(size: _models.Size, mesh: Mesh) -> Program:
    """Plain jit: ``jzero.value_and_grad`` and ``tx.step``."""
    tx = _jzero(size, mesh, stacked="layers" if size.scanned else ())
    value_and_grad = jzero.value_and_grad(functools.partial(_models.loss_fn, size), zero=tx)

    def step(params: Any, state: Any, tokens: Array) -> Any:
        loss, grads = value_and_grad(params, tokens)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    specs = jzero.partition_specs(jax.eval_shape(tx.init, _models.shapes(size)))
    return Program(_jitted(step, specs, mesh), tx.init, specs)


def jzero_shard_map(size: _models.Size, mesh: Mesh) -> Program:
    """The same inside the user's own shard_map."""
    tx = _jzero(size, mesh)
    specs = jzero.partition_specs(jax.eval_shape(tx.init, _models.shapes(size)))
    value_and_grad = jzero.value_and_grad(functools.partial(_models.loss_fn, size), zero=tx)

    def local(params: Any, state: Any, tokens: Array) -> Any:
        loss, grads = value_and_grad(params, tokens)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs, P())
    )
    return Program(_jitted(step, specs, mesh), tx.init, specs)


def lazy(size: _models.Size, mesh: Mesh) -> Program:
    """Plain jit: the state holds shards of the parameters, the loss gathers them."""
    # Twice the bucket: a layer of the large model is then one bucket, at the least peak.
    tx = _jzero(size, mesh, param_sync="lazy", bucket_mb=2 * size.bucket_mb + 4)

    def loss_fn(shards: Any, tokens: Array) -> Array:
        return _models.loss_fn(size, shards, tokens, jzero.gather_params)

    value_and_grad = jzero.value_and_grad(loss_fn, zero=tx)

    def step(shards: Any, state: Any, tokens: Array) -> Any:
        loss, grads = value_and_grad(shards, tokens)
        shards, state = tx.step(grads, state, shards)
        return shards, state, loss

    prepare = functools.partial(
        jzero.shard_params, zero=tx, stacked="layers" if size.scanned else None
    )
    shards = jax.eval_shape(prepare, _models.shapes(size))
    specs = jzero.partition_specs(jax.eval_shape(tx.init, shards))
    param_specs = jzero.partition_specs(shards)
    return Program(_jitted(step, specs, mesh, param_specs), tx.init, specs, prepare, param_specs)


def replicated(size: _models.Size, mesh: Mesh) -> Program:
    """optax.adamw on every device, after a pmean of the gradient in float32."""
    tx = optax.adamw(**ADAMW)

    def local(params: Any, state: Any, tokens: Array) -> Any:
        mine = jax.lax.pcast(params, AXIS, to="varying")  # the gradient stays a partial sum
        loss, grads = jax.value_and_grad(functools.partial(_models.loss_fn, size))(mine, tokens)
        grads = jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), AXIS)
        return *_optax_step(tx, grads, state, params), jax.lax.pmean(loss, AXIS)

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=(P(), P(), P()))
    init = functools.partial(_optax_init, tx)
    specs = jax.tree.map(lambda _: P(), jax.eval_shape(init, _models.shapes(size)))
    return Program(_jitted(step, specs, mesh), init, specs)


def annotated(size: _models.Size, mesh: Mesh) -> Program:
    """optax.adamw under jit; NamedShardings split the gradient and the state, XLA does the rest."""
    tx = optax.adamw(**ADAMW)
    init = functools.partial(_optax_init, tx)

    def spec(x: Any) -> P:
        """Over the largest dim that the devices divide."""
        fits = [(n, dim) for dim, n in enumerate(x.shape) if n and n % mesh.size == 0]
        return P(*[None] * max(fits)[1], AXIS) if fits else P()

    def step(params: Any, state: Any, tokens: Array) -> Any:
        loss, grads = jax.value_and_grad(functools.partial(_models.loss_fn, size))(params, tokens)
        grads = jax.lax.with_sharding_constraint(
            grads, jax.tree.map(lambda g: NamedSharding(mesh, spec(g)), grads)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return *_optax_step(tx, grads, state, params), loss

    specs = jax.tree.map(spec, jax.eval_shape(init, _models.shapes(size)))
    return Program(_jitted(step, specs, mesh), init, specs)


METHODS: dict[str, Callable[[_models.Size, Mesh], Program]] = {
    "jzero": jzero_jit,
    "jzero in shard_map": jzero_shard_map,
    "jzero lazy": lazy,
    "replicated": replicated,
    "annotated": annotated,
}


def _jzero(size: _models.Size, mesh: Mesh, **options: Any) -> Any:
    # Gradients travel in the dtype of the parameters, as XLA sends those of the annotated program.
    precision = jzero.Precision(grad_sync=size.dtype)
    chosen: dict[str, Any] = {"bucket_mb": size.bucket_mb, "precision": precision, **options}
    zero = jzero.ZeroConfig(axis=AXIS, mesh=mesh, **chosen)
    return jzero.adamw(**ADAMW, zero=zero)


def _jitted(step: Callable[..., Any], specs: Any, mesh: Mesh, param_specs: Any = WHOLE) -> Any:
    def named(specs: Any) -> Any:
        return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)

    shardings = (named(param_specs), named(specs))
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(*shardings, named(P(AXIS))),
        out_shardings=(*shardings, named(P())),
    )


def _optax_init(tx: optax.GradientTransformation, params: Any) -> Any:
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    is_wide = all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
    return (None if is_wide else wide), tx.init(wide)


def _optax_step(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    master, inner = state
    old = params if master is None else master
    updates, inner = tx.update(grads, inner, old)
    new: Any = optax.apply_updates(old, updates)
    if master is None:
        return new, (None, inner)
    return jax.tree.map(lambda m, p: m.astype(p.dtype), new, params), (new, inner)
