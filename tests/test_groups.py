"""Parameter groups: labels, overrides, masks and frozen leaves, against optax.multi_transform."""

import functools
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
    replicated,
    split,
    train,
    train_optax,
)

import jzero

BATCHES = [batch(i) for i in range(5)]

# Three labels, written in three ways.
LABELS: dict[str, Any] = {
    "pytree": {
        "layers": [{"kernel": "body", "bias": "bias"}, {"kernel": "head", "bias": "bias"}],
        "scale": "bias",
        "shift": "bias",
    },
    "prefix": {"layers": ["body", "head"], "scale": "bias", "shift": "bias"},
    "function": lambda path: {"layers/0/kernel": "body", "layers/1/kernel": "head"}.get(
        path, "bias"
    ),
}
OVERRIDES = {
    "head": {"learning_rate": optax.linear_schedule(3e-2, 0.0, 8), "b1": 0.5, "eps": 1e-3},
    "bias": {"weight_decay": 0.0, "b2": 0.9, "eps_root": 1e-6, "learning_rate": jnp.float32(2e-3)},
}
DEFAULTS = {"learning_rate": 1e-2, "weight_decay": 0.1}


def full_labels(labels: Any) -> Any:
    """A label a leaf, as optax wants them."""
    if callable(labels):
        return LABELS["pytree"]
    return jax.tree.map(lambda label, sub: jax.tree.map(lambda _: label, sub), labels, model())


def per_label(make: Any, defaults: Any, overrides: Any, labels: Any) -> Any:
    names = set(jax.tree.leaves(labels)) - {"frozen"}
    transforms = {name: make(**{**defaults, **overrides.get(name, {})}) for name in names}
    return optax.multi_transform({**transforms, "frozen": optax.set_to_zero()}, labels)


@pytest.mark.parametrize("form", LABELS)
@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
def test_groups_are_those_of_multi_transform(make_mesh, shape, form):
    mesh, labels = make_mesh(shape), LABELS[form]
    theirs = per_label(optax.adamw, DEFAULTS, OVERRIDES, full_labels(labels))
    want, _ = train_optax(theirs, model(), BATCHES)
    ours = jzero.adamw(**DEFAULTS, param_labels=labels, overrides=OVERRIDES, zero=config_for(mesh))
    way = {"pytree": "plain", "prefix": "unchecked", "function": "drop-in"}[form]
    params, state = train(way, ours, mesh, model(), BATCHES)
    assert_close(params, want)
    assert {b.group for b in state.layout.buckets} == {"body", "head", "bias"}
    assert all(len({s.group for s in b.slots}) == 1 for b in state.layout.buckets)


def test_each_override_is_felt(make_mesh):
    """So that the test above can tell: without any one of them the result is another."""
    mesh = make_mesh(2)
    config = config_for(mesh)

    def result(overrides):
        tx = jzero.adamw(
            **DEFAULTS, param_labels=LABELS["pytree"], overrides=overrides, zero=config
        )
        return train("plain", tx, mesh, model(), BATCHES[:2])[0]

    full = result(OVERRIDES)
    for label, name in [("head", "b1"), ("bias", "b2"), ("bias", "weight_decay")]:
        less = {k: dict(v) for k, v in OVERRIDES.items()}
        del less[label][name]
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(result(less), full)


def test_a_mask_and_labels_together(make_mesh):
    mesh = make_mesh(4)
    labels = {"layers": ["a", "b"], "scale": "b", "shift": "a"}
    overrides = {"b": {"learning_rate": 3e-3, "weight_decay": 0.3}}

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    theirs = per_label(
        functools.partial(optax.adamw, mask=matrices), DEFAULTS, overrides, full_labels(labels)
    )
    want, _ = train_optax(theirs, model(), BATCHES)
    for mask in (matrices, matrices(model())):
        ours = jzero.adamw(
            **DEFAULTS, mask=mask, param_labels=labels, overrides=overrides, zero=config_for(mesh)
        )
        assert_close(train("plain", ours, mesh, model(), BATCHES)[0], want)


