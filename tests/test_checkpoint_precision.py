"""From any precision policy to any: exact where the target can hold the value."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support import assert_bits, config_for, host, replicated

import jzero
from jzero import checkpoint
from jzero._ckpt_codec import join, split
from jzero._codec import codec_of
from jzero_kernels.adam import forms

F8 = "float8_e4m3fn"
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "remainder": {"master": "remainder"},
    "none": {"master": "none"},
    "bf16": {"state": "bfloat16", "master": "remainder"},
    "fp16": {"state": "float16", "scaled": True},
    "fp8": {"state": F8, "scaled": True, "master": "remainder"},
    "wire": {"param_sync": "float8_e5m2"},
}
# ``param_sync`` is not seen in a state, so between policies that differ in it alone, bytes are
# copied; see docs/checkpoints.md.
CONVERTED = [name for name in POLICIES if name != "wire"]
SIZE = 900


def leaves() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1, shape), jnp.bfloat16)

    return {"a": draw(SIZE), "b": draw(7, 31), "c": draw(), "d": draw(5, 130)}


def build(make_mesh: Any, policy: str, shape: Any, cap: float = 2**-9) -> Any:
    mesh = make_mesh(shape)
    zero = config_for(mesh, bucket_mb=cap, precision=jzero.Precision(**POLICIES[policy]))
    return mesh, jzero.adamw(1e-2, zero=zero)


def values() -> dict[str, Any]:
    """A state dict of float32 numbers that bfloat16 cannot hold, some of them awkward."""
    rng = np.random.default_rng(1)
    d: dict[str, Any] = {"step": 4}
    for path, leaf in leaves().items():
        param = rng.uniform(-1, 1, leaf.shape).astype(np.float32)
        first = param.reshape(-1)
        awkward = np.array([0x3F808000, 0xBF808000, 0x3F818000, 0xC1000000, 0], np.uint32)
        first[: min(5, first.size)] = awkward.view(np.float32)[: first.size]
        moments = {
            "exp_avg": rng.normal(size=leaf.shape).astype(np.float32),
            "exp_avg_sq": (rng.normal(size=leaf.shape) ** 2 * 1e-6).astype(np.float32),
        }
        d[path] = {"param": param, **moments}
    return d


@pytest.fixture(scope="module")
def saved(make_mesh: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of each policy, saved on four devices, and the state that it holds."""
    found: dict[str, Any] = {}
    for policy in POLICIES:
        mesh, tx = build(make_mesh, policy, 4)
        params = replicated(leaves(), mesh)
        state, params = checkpoint.load_state_dict(values(), tx.init(params), params)
        if policy == "wire":  # what is visible came over the wire, in 8 bits
            grads = jax.tree.map(jnp.zeros_like, params)
            params, state = tx.step(grads, state, params)
        folder = tmp_path_factory.mktemp(policy)
        checkpoint.save(folder, state, params)
        found[policy] = folder, state, params, checkpoint.state_dict(state, params)
    return found


def same_bits(have: np.ndarray, want: np.ndarray, what: Any) -> None:
    assert have.dtype == want.dtype == np.float32
    bits = have.view(np.uint32), want.view(np.uint32)
    np.testing.assert_array_equal(*bits, err_msg=str((what, have[bits[0] != bits[1]][:5])))


def decoded(tx: Any, state: Any, params: Any) -> dict[str, np.ndarray]:
    """Parameters in full precision, by the codec itself, which also resets stale masters."""
    found: dict[str, np.ndarray] = {}
    for bucket, stored in zip(state.layout.buckets, state.master, strict=True):
        flat = np.zeros(bucket.padded, jnp.bfloat16)
        for slot in bucket.slots:
            leaf = host(params[slot.path]).reshape(-1)
            flat[slot.offset : slot.offset + slot.size] = leaf
        codec = codec_of(bucket, tx.config.precision)
        device_free = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), stored)
        full = np.asarray(codec.decode(device_free, jnp.asarray(flat))).astype(np.float32)
        for slot in bucket.slots:
            found[slot.path] = full[slot.offset : slot.offset + slot.size].reshape(slot.shape)
    return found


@pytest.fixture(scope="module")
def targets(make_mesh: Any) -> dict[str, Any]:
    """Each policy on three devices in one bucket, abstract."""
    found: dict[str, Any] = {}
    for policy in CONVERTED:
        mesh, tx = build(make_mesh, policy, 3, cap=2**-7)
        like = jax.eval_shape(tx.init, leaves()), jax.eval_shape(leaves)
        assert len(like[0].layout.buckets) == 1
        found[policy] = mesh, tx, like
    return found


