"""Clipping, loss scales and skipped steps; and what may be wrapped around jzero or inside it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    WAYS,
    assert_bits,
    assert_close,
    batch,
    config_for,
    counting,
    loss_fn,
    model,
    replicated,
    split,
    train,
    train_optax,
    with_paths,
)

import jzero

# ---------------------------------------------------------------- golden sequences (parity.md)

GOLDEN = {"learning_rate": 0.1, "b1": 0.1, "b2": 0.2, "eps": 0.25, "weight_decay": 0.1}
X = [3.0, 1, 4, 1, 5, 9]
CLIPPED = [1.392692308, 1.414565925, 1.311217836, 1.328597088, 1.226255449, 1.290858021]
SCALED = [1.392692308, 1.392692308, 1.283454404, 1.211187644, 1.211187644, 1.294532617]
SCALES = [3.9483, 3.4587108, 4.2542143, 5.2326836, 4.5838308, 5.6381119]
COUNTS = [1, 1, 2, 3, 3, 4]


def linear(params: Any, data: jax.Array) -> jax.Array:
    """Its gradient is the mean of the data."""
    return params["p"].sum() * data.mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shards", [1, 8])
def test_clipping_follows_the_golden_sequence(make_mesh, shards, way):
    mesh = make_mesh(shards)
    tx = jzero.adamw(**GOLDEN, clip_norm=3.5, zero=config_for(mesh))
    params = replicated({"p": jnp.array([1.5])}, mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(WAYS[way](tx, mesh, linear))
    for x, dy, want in zip(X, [1, -1, 1, -1, 1, -1], CLIPPED, strict=True):
        params, state = step(params, state, split(jnp.full(8, x * dy), mesh))
        assert float(params["p"][0]) == pytest.approx(want, rel=1e-6)
        assert float(state.grad_norm) == x  # before clipping


@pytest.mark.parametrize("way", ["plain", "unchecked"])
@pytest.mark.parametrize("shards", [1, 8])
def test_the_loss_scale_follows_the_golden_sequence(make_mesh, shards, way):
    """One compilation, scale and all; gradients of inf and nan leave no trace."""
    mesh = make_mesh(shards)
    tx = jzero.adamw(**GOLDEN, zero=config_for(mesh))
    params = replicated({"p": jnp.array([1.5])}, mesh)
    scale = replicated(jzero.DynamicLossScale(3.21, 1.23, 0.876, 1), mesh)
    state = jax.jit(tx.init)(params)

    def local(params, state, scale, data):
        def loss(params, data):
            return scale.scale(linear(params, data))

        if way == "plain":
            _, grads = jzero.value_and_grad(loss, zero=tx)(params, data)
        else:
            grads = jax.grad(loss)(params, data)
        params, state = tx.step(grads, state, params, grad_scale=scale.value)
        return params, state, scale.update(state.finite)

    step = jax.jit(local)
    if way == "unchecked":
        specs = (jax.P(), jzero.partition_specs(state), jax.P(), jax.P("data"))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=specs[:3], check_vma=False
        )
        step = jax.jit(mapped)
    wanted = zip(X, [1, np.inf, 1, 1, np.nan, -1], SCALED, SCALES, COUNTS, strict=True)
    compiled = step.lower(params, state, scale, split(jnp.zeros(8), mesh)).compile()
    for i, (x, dy, p, next_scale, count) in enumerate(wanted):
        data = split(jnp.full(8, x * dy, jnp.float32), mesh)
        params, state, scale = compiled(params, state, scale, data)
        assert float(params["p"][0]) == pytest.approx(p, rel=1e-6)
        assert float(scale.value) == pytest.approx(next_scale, rel=1e-6)
        assert (int(state.step), int(state.skipped)) == (count, i + 1 - count)
        assert bool(state.finite) == math.isfinite(dy)
        if state.finite:
            assert float(state.grad_norm) == pytest.approx(x, rel=1e-6)  # unscaled


# ---------------------------------------------------------------- clipping and unscaling

SCALE = 65536.0


@pytest.mark.parametrize("shards", [1, 8])
def test_clipping_and_unscaling_in_either_order(make_mesh, shards):
    """Case 36: scale 65536, true gradient (3, 4), clip at 1: (0.6, 0.8) however it is written."""
    mesh = make_mesh(shards)
    tx = jzero.zero(optax.sgd(1.0), clip_norm=1.0, zero=config_for(mesh))
    params = {"w": jnp.zeros(2)}
    state = tx.init(params)
    true, scaled = ({"w": jnp.array([3.0, 4.0]) * s} for s in (1.0, SCALE))
    scale = jzero.DynamicLossScale(SCALE)
    shard = tx.reduce(scaled, params)
    calls = {
        "in the step": (scaled, SCALE),
        "of shards": (shard, scale.value),
        "before it": (scale.unscale(scaled), None),
        "shards before it": (scale.unscale(shard), None),
        "not at all": (true, None),
    }
    for name, (grads, grad_scale) in calls.items():
        new, after = tx.step(grads, state, params, grad_scale=grad_scale)
        np.testing.assert_allclose(new["w"], [-0.6, -0.8], rtol=1e-6, err_msg=name)
        assert float(after.grad_norm) == pytest.approx(5, rel=1e-6), name
        updates, _ = tx.update(grads, state, params, grad_scale=grad_scale)
        np.testing.assert_allclose(updates["w"], [-0.6, -0.8], rtol=1e-6, err_msg=name)


def test_a_gradient_below_the_limit_is_not_touched(make_mesh):
    """The factor is at most 1: a gradient of norm 0, or exactly below the limit, is itself."""
    mesh = make_mesh(2)
    params = {"w": jnp.zeros(3)}
    for limit in (1e-3, 100.0, jnp.float32(100.0)):
        tx = jzero.zero(optax.sgd(1.0), clip_norm=limit, zero=config_for(mesh))
        state = tx.init(params)
        assert_bits(tx.step(params, state, params)[0]["w"], jnp.zeros(3))
    grads = {"w": jnp.array([3.0, 4.0, 0.1])}
    assert_bits(tx.step(grads, tx.init(params), params)[0]["w"], -grads["w"])


@pytest.mark.parametrize("limit", [0, -1.0, 0.0])
def test_a_limit_that_is_not_positive_is_named(limit):
    with pytest.raises(ValueError, match="clip_norm="):
        jzero.adamw(1e-2, clip_norm=limit)


def test_a_scale_that_is_not_a_scalar_is_named(make_mesh):
    tx = jzero.adamw(1e-2, zero=config_for(make_mesh(2)))
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="grad_scale must be a scalar"):
        tx.step(params, tx.init(params), params, grad_scale=jnp.ones(2))


@pytest.mark.parametrize("value", [2e19, 5e37])  # the factor must be a normal float32
def test_a_large_finite_gradient_is_no_overflow(make_mesh, value):
    """Its squares overflow; it is clipped like any other."""
    mesh = make_mesh(8)
    tx = jzero.zero(optax.sgd(1.0), clip_norm=1.0, zero=config_for(mesh))
    params = {"w": jnp.zeros(700), "v": jnp.zeros(2)}
    grads = {"w": jnp.zeros(700).at[3].set(0.6 * value), "v": jnp.array([0.0, -0.8 * value])}
    new, state = tx.step(grads, tx.init(params), params)
    assert (int(state.step), int(state.skipped), bool(state.finite)) == (1, 0, True)
    assert float(state.grad_norm) == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(new["w"], jnp.zeros(700).at[3].set(-0.6), rtol=2e-6)
    np.testing.assert_allclose(new["v"], [0, 0.8], rtol=2e-6)


def test_a_tiny_gradient_has_a_norm_and_a_direction(make_mesh):
    tx = jzero.zero(optax.sgd(1.0), clip_norm=1e-30, zero=config_for(make_mesh(8)))
    params = {"w": jnp.zeros(400)}
    new, state = tx.step({"w": jnp.full(400, 1e-25)}, tx.init(params), params)
    assert float(state.grad_norm) == pytest.approx(2e-24, rel=4e-6)
    # The guard of 1e-6 in the coefficient (torch's, Apex's) is far above this norm.
    np.testing.assert_allclose(
        new["w"], np.full(400, -1e-25 * 1e-30 / 1e-6, np.float64), atol=1e-38
    )


# ---------------------------------------------------------------- an overflow anywhere

# A shard is 128 elements here, so every device has some of "wide"; its last element is followed
# by padding, as is that of "low", which has a master copy and a bucket of its own.
WIDE, LOW, DEVICES = 1021, 200, 8
PLACES = [("wide", 128 * s + 5 * s) for s in range(8)] + [("wide", WIDE - 1), ("low", LOW - 1)]


def overflow_params():
    rng = np.random.default_rng(0)
    return {
        "wide": jnp.asarray(rng.normal(size=WIDE), jnp.float32),
        "low": jnp.asarray(rng.normal(size=LOW), jnp.bfloat16),
    }


def one_on_each_device(seed: int) -> dict[str, np.ndarray]:
    """Partial gradients, stacked over devices."""
    rng = np.random.default_rng(seed)
    return {
        "wide": np.asarray(rng.normal(size=(DEVICES, WIDE)), np.float32),
        "low": np.asarray(rng.normal(size=(DEVICES, LOW)), np.float32),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["checked", "unchecked"])
def on_each_device(request, make_mesh):
    """A compiled step of per-device gradients, and parameters and state after two steps."""
    mesh = make_mesh(DEVICES)
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    tx = jzero.adamw(schedule, weight_decay=0.1, clip_norm=5.0, zero=config_for(mesh))
    params = replicated(overflow_params(), mesh)
    state = jax.jit(tx.init)(params)

    def local(grads, state, params):
        return tx.step(jax.tree.map(lambda g: g[0], grads), state, params)

    specs = (jax.P("data"), jzero.partition_specs(state), jax.P())
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=(jax.P(), specs[1]),
        check_vma=request.param,
    )
    step = jax.jit(mapped)
    for seed in (1, 2):
        params, state = step(one_on_each_device(seed), state, params)
    assert len(state.layout.buckets) == 2
    assert state.layout.by_path["wide"].size == WIDE
    return step, params, state


def every_copy(tree: Any) -> list[tuple[np.ndarray, ...]]:
    """What each device holds, so that devices which disagree show."""
    return [tuple(np.asarray(s.data) for s in x.addressable_shards) for x in jax.tree.leaves(tree)]


def assert_all_devices_unchanged(have: Any, want: Any) -> None:
    for a, b in zip(every_copy(have), every_copy(want), strict=True):
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_overflow_on_one_device_in_any_shard_skips_everywhere(on_each_device, bad):
    """Cases 40, 42, 43: bits of parameters, moments, master and count on every device, then the
    next step as if there had been no bad one."""
    step, params, state = on_each_device
    good_params, good_state = step(one_on_each_device(4), state, params)
    for i, (leaf, element) in enumerate(PLACES):
        grads = one_on_each_device(3)
        grads[leaf][(i + 3) % DEVICES, element] = bad
        new, after = step(grads, state, params)
        assert_all_devices_unchanged(new, params)
        for name in ("step", "master", "inner"):
            assert_all_devices_unchanged(getattr(after, name), getattr(state, name))
        assert {int(s.data) for s in after.skipped.addressable_shards} == {1}
        assert {bool(s.data) for s in after.finite.addressable_shards} == {False}
        assert not math.isfinite(after.grad_norm)
        new, after = step(one_on_each_device(4), after, new)
        assert_all_devices_unchanged(new, good_params)
        for name in ("step", "master", "inner", "grad_norm", "finite"):
            assert_all_devices_unchanged(getattr(after, name), getattr(good_state, name))
        assert int(after.skipped) == 1
    moved = zip(every_copy(good_params), every_copy(params), strict=True)
    assert not any(a[0].tobytes() == b[0].tobytes() for a, b in moved)


def test_a_sum_that_overflows_is_an_overflow(on_each_device):
    """Finite on every device, infinite or undefined only once summed."""
    step, params, state = on_each_device
    for values in ([3e38, 3e38], [np.inf, -np.inf]):
        grads = one_on_each_device(3)
        grads["wide"][[2, 6], 700] = values
        new, after = step(grads, state, params)
        assert_all_devices_unchanged(new, params)
        assert (int(after.skipped), int(after.step)) == (1, 2)


@pytest.mark.parametrize("way", ["plain", "unchecked"])
def test_a_schedule_does_not_advance_on_a_skipped_step(make_mesh, way):
    """Case 42: five steps, overflow on the third: count 4, and the result of four steps."""
    mesh = make_mesh(4)
    schedule = optax.exponential_decay(1e-2, 1, 0.5)
    batches = [batch(i) for i in range(5)]
    x, y = batches[2]
    batches[2] = (x, y.at[17, 3].set(np.inf))
    finite = batches[:2] + batches[3:]
    make = {
        "adamw": lambda: jzero.adamw(schedule, zero=config_for(mesh)),
        "zero": lambda: jzero.zero(optax.adamw(schedule), zero=config_for(mesh)),
    }
    want, _ = train_optax(optax.adamw(schedule), model(), finite)
    for name in make if way == "plain" else ["adamw"]:
        params, state = train(way, make[name](), mesh, model(), batches)
        assert_close(params, want)
        assert (int(state.step), int(state.skipped)) == (4, 1)
        clean, _ = train(way, make[name](), mesh, model(), finite)
        assert_bits(params, clean)


def test_without_skipping_the_step_is_taken(make_mesh):
    """skip_nonfinite=False: NaN goes where it is, and only there; it is still reported."""
    mesh = make_mesh(8)
    tx = jzero.adamw(1e-2, skip_nonfinite=False, zero=config_for(mesh))
    params = {"w": jnp.ones(700)}
    grads = {"w": jnp.ones(700).at[300].set(np.nan)}
    new, state = tx.step(grads, tx.init(params), params)
    assert np.flatnonzero(np.isnan(new["w"])).tolist() == [300]
    assert (int(state.step), int(state.skipped), bool(state.finite)) == (1, 0, False)
    assert math.isnan(state.grad_norm)


def test_skip_nonfinite_is_a_bool():
    with pytest.raises(ValueError, match="skip_nonfinite="):
        jzero.adamw(1e-2, skip_nonfinite=2)


def test_one_compilation_whatever_happens(make_mesh):
    """Scale, clip limit, overflow and recovery are values, not programs."""
    mesh = make_mesh(4)
    params = replicated(model(), mesh)
    scale = replicated(jzero.DynamicLossScale(2.0**4, growth_interval=2), mesh)
    config = config_for(mesh)
    state = jax.jit(jzero.adamw(1e-2, zero=config).init)(params)

    @jax.jit
    def step(params, state, scale, limit, data):
        tx = jzero.adamw(1e-2, clip_norm=limit, zero=config)
        _, grads = jzero.value_and_grad(lambda p, d: scale.scale(loss_fn(p, d)), zero=tx)(
            params, data
        )
        params, state = tx.step(grads, state, params, grad_scale=scale.value)
        return params, state, scale.update(state.finite)

    limits = replicated([jnp.float32(x) for x in (1.0, 0.5, 1.0, 2.0)], mesh)
    data = [split(batch(i), mesh) for i in range(4)]
    data[1] = (data[1][0], split(data[1][1].at[0, 0].set(np.nan), mesh))
    params, state, scale = step(params, state, scale, limits[0], data[0])
    with counting() as compiled:
        for i in (1, 2, 3):
            params, state, scale = step(params, state, scale, limits[i], data[i])
    assert compiled == []
    assert (int(state.step), int(state.skipped), float(scale.value)) == (3, 1, 16)


# ---------------------------------------------------------------- the loss scale by itself


def reference_scales(events, value, growth, backoff, interval, minimum, hysteresis):
    """Megatron-LM's DynamicGradScaler, written with Python numbers."""
    tracker, left, scales = 0, hysteresis, []
    for finite in events:
        if finite:
            tracker += 1
            if tracker == interval:
                tracker, left = 0, hysteresis
                value = value * growth if value * growth < 2**128 else value
        else:
            tracker, left = 0, left - 1
            if left <= 0:
                value = max(value * backoff, minimum)
        scales.append(value)
    return scales


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_loss_scale_is_the_state_machine_of_megatron(interval, hysteresis):
    rng = np.random.default_rng(interval)
    events = rng.random(400) < 0.8
    options = {"interval": interval, "minimum": 0.25, "hysteresis": hysteresis}
    want = reference_scales(events, 8.0, 2.0, 0.5, **options)
    start = jzero.DynamicLossScale(8.0, 2.0, 0.5, interval, minimum=0.25, hysteresis=hysteresis)

    def advance(scale, finite):
        scale = scale.update(finite)
        return scale, scale.value

    _, have = jax.jit(lambda e: jax.lax.scan(advance, start, e))(jnp.asarray(events))
    assert have.tolist() == want


