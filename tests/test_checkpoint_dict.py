"""State dicts, and moving between jzero, optax, torch and Apex without losing moments."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from support import assert_bits, config_for, host, model, replicated

import jzero
from jzero import checkpoint


def leaves(dtype: Any = jnp.float32) -> dict[str, Any]:
    return {
        **model(dtype=dtype),
        "empty": jnp.zeros((0, 8), dtype),
        "count": jnp.uint32(2**31 + 1),
        "key": jax.random.key(7),
        "none": None,
    }


def gradients(params: Any, seed: int) -> Any:
    """Whole numbers over 64: their means and squares are exact."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (
            jnp.asarray(rng.integers(-64, 64, x.shape) / 64, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        params,
    )


def stepped(tx: Any, mesh: Any, params: Any, state: Any, seeds: range) -> Any:
    for seed in seeds:
        params, state = tx.step(replicated(gradients(params, seed), mesh), state, params)
    return params, state


@pytest.fixture(scope="module")
def run(make_mesh: Any) -> Any:
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = replicated(leaves(jnp.bfloat16), mesh)
    params, state = stepped(tx, mesh, params, tx.init(params), range(2))
    return mesh, tx, params, state


def test_real_shapes_and_full_precision(run: Any):
    _, _, params, state = run
    d = checkpoint.state_dict(state, params)
    assert d["step"] == 2
    assert set(d) == {
        "step",
        *(f"layers/{i}/{k}" for i in (0, 1) for k in ("kernel", "bias")),
        *("scale", "shift", "empty", "count", "key"),
    }
    kernel = d["layers/0/kernel"]
    assert set(kernel) == {"param", "exp_avg", "exp_avg_sq"}
    assert {x.dtype for x in kernel.values()} == {np.dtype(np.float32)}
    assert {x.shape for x in kernel.values()} == {(6, 7)}
    assert d["scale"]["exp_avg"].shape == ()
    assert d["empty"]["exp_avg"].shape == (0, 8)
    slot = state.layout.by_path["layers/0/kernel"]
    cut = slice(slot.offset, slot.offset + 42)
    for name, arrays in (
        ("param", state.master),
        ("exp_avg", state.inner.mu),
        ("exp_avg_sq", state.inner.nu),
    ):
        np.testing.assert_array_equal(
            kernel[name].reshape(-1), np.asarray(arrays[slot.bucket])[cut]
        )
    # The master is finer than the parameter, which is its rounding.
    visible = np.asarray(params["layers"][0]["kernel"])
    assert (kernel["param"] != visible.astype(np.float32)).any()
    np.testing.assert_array_equal(kernel["param"].astype(visible.dtype), visible)
    assert set(d["count"]) == {"param"}
    assert d["count"]["param"] == 2**31 + 1
    assert d["key"]["key"] == "threefry2x32"


@pytest.mark.parametrize("devices", [1, 3])
def test_loads_what_it_gave(run: Any, make_mesh: Any, devices: int):
    _, _, params, state = run
    d = checkpoint.state_dict(state, params)
    mesh = make_mesh(devices)
    tx = jzero.adamw(1e-2, zero=config_for(mesh, bucket_mb=2**-12))
    like = replicated(leaves(jnp.bfloat16), mesh)
    before = jax.tree.map(lambda x: x, like)
    new_state, new_params = checkpoint.load_state_dict(d, jax.eval_shape(tx.init, like), like)
    assert_bits(new_params, params)
    assert_bits(checkpoint.state_dict(new_state, new_params), d)
    assert_bits(like, before)
    assert int(new_state.step) == 2


def test_a_changed_parameter_is_the_truth(run: Any):
    _, _, params, state = run
    changed = {**params, "scale": params["scale"] + jnp.bfloat16(1)}
    d = checkpoint.state_dict(state, changed)
    assert d["scale"]["param"] == np.float32(changed["scale"])
    kernel = d["layers/0/kernel"]["param"]
    np.testing.assert_array_equal(
        kernel, checkpoint.state_dict(state, params)["layers/0/kernel"]["param"]
    )


