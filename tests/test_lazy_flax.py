"""Lazy sync of flax modules: nnx (scanned and not) and linen, against optax on one device."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from support import assert_close, batch, replicated, split, train_optax
from test_lazy import lazy_config

import jzero

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")

LAYERS = 3
BATCHES = [batch(i) for i in range(2)]


def check(mesh, params, loss, stacked=None):
    """``loss(params, data, gather)`` trained lazily is optax on one device."""
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = jzero.shard_params(replicated(params, mesh), zero=tx, stacked=stacked)
    state = tx.init(shards)
    lazy = functools.partial(loss, gather=jzero.gather_params)

    @jax.jit
    def step(shards, state, data):
        _, grads = jzero.value_and_grad(lazy, zero=tx)(shards, data)
        return tx.step(grads, state, shards)

    for data in BATCHES:
        shards, state = step(shards, state, split(data, mesh))
    want, _ = train_optax(
        optax.adamw(1e-2), params, BATCHES, functools.partial(loss, gather=lambda x: x)
    )
    assert_close(jzero.gather_params(shards), want, 1e-5)


def mean_square(out, y):
    return jnp.mean((out - y) ** 2)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


class Scanned(nnx.Module):
    """Layers made by vmap and run by scan."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.layers = nnx.vmap(Layer)(rngs.split(LAYERS))
        self.last = nnx.Linear(8, 5, rngs=rngs)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.last = nnx.Linear(8, 5, rngs=rngs)


def test_nnx_scan(make_mesh):
    mesh = make_mesh(4)
    graphdef, params = nnx.split(Scanned(nnx.Rngs(0)), nnx.Param)
    layer_def = nnx.graphdef(nnx.merge(graphdef, params).layers)

    def loss(params, data, gather):
        x, y = data
        first, last = (
            nnx.merge(nnx.graphdef(nnx.eval_shape(make, nnx.Rngs(0))), gather(params[name]))
            for name, make in {
                "first": lambda r: nnx.Linear(6, 8, rngs=r),
                "last": lambda r: nnx.Linear(8, 5, rngs=r),
            }.items()
        )

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, part):
            return nnx.merge(layer_def, gather(part))(x)

        return mean_square(last(run(first(x), params["layers"])), y)

    check(mesh, params, loss, stacked="layers")


def test_nnx_layers_in_a_list(make_mesh):
    mesh = make_mesh(4)
    graphdef, params = nnx.split(Listed(nnx.Rngs(0)), nnx.Param)

    def loss(params, data, gather):
        x, y = data
        model = nnx.merge(graphdef, gather(params))
        x = model.first(x)
        for layer in model.layers:
            x = layer(x)
        return mean_square(model.last(x), y)

    check(mesh, params, loss)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        scan = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = scan(name="blocks")(x, None)
        return nn.Dense(5)(x)


def test_linen_scan(make_mesh):
    """The tree of nn.scan, with a scan over its shards."""
    mesh = make_mesh(4)
    params = Linen().init(jax.random.key(0), BATCHES[0][0])

    def loss(params, data, gather):
        x, y = data
        p = params["params"]
        x = nn.Dense(8).apply({"params": gather(p["Dense_0"])}, x)

        def body(x, part):
            return Block().apply({"params": gather(part)}, x, None)

        x, _ = jax.lax.scan(body, x, p["blocks"])
        return mean_square(nn.Dense(5).apply({"params": gather(p["Dense_1"])}, x), y)

    full = functools.partial(loss, gather=lambda x: x)
    direct = mean_square(Linen().apply(params, BATCHES[0][0]), BATCHES[0][1])
    assert jnp.allclose(full(params, BATCHES[0]), direct)
    check(mesh, params, loss, stacked="params/blocks")