def test_the_loss_scale_never_becomes_infinite_or_zero():
    scale = jzero.DynamicLossScale(2.0**126, growth_interval=1)
    values = []
    for _ in range(3):
        scale = scale.update(jnp.bool_(True))
        values.append(float(scale.value))
    assert values == [2.0**127] * 3
    scale = jzero.DynamicLossScale(2.0**-125)
    for _ in range(3):
        scale = scale.update(jnp.bool_(False))
    assert float(scale.value) == 2.0**-126


def test_the_loss_scale_is_a_pytree():
    """It goes through jit, scan, donation and checkpoints, by names."""
    scale = jzero.DynamicLossScale(8.0, hysteresis=2).update(jnp.bool_(False))
    leaves, treedef = jax.tree.flatten(scale)
    assert_bits(jax.tree.unflatten(treedef, leaves), scale)
    assert_bits(jax.jit(lambda s: s)(scale), scale)
    assert sorted(with_paths(scale)) == [".finite_steps", ".tolerance", ".value"]
    jax.tree.map(lambda x: None, scale)  # a structure without arrays is no error
    assert jax.tree.structure(scale) != jax.tree.structure(jzero.DynamicLossScale(8.0))


def test_scaling_is_done_in_float32_at_least():
    """A float16 loss times 2**15 is infinite in float16."""
    scale = jzero.DynamicLossScale(2.0**15)
    scaled = scale.scale(jnp.float16(4))
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.0**17)
    back = scale.unscale({"loss": scaled, "g": jnp.float16(2.0**14)})
    assert float(back["loss"]) == 4
    assert (back["g"].dtype, float(back["g"])) == (jnp.float16, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("minimum", 0.0),
        ("hysteresis", 0),
        ("initial", math.inf),
        ("initial", 1e-45),
    ],
)
def test_loss_scale_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=rf"DynamicLossScale\({name}="):
        jzero.DynamicLossScale(**{name: value})