@pytest.mark.parametrize("have", CONVERTED)
def test_every_policy_restores_into_every_other(have: str, saved: Any, targets: Any):
    folder, _, params, d = saved[have]
    for want, (mesh, tx, like) in targets.items():
        new_state, new_params = checkpoint.restore(folder, like, mesh=mesh)
        assert jax.tree.structure(new_state) == jax.tree.structure(like[0])
        for x, y in zip(jax.tree.leaves(new_state), jax.tree.leaves(like[0]), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
        again = checkpoint.state_dict(new_state, new_params)
        if have == "full":
            for path, full in decoded(tx, new_state, new_params).items():
                same_bits(np.float32(again[path]["param"]), full, (want, path))
        scaled = POLICIES[want].get("scaled")
        for path in leaves():
            after, before = (np.float32(x[path]["param"]) for x in (again, d))
            if want in ("full", "remainder", "bf16", "fp8"):
                same_bits(after, before, (want, path))  # a float32 master
            elif want == "none":
                assert_bits(host(new_params[path]), host(params[path]))
            else:
                np.testing.assert_allclose(after, before, rtol=2**-10, atol=2**-22)
            for moment in ("exp_avg", "exp_avg_sq"):
                before, after = d[path][moment], again[path][moment]
                if POLICIES[want].get("state") is None or (have == want and not scaled):
                    same_bits(after, before, (want, path, moment))
                else:
                    # Half a unit of bfloat16 or float16 (twice, of a root), of e4m3 an eighth.
                    near, floor = (0.13, 2**-9) if want == "fp8" else (2**-8, 2**-20)
                    largest = np.max(np.abs(before), initial=0)
                    np.testing.assert_allclose(after, before, rtol=near, atol=floor * largest)


def test_parameters_gathered_in_8_bits_keep_their_master(saved: Any, targets: Any):
    """What is visible is up to an eighth off its master, which is still what counts."""
    _, state, params, d = saved["wire"]
    for path in leaves():
        slot = state.layout.by_path[path]
        cut = slice(slot.offset, slot.offset + slot.size)
        master = host(state.master[slot.bucket])[cut].reshape(slot.shape)
        same_bits(d[path]["param"], master, path)
        assert (host(params[path]).astype(np.float32) != master).any()
    _, _, like = targets["full"]
    mesh = targets["full"][0]
    empty = jax.device_put(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like[0]),
        jax.tree.map(lambda s: NamedSharding(mesh, s), jzero.partition_specs(like[0])),
    )
    new = checkpoint.load_state_dict(d, empty, replicated(leaves(), mesh))
    assert_bits(checkpoint.state_dict(*new), d)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_policy_on_other_devices_keeps_every_bit(policy: str, saved: Any, make_mesh: Any):
    folder, state, params, _ = saved[policy]
    mesh, tx = build(make_mesh, policy, (2, 3))
    like = jax.eval_shape(tx.init, leaves()), jax.eval_shape(leaves)
    new_state, new_params = checkpoint.restore(folder, like, mesh=mesh)
    assert_bits(new_params, params)
    for bucket in state.layout.buckets:
        i = bucket.number
        pairs = [(new_state.master[i], state.master[i])]
        pairs += [(new_state.inner.mu[i], state.inner.mu[i])]
        pairs += [(new_state.inner.nu[i], state.inner.nu[i])]
        for new, old in pairs:
            for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
                n = min(x.size, y.size)
                assert host(x)[:n].tobytes() == host(y)[:n].tobytes()
                assert not host(x)[n:].astype(np.float32).any()


def test_ties_are_not_rounded_again(saved: Any, make_mesh: Any):
    """cases.md 45: 1.00390625 lies between two bfloat16; each codec rounds it by its own rule."""
    mesh, tx = build(make_mesh, "remainder", 2)
    like = jax.eval_shape(tx.init, leaves()), jax.eval_shape(leaves)
    state, params = checkpoint.restore(saved["full"][0], like, mesh=mesh)
    assert host(params["a"])[:2].view(np.uint16).tolist() == [0x3F81, 0xBF81]
    assert host(saved["full"][2]["a"])[:2].view(np.uint16).tolist() == [0x3F80, 0xBF80]
    full = decoded(tx, state, params)["a"][:5]
    assert full.view(np.uint32).tolist() == [0x3F808000, 0xBF808000, 0x3F818000, 0xC1000000, 0]


def test_halves_are_the_kernels_halves():
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    special = [
        0,
        0x80000000,
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7FC00000,
    ]
    special += [0x3F808000, 0xBF808000, 0x7F7F8000, 0x00008000, 0x00007FFF, 1]
    values = np.concatenate([np.array(special, np.uint32), bits]).view(np.float32)
    high, low = split(values)
    want_high, want_low = forms.split(jnp.asarray(values))
    assert_bits(high, np.asarray(want_high))
    assert_bits(low, np.asarray(want_low))
    finite = ~np.isnan(values)
    assert_bits(join(high, low)[finite], values[finite])
    # Any pair, also those that no split makes; XLA on CPU takes a subnormal for zero.
    pair = rng.integers(0, 2**16, (2, 100_000), dtype=np.uint16)
    pair = pair[:, (pair[0] & 0x7F80) != 0]
    high, low = pair[0].view(jnp.bfloat16), pair[1].view(np.int16)
    assert_bits(join(high, low), np.asarray(forms.join(jnp.asarray(high), jnp.asarray(low))))


def test_other_rules_and_overrides(make_mesh: Any, tmp_path: Path):
    """Scaled state of an optax rule; policies by path, whose buckets are others."""
    mesh = make_mesh(4)
    params = replicated(leaves(), mesh)
    grads = jax.tree.map(lambda x: x * 0 + jnp.asarray(0.5, x.dtype), params)

    def rule(on: Any, **precision: Any) -> Any:
        zero = config_for(on, bucket_mb=2**-9, precision=jzero.Precision(**precision))
        return jzero.zero(optax.adam(1e-2), zero=zero)

    tx = rule(
        mesh,
        state=F8,
        scaled=True,
        master="remainder",
        overrides={"b": {"state": "float32", "scaled": False}},
    )
    new_params, state = tx.step(grads, tx.init(params), params)
    checkpoint.save(tmp_path / "a", state, new_params)
    on = make_mesh(2)
    want = checkpoint.state_dict(state, new_params)
    for precision in ({}, {"state": F8, "scaled": True, "master": "remainder"}):
        other = rule(on, **precision)
        like = jax.eval_shape(other.init, leaves()), jax.eval_shape(leaves)
        found = checkpoint.state_dict(*checkpoint.restore(tmp_path / "a", like, mesh=on))
        for path in leaves():
            assert_bits(np.float32(found[path]["param"]), np.float32(want[path]["param"]))
            if not precision:
                assert_bits(found[path], {**want[path], "param": found[path]["param"]})