def test_safetensors(run: Any, tmp_path: Path):
    _, _, params, state = run
    path = tmp_path / "state.safetensors"
    checkpoint.write_safetensors(path, state, params)
    d = checkpoint.state_dict(state, params)
    read = checkpoint.read_safetensors(path)
    assert_bits(
        {k: v for k, v in read.items() if k != "key"}, {k: v for k, v in d.items() if k != "key"}
    )
    assert read["key"]["key"] == d["key"]["key"]
    new_state, new_params = checkpoint.load_state_dict(read, state, params)
    assert_bits(new_params, params)
    assert_bits(new_state.inner, state.inner)

    theirs = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(
        theirs["layers/0/kernel/exp_avg"], d["layers/0/kernel"]["exp_avg"]
    )
    assert theirs["empty/param"].shape == (0, 8)

    data = path.read_bytes()
    for damaged in (data[:-1], data[:20], b"", data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.CheckpointError, match=r"state\.safetensors is no"):
            checkpoint.read_safetensors(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.pop("scale"), r"the state dict does not fit: there is no parameter 'scale'"),
        (lambda d: d["scale"].pop("exp_avg"), r"there is no exp_avg of 'scale'"),
        (lambda d: d["scale"].pop("param"), r"no 'param' of 'scale'"),
        (
            lambda d: d["shift"].update(exp_avg=np.zeros(2)),
            r"exp_avg of 'shift' has shape \(2,\), its param \(1,\)",
        ),
        (
            lambda d: d.update(shift={k: np.zeros(2) for k in ("param", "exp_avg", "exp_avg_sq")}),
            r"'shift' has shape \(2,\), and like \(1,\)",
        ),
        (lambda d: d.pop("step"), r'must be a state dict with a "step"'),
        (
            lambda d: d.update(count={"param": np.float32(1)}),
            r"'count' has dtype float32, and like uint32",
        ),
    ],
    ids=["parameter", "moment", "param", "moment-shape", "shape", "step", "dtype"],
)
def test_says_what_does_not_fit(run: Any, change: Any, error: str):
    _, _, params, state = run
    d = checkpoint.state_dict(state, params)
    change(d)
    with pytest.raises(ValueError, match=error):
        checkpoint.load_state_dict(d, state, params)


def test_a_parameter_called_step_is_refused(make_mesh: Any):
    mesh = make_mesh(1)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = {"step": jnp.ones(3)}
    with pytest.raises(ValueError, match="a parameter is called 'step'"):
        checkpoint.state_dict(tx.init(params), params)


# ---------------------------------------------------------------- optax


def test_in_and_out_of_optax(make_mesh: Any):
    """Three steps of one, three of the other, three of the first: as nine of optax alone."""
    mesh = make_mesh(4)
    schedule = optax.linear_schedule(1e-2, 1e-3, 9)
    ours = jzero.adamw(schedule, weight_decay=0.1, zero=config_for(mesh))
    theirs = optax.adamw(schedule, weight_decay=0.1)
    start = model()

    def train(params: Any, state: Any, seeds: range) -> Any:
        for seed in seeds:
            updates, state = jax.jit(theirs.update)(gradients(params, seed), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    want, want_state = train(start, theirs.init(start), range(9))
    params, opt_state = train(start, theirs.init(start), range(3))
    on_mesh = replicated(params, mesh)
    state, on_mesh = checkpoint.from_optax(opt_state, ours.init(on_mesh), on_mesh)
    assert int(state.step) == 3
    d = checkpoint.state_dict(state, on_mesh)
    np.testing.assert_array_equal(
        d["layers/1/bias"]["exp_avg"], opt_state[0].mu["layers"][1]["bias"]
    )
    on_mesh, state = stepped(ours, mesh, on_mesh, state, range(3, 6))
    back = checkpoint.to_optax(state, on_mesh, theirs.init(start))
    assert jax.tree.structure(back) == jax.tree.structure(opt_state)
    assert [int(x) for x in (back[0].count, back[2].count)] == [6, 6]
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), on_mesh)
    params, state = train(params, back, range(6, 9))
    for have, value in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((want, want_state)), strict=True
    ):
        np.testing.assert_allclose(have, value, rtol=2e-6, atol=1e-9)


def test_optax_states_that_do_not_fit(run: Any):
    _, _, params, state = run
    with pytest.raises(ValueError, match=r"must hold optax\.ScaleByAdamState with one count"):
        checkpoint.from_optax(optax.sgd(0.1).init(model()), state, params)
    with pytest.raises(ValueError, match=r"holds no optax\.ScaleByAdamState"):
        checkpoint.to_optax(state, params, optax.sgd(0.1).init(model()))
    masked = optax.masked(optax.scale_by_adam(), {"layers": True, "scale": False, "shift": True})
    adam = masked.init(model(dtype=jnp.bfloat16))
    float_params = {k: v for k, v in params.items() if k in ("layers", "scale", "shift")}
    float_state = jzero.adamw(1e-2, zero=config_for(run[0])).init(float_params)
    with pytest.raises(checkpoint.CheckpointError, match="there is no exp_avg of 'scale'"):
        checkpoint.from_optax(adam, float_state, float_params)