# ---------------------------------------------------------------- flax


def test_to_flax_and_back():
    flax_scale = pytest.importorskip("flax.training.dynamic_scale")
    ours = jzero.DynamicLossScale(64.0, 4.0, 0.25, 7, minimum=2.0)
    for finite in (True, False, True, True):
        ours = ours.update(jnp.bool_(finite))
    theirs = ours.to_flax()
    assert isinstance(theirs, flax_scale.DynamicScale)
    assert (float(theirs.scale), int(theirs.fin_steps), theirs.minimum_scale) == (16.0, 2, 2.0)
    back = jzero.DynamicLossScale.from_flax(theirs)
    assert jax.tree.structure(back) == jax.tree.structure(ours)
    for finite in (True, False, False, *(True,) * 8):
        assert_bits([back.value, back.finite_steps], [ours.value, ours.finite_steps])
        back, ours = back.update(jnp.bool_(finite)), ours.update(jnp.bool_(finite))
    unlimited = jzero.DynamicLossScale.from_flax(flax_scale.DynamicScale(minimum_scale=None))
    assert float(unlimited.value) == 65536.0
    assert unlimited.minimum > 0
    with pytest.raises(ValueError, match="hysteresis"):
        jzero.DynamicLossScale(hysteresis=2).to_flax()


