"""Bad input gets a ValueError that names what is wrong, what was got and what would do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import assert_bits, batch, config_for, loss_fn, model, replicated

import jzero

P = jax.P


def grads_of(params):
    return jax.tree.map(jnp.ones_like, params)


@pytest.fixture(scope="module")
def ready(make_mesh):
    """A transformation, its parameters and its state, for calls that must not change them."""
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = replicated({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(3)}, mesh)
    return tx, params, tx.init(params), mesh


def refused(ready, *patterns: str, face="step", **changed):
    """The call raises, its message has every pattern, and parameters and state are as before."""
    tx, params, state, _ = ready
    before = jax.tree.map(np.asarray, (params, state))
    arguments = {"grads": grads_of(params), "state": state, "params": params, **changed}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the patterns are matched below
        getattr(tx, face)(arguments["grads"], arguments["state"], arguments["params"])
    for pattern in patterns:
        assert pattern in str(error.value)
    assert_bits(jax.tree.map(np.asarray, (params, state)), before)


# ---------------------------------------------------------------- the mesh


def test_an_axis_that_the_mesh_lacks(make_mesh):
    mesh = make_mesh(4)
    with pytest.raises(ValueError, match=r"axis='model'.*not an axis.*'data'"):
        jzero.ZeroConfig(axis="model", mesh=mesh)
    with pytest.raises(ValueError, match=r"replica_axis='rows'.*not an axis.*'data'"):
        jzero.ZeroConfig(replica_axis="rows", mesh=mesh)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"axis='model'.*not an axis.*'data'"),
    ):
        jzero.adamw(1e-2, zero=jzero.ZeroConfig(axis="model")).init(model())


def test_no_mesh_at_all():
    tx = jzero.adamw(1e-2)
    for call in (
        lambda: tx.init(model()),
        lambda: jax.jit(tx.init)(model()),
        lambda: jzero.value_and_grad(loss_fn)(model(), batch()),
    ):
        with pytest.raises(ValueError, match=r"no mesh.*ZeroConfig\(mesh=mesh\).*jax\.set_mesh"):
            call()


def test_a_shard_map_over_one_of_two_axes(make_mesh):
    mesh = make_mesh((2, 4))
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    inside = jax.shard_map(
        tx.init, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    with pytest.raises(ValueError, match=r"manual over.*'data'.*'replica'.*both"):
        jax.jit(inside)(model())


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"axis": ""}, "axis=''"),
        ({"axis": ("data", "model")}, r"axis=\('data', 'model'\).*replica_axis"),
        ({"axis": "x", "replica_axis": "x"}, "different mesh axes"),
        ({"replica_axis": 3}, "replica_axis=3"),
        ({"mesh": "mesh"}, r"mesh='mesh'.*jax\.make_mesh"),
        ({"bucket_mb": 0}, "bucket_mb=0.*positive"),
        ({"bucket_mb": -1.5}, "bucket_mb=-1.5.*positive"),
        ({"bucket_mb": float("nan")}, "bucket_mb=nan.*positive"),
        ({"bucket_mb": float("inf")}, "bucket_mb=inf.*positive"),
        ({"bucket_mb": True}, "bucket_mb=True"),
        ({"bucket_mb": "25"}, "bucket_mb='25'"),
        ({"param_sync": "sometimes"}, "param_sync='sometimes'.*'eager' or 'lazy'"),
        ({"precision": "bfloat16"}, r"precision='bfloat16'.*jzero\.Precision"),
    ],
    ids=str,
)
def test_illegal_configurations(arguments: dict, pattern: str):
    with pytest.raises(ValueError, match=pattern):
        jzero.ZeroConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"grad_sync": "float8"}, "grad_sync='float8'"),
        ({"grad_sync": "int32"}, "grad_sync='int32'.*float32"),
        ({"param_sync": "float64"}, "param_sync='float64'.*float32"),
        ({"state": "int8"}, "state='int8'.*float32"),
        ({"master": "some"}, "master='some'.*full"),
        ({"scaled": True}, "scaled=True"),
    ],
    ids=str,
)
def test_illegal_precisions(arguments: dict, pattern: str):
    with pytest.raises(ValueError, match=pattern):
        jzero.Precision(**arguments)


def test_configurations_are_keyword_only_frozen_and_hashable():
    with pytest.raises(TypeError):
        jzero.ZeroConfig("data")
    config = jzero.ZeroConfig()
    with pytest.raises(AttributeError):
        config.axis = "x"
    assert hash(config) == hash(jzero.ZeroConfig())
    assert jzero.Precision(grad_sync="bfloat16") == jzero.Precision(grad_sync=jnp.bfloat16)


# ---------------------------------------------------------------- gradients, state, parameters


@pytest.mark.parametrize("face", ["step", "update"])
def test_no_parameters(ready, face: str):
    refused(ready, f"{face} needs params", "None", face=face, params=None)


def test_init_without_parameters(ready):
    with pytest.raises(ValueError, match="init needs params"):
        ready[0].init(None)


def test_gradients_of_another_structure(ready):
    ones = jnp.ones((2, 3))
    refused(ready, "structure of params", "'b'", grads={"a": {"w": ones}})
    refused(ready, "structure", "'a/x'", grads={"a": {"w": ones, "x": ones}, "b": jnp.ones(3)})
    refused(ready, "structure", grads=[ones, jnp.ones(3)])


def test_a_gradient_that_is_missing(ready):
    for nothing in (None, np.zeros(3, jax.dtypes.float0)):
        grads = {"a": {"w": jnp.ones((2, 3))}, "b": nothing}
        refused(ready, "grads['b']", "missing", "frozen", grads=grads)


def test_a_gradient_of_another_shape(ready):
    for shape in ((3, 2), (6,), (2, 4)):
        grads = {"a": {"w": jnp.ones(shape)}, "b": jnp.ones(3)}
        refused(ready, "grads['a/w']", str(shape), "(2, 3)", grads=grads)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_gradient_that_is_not_floating(ready, dtype: str):
    grads = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(3, dtype)}
    refused(ready, "grads['b']", dtype, "floating", grads=grads)


def test_state_of_something_else(ready):
    tx, params, _, _ = ready
    refused(ready, "state must be", "tuple", state=optax.adam(1.0).init(params))
    other = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}
    refused(ready, "'b'", "float32[4]", "float32[3]", state=tx.init(other))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    refused(ready, "bfloat16", "float32", state=tx.init(half))


def test_state_of_another_world(ready, make_mesh):
    other = jzero.adamw(1e-2, zero=config_for(make_mesh(2)))
    refused(ready, "2 shards", "has 4", state=other.init(replicated(ready[1], make_mesh(2))))
    renamed = make_mesh(4, ("rows",))
    other = jzero.adamw(1e-2, zero=jzero.ZeroConfig(axis="rows", mesh=renamed))
    refused(ready, "'rows'", "'data'", state=other.init(replicated(ready[1], renamed)))


def test_state_without_its_specs_in_a_shard_map(ready):
    tx, params, state, mesh = ready
    step = jax.shard_map(
        tx.step, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"512 elements.*jzero\.partition_specs\(state\)"):
        jax.jit(step)(grads_of(params), state, params)


def test_shards_of_other_parameters(ready):
    tx = ready[0]
    other = {"a": {"w": jnp.ones((2, 3))}}
    _, shards = jzero.value_and_grad(lambda p, x: p["a"]["w"].sum() * x.mean(), zero=tx)(
        other, jnp.ones(4)
    )
    refused(ready, "other parameters", "'b'", grads=shards)


def test_complex_parameters_are_refused_by_name(ready):
    with pytest.raises(ValueError, match=r"params\['a/z'\].*complex64.*real"):
        ready[0].init({"a": {"z": jnp.ones(3, jnp.complex64)}})


def test_a_leaf_that_is_no_array(ready):
    with pytest.raises(TypeError, match=r"params\['lr'\] is a float.*jnp\.asarray"):
        ready[0].init({"lr": 0.1})


# ---------------------------------------------------------------- value_and_grad


def test_a_batch_that_the_devices_do_not_divide(ready):
    tx = ready[0]
    run = jzero.value_and_grad(lambda p, d: d["x"].mean() * p["w"].sum(), zero=tx)
    data = {"x": jnp.ones((6, 2)), "y": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"'x'.*6 elements.*4 devices"):
        run({"w": jnp.ones(3)}, data)


@pytest.mark.parametrize("argnums", [-1, (0, 1), True, "params", None])
def test_argnums_is_one_position(argnums):
    with pytest.raises(ValueError, match="argnums="):
        jzero.value_and_grad(loss_fn, argnums=argnums)


def test_a_loss_that_is_no_scalar(ready):
    run = jzero.value_and_grad(lambda p, x: p["w"] * x.mean(), zero=ready[0])
    with pytest.raises(ValueError, match=r"scalar.*\(3,\)"):
        run({"w": jnp.ones(3)}, jnp.ones(4))


def test_a_zero_that_is_no_configuration():
    with pytest.raises(ValueError, match=r"zero=3.*ZeroConfig"):
        jzero.value_and_grad(loss_fn, zero=3)
    with pytest.raises(ValueError, match=r"zero='data'.*ZeroConfig"):
        jzero.adamw(1e-2, zero="data")


# ---------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"learning_rate": float("nan")}, "learning_rate must be finite, got nan"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite, got inf"),
        ({"weight_decay": np.ones(3)}, "weight_decay must be a number, a scalar array"),
        ({"clip_norm": float("nan")}, "clip_norm=nan must be positive"),
        ({"clip_norm": "1"}, "clip_norm='1' must be positive"),
        ({"b1": 1.0}, "b1 must be at least 0 and below 1, got 1.0"),
        ({"b2": -0.1}, "b2 must be at least 0 and below 1, got -0.1"),
        ({"eps": -1e-8}, "eps must not be negative"),
        ({"eps_root": -1.0}, "eps_root must not be negative"),
        ({"learning_rate": "fast"}, "learning_rate must be a number.*'fast'"),
        ({"learning_rate": None}, "learning_rate must be a number.*None"),
        ({"weight_decay_mode": "L2"}, "weight_decay_mode='L2'.*'l2'"),
        ({"clip_norm": 0}, "clip_norm=0 must be positive"),
        ({"skip_nonfinite": None}, "skip_nonfinite=None"),
        ({"overrides": {"x": {"b1": 0.5}}}, r"overrides.*'x'.*param_labels"),
        ({"overrides": {"x": {"beta": 1}}, "param_labels": "x"}, r"'x'.*'beta'.*'b1'"),
        ({"overrides": {"x": {"b1": 2.0}}, "param_labels": "x"}, r"'x'.*b1 must be"),
        ({"overrides": {"frozen": {}}, "param_labels": "frozen"}, "frozen"),
    ],
    ids=str,
)
def test_illegal_hyperparameters(arguments: dict, pattern: str):
    with pytest.raises(ValueError, match=pattern):
        jzero.adamw(**{"learning_rate": 1e-2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"mask": {"a": True}}, "mask must be a pytree prefix"),
        ({"param_labels": {"a": "x"}}, "param_labels must be a pytree prefix"),
        ({"param_labels": lambda path: None}, r"param_labels gives None for 'a/w'"),
        ({"param_labels": "x", "overrides": {"y": {"b1": 0.5}}}, r"'y'.*no parameter has.*'x'"),
    ],
    ids=["mask", "labels", "no label", "override"],
)
def test_labels_and_masks_that_do_not_fit(ready, arguments: dict, pattern: str):
    tx = jzero.adamw(1e-2, zero=ready[0].config, **arguments)
    with pytest.raises(ValueError, match=pattern):
        tx.init(ready[1])


# ---------------------------------------------------------------- transformations that mix


MIXING = {
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=1),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(1e-2), 3),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "centralize": optax.chain(optax.centralize(), optax.sgd(1e-2)),
    "normalize": optax.chain(optax.normalize_by_update_norm(), optax.sgd(1e-2)),
    # These keep the shape, so only the primitive tells.
    "sort": optax.stateless(lambda grads, _: jax.tree.map(jnp.sort, grads)),
    "cumsum": optax.stateless(lambda grads, _: jax.tree.map(jnp.cumsum, grads)),
    "reverse": optax.stateless(lambda grads, _: jax.tree.map(jnp.flip, grads)),
    "roll": optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.roll(g, 1), grads)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1e-2)),
}
ELEMENTWISE = {
    "adam": optax.adam(1e-3),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2, centered=True),
    "adabelief": optax.adabelief(1e-3),
    "radam": optax.radam(1e-3),
    "injected": optax.inject_hyperparams(optax.adam)(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
}


@pytest.mark.parametrize("name", MIXING)
def test_transformations_that_mix_elements_are_refused(ready, name: str):
    tx = jzero.zero(MIXING[name], zero=ready[0].config)
    with pytest.raises(ValueError, match=r"jzero\.zero\(inner\).*elementwise|needs an elementwise"):
        jax.eval_shape(tx.init, ready[1])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_transformations_are_accepted(ready, name: str):
    tx, params = jzero.zero(ELEMENTWISE[name], zero=ready[0].config), ready[1]
    state = jax.eval_shape(tx.init, params)
    jax.eval_shape(tx.step, grads_of(params), state, params)


def test_what_cannot_be_sharded(ready):
    with pytest.raises(ValueError, match=r"inner=3.*optax\.GradientTransformation"):
        jzero.zero(3)
    with pytest.raises(ValueError, match="sharded already"):
        jzero.zero(ready[0])
