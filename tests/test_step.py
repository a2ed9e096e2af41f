"""Twenty steps on many devices against optax on one.

The error is that of each parameter relative to itself (`support.relative_error`); no parameter of
the model is near 0. Adam hides a wrong factor on the gradient, so `tests/test_reduction.py` looks
at norms and at SGD.
"""

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
    loss_fn,
    model,
    relative_error,
    replicated,
    split,
    train,
    train_optax,
    with_paths,
)

import jzero

BATCHES = [batch(i) for i in range(20)]
SHAPES = [(1,), (2,), (3,), (4,), (8,), (2, 4)]
# Every (shape, way), (shape, types) and (way, types) is among these.
COVER = [
    (shape, way, ("auto", "explicit")[(i + j) % 2])
    for i, shape in enumerate(SHAPES)
    for j, way in enumerate(WAYS)
]
REST = [
    (shape, way, types)
    for shape in SHAPES
    for way in WAYS
    for types in ("auto", "explicit")
    if (shape, way, types) not in COVER
]


def ident(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="module")
def adamw_on_one_device():
    return train_optax(optax.adamw(1e-2), model(), BATCHES)[0]


def check_twenty_steps(mesh, way, want):
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params, state = train(way, tx, mesh, model(), BATCHES)
    assert_close(params, want)
    assert len(state.layout.buckets) > 1
    assert (int(state.step), int(state.skipped)) == (20, 0)


@pytest.mark.parametrize(("shape", "way", "types"), COVER, ids=ident)
def test_twenty_steps_equal_one_device(make_mesh, adamw_on_one_device, shape, way, types):
    check_twenty_steps(make_mesh(shape, types=types), way, adamw_on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "way", "types"), REST, ids=ident)
def test_twenty_steps_equal_one_device_in_the_rest(
    make_mesh, adamw_on_one_device, shape, way, types
):
    check_twenty_steps(make_mesh(shape, types=types), way, adamw_on_one_device)


def test_the_oracle_can_tell(adamw_on_one_device):
    """A learning rate that is 0.01 % off, or one batch that is missing, is over the tolerance."""
    for tx, batches in ((optax.adamw(1.0001e-2), BATCHES), (optax.adamw(1e-2), BATCHES[:-1])):
        other, _ = train_optax(tx, model(), batches)
        assert relative_error(other, adamw_on_one_device) > 2e-5


# ---------------------------------------------------------------- hyperparameters