def test_the_dynamic_scale_of_flax_in_a_plain_jit(make_mesh):
    """Drop-in: flax scales, unscales and judges; jzero skips what flax found to be infinite."""
    flax_scale = pytest.importorskip("flax.training.dynamic_scale")
    mesh = make_mesh(4)
    batches = [batch(i) for i in range(5)]
    x, y = batches[2]
    batches[2] = (x, y.at[17, 3].set(np.inf))
    tx = jzero.adamw(1e-2, zero=config_for(mesh))

    def flax_step(tx, own_skip: bool):
        @jax.jit
        def step(params, state, scale, data):
            scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, data)
            updates, new_state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            if own_skip:
                return new, new_state, scale
            keep = lambda a, b: jnp.where(finite, a, b)  # noqa: E731
            return (
                jax.tree.map(keep, new, params),
                jax.tree.map(keep, new_state, state),
                scale,
            )

        return step

    initial = flax_scale.DynamicScale(growth_interval=2, scale=jnp.float32(256))
    params, scale = replicated((model(), initial), mesh)
    state, step = jax.jit(tx.init)(params), flax_step(tx, own_skip=True)
    other = optax.adamw(1e-2)
    want, opt, other_scale = model(), other.init(model()), initial
    other_step = flax_step(other, own_skip=False)
    for data in batches:
        params, state, scale = step(params, state, scale, split(data, mesh))
        want, opt, other_scale = other_step(want, opt, other_scale, data)
        assert float(scale.scale) == float(other_scale.scale)
    assert_close(params, want)
    assert (int(state.step), int(state.skipped)) == (4, 1)


