"""Lazy sync: shards are the training state, gathered in the loss; equal to optax on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    assert_bits,
    assert_close,
    batch,
    config_for,
    replicated,
    split,
    train,
    train_optax,
)

import jzero

P = jax.P
LAYERS = 3
BATCHES = [batch(i) for i in range(3)]


def deep(stacked: bool = True, dtype=jnp.float32):
    """A network of equal layers, in one leaf a kernel or in a list."""
    rng = np.random.default_rng(7)

    def draw(*shape: int):
        values = rng.uniform(0.5, 1.0, shape) * rng.choice([-1, 1], shape)
        return jnp.asarray(values, dtype)

    layers = {"kernel": draw(LAYERS, 8, 8), "bias": draw(LAYERS, 8), "gain": draw(LAYERS)}
    return {
        "first": {"kernel": draw(6, 8)},
        "layers": layers
        if stacked
        else [{k: x[i] for k, x in layers.items()} for i in range(LAYERS)],
        "last": draw(8, 5),
    }


def deep_loss(params, data, gather=lambda x: x, checkpoint=lambda f: f):
    """Mean over the batch of a squared error; ``gather`` where a part is used."""
    x, y = data
    x = x.astype(jnp.bfloat16) if params_dtype(params) == jnp.bfloat16 else x

    @checkpoint
    def layer(x, part):
        p = gather(part)
        return jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"] + x

    x = jnp.tanh(x @ gather(params["first"])["kernel"])
    layers = params["layers"]
    if not isinstance(layers, list) and jax.tree.leaves(layers)[0].ndim > 1:
        x, _ = jax.lax.scan(lambda x, part: (layer(x, part), None), x, layers)
    else:
        for part in layers:
            x = layer(x, part)
    out = x @ gather(params["last"])
    return jnp.mean((out - y.astype(out.dtype)) ** 2)


def params_dtype(params):
    return jax.tree.leaves(params)[0].dtype


lazy_loss = functools.partial(deep_loss, gather=jzero.gather_params)
rematted = functools.partial(lazy_loss, checkpoint=jax.checkpoint)
STACKED = [True, False]
MESHES = {"1": (1,), "2": (2,), "4": (4,), "8": (8,), "2x4": (2, 4)}


def lazy_config(mesh, **options):
    return config_for(mesh, **{"param_sync": "lazy", "bucket_mb": 2**-11, **options})


def shard(params, tx, mesh, stacked: bool):
    return jzero.shard_params(
        replicated(params, mesh), zero=tx, stacked="layers" if stacked else None
    )


def train_lazy(tx, mesh, params, batches, loss, stacked: bool = False, grad_scale=None):
    shards = shard(params, tx, mesh, stacked)
    state = tx.init(shards)

    @jax.jit
    def step(shards, state, data):
        def scaled(shards, data):
            return loss(shards, data) * (grad_scale or 1.0)

        _, grads = jzero.value_and_grad(scaled, zero=tx)(shards, data)
        return tx.step(grads, state, shards, grad_scale=grad_scale)

    for data in batches:
        shards, state = step(shards, state, split(data, mesh))
    return shards, state


# ---------------------------------------------------------------- equal to optax, and to eager


@pytest.mark.parametrize("stacked", STACKED, ids=["scanned", "unrolled"])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_equal_to_optax_and_to_eager(make_mesh, shape, stacked: bool):
    """With clipping, a loss scale, a schedule and a recomputed backward pass."""
    mesh, params = make_mesh(shape), deep(stacked)
    options = {"learning_rate": optax.linear_schedule(1e-2, 0, 9), "clip_norm": 0.5}
    tx = jzero.adamw(**options, zero=lazy_config(mesh))
    shards, state = train_lazy(tx, mesh, params, BATCHES, rematted, stacked, grad_scale=1024.0)
    have = jzero.gather_params(shards)

    eager = jzero.adamw(**options, zero=config_for(mesh))
    want, eager_state = train("plain", eager, mesh, params, BATCHES, deep_loss)
    assert_close(have, want, 5e-7)
    np.testing.assert_allclose(state.grad_norm, eager_state.grad_norm, rtol=1e-6)
    assert float(state.grad_norm) > 0.5  # it clips

    want, _ = train_optax(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 0, 9))),
        params,
        BATCHES,
        deep_loss,
    )
    assert_close(have, want, 5e-6)
    assert int(state.step) == 3


def test_round_trip(make_mesh):
    """Odd leaves, stacked and not, on an axis of 3 and beside replicas."""
    for shape in ((3,), (2, 4)):
        mesh = make_mesh(shape)
        params = {
            **deep(),
            "odd": {"scalar": jnp.float32(2), "none": None, "empty": jnp.zeros((0, 3))},
            "count": jnp.arange(3),
            "key": jax.random.key(3),
            "flag": jnp.array([True, False]),
        }
        shards = jzero.shard_params(params, zero=lazy_config(mesh), stacked="layers")
        assert_bits(jzero.gather_params(shards), params)
        assert_bits(jzero.gather_params(shards["layers"]), params["layers"])
        assert_bits(jzero.gather_params(shards["layers"]["bias"]), params["layers"]["bias"])
        assert_bits(jax.jit(jzero.gather_params)(shards["odd"]), params["odd"])
        again = jax.jit(
            lambda p, mesh=mesh: jzero.shard_params(p, zero=lazy_config(mesh), stacked="layers")
        )(params)
        assert_bits(again, shards)
        for device in mesh.devices.flat:
            held = sum(
                s.data.size
                for x in shards.buckets
                for s in x.addressable_shards
                if s.device == device
            )
            assert held == sum(bucket.shard for bucket in shards.layout.buckets)