def test_transformations_by_label(make_mesh):
    """jzero.zero: overrides are transformations, each with state of its own kind."""
    mesh = make_mesh(4)
    labels = {"layers": ["adam", "lion"], "scale": "rest", "shift": "frozen"}
    transforms = {"adam": optax.adam(1e-2), "lion": optax.lion(1e-3)}
    rest = optax.sgd(1e-2, momentum=0.9)
    theirs = optax.multi_transform(
        {**transforms, "rest": rest, "frozen": optax.set_to_zero()}, full_labels(labels)
    )
    want, _ = train_optax(theirs, model(), BATCHES)
    ours = jzero.zero(rest, param_labels=labels, overrides=transforms, zero=config_for(mesh))
    params, state = train("checked", ours, mesh, model(), BATCHES)
    assert_close(params, want)
    assert sorted(state.inner) == ["adam", "lion", "rest"]


# ---------------------------------------------------------------- boundaries and padding


@pytest.mark.parametrize("sizes", [(5, 6), (150, 301)], ids=str)
def test_decay_and_no_decay_side_by_side(make_mesh, sizes):
    """Case 51: two groups, W=4; after 100 steps with decay the padding is exactly zero."""
    mesh = make_mesh(4)
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.uniform(0.5, 1.0, n), jnp.float32)
        for name, n in zip("ab", sizes, strict=True)
    }
    labels = {"a": "decay", "b": "none"}
    overrides = {"none": {"weight_decay": 0.0}}
    tx = jzero.adamw(
        1e-3,
        weight_decay=0.1,
        param_labels=labels,
        overrides=overrides,
        zero=config_for(mesh, bucket_mb=1.0),
    )
    theirs = per_label(optax.adamw, {"learning_rate": 1e-3, "weight_decay": 0.1}, overrides, labels)
    grads = {k: jnp.asarray(rng.normal(size=(100, p.size)), jnp.float32) for k, p in params.items()}

    def hundred(tx):
        def body(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda p, s: jax.lax.scan(body, (p, s), grads)[0])

    want, _ = hundred(theirs)(params, theirs.init(params))
    have, state = hundred(tx)(replicated(params, mesh), tx.init(params))
    assert_close(have, want, 1e-5)
    assert int(state.step) == 100
    assert_padding_is_zero(state)


def assert_padding_is_zero(state):
    padding = 0
    for bucket, *arrays in zip(state.layout.buckets, *state.inner, state.master, strict=True):
        for x in arrays:
            if x is not None:
                assert x.shape == (bucket.padded,)
                tail = np.asarray(x)[bucket.size :]
                assert tail.tobytes() == bytes(tail.nbytes)
                padding += tail.size
    assert padding > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mode", ["decoupled", "l2"])
def test_padding_stays_zero(make_mesh, mode, dtype):
    """Moments and master, in both modes of decay, however eps and schedules divide by zero."""
    mesh = make_mesh(8)
    tx = jzero.adamw(
        1e-2,
        eps=0.0,
        weight_decay=0.5,
        weight_decay_mode=mode,
        clip_norm=1.0,
        zero=config_for(mesh),
    )
    params = {"w": jnp.full(300, 0.7, dtype), "v": jnp.full((3, 5), -0.4, dtype)}
    state = tx.init(params)

    def body(carry, seed):
        params, state = carry
        grads = jax.tree.map(lambda p: jnp.sin(seed + jnp.arange(p.size)).reshape(p.shape), params)
        return tx.step(grads, state, params), None

    step = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(100.0))[0])
    params, state = step((replicated(params, mesh), state))
    assert int(state.step) == 100
    assert_padding_is_zero(state)
    assert all(np.isfinite(np.asarray(p, np.float32)).all() for p in jax.tree.leaves(params))