def test_any_rule_is_restored_with_its_counters(make_mesh: Any, tmp_path: Path):
    """Sharded and replicated inner state, groups in other buckets, and Adam by another rule."""
    inner = optax.chain(
        optax.scale_by_adam(),
        optax.trace(0.9),
        optax.scale_by_schedule(optax.linear_schedule(-1e-2, -1e-3, 9)),
    )

    def build(shape: Any, bucket_mb: float, labels: Any) -> Any:
        mesh = make_mesh(shape)
        tx = jzero.zero(inner, param_labels=labels, zero=config_for(mesh, bucket_mb=bucket_mb))
        return mesh, tx

    mesh, tx = build(4, 2**-12, lambda path: "a" if "kernel" in path else "b")
    params = replicated(model(), mesh)
    params, state = stepped(tx, mesh, params, tx.init(params), range(3))
    checkpoint.save(tmp_path / "a", state, params)
    d = checkpoint.state_dict(state, params)
    assert set(d["scale"]) == {"param", "exp_avg", "exp_avg_sq", "1/trace"}
    assert {name: int(x) for name, x in d["inner"].items()} == {
        f"{group}/{i}/count": 3 for group in "ab" for i in (0, 2)
    }
    on, other = build((2, 3), 2**-9, None)
    like = replicated(model(seed=1), on)
    new_state, new_params = checkpoint.restore(
        tmp_path / "a", (jax.eval_shape(other.init, like), like)
    )
    assert_bits(new_params, params)
    again = checkpoint.state_dict(new_state, new_params)
    assert {name: int(x) for name, x in again.pop("inner").items()} == {
        "/0/count": 3,
        "/2/count": 3,
    }
    del d["inner"]
    assert_bits(again, d)
    params, state = stepped(tx, mesh, params, state, range(3, 5))
    new_params, new_state = stepped(other, on, new_params, new_state, range(3, 5))
    assert_bits(new_params, params)

    # Adam's moments are Adam's, by whatever rule; a counter that is missing is the step.
    fused = jzero.adamw(1e-2, zero=config_for(mesh))
    state, params = checkpoint.restore(
        tmp_path / "a", (jax.eval_shape(fused.init, params), params), mesh=mesh
    )
    d = checkpoint.state_dict(state, params)
    checkpoint.save(tmp_path / "b", state, params)
    chain = jzero.zero(optax.adamw(1e-2), zero=config_for(mesh))
    back, _ = checkpoint.restore(
        tmp_path / "b", (jax.eval_shape(chain.init, params), params), mesh=mesh
    )
    found = checkpoint.state_dict(back, params)
    assert [int(x) for x in found.pop("inner").values()] == [3]
    assert_bits(found, d)


# ---------------------------------------------------------------- torch and Apex


def torch_adamw(param: np.ndarray, grads: list[np.ndarray], lr: float, decay: float) -> Any:
    """torch's documented AdamW in float64: parameters, moments."""
    m = v = np.zeros_like(param)
    for t, g in enumerate(grads, 1):
        param = param * (1 - lr * decay)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        param = param - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return param, m, v