def decays(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "schedule": {"learning_rate": optax.cosine_decay_schedule(2e-2, 15)},
    "warmup": {"learning_rate": optax.linear_schedule(0.0, 1e-2, 5)},
    "array lr": {"learning_rate": jnp.float32(1e-2)},
    "no decay": {"weight_decay": 0.0},
    "decay": {"weight_decay": 0.3},
    "mask function": {"weight_decay": 0.3, "mask": decays},
    "mask prefix": {"weight_decay": 0.3, "mask": {"layers": True, "scale": False, "shift": False}},
    "mask nothing": {"weight_decay": 0.3, "mask": False},
    "large eps": {"eps": 0.25},
    "small eps": {"eps": 1e-30},
    "eps_root": {"eps_root": 1e-6},
    "b1 0": {"b1": 0.0},
    "b2 0": {"b2": 0.0, "eps": 0.1},
    "apex betas": {"b1": 0.1, "b2": 0.2, "eps": 0.25, "weight_decay": 0.1, "learning_rate": 0.1},
    "nesterov": {"nesterov": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_mean_what_they_mean_to_optax(make_mesh, name: str):
    arguments = {"learning_rate": 1e-2, **ARGUMENTS[name]}
    mesh = make_mesh(4)
    want, _ = train_optax(optax.adamw(**arguments), model(), BATCHES[:8])
    tx = jzero.adamw(**arguments, zero=config_for(mesh))
    have, _ = train("plain", tx, mesh, model(), BATCHES[:8])
    assert_close(have, want)


def test_defaults_are_those_of_optax(make_mesh):
    mesh = make_mesh(1)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    ours, _ = train("plain", tx, mesh, model(), BATCHES[:3])
    theirs, _ = train_optax(optax.adamw(1e-2), model(), BATCHES[:3])
    assert_close(ours, theirs, 5e-7)


def test_positional_arguments_are_in_the_order_of_optax(make_mesh):
    mesh = make_mesh(2)
    arguments = (1e-2, 0.8, 0.9, 1e-3, 1e-4, 0.2, decays)
    names = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "mask")
    want, _ = train_optax(
        optax.adamw(**dict(zip(names, arguments, strict=True))), model(), BATCHES[:3]
    )
    tx = jzero.adamw(*arguments, zero=config_for(mesh))
    assert_close(train("plain", tx, mesh, model(), BATCHES[:3])[0], want)


@pytest.mark.parametrize("way", ["plain", "checked", "drop-in"])
def test_a_traced_learning_rate(make_mesh, way: str):
    """The transformation is made inside jit; another value compiles nothing new."""
    mesh, rates = make_mesh(4), [3e-2, 1e-2, 1e-3]
    fixed = jzero.adamw(1.0, zero=config_for(mesh))
    params = replicated(model(), mesh)
    state = jax.jit(fixed.init)(params)
    traces = []

    @jax.jit
    def step(params, state, data, rate):
        traces.append(1)
        return WAYS[way](jzero.adamw(rate, zero=fixed.config), mesh)(params, state, data)

    want, opt = model(), None
    for rate, data in zip(rates, BATCHES, strict=False):
        tx = optax.adamw(rate)
        opt = tx.init(want) if opt is None else opt
        updates, opt = tx.update(jax.grad(loss_fn)(want, data), opt, want)
        want = optax.apply_updates(want, updates)
        params, state = step(params, state, split(data, mesh), jnp.float32(rate))
    assert_close(params, want)
    assert len(traces) == 1


@pytest.mark.parametrize("way", ["checked", "drop-in"])
def test_inject_hyperparams_around_jzero(make_mesh, way: str):
    mesh = make_mesh(4)
    schedule = optax.linear_schedule(2e-2, 0.0, 6)
    ours = optax.inject_hyperparams(jzero.adamw)(
        learning_rate=schedule, b1=0.8, weight_decay=0.1, zero=config_for(mesh)
    )
    theirs = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, b1=0.8, weight_decay=0.1)
    want, _ = train_optax(theirs, model(), BATCHES[:6])
    params = replicated(model(), mesh)
    state = jax.jit(ours.init)(params)

    def local(params, state, data):
        updates, state = ours.update(jax.grad(loss_fn)(params, data), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(local)
    if way == "checked":
        specs = (jax.P(), jzero.partition_specs(state), jax.P("data"))
        step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[:2]))
    for data in BATCHES[:6]:
        params, state = step(params, state, split(data, mesh))
    assert_close(params, want)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(float(schedule(5)))


def test_l2_mode_decays_through_the_moments(make_mesh):
    """Case 52: in L2 mode the moments hold weight_decay * p; decoupled, they do not."""
    mesh, decay = make_mesh(4), 0.1
    l2 = optax.chain(
        optax.add_decayed_weights(decay), optax.scale_by_adam(), optax.scale_by_learning_rate(1e-2)
    )
    want, (_, adam, _) = train_optax(l2, model(), BATCHES[:2])
    moments = {}
    for mode in ("l2", "decoupled"):
        tx = jzero.adamw(1e-2, weight_decay=decay, weight_decay_mode=mode, zero=config_for(mesh))
        params, state = train("plain", tx, mesh, model(), BATCHES[:2])
        moments[mode] = moments_by_path(state)
        if mode == "l2":
            assert_close(params, want)
    for path, mu in with_paths(adam.mu).items():
        scale = float(np.abs(mu).max())
        l2_error = np.abs(moments["l2"][path][0] - np.asarray(mu).reshape(-1)).max()
        assert l2_error <= 2e-6 * scale
        decoupled = np.abs(moments["decoupled"][path][0] - np.asarray(mu).reshape(-1)).max()
        assert decoupled > 1e-2 * scale