# ---------------------------------------------------------------- frozen leaves


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_leaf_in_the_middle(make_mesh, way):
    """Case 31: leaves of 5, 7 (frozen) and 3: no state, bits kept, neighbours right."""
    mesh = make_mesh(2)
    params = {
        "a": jnp.linspace(0.5, 1, 5),
        "b": jnp.array([np.nan, -0.0, 1, 2, 3, 4, 5]),
        "c": jnp.linspace(1, 2, 3),
    }
    labels = {"a": "train", "b": "frozen", "c": "train"}

    def loss(params, data):
        total = (params["a"] ** 2).sum() + (params["c"] ** 3).sum() + params["b"][2:].sum()
        return total * data.mean()

    data = [jnp.arange(1.0, 5.0) + i for i in range(3)]
    tx = jzero.adamw(1e-2, param_labels=labels, zero=config_for(mesh))
    have, state = train(way, tx, mesh, params, data, loss)
    assert_bits(have["b"], params["b"])
    assert sorted(s.path for s in state.layout.slots) == ["a", "c"]
    assert sum(b.size for b in state.layout.buckets) == 8
    theirs = per_label(optax.adamw, {"learning_rate": 1e-2}, {}, labels)
    want, _ = train_optax(theirs, params, data, loss)
    assert_close({k: have[k] for k in "ac"}, {k: want[k] for k in "ac"})


@pytest.mark.parametrize("way", ["plain", "checked", "drop-in"])
def test_all_leaves_frozen(make_mesh, way):
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, clip_norm=1.0, param_labels=lambda path: "frozen", zero=config_for(mesh))
    params, state = train(way, tx, mesh, model(), BATCHES[:2])
    assert_bits(jax.device_get(params), jax.device_get(model()))
    assert state.layout.buckets == ()
    assert (int(state.step), int(state.skipped), float(state.grad_norm)) == (2, 0, 0)


def test_frozen_gradients_are_not_read(make_mesh):
    """They may be missing, infinite, or of no dtype at all; they do not skip the step."""
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, param_labels={"w": "train", "b": "frozen"}, zero=config_for(mesh))
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    results = []
    for grad in (jnp.full(2, np.nan), None, jnp.zeros(2)):
        new, state = tx.step({"w": jnp.ones(3), "b": grad}, tx.init(params), params)
        assert (int(state.step), int(state.skipped)) == (1, 0)
        results.append(new)
    for one in results:
        assert_bits(one, results[0])


def test_the_state_is_smaller_by_what_is_frozen(make_mesh):
    mesh = make_mesh(4)
    params = {"big": jnp.ones(4096), "small": jnp.ones(512)}
    tx = jzero.adamw(1e-2, param_labels={"big": "frozen", "small": "train"}, zero=config_for(mesh))
    state = tx.init(params)
    assert sum(x.size for x in jax.tree.leaves(state.inner)) == 2 * 512


# ---------------------------------------------------------------- the step count


def test_one_counter_for_all_leaves(make_mesh):
    """Case 32: a leaf without a gradient counts as one with gradient zero, as in optax: g = 1,
    0, 1 moves it 2.488061. Leaves of other dtypes do not advance the count again."""
    mesh = make_mesh(2)
    tx = jzero.adamw(1.0, eps=1e-30, weight_decay=0.0, zero=config_for(mesh))
    params = {"w": jnp.zeros(2), "h": jnp.zeros(2, jnp.bfloat16)}
    want = {"w": jnp.zeros(2)}
    state, theirs = tx.init(params), optax.adamw(1.0, eps=1e-30, weight_decay=0.0)
    opt = theirs.init(want)
    for g in (1.0, 0.0, 1.0):
        params, state = tx.step(jax.tree.map(lambda p, g=g: p * 0 + g, params), state, params)
        updates, opt = theirs.update({"w": jnp.full(2, g)}, opt, want)
        want = optax.apply_updates(want, updates)
    # 1 - 0.999**3 in float32 is 1e-5 off, for optax too.
    np.testing.assert_allclose(params["w"], [-2.488061] * 2, rtol=1e-5)
    assert_close({"w": params["w"]}, want)
    assert int(state.step) == 3


