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
from flax import nnx
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
    ("saved", "loaded"),
    [
        pytest.param(8, 3, id="8-3"),
        pytest.param(1, (4, 2), id="1-4x2", marks=pytest.mark.slow),
        pytest.param((2, 4), 6, id="2x4-6", marks=pytest.mark.slow),
    ],
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


# ---------------------------------------------------------------- lazy parameter sync


def scanned() -> dict[str, Any]:
    """Leaves with a leading dim of five layers, and others; one is frozen, one does not train."""
    rng = np.random.default_rng(9)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1, shape), jnp.bfloat16)

    return {
        "layers": {"kernel": draw(5, 40, 11), "bias": draw(5, 13)},
        "embedding": draw(37, 19),
        "frozen": draw(23, 3),
        "count": jnp.int32(7),
    }


@pytest.fixture(scope="module")
def kinds(make_mesh: Any) -> Any:
    """From a kind of parameter sync and a mesh: the optimizer, and parameters as it takes them."""

    def make(kind: str, shape: Any, bucket_mb: float = 2**-10) -> Any:
        mesh = make_mesh(shape)
        sync = "eager" if kind == "eager" else "lazy"
        zero = config_for(mesh, bucket_mb=bucket_mb, param_sync=sync)
        labels = {"layers": "", "embedding": "", "frozen": "frozen", "count": ""}
        tx = jzero.adamw(1e-2, param_labels=labels, zero=zero)
        params = replicated(scanned(), mesh)
        if kind != "eager":
            stacked = "layers" if kind == "stacked" else None
            params = jzero.shard_params(params, zero=tx, stacked=stacked)
        return mesh, tx, params

    return make


def random_like(state: Any, params: Any, mesh: Mesh, seed: int) -> Any:
    """A state whose values are random, through a state dict, which knows no layout."""
    d = checkpoint.state_dict(state, params)
    rng = np.random.default_rng(seed)
    for path, entry in d.items():
        if path != "step" and "exp_avg" in entry:
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = rng.uniform(0.5, 1, entry[name].shape).astype(np.float32)
            noise = 1 + rng.uniform(-(2**-10), 2**-10, entry["param"].shape)
            entry["param"] = np.float32(entry["param"] * noise)
    return d, checkpoint.load_state_dict({**d, "step": 5}, state, params)


@pytest.mark.parametrize("saved", ["eager", "lazy", "stacked"])
def test_eager_and_lazy_and_stacked_are_one(saved: str, kinds: Any, tmp_path: Path):
    mesh, tx, params = kinds(saved, 4)
    d, (state, params) = random_like(tx.init(params), params, mesh, seed=1)
    assert_bits(checkpoint.state_dict(state, params), {**d, "step": 5})
    checkpoint.save(tmp_path, state, params)
    assert checkpoint.verify(tmp_path) == 5
    for kind, shape in (("eager", 3), ("lazy", (4, 2)), ("stacked", 2), ("stacked", 5)):
        on, other, like = kinds(kind, shape, 2**-11)
        new_state, new_params = checkpoint.restore(
            tmp_path,
            (jax.eval_shape(other.init, like), jax.eval_shape(lambda like=like: like)),
            mesh=on,
        )
        assert_bits(
            checkpoint.state_dict(new_state, new_params), checkpoint.state_dict(state, params)
        )
        assert type(new_params) is type(like)
        assert jax.tree.structure((new_state, new_params)) == jax.tree.structure(
            (jax.eval_shape(other.init, like), like)
        )
        whole = new_params if kind == "eager" else jzero.gather_params(new_params)
        assert_bits(whole["count"], params["count"] if saved == "eager" else params.others[0])
        specs = jzero.partition_specs((new_state, new_params))
        arrays = jax.tree.leaves((new_state, new_params))
        for array, spec in zip(arrays, jax.tree.leaves(specs), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(on, spec), array.ndim)


def test_flax_optimizer(make_mesh: Any, tmp_path: Path):
    """`nnx.Optimizer` boxes each array of its state; a restored one goes on as if nothing was."""
    mesh = make_mesh(4)

    def start(seed: int) -> Any:
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(seed))
        ddp = jzero.DistributedDataParallel(model, mesh)
        tx = jzero.adamw(1e-2, zero=config_for(mesh))
        return ddp, nnx.Optimizer(ddp, tx, wrt=nnx.Param)

    @nnx.jit
    def step(ddp: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = ddp.value_and_grad(lambda m, b: jnp.mean((m(b) - 1) ** 2))(ddp, batch)
        optimizer.update(ddp, grads)
        return loss

    batch = jnp.arange(64.0).reshape(8, 8) / 64
    ddp, optimizer = start(0)
    step(ddp, optimizer, batch)
    checkpoint.save(tmp_path / "a", optimizer.opt_state, nnx.state(ddp, nnx.Param))
    want = [float(step(ddp, optimizer, batch)) for _ in range(2)]

    ddp, optimizer = start(1)
    like = optimizer.opt_state, nnx.state(ddp, nnx.Param)
    state, params = checkpoint.restore(tmp_path / "a", like)
    assert jax.tree.structure((state, params)) == jax.tree.structure(like)
    optimizer.opt_state = state
    nnx.update(ddp, params)
    assert [float(step(ddp, optimizer, batch)) for _ in range(2)] == want

    d = checkpoint.state_dict(optimizer.opt_state, nnx.state(ddp, nnx.Param))
    assert d["step"] == 3
    loaded, _ = checkpoint.load_state_dict(d, *like)
    assert jax.tree.structure(loaded) == jax.tree.structure(like[0])