# ---------------------------------------------------------------- optax around and inside


def drop_in_with(tx: Any, mesh: Any, batches: Any) -> tuple[Any, Any]:
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(WAYS["drop-in"](tx, mesh))
    for data in batches:
        params, state = step(params, state, split(data, mesh))
    return params, state


def schedule_free(inner):
    return optax.contrib.schedule_free(inner, learning_rate=1e-2, b1=0.9)


def test_schedule_free_around_jzero(make_mesh):
    """It works, on replicated parameters; its own copy of them (z) is not sharded."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(6)]
    theirs = schedule_free(optax.adamw(1e-2, b1=0.0))
    want, opt = train_optax(theirs, model(), batches)
    ours = schedule_free(jzero.adamw(1e-2, b1=0.0, zero=config_for(mesh)))
    params, state = drop_in_with(ours, mesh, batches)
    assert_close(params, want, 1e-5)  # its y - (1 - b1) z cancels
    assert_close(
        optax.contrib.schedule_free_eval_params(state, params),
        optax.contrib.schedule_free_eval_params(opt, want),
        1e-5,
    )


def test_schedule_free_inside_jzero(make_mesh):
    """All of its state is sharded."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(6)]
    inner = schedule_free(optax.adamw(1e-2, b1=0.0))
    want, _ = train_optax(inner, model(), batches)
    for way in ("plain", "unchecked"):
        params, state = train(way, jzero.zero(inner, zero=config_for(mesh)), mesh, model(), batches)
        assert_close(params, want, 1e-5)
    shapes = {x.shape for x in jax.tree.leaves(state.inner) if x.ndim}
    assert shapes == {(b.padded,) for b in state.layout.buckets}