# ---------------------------------------------------------------- shards made elsewhere


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_shards_made_without_the_labels(make_mesh, check):
    """A gradient from value_and_grad(zero=config) is cut anew; inside shard_map too."""
    mesh = make_mesh(4)
    config = config_for(mesh)
    tx = jzero.adamw(1e-2, param_labels=LABELS["prefix"], overrides=OVERRIDES, zero=config)
    params, data = replicated(model(), mesh), split(BATCHES[0], mesh)
    state = jax.jit(tx.init)(params)

    def local(zero, params, state, data):
        _, grads = jzero.value_and_grad(loss_fn, zero=zero)(params, data)
        return tx.step(grads, state, params)

    specs = (jax.P(), jzero.partition_specs(state), jax.P("data"))
    results = []
    for zero in (config, tx):
        body = functools.partial(local, zero)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=check
        )
        results.append(jax.jit(mapped)(params, state, data))
    assert_close(results[0][0], results[1][0], 1e-6)
    assert_close(jax.jit(functools.partial(local, config))(params, state, data)[0], results[1][0])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"a": {}}}, r"overrides for \['a'\] need param_labels"),
        (
            {"param_labels": {"w": "a"}, "overrides": {"frozen": {}}},
            r"overrides\['frozen'\].*no hyperparameters",
        ),
        (
            {"param_labels": {"w": "a"}, "overrides": {"a": {"lr": 1}}},
            r"overrides\['a'\] sets \['lr'\].*'learning_rate'",
        ),
        (
            {"param_labels": {"w": "a"}, "overrides": {"a": {"b1": 1.5}}},
            r"overrides\['a'\]: b1 must be at least 0 and below 1",
        ),
        (
            {"param_labels": {"w": "a"}, "overrides": {"a": {"eps": "x"}}},
            r"overrides\['a'\]: eps must be a number",
        ),
    ],
)
def test_overrides_are_checked_when_written(options, message):
    with pytest.raises(ValueError, match=message):
        jzero.adamw(1e-2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_labels": {"w": "a"}, "overrides": {"b": {}}}, r"labels \['b'\].*gives \['a'\]"),
        ({"param_labels": {"w": 3}}, r"gives 3 for 'w'; a label is a string"),
        ({"param_labels": lambda path: None}, r"gives None for 'w'"),
        ({"param_labels": {"v": "a"}}, "param_labels must be a pytree prefix of params"),
        ({"param_labels": ["a"]}, "param_labels must be a pytree prefix of params"),
        ({"mask": {"v": True}}, "mask must be a pytree prefix of params"),
    ],
)
def test_labels_that_do_not_fit_are_named(make_mesh, options, message):
    tx = jzero.adamw(1e-2, **options, zero=config_for(make_mesh(2)))
    with pytest.raises(ValueError, match=message):
        tx.init({"w": jnp.ones(3)})


def test_a_state_of_other_labels_is_refused(make_mesh):
    config = config_for(make_mesh(2))
    params = {"a": jnp.ones(3), "b": jnp.ones(4)}
    plain, labelled = (
        jzero.adamw(1e-2, param_labels=labels, zero=config)
        for labels in (None, {"a": "x", "b": "y"})
    )
    with pytest.raises(ValueError, match="does not belong to these params and options"):
        labelled.step(params, plain.init(params), params)


def test_transformations_by_label_are_checked():
    with pytest.raises(ValueError, match=r"a={'learning_rate': 1}.*GradientTransformation"):
        jzero.zero(optax.sgd(1.0), param_labels={"w": "a"}, overrides={"a": {"learning_rate": 1}})
