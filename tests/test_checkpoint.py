"""A checkpoint restores bit for bit on any number of devices, and damage is found."""

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from support import assert_bits, config_for, host, model, replicated

import jzero
from jzero import checkpoint
from jzero._layout import Leaf, plan_layout

SAVED = [1, 2, 4, 8, (2, 4)]
LOADED = [1, 2, 3, 5, 6, 8, (4, 2)]


def name_of(shape: Any) -> str:
    return "x".join(map(str, shape)) if isinstance(shape, tuple) else str(shape)


def tree(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Leaves of every kind: trained ones that straddle shards, and what passes through."""
    rng = np.random.default_rng(5)
    return {
        **model(dtype=dtype),
        "wide": jnp.asarray(rng.uniform(1, 2, (50, 31)), dtype),
        "empty": jnp.zeros((0, 8), dtype),
        "count": jnp.uint32(2**31 + 1),
        "mask": jnp.array([True, False]),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8), 3),
        "none": None,
    }


def gradients(params: Any, seed: int) -> Any:
    """Whole numbers over 64, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        if leaf is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(rng.integers(-64, 64, leaf.shape) / 64, leaf.dtype)

    return jax.tree.map(draw, params)


def optimizer(mesh: Mesh, bucket_mb: float = 2**-8, **options: Any) -> jzero.ZeroTransformation:
    precision = options.pop("precision", jzero.Precision())
    zero = config_for(mesh, bucket_mb=bucket_mb, precision=precision)
    return jzero.adamw(
        optax.linear_schedule(1e-2, 1e-3, 20), weight_decay=0.1, zero=zero, **options
    )


def steps(tx: Any, mesh: Mesh, params: Any, state: Any, seeds: range) -> Any:
    for seed in seeds:
        params, state = tx.step(replicated(gradients(params, seed), mesh), state, params)
    return params, state


def moments(state: jzero.ZeroState) -> dict[str, dict[str, np.ndarray]]:
    """Moments and master of each parameter, cut out of the buckets by hand."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for slot in state.layout.slots:
        cut = slice(slot.offset, slot.offset + slot.size)
        arrays = {"mu": state.inner.mu, "nu": state.inner.nu, "master": state.master}
        found[slot.path] = {
            name: host(buckets[slot.bucket])[cut].reshape(slot.shape)
            for name, buckets in arrays.items()
            if buckets[slot.bucket] is not None
        }
    return found


def assert_padding_is_zero(state: jzero.ZeroState) -> None:
    for bucket in state.layout.buckets:
        for arrays in (state.inner.mu, state.inner.nu, state.master):
            if arrays[bucket.number] is not None:
                assert not host(arrays[bucket.number])[bucket.size :].any()


@pytest.fixture(scope="module")
def trained(make_mesh: Any) -> Any:
    """Three steps on a mesh, by shape of the mesh and dtype of the parameters."""

    @functools.cache
    def run(shape: Any, dtype: str = "bfloat16") -> Any:
        mesh = make_mesh(shape)
        tx = optimizer(mesh)
        params = replicated(tree(jnp.dtype(dtype)), mesh)
        params, state = steps(tx, mesh, params, tx.init(params), range(3))
        return mesh, tx, params, state

    return run


@pytest.fixture(scope="module")
def target(make_mesh: Any) -> Any:
    """An abstract ``(state, params)`` on a mesh, in other buckets than those of ``trained``."""

    @functools.cache
    def make(shape: Any, dtype: str = "bfloat16", bucket_mb: float = 2**-12) -> Any:
        mesh = make_mesh(shape)
        tx = optimizer(mesh, bucket_mb)
        params = tree(jnp.dtype(dtype))
        return mesh, tx, (jax.eval_shape(tx.init, params), jax.eval_shape(lambda: params))

    return make


# ---------------------------------------------------------------- any number of devices


@pytest.mark.parametrize("saved", SAVED, ids=name_of)
def test_restores_bit_equal_on_any_number_of_devices(
    saved: Any, trained: Any, target: Any, tmp_path: Path
):
    _, _, params, state = trained(saved)
    saving = checkpoint.save(tmp_path, state, params)
    assert saving.done
    assert checkpoint.step_of(tmp_path) == checkpoint.verify(tmp_path) == 3
    want = moments(state)
    for loaded in LOADED:
        mesh, _, like = target(loaded)
        new_state, new_params = checkpoint.restore(tmp_path, like, mesh=mesh)
        assert_bits(new_params, params)
        assert_bits(moments(new_state), want)
        assert_padding_is_zero(new_state)
        assert int(new_state.step) == 3
        assert new_state.layout == like[0].layout != state.layout
        specs = jzero.partition_specs(new_state)
        for array, spec in zip(jax.tree.leaves(new_state), jax.tree.leaves(specs), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(8, 3), (1, (4, 2)), ((2, 4), 6)], ids=["8-3", "1-4x2", "2x4-6"]
)
def test_the_next_steps_equal_the_uninterrupted_run(
    saved: Any, loaded: Any, trained: Any, target: Any, tmp_path: Path
):
    mesh, tx, params, state = trained(saved, "float32")
    checkpoint.save(tmp_path, state, params)
    on, new_tx, like = target(loaded, "float32")
    new_state, new_params = checkpoint.restore(tmp_path, like, mesh=on)
    params, state = steps(tx, mesh, params, state, range(3, 8))
    new_params, new_state = steps(new_tx, on, new_params, new_state, range(3, 8))
    assert_bits(new_params, params)
    assert_bits(moments(new_state), moments(state))
    assert int(new_state.step) == int(state.step) == 8


def test_restores_into_a_shuffled_leaf_order(trained: Any, tmp_path: Path, make_mesh: Any):
    _, _, params, state = trained(4)
    checkpoint.save(tmp_path, state, params)
    mesh = make_mesh(5)
    slots = state.layout.slots
    for seed in range(3):
        order = [slot.path for slot in slots]
        random.Random(seed).shuffle(order)
        leaves = [Leaf((s.path,), s.shape, s.dtype, 2, s.group) for s in slots]
        layout = plan_layout(leaves, shards=5, cap_bytes=300, order=order)
        flat = tuple(jax.ShapeDtypeStruct((b.padded,), jnp.float32) for b in layout.buckets)
        inner = type(state.inner)(flat, flat)
        like = dataclasses.replace(
            jax.eval_shape(lambda: state),
            layout=layout,
            master=flat,
            inner=inner,
            sharded=(True,) * 2 * len(flat),
        )
        new_state, new_params = checkpoint.restore(
            tmp_path, (like, jax.eval_shape(lambda: params)), mesh=mesh
        )
        assert_bits(new_params, params)
        assert_bits(moments(new_state), moments(state))


def test_padding_is_not_stored(make_mesh: Any, tmp_path: Path):
    """cases.md 9: eight shards of 128 for a leaf of 300 elements; five hold padding only."""
    mesh = make_mesh(8)
    params = replicated({"w": jnp.arange(300.0)}, mesh)
    tx = optimizer(mesh)
    _, state = steps(tx, mesh, params, tx.init(params), range(1))
    checkpoint.save(tmp_path, state, params)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    pieces = manifest["nodes"][""]["arrays"]["exp_avg"][0]["pieces"]
    assert [count for _, count, _, _ in pieces] == [128, 128, 44]
    assert manifest["streams"][0][0] == 3 * 300 * 4 + 4 + 4 + 4 + 1
    for shape in (1, 2, 3, 6):
        on = make_mesh(shape)
        like = jax.eval_shape(optimizer(on).init, params), params
        new_state, _ = checkpoint.restore(tmp_path, like, mesh=on)
        assert_bits(moments(new_state), moments(state))