def test_amsgrad(make_mesh):
    """By any optax transformation, yes; as an argument of jzero.adamw there is none."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(6)]
    want, _ = train_optax(optax.amsgrad(1e-2), model(), batches)
    tx = jzero.zero(optax.amsgrad(1e-2), zero=config_for(mesh))
    assert_close(train("plain", tx, mesh, model(), batches)[0], want)
    with pytest.raises(TypeError, match="amsgrad"):
        jzero.adamw(1e-2, amsgrad=True)


def test_a_skipped_step_in_a_chain(make_mesh):
    mesh = make_mesh(4)
    tx = optax.chain(optax.scale(2.0), jzero.adamw(1e-2, zero=config_for(mesh)), optax.scale(0.5))
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(WAYS["drop-in"](tx, mesh))
    x, y = batch()
    params, state = step(params, state, split((x, y), mesh))
    new, after = step(params, state, split((x, y.at[0, 0].set(np.nan)), mesh))
    assert_bits(new, params)
    assert_bits(after[1].inner, state[1].inner)
    assert (int(after[1].step), int(after[1].skipped)) == (1, 1)


def test_inject_hyperparams_counts_calls(make_mesh):
    """Around jzero it has a counter of its own, which a skipped step advances; inside
    jzero.zero it has not."""
    mesh = make_mesh(2)
    schedule = optax.exponential_decay(1e-2, 1, 0.5)
    x, y = batch()
    bad = [(x, y), (x, y.at[0, 0].set(np.nan)), (x, y)]
    around = optax.inject_hyperparams(jzero.adamw)(learning_rate=schedule, zero=config_for(mesh))
    _, state = drop_in_with(around, mesh, bad)
    assert (int(state.count), int(state.inner_state.step)) == (3, 2)
    inside = jzero.zero(
        optax.inject_hyperparams(optax.adamw)(learning_rate=schedule), zero=config_for(mesh)
    )
    _, state = drop_in_with(inside, mesh, bad)
    assert (int(state.inner[""].count), int(state.step)) == (2, 2)


def test_optax_multi_steps_around_jzero(make_mesh):
    """In a plain jit program it is right, if wasteful: its accumulator is replicated."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(6)]
    want, _ = train_optax(optax.MultiSteps(optax.adamw(1e-2), 3), model(), batches)
    ours = optax.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), 3)
    params, state = drop_in_with(ours, mesh, batches)
    assert_close(params, want)
    assert int(state.inner_opt_state.step) == 2


def test_apply_if_finite_around_jzero(make_mesh):
    """In a plain jit program it is right, and sees the overflow first; jzero skips anyway."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(3)]
    x, y = batches[1]
    batches[1] = (x, y.at[5, 1].set(np.inf))
    want, _ = train_optax(optax.apply_if_finite(optax.adamw(1e-2), 5), model(), batches)
    ours = optax.apply_if_finite(jzero.adamw(1e-2, zero=config_for(mesh)), 5)
    params, state = drop_in_with(ours, mesh, batches)
    assert_close(params, want)
    assert (int(state.total_notfinite), int(state.inner_state.step)) == (1, 2)


@pytest.mark.parametrize(
    "inner", [optax.clip_by_global_norm(1.0), optax.apply_if_finite(optax.sgd(1e-2), 3)]
)
def test_what_looks_at_all_elements_is_refused_inside(make_mesh, inner):
    tx = jzero.zero(inner, zero=config_for(make_mesh(2)))
    with pytest.raises(ValueError, match=r"elementwise.*clip_norm=.*skip_nonfinite="):
        tx.init(model())