def moments_by_path(state) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """mu and nu of each leaf, flat, by its path as JAX writes it."""
    names = {
        "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): keystr
        for (path, _), keystr in zip(
            jax.tree_util.tree_flatten_with_path(model())[0], with_paths(model()), strict=True
        )
    }
    return {  # pyright: ignore[reportReturnType]
        names[slot.path]: tuple(
            np.asarray(m[slot.bucket])[slot.offset : slot.offset + slot.size] for m in state.inner
        )
        for slot in state.layout.slots
    }


def test_bias_correction_off(make_mesh):
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, bias_correction=False, weight_decay=0.0, zero=config_for(mesh))
    params, _ = train("plain", tx, mesh, model(), BATCHES[:1])
    grads = jax.grad(loss_fn)(model(), BATCHES[0])
    want = jax.tree.map(
        lambda p, g: p - 1e-2 * (0.1 * g) / (jnp.sqrt(1e-3 * g * g) + 1e-8), model(), grads
    )
    assert_close(params, want)


# ---------------------------------------------------------------- chains and other optimizers


@pytest.mark.parametrize("way", ["plain", "drop-in"])
def test_in_a_chain_before_and_after_others(make_mesh, way: str):
    mesh = make_mesh(4)

    def chain(adamw):
        return optax.chain(optax.clip_by_global_norm(0.1), adamw, optax.scale(0.5))

    want, _ = train_optax(chain(optax.adamw(1e-2, eps=1e-2)), model(), BATCHES[:5])
    inner = jzero.adamw(1e-2, eps=1e-2, zero=config_for(mesh))
    tx = chain(inner)
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, data):
        if way == "plain":
            _, grads = jzero.value_and_grad(loss_fn, zero=inner)(params, data)
        else:
            grads = jax.grad(loss_fn)(params, data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for data in BATCHES[:5]:
        params, state = step(params, state, split(data, mesh))
    assert_close(params, want)
    # What the sharded part saw is the clipped gradient.
    assert float(state[1].grad_norm) == pytest.approx(0.1, rel=1e-6)


INNER = {
    "lion": optax.lion(1e-3, weight_decay=0.1),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.5),
    "chain": optax.chain(
        optax.clip(0.05), optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -1e-2 / (n + 1))
    ),
    "injected": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 5)),
}


@pytest.mark.parametrize("name", INNER)
def test_other_optimizers_on_shards(make_mesh, name: str):
    mesh = make_mesh(3)
    want, _ = train_optax(INNER[name], model(), BATCHES[:6])
    tx = jzero.zero(INNER[name], zero=config_for(mesh))
    have, _ = train("checked" if name == "lion" else "plain", tx, mesh, model(), BATCHES[:6])
    assert_close(have, want)


# ---------------------------------------------------------------- updates against parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [1, 4], ids=["1", "4"])
def test_applied_updates_are_the_parameters_of_the_direct_path(make_mesh, shape, dtype: str):
    mesh = make_mesh(shape)
    tx = jzero.adamw(3e-2, weight_decay=0.1, zero=config_for(mesh))
    params = replicated(model(dtype=dtype), mesh)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def gradients(params, data):
        return jzero.value_and_grad(loss_fn, zero=tx)(params, data)[1]

    step, update = jax.jit(tx.step), jax.jit(tx.update)
    for data in BATCHES[:6]:
        grads = gradients(params, split(data, mesh))
        direct, after_step = step(grads, state, params)
        updates, after_update = update(grads, state, params)
        assert_bits(optax.apply_updates(params, updates), direct)
        assert_bits(after_update, after_step)
        params, state = direct, after_step