@pytest.mark.parametrize("apex", [False, True], ids=["torch", "apex"])
def test_goes_on_where_torch_stopped(make_mesh: Any, apex: bool):
    rng = np.random.default_rng(0)
    weights = {"fc.weight": rng.normal(size=(5, 3)), "fc.bias": rng.normal(size=5)}
    grads = {k: [rng.normal(size=v.shape) for _ in range(4)] for k, v in weights.items()}
    state: dict[Any, Any] = {"step": 3} if apex else {}
    model_dict: dict[str, Any] = {}
    for index, (name, weight) in enumerate(weights.items()):
        param, m, v = torch_adamw(weight, grads[name][:3], 0.1, 0.01)
        entry = {"exp_avg": np.float32(m), "exp_avg_sq": np.float32(v)}
        if apex:
            entry["param"] = np.float32(param)
        else:
            entry["step"] = np.float32(3)
            model_dict[name] = np.float32(param)
        state[index] = entry
    optimizer = {
        "state": state,
        "param_groups": [
            {"lr": 9.0, "params": [0, 1], "param_names": ["fc.weight", "fc.bias"]},
        ],
        **({"format": 2} if apex else {}),
    }
    names = {"fc.weight": "dense/kernel", "fc.bias": "dense/bias"}
    d = checkpoint.from_torch(
        optimizer, names, model_dict, lambda path, x: x.T if "kernel" in path else x
    )
    assert d["step"] == 3
    mesh = make_mesh(2)
    tx = jzero.adamw(0.1, weight_decay=0.01, zero=config_for(mesh))
    like = replicated({"dense": {"kernel": jnp.zeros((3, 5)), "bias": jnp.zeros(5)}}, mesh)
    new_state, params = checkpoint.load_state_dict(d, tx.init(like), like)
    last = {"dense": {"kernel": grads["fc.weight"][3].T, "bias": grads["fc.bias"][3]}}
    last = replicated(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), last), mesh)
    params, new_state = tx.step(last, new_state, params)
    for ours, name in (("kernel", "fc.weight"), ("bias", "fc.bias")):
        want = torch_adamw(weights[name], grads[name], 0.1, 0.01)[0]
        have = np.asarray(params["dense"][ours])
        # float32's 0.999 is 1.3e-5 off in 1 - 0.999**t: of a step of 0.1, below a millionth.
        have = have.T if ours == "kernel" else have
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"names": {0: "a"}}, r"names has no entry for parameter 1 \('b\.w'\)"),
        ({"model": None}, r"no value for 'a'.*pass model="),
        ({"amsgrad": True}, r"amsgrad"),
        ({"step": 5}, r"different numbers of steps: \[3, 5\]"),
        ({"optimizer": {}}, r"must be a torch optimizer's state_dict"),
    ],
    ids=["names", "model", "amsgrad", "steps", "foreign"],
)
def test_says_what_a_torch_state_lacks(change: dict[str, Any], error: str):
    entry = {"exp_avg": np.zeros(2), "exp_avg_sq": np.zeros(2), "step": 3}
    group = {"params": [0, 1], "param_names": ["a.w", "b.w"], "amsgrad": change.get("amsgrad")}
    optimizer = {
        "state": {0: entry, 1: {**entry, "step": change.get("step", 3)}},
        "param_groups": [group],
    }
    model_dict = {"a": np.ones(2), "b": np.ones(2)}
    with pytest.raises(ValueError, match=error):
        checkpoint.from_torch(
            change.get("optimizer", optimizer),
            change.get("names", {0: "a", 1: "b"}),
            change.get("model", model_dict),
        )


# ---------------------------------------------------------------- Apex' checkpoint tests

APEX = {
    "plain": ("float32", {}, {}),
    "bf16": ("bfloat16", {"master": "remainder"}, {"master": "remainder"}),
    "scaled": (
        "bfloat16",
        {"state": "float16", "scaled": True},
        {"state": "float16", "scaled": True},
    ),
    "across": ("bfloat16", {"master": "remainder"}, {}),
}


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        pytest.param("plain", 4, 4, marks=pytest.mark.slow),
        pytest.param("plain", 1, 4, marks=pytest.mark.slow),
        ("plain", 3, 8),
        ("bf16", 4, 1),
        ("scaled", 4, 1),
        ("across", 4, 1),
    ],
)
def test_apex_checkpoint(make_mesh: Any, tmp_path: Path, name: str, saved: int, loaded: int):
    """parity.md, test_checkpoint*: two parameters of two, other buckets and other initial values
    on the loading side, sums of gradients; after loading both train on alike."""
    dtype, *policies = APEX[name]
    sides: list[Any] = []
    for seed, devices, policy in ((1234, saved, policies[0]), (1235, loaded, policies[1])):
        mesh = make_mesh(devices)
        precision = jzero.Precision(**policy)
        zero = jzero.ZeroConfig(
            mesh=mesh, average=False, bucket_mb=2**-20 * (1 + seed % 2 * 99), precision=precision
        )
        tx = jzero.adamw(0.1, b1=0.1, b2=0.2, eps=0.25, weight_decay=0.1, zero=zero)
        rng = np.random.default_rng(seed)
        drawn = {str(i): jnp.asarray(rng.uniform(1, 2, (1, 2)), dtype) for i in range(2)}
        params = replicated(drawn, mesh)
        sides.append([mesh, tx, params, tx.init(params)])
    data = np.random.default_rng(1236)

    def train(side: Any, grads: Any) -> None:
        mesh, tx, params, state = side
        placed = replicated({k: jnp.asarray(g, dtype) for k, g in grads.items()}, mesh)
        side[2:] = tx.step(placed, state, params)

    def draw() -> Any:
        return {str(i): data.integers(-8, 8, (1, 2)) / 8 for i in range(2)}

    for _ in range(3):
        train(sides[0], draw())
    assert all((host(sides[0][2][k]) != host(sides[1][2][k])).all() for k in "01")
    checkpoint.save(tmp_path, sides[0][3], sides[0][2])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        (sides[1][3], sides[1][2]),
    )
    state, params = checkpoint.restore(tmp_path, like)
    sides[1][2:] = params, state
    assert_bits(params, sides[0][2])
    for _ in range(3):
        grads = draw()
        for side in sides:
            train(side, grads)
        assert_bits(sides[1][2], sides[0][2])
    assert int(sides[1][3].step) == 6
