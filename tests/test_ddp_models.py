"""What lives in a model beside its parameters: statistics, random streams; and linen models."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import assert_bits, collectives, replicated
from test_ddp import MIB, MLP, by_path, data, loss_fn, place, wrap
from test_ddp_rules import Scalars, f32, linear

import jzero


@pytest.fixture(autouse=True)
def _flax_broadcasts():
    """flax adds biases by numpy's rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


# ---------------------------------------------------------------- BatchNorm


class Norm(nnx.Module):
    def __init__(self, axis_name: str | None = None):
        self.norm = nnx.BatchNorm(2, momentum=0.5, axis_name=axis_name, rngs=nnx.Rngs(0))
        self.w = nnx.Param(f32(1, -2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x) * self.w[...]


def squares(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def batch_of(size: int = 32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 2)) * [1, 3] + np.arange(size)[:, None] / 8
    return jnp.asarray(x, jnp.float32), jnp.asarray(rng.normal(size=(size, 2)), jnp.float32)


def test_statistics_are_the_mean_over_devices_or_the_first_ones(make_mesh):
    mesh, (x, y) = make_mesh(8, types="auto"), batch_of()
    parts = np.asarray(x).reshape(8, 4, 2)
    means, variances = 0.5 * parts.mean(1), 0.5 + 0.5 * parts.var(1)
    big = Norm()
    nnx.jit(squares)(big, (x, y))
    for rule in ("mean", "first"):
        ddp = wrap(mesh, Norm(), buffers=rule, bucket_cap_mb=1)
        place(mesh, ddp)
        step = nnx.jit(ddp.value_and_grad(squares)).lower(ddp, (x, y)).compile()
        # A bucket of six; loss and statistics are one more all-reduce, which XLA joins to it.
        assert [sum(c.sizes) for c in collectives(step)] == [6 + 1 + 4]
        step(ddp, (x, y))
        norm = ddp.module.norm
        want = (means[0], variances[0]) if rule == "first" else (means.mean(0), variances.mean(0))
        np.testing.assert_allclose(norm.mean[...], want[0], rtol=1e-5)
        np.testing.assert_allclose(norm.var[...], want[1], rtol=1e-5)
        assert ddp.first_difference() is None
        if rule == "mean":  # the mean of the whole batch
            np.testing.assert_allclose(norm.mean[...], big.norm.mean[...], rtol=1e-5)
        before = by_path(nnx.state(ddp))
        with ddp.no_sync():
            step = nnx.jit(ddp.value_and_grad(squares)).lower(ddp, (x, y)).compile()
            step(ddp, (x, y))
        assert collectives(step) == []
        for path, value in by_path(nnx.state(ddp)).items():
            np.testing.assert_array_equal(value, before[path])


def test_synchronised_batch_norm_is_the_big_batch(make_mesh):
    ddp, batch = wrap(make_mesh(8), Norm("data")), batch_of()
    loss, grads = ddp.value_and_grad(squares)(ddp, batch)
    model = Norm()
    want_loss, want = nnx.jit(nnx.value_and_grad(squares))(model, batch)
    np.testing.assert_allclose(float(loss), float(want_loss), rtol=1e-6)
    for path, g in by_path(want).items():
        np.testing.assert_allclose(by_path(grads)[path], g, rtol=2e-4, atol=1e-6, err_msg=path)
    for path, x in by_path(nnx.state(model)).items():
        np.testing.assert_allclose(by_path(nnx.state(ddp))[path], x, rtol=1e-5, err_msg=path)
    assert ddp.first_difference() is None


# ---------------------------------------------------------------- random streams


class Drop(nnx.Module):
    def __init__(self, seed: int = 0):
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        self.w = nnx.Param(f32(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(nnx.jit(lambda m, x: m.drop(x)))(self, x) * self.w[...]


def dropped(model: Any, x: jax.Array, key: jax.Array) -> Any:
    return jnp.mean(model(x)), (model(x), jax.random.bits(key, (1, 4)))


def test_devices_draw_differently_and_again_the_same(make_mesh):
    mesh, x = make_mesh(8), jnp.ones((8, 64))

    ddp = wrap(mesh, Drop())
    fn = ddp.value_and_grad(dropped, has_aux=True)

    def run(seed: int, steps: int = 2) -> list[Any]:
        nnx.update(ddp, nnx.as_pure(nnx.state(Drop(seed))))
        results = []
        for step in range(steps):
            (_, aux), _ = fn(ddp, x, jax.random.key(step))
            results.append(jax.tree.map(np.asarray, aux))
            assert int(ddp.module.drop.rngs.count[...]) == 2 * (step + 1)
            assert ddp.first_difference() is None
        np.testing.assert_array_equal(
            jax.random.key_data(ddp.module.drop.rngs.key[...]),
            jax.random.key_data(Drop(seed).drop.rngs.key[...]),
        )
        return results

    first, again, other = run(0), run(0), run(1)
    (mask, bits), (mask2, _) = first
    assert len({row.tobytes() for row in mask}) == 8  # per device
    assert len({row.tobytes() for row in bits}) == 8
    assert not np.array_equal(mask, mask2)  # per step
    assert not np.array_equal(mask, other[0][0])  # per seed
    assert_bits(first, again)


def test_a_buffer_that_was_drawn_becomes_equal(make_mesh):
    """It does not depend on the batch, and yet differs between devices."""

    class Noisy(nnx.Module):
        def __init__(self):
            self.rngs, self.noise = nnx.Rngs(0), nnx.Variable(jnp.float32(0))
            self.w = nnx.Param(f32(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.noise[...] = jax.random.uniform(self.rngs())
            return jnp.mean(x) * self.w[0]

    def fn(model: Any, x: jax.Array) -> Any:
        loss = model(x)
        return loss, model.module.noise[...][None]

    ddp = wrap(make_mesh(8), Noisy())
    (_, drawn), _ = ddp.value_and_grad(fn, has_aux=True)(ddp, jnp.ones(8))
    assert len(set(np.asarray(drawn).tolist())) == 8
    np.testing.assert_allclose(ddp.module.noise[...], np.mean(drawn), rtol=1e-6)
    assert ddp.first_difference() is None


# ---------------------------------------------------------------- what a loss may do


class Shared(nnx.Module):
    """One layer in two places, and leaves of no element or no dimension between the others."""

    def __init__(self):
        self.one = nnx.Dict(w=nnx.Param(f32(1, 2)))
        self.two = self.one
        self.empty = nnx.Param(jnp.zeros((0,)))
        self.scalar = nnx.Param(jnp.float32(2))

    def __call__(self, x: jax.Array) -> dict[str, Any]:
        return {"a": (x @ self.one["w"][...], [x @ self.two["w"][...] * self.scalar[...]]), "b": ()}


@pytest.mark.parametrize("static_graph", [False, True], ids=["", "static_graph"])
def test_two_forwards_shared_modules_and_nested_outputs(make_mesh, static_graph):
    def fn(model: Any, x: jax.Array) -> Any:
        first, second = model(x), model(2 * x)
        out = first["a"][0] + second["a"][1][0]
        aux = {"rows": x, "sum": jnp.sum(out), "count": x.shape[0], "none": None}
        return jnp.mean(out), aux

    ddp = wrap(make_mesh(8), Shared(), static_graph=static_graph)
    x = jnp.arange(32.0).reshape(16, 2)
    (loss, aux), grads = ddp.value_and_grad(fn, has_aux=True)(ddp, x)
    (want, want_aux), want_grads = nnx.value_and_grad(fn, has_aux=True)(Shared(), x)
    assert float(loss) == float(want)
    assert by_path(grads).keys() == {"one/w", "empty", "scalar"}
    for path, g in by_path(want_grads).items():
        np.testing.assert_array_equal(by_path(grads)[path], g)
    np.testing.assert_array_equal(aux["rows"], x)
    assert float(aux["sum"]) == float(want_aux["sum"]) / 8
    assert int(aux["count"]) == 16
    assert aux["none"] is None


def test_variables_that_a_loss_creates_stay_inside(make_mesh):
    def fn(model: Any, x: jax.Array) -> jax.Array:
        model.module.seen = nnx.Intermediate(x)
        return linear(model, x)

    ddp = wrap(make_mesh(2), Scalars(w=f32(1)))
    _, grads = ddp.value_and_grad(fn)(ddp, f32(1, 3))
    assert by_path(grads) == {"w": 2}
    assert by_path(nnx.state(ddp)).keys() == {"w"}


def test_calls_compile_once_and_tracing_is_done_once(make_mesh):
    mesh, count = make_mesh(2, types="auto"), [0]

    def fn(model: Any, x: jax.Array) -> jax.Array:
        count[0] += 1
        return linear(model, x)

    ddp = wrap(mesh, Scalars(w=f32(1)))
    for i in range(3):
        # A new function each time, as in a loop in PyTorch.
        ddp.value_and_grad(fn)(ddp, f32(i, 1))
    assert count == [1]
    ddp.value_and_grad(fn)(ddp, f32(1, 2, 3, 4))
    assert count == [2]
    with ddp.no_sync():
        ddp.value_and_grad(fn)(ddp, f32(1, 1))
    assert count == [3]
    _, grads = ddp.value_and_grad(fn)(ddp, f32(7, 1))
    assert count == [3]
    assert by_path(grads) == {"w": 4}


def test_different_calls_do_not_share_a_program(make_mesh):
    mesh, model, x, two = make_mesh(2), Scalars(w=f32(1)), f32(1, 3), jnp.float32(2)
    ddp = wrap(mesh, model)
    tx = jzero.adamw(1e-3, zero=jzero.ZeroConfig(mesh=mesh))

    def scaled(model: Any, x: jax.Array, by: jax.Array) -> jax.Array:
        return linear(model, x * by)

    def negative(model: Any, x: jax.Array, by: jax.Array) -> jax.Array:
        return -scaled(model, x, by)

    fn = ddp.value_and_grad(scaled)
    assert by_path(fn(ddp, x, two)[1]) == {"w": 4}
    assert by_path(fn(ddp, x, f32(2, 10))[1]) == {"w": 16}  # split, where a scalar is not
    assert by_path(fn(ddp, jnp.float16(0.5) + x, two)[1]) == {"w": 5}
    assert by_path(ddp.value_and_grad(negative)(ddp, x, two)[1]) == {"w": -4}
    assert by_path(fn(model, x, two)[1]) == {"w": 4}
    with ddp.no_sync():
        assert isinstance(fn(model, x, two)[1], jzero.LocalGrads)
    assert by_path(fn(model, x, two)[1]) == {"w": 4}
    _, shards = ddp.value_and_grad(scaled, zero=tx)(ddp, x, two)
    (shards,) = jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, jzero.GradShards))
    assert float(shards.buckets[0][0]) == 4


def test_the_wrapper_looks_like_its_module_to_nnx(make_mesh):
    model = MLP()
    ddp = wrap(make_mesh(2, types="auto"), model)
    assert ddp.module is model
    ours, theirs = nnx.to_flat_state(nnx.state(ddp)), nnx.to_flat_state(nnx.state(model))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    copy = nnx.clone(ddp)
    assert isinstance(copy, jzero.DistributedDataParallel)
    assert copy.module is not model
    copy.module.scale[...] = jnp.float32(9)
    assert float(model.scale[...]) != 9
    grads = ddp.value_and_grad(loss_fn)(ddp, data())[1]
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.grad(loss_fn)(model, data()))
    # The module itself may be differentiated through the wrapper.
    _, same = ddp.value_and_grad(loss_fn)(model, data())
    assert_bits(nnx.as_pure(same), nnx.as_pure(grads))
    assert "DistributedDataParallel(MLP" in repr(ddp)


# ---------------------------------------------------------------- linen


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Dense(4, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train or not self.has_rng("dropout"))(x)
        return nn.Dense(2, name="last")(x)


def linen_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


@pytest.mark.parametrize("sharded", [False, True], ids=["optax", "jzero.adamw"])
def test_a_linen_model_trains_under_jit(make_mesh, sharded):
    mesh, batch = make_mesh(8, types="auto"), batch_of()
    module = Dense()
    variables = jax.jit(module.init)(jax.random.key(0), batch[0])
    ddp = jzero.DistributedDataParallel(
        module, mesh, variables=variables, bucket_cap_mb=40 / MIB, static_graph=True
    )
    config = jzero.ZeroConfig(mesh=mesh)
    tx = jzero.adamw(1e-2, zero=config) if sharded else optax.adamw(1e-2)
    state = tx.init(ddp.params)
    if not sharded:
        state = replicated(state, mesh)

    @jax.jit
    def step(ddp: Any, state: Any, batch: Any) -> Any:
        fn = ddp.value_and_grad(linen_loss, zero=tx if sharded else None)
        loss, grads = fn(ddp, batch)
        updates, state = tx.update(grads, state, ddp.params)
        return ddp.replace(params=optax.apply_updates(ddp.params, updates)), state, loss

    losses = []
    for _ in range(20):
        ddp, state, loss = step(ddp, state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert ddp.first_difference() is None
    assert np.asarray(ddp.variables["batch_stats"]["norm"]["mean"]).all()
    assert ddp.module is module
    out = jax.jit(lambda ddp, x: ddp(x, train=False))(ddp, batch[0])
    want = jax.jit(lambda v, x: module.apply(v, x, train=False))(ddp.variables, batch[0])
    np.testing.assert_array_equal(out, want)


def test_linen_gradients_statistics_and_keys(make_mesh):
    mesh, batch = make_mesh(8), batch_of()
    module = Dense()
    variables = jax.jit(module.init)(jax.random.key(0), batch[0])
    frozen = {"params": {**variables["params"], "count": jnp.int32(3)}}
    ddp = jzero.DistributedDataParallel(
        module, mesh, variables={**variables, **frozen}, wrt=lambda path: "first" not in path
    )
    fn = ddp.value_and_grad(linen_loss)
    loss, grads = fn(ddp, batch)

    def local(params: Any, part: Any) -> Any:
        out, new = module.apply({**variables, "params": params}, part[0], mutable=["batch_stats"])
        return jnp.mean((out - part[1]) ** 2), new["batch_stats"]

    parts = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
    each = jax.jit(jax.vmap(jax.value_and_grad(local, has_aux=True), (None, 0)))
    (losses, stats), want = each(variables["params"], parts)
    np.testing.assert_allclose(float(loss), float(losses.mean()), rtol=1e-6)
    np.testing.assert_allclose(
        grads["last"]["kernel"], want["last"]["kernel"].mean(0), rtol=1e-4, atol=1e-6
    )
    assert not np.asarray(grads["first"]["kernel"]).any()
    assert int(grads["count"]) == 0
    assert [s.path for b in ddp.buckets for s in b.slots] == [
        "norm/scale",
        "norm/bias",
        "last/kernel",
        "last/bias",
    ]
    have = ddp.variables["batch_stats"]["norm"]
    np.testing.assert_allclose(have["mean"], stats["norm"]["mean"].mean(0), rtol=1e-5, atol=1e-6)
    assert ddp.unused_parameters(linen_loss, batch) == ()

    drop = nn.Dropout(0.5, deterministic=False)
    drop = jzero.DistributedDataParallel(drop, mesh, variables={"params": {}})

    def noisy(model: Any, x: jax.Array, key: jax.Array) -> Any:
        return jnp.mean(x), model(x, rngs={"dropout": key})

    x = jnp.ones((8, 32))
    (_, rows), none = drop.value_and_grad(noisy, has_aux=True)(drop, x, jax.random.key(5))
    assert len({np.asarray(row).tobytes() for row in rows}) == 8
    assert none == {}
    # With linen's own mutable=, a call returns what it changed and keeps nothing.
    _, new = ddp(batch[0], mutable=["batch_stats"])
    assert new.keys() == {"batch_stats"}
    with pytest.raises(ValueError, match="pass ddp to the jitted function and return it"):
        jax.jit(lambda x: ddp(x))(batch[0])
    with pytest.raises(TypeError, match="first argument must be the wrapper"):
        fn(ddp.params, batch)


# ---------------------------------------------------------------- equal from the start


def test_init_sync_and_broadcast(make_mesh):
    """pytorch#111138: buffers and frozen leaves are sent like parameters."""
    mesh = make_mesh(8)

    class Mixed(nnx.Module):
        def __init__(self):
            self.trained = nnx.Param(_ranks(mesh, jnp.float32))
            self.frozen = nnx.Variable(_ranks(mesh, jnp.bfloat16))
            self.step = nnx.Variable(_ranks(mesh, jnp.int32))
            self.flag = nnx.Variable(_ranks(mesh, jnp.bool_))

    def values(node: Any) -> dict[str, list[float]]:
        return {
            str(path[0]): [float(np.asarray(s.data)[0]) for s in x.addressable_shards]
            for path, x in nnx.to_flat_state(nnx.as_pure(nnx.state(node)))
        }

    ranks = [float(r) for r in range(8)]
    ddp = jzero.DistributedDataParallel(Mixed(), mesh, init_sync=False)
    assert values(ddp)["frozen"] == values(ddp)["step"] == values(ddp)["trained"] == ranks
    assert ddp.first_difference() == "flag"
    ddp.broadcast()
    assert ddp.first_difference() is None
    assert all(v == [0.0] * 8 for v in values(ddp).values())
    ddp = jzero.DistributedDataParallel(Mixed(), mesh)
    state = by_path(nnx.state(ddp))
    assert all(v == [0.0] * 8 for v in values(ddp).values())
    assert {p: str(x.dtype) for p, x in state.items()} == {
        "trained": "float32",
        "frozen": "bfloat16",
        "step": "int32",
        "flag": "bool",
    }


def _ranks(mesh: Any, dtype: Any) -> jax.Array:
    copies = [jax.device_put(jnp.full(1, r, dtype), d) for r, d in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(
        (1,), jax.sharding.NamedSharding(mesh, P()), copies
    )
