"""Parameters in low precision: a float32 master sees what their leaves cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    assert_bits,
    batch,
    config_for,
    loss_fn,
    model,
    plain_jit,
    replicated,
    split,
    train,
    with_paths,
)

import jzero

BATCHES = [batch(i) for i in range(20)]


def test_bfloat16_parameters_follow_a_float32_master(make_mesh):
    """The visible parameter is the rounding of a master that sees every small update."""
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-3, zero=config_for(mesh))
    params, state = train("plain", tx, mesh, model(dtype=jnp.bfloat16), BATCHES)

    @jax.jit
    def oracle(master, opt, data):
        visible = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), per_device_mean(visible, data))
        updates, opt = optax.adamw(1e-3).update(grads, opt, master)
        return optax.apply_updates(master, updates), opt

    def per_device_mean(params, data):
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, parts)
        return jax.tree.map(lambda g: g.astype(jnp.float32).mean(0), grads)

    master = jax.tree.map(lambda p: p.astype(jnp.float32), model(dtype=jnp.bfloat16))
    opt = optax.adamw(1e-3).init(master)
    for data in BATCHES:
        master, opt = oracle(master, opt, data)
    stored = {
        slot.path: np.asarray(state.master[slot.bucket])[slot.offset : slot.offset + slot.size]
        for slot in state.layout.slots
    }
    visible = {slot.path: None for slot in state.layout.slots}
    for (path, leaf), slot in zip(
        with_paths(params).items(), sorted(state.layout.slots), strict=True
    ):
        rounded = jnp.asarray(stored[slot.path]).astype(jnp.bfloat16)
        assert_bits(rounded, jnp.asarray(leaf).reshape(-1))
        visible[slot.path] = path
    # bf16 arithmetic in the gradient differs between programs: steps of 1e-3 agree to a few.
    for path, want in with_paths(master).items():
        name = next(name for name, p in visible.items() if p == path)
        assert np.abs(stored[name] - np.asarray(want).reshape(-1)).max() < 4e-3


def constant_gradients(value: float):
    def loss(params, data):
        return jnp.mean(data[0]) * 0 + value * sum(p.sum() for p in jax.tree.leaves(params))

    return loss


@pytest.mark.parametrize(("keep", "visible"), [("full", 0.9921875), ("none", 1.0)])
def test_a_master_copy_sees_small_updates(make_mesh, keep, visible):
    """Case 48: 1000 updates of 6e-6 from 1."""
    mesh = make_mesh(4)
    config = config_for(mesh, precision=jzero.Precision(master=keep))
    tx = jzero.zero(optax.sgd(6e-6), zero=config)
    params = replicated({"w": jnp.ones(5, jnp.bfloat16)}, mesh)
    state = jax.jit(tx.init)(params)
    step = plain_jit(tx, mesh, constant_gradients(1.0))
    data = split(batch(), mesh)

    @jax.jit
    def thousand(params, state):
        return jax.lax.fori_loop(0, 1000, lambda _, c: step(*c, data), (params, state))

    params, state = thousand(params, state)
    assert np.asarray(params["w"], np.float32) == pytest.approx(visible, abs=1e-7)
    if keep == "full":
        assert np.asarray(state.master[0])[:5] == pytest.approx(0.994, abs=4e-5)
        assert not np.asarray(state.master[0])[5:].any()


def test_edited_parameters_reset_the_master(make_mesh):
    """No stale master: the elements that the user changed, and no others."""
    mesh = make_mesh(4)
    tx = jzero.zero(optax.sgd(2.0**-12), zero=config_for(mesh))
    params = replicated({"w": jnp.ones(300, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}, mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(plain_jit(tx, mesh, constant_gradients(1.0)))
    data = split(batch(), mesh)
    params, state = step(params, state, data)
    w = np.ones(300, np.float32)
    assert_bits(params["w"], replicated(jnp.asarray(w, jnp.bfloat16), mesh))  # 1 - 2**-12 is 1
    params["w"] = params["w"].at[137].set(3.0)
    params, state = step(params, state, data)
    slot = state.layout.by_path["w"]
    master = np.asarray(state.master[0])[slot.offset : slot.offset + slot.size]
    want = np.full(300, 1 - 2 * 2.0**-12, np.float32)
    want[137] = 3 - 2.0**-12
    assert_bits(master, want)
