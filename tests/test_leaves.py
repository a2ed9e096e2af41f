"""Leaves of every kind and size: those that train equal optax, the others do not move a bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    assert_bits,
    assert_close,
    config_for,
    in_shard_map,
    plain_jit,
    replicated,
    train_optax,
)

import jzero

P = jax.P
WORLDS = [1, 3, 8]


def quadratic(params, data):
    """Every float leaf is pulled towards a target; the batch only scales that."""
    floats = [p for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.floating)]
    return jnp.mean(data) * sum(jnp.sum((p.astype(jnp.float32) - 3) ** 2) for p in floats)


def run(mesh, params, steps: int = 3, way=plain_jit, **options):
    tx = jzero.adamw(1e-2, weight_decay=0.1, zero=config_for(mesh), **options)
    params = replicated(params, mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(way(tx, mesh, quadratic))
    data = jnp.ones(24)
    for _ in range(steps):
        params, state = step(params, state, data)
    return params, state, tx


def on_one_device(params, steps: int = 3):
    batches = [jnp.ones(24)] * steps
    return train_optax(optax.adamw(1e-2, weight_decay=0.1), params, batches, quadratic)[0]


@pytest.fixture(scope="module")
def wanted():
    return functools.cache(lambda name: on_one_device(SIZES[name]))


SIZES = {
    "one leaf of 3": {"w": jnp.ones(3)},  # case 3: fewer elements than devices
    "one leaf of 1": {"w": jnp.ones(1)},
    "0-d beside a matrix": {"s": jnp.float32(0.5), "w": jnp.ones((4, 4))},  # case 6
    "zero-size last": {"a": jnp.ones((4, 4)), "z": jnp.ones((0, 8))},  # case 2
    "zero-size first and in the middle": {
        "a": jnp.ones(0),
        "b": jnp.ones(1),
        "c": jnp.ones((3, 0)),
        "d": jnp.ones(2),
    },
    "36 leaves, then one that is empty": [
        jnp.full(int(i != 35), i + 1.0) for i in range(40)
    ],  # case 1
    "primes": {"a": jnp.ones((7, 13)), "b": jnp.ones(97), "c": jnp.ones(1021)},
    "a bare array": jnp.ones((3, 5)),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes_equal_one_device(make_mesh, wanted, name: str, world: int):
    params, _, _ = run(make_mesh(world), SIZES[name])
    assert_close(params, wanted(name))
    for have, want in zip(jax.tree.leaves(params), jax.tree.leaves(SIZES[name]), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("empty", [{}, {"a": None, "b": {}}, (), {"z": jnp.ones((0, 8))}])
def test_nothing_to_train(make_mesh, empty, world: int):
    mesh = make_mesh(world)
    tx = jzero.adamw(1e-2, clip_norm=1.0, zero=config_for(mesh))
    state = jax.jit(tx.init)(empty)
    for call in (tx.step, tx.update):
        out, after = jax.jit(call)(empty, state, empty)
        assert_bits(out, empty) if call == tx.step else None
        assert jax.tree.structure(out) == jax.tree.structure(empty)
        assert int(after.step) == 1
        assert float(after.grad_norm) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_stays_zero_in_the_state(make_mesh, dtype: str):
    """Whatever the hyperparameters: weight decay, and an eps of 0 where 0/0 lurks."""
    mesh = make_mesh(8)
    for options in ({}, {"eps": 0.0}, {"nesterov": True, "eps": 0.0}, {"eps_root": 1e-3}):
        _, state, _ = run(mesh, {"w": jnp.ones(100, dtype)}, steps=4, **options)
        for x in jax.tree.leaves((state.inner, state.master)):
            assert x.shape == (1024,)
            assert np.isfinite(np.asarray(x)).all(), options
            assert not np.asarray(x)[100:].view(np.uint32).any(), options


# ---------------------------------------------------------------- leaves that do not train


def others() -> dict:
    return {
        "key": jax.random.key(7),
        "raw key": jnp.array([2**31 + 1, 5], jnp.uint32),  # case 49
        "flag": jnp.array([True, False]),
        "count": jnp.int32(2**24 + 1),
        "none": None,
        "w": jnp.ones(7),
    }


@pytest.mark.parametrize("way", ["plain", "shard_map"])
def test_other_dtypes_pass_through_the_direct_path(make_mesh, way: str):
    """Case 49: bits unchanged, and no state."""
    mesh, params = make_mesh(4), others()

    def loss(params, data):
        return quadratic({"w": params["w"]}, data)

    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    state = tx.init(params)
    assert [slot.path for slot in state.layout.slots] == ["w"]

    def step(params, state, data):
        if way == "plain":
            _, grads = jzero.value_and_grad(loss, zero=tx)(params, data)
        else:
            # What a gradient holds for the others does not matter.
            grads = {**params, "w": jax.grad(lambda w: loss({"w": w}, data))(params["w"])}
        return tx.step(grads, state, params)

    if way == "shard_map":
        specs = jzero.partition_specs(state)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
        )
    after, state = jax.jit(step)(params, state, jnp.ones(24))
    assert float(after["w"][0]) > 1
    for name in set(params) - {"w"}:
        assert_bits(after[name], params[name])


def test_other_dtypes_pass_through_updates(make_mesh):
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = {name: leaf for name, leaf in others().items() if name != "key"}
    grads = {**params, "w": jnp.ones(7)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    for name in set(params) - {"w"}:
        assert_bits(after[name], params[name])
    assert float(after["w"][0]) < 1


@pytest.mark.parametrize("face", ["step", "update"])
def test_frozen_leaves_do_not_move_and_have_no_state(make_mesh, face: str):
    """Case 31: leaves of 5, 7 (frozen) and 3; every bit of a frozen one survives, -0.0 too."""
    mesh = make_mesh(4)
    odd = jnp.array([0.0, -0.0, jnp.nan, jnp.inf, -jnp.inf, -1.0, 3.0])
    params = {"a": jnp.ones(5), "b": odd, "c": jnp.ones(3)}
    tx = jzero.adamw(
        1e-2,
        weight_decay=0.5,
        param_labels=lambda path: "frozen" if path == "b" else "moving",
        zero=config_for(mesh),
    )
    state = tx.init(params)
    assert [slot.path for slot in state.layout.slots] == ["c", "a"]
    assert state.layout.size == 8
    grads = jax.tree.map(jnp.ones_like, params)
    out, _ = jax.jit(getattr(tx, face))(grads, state, params)
    after = out if face == "step" else optax.apply_updates(params, out)
    assert_bits(after["b"], params["b"])
    alone = {"a": params["a"], "c": params["c"]}
    reference = optax.adamw(1e-2, weight_decay=0.5)
    ones = jax.tree.map(jnp.ones_like, alone)
    updates, _ = reference.update(ones, reference.init(alone), alone)
    assert_close({"a": after["a"], "c": after["c"]}, optax.apply_updates(alone, updates))


def test_everything_frozen(make_mesh):
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, param_labels="frozen", zero=config_for(mesh))
    params = {"a": jnp.ones(5), "b": jnp.ones(3)}
    state = tx.init(params)
    assert not state.layout.buckets
    after, _ = tx.step(params, state, params)
    assert_bits(after, params)


@pytest.mark.parametrize("face", ["step", "update"])
def test_a_skipped_step_changes_no_bit(make_mesh, face: str):
    mesh = make_mesh(4)
    params = {"a": jnp.array([0.0, -0.0, 1.0]), "b": jnp.array([1, -0.0, 2, 3, 0], jnp.bfloat16)}
    tx = jzero.adamw(1e-2, weight_decay=0.1, zero=config_for(mesh))
    state = tx.init(params)
    good = jax.tree.map(jnp.ones_like, params)
    bad = {"a": good["a"], "b": good["b"].at[4].set(jnp.nan)}
    out, after = jax.jit(getattr(tx, face))(bad, state, params)
    new = out if face == "step" else optax.apply_updates(params, out)
    assert_bits(new, params)
    assert_bits((after.inner, after.master, after.step), (state.inner, state.master, state.step))
    assert int(after.skipped) == 1
    assert np.isnan(float(after.grad_norm))


def test_numpy_parameters(make_mesh):
    """As jax.numpy takes them: double precision becomes single where JAX is so configured."""
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, weight_decay=0.1, zero=config_for(mesh))
    for params in ({"w": np.ones(5, np.float32)}, {"w": np.ones(5), "n": np.arange(3)}):
        grads = jax.tree.map(np.ones_like, params)
        after, _ = tx.step(grads, tx.init(params), params)
        assert after["w"].dtype == jnp.float32
        assert_close(after["w"], jnp.full(5, 1 - 1e-2 * 1.1))


def test_nnx_state(make_mesh):
    nnx = pytest.importorskip("flax.nnx")
    mesh = make_mesh(4)
    params = nnx.state(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(params)
    after, _, _ = run(mesh, params, way=in_shard_map(True))
    assert jax.tree.structure(after) == jax.tree.structure(params)
    want = on_one_device(jax.tree.map(jnp.asarray, pure))
    for have, one in zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True):
        assert_close(have - 3, one - 3)
