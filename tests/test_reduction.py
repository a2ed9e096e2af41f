"""A gradient is reduced exactly once, and averaged or summed as asked.

Adam's update barely changes when a gradient is wrong by a factor, so these tests look at gradient
norms and at SGD.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import WAYS, assert_bits, config_for, replicated, split, train

import jzero
from jzero._collectives import divide

P = jax.P


def linear(params: Any, data: Any) -> jax.Array:
    """Mean over samples of <x, w> + sum(b): the gradient of w is the mean of x, that of b is 1."""
    return jnp.mean(data @ params["w"]) + params["b"].sum()


def sgd(mesh, rate: float = 1.0, **options: Any):
    return jzero.zero(optax.sgd(rate), zero=config_for(mesh, **options))


def zeros(size: int = 4) -> dict[str, jax.Array]:
    return {"w": jnp.zeros(size), "b": jnp.zeros(3)}


# ---------------------------------------------------------------- mean and sum


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (3,), (1,)], ids=["8", "2x4", "3", "1"])
def test_a_gradient_of_one_everywhere(make_mesh, way: str, average: bool, shape):
    """Cases 14 and 17: 1 in mean mode; the number of devices in sum mode; never 1/8 or 64.

    XLA has reduced the drop-in's gradient: it is what it is, in both modes.
    """
    mesh = make_mesh(shape, types="explicit" if average else "auto")
    world = mesh.size
    tx = sgd(mesh, average=average)
    params, state = train(way, tx, mesh, zeros(), [jnp.ones((world * 2, 4))], linear)
    want = 1.0 if average or way == "drop-in" else float(world)
    assert np.asarray(params["w"]).tolist() == [-want] * 4
    assert np.asarray(params["b"]).tolist() == [-want] * 3
    assert float(state.grad_norm) == pytest.approx(want * 7**0.5, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "shape", [(1,), (2,), (3,), (4,), (8,), (2, 4)], ids=["1", "2", "3", "4", "8", "2x4"]
)
def test_sgd_is_bit_equal_where_gradients_are_integers(make_mesh, shape, way: str):
    mesh = make_mesh(shape)
    world, rng = mesh.size, np.random.default_rng(3)
    batches, want = [], np.zeros(300, np.float32)
    for _ in range(20):
        x = rng.integers(-50, 50, (world, 300))
        x[0] -= x.sum(0) % world  # the mean is an integer too
        batches.append(jnp.asarray(x, jnp.float32))
        want -= np.float32(2**-6) * np.asarray(x.sum(0) // world, np.float32)

    def loss(params, data):  # each device's gradient is its sample: nothing is rounded before us
        return (data @ params["w"]).sum() + params["b"].sum()

    params, _ = train(way, sgd(mesh, 2**-6), mesh, zeros(300), batches, loss)
    if way == "drop-in":  # the sum, for XLA was not asked for the mean
        want *= world
    assert_bits(params["w"], want)
    assert_bits(params["b"], np.full(3, -20 * 2**-6, np.float32))


@pytest.mark.parametrize("n", [3, 7, 8, 41, 1000])
def test_a_quotient_of_integers_is_exact(n: int):
    """A product with the reciprocal of 7 would miss one integer in four."""
    k = np.arange(1, 2**14, dtype=np.float32)
    assert_bits(jax.jit(lambda x: divide(x, n))(jnp.asarray(k * n)), k)
    assert np.isnan(jax.jit(lambda x: divide(x, n))(jnp.float32(jnp.nan)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_the_mean_over_devices_is_the_big_batch(make_mesh, world: int, way: str):
    """Case 59: per-sample gradients equal the samples; their mean is the big batch's."""
    mesh = make_mesh(world)
    samples = jnp.array([[0.0, 1], [1, 1], [1, 0], [0, 0]] * (2 if world == 8 else 1))
    params = {"w": jnp.array([1.0, 2.0]), "b": jnp.zeros(1)}
    params, state = train(way, sgd(mesh), mesh, params, [samples], linear)
    assert np.asarray(params["w"]).tolist() == [0.5, 1.5]
    assert float(state.grad_norm) == pytest.approx(1.5**0.5, rel=1e-6)


def test_one_weight_two_samples(make_mesh):
    """Case 59, jax#3970: w = 1, data [0, 1]."""
    mesh = make_mesh(2)
    for way in WAYS:
        params, _ = train(
            way,
            sgd(mesh),
            mesh,
            {"w": jnp.ones(1)},
            [jnp.array([[0.0], [1.0]])],
            lambda p, x: (p["w"] * x.mean() + p["w"] ** 2).sum(),
        )
        assert np.asarray(params["w"]).tolist() == [1 - 2.5], way  # mean of 2w and 1 + 2w


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_leaves_do_not_trade_places(make_mesh, names: str):
    """Case 12: gradients (1, 10) on one device and (3, 30) on the other have the mean (2, 20)."""
    mesh = make_mesh(2)
    scale = {"a": 1.0, "b": 10.0}

    def loss(params, data):
        return data[0, 0] * sum(scale[name] * params[name].sum() for name in names)

    start = {name: jnp.zeros((3, 2)) for name in names}
    params, _ = train("unchecked", sgd(mesh), mesh, start, [jnp.array([[1.0], [3.0]])], loss)
    assert np.asarray(params["a"]).tolist() == [[-2.0] * 2] * 3
    assert np.asarray(params["b"]).tolist() == [[-20.0] * 2] * 3


# ---------------------------------------------------------------- unequal parts


def test_the_mean_over_tokens_when_counts_differ(make_mesh):
    """Case 15: three tokens of gradient 1 and one of 5: 2, not 3. Sum mode, divided by psum."""
    mesh = make_mesh(2)
    tokens = jnp.array([[1.0], [1.0], [1.0], [5.0], [0.0], [0.0]])
    real = jnp.array([1.0, 1, 1, 1, 0, 0])

    def loss(params, data):
        tokens, real = data
        count = jax.lax.psum(real.sum(), "data")
        return (real * (tokens @ params["w"])).sum() / count

    tx = sgd(mesh, average=False)
    for way in ("plain", "unchecked", "checked"):
        params, state = train(way, tx, mesh, {"w": jnp.zeros(1)}, [(tokens, real)], loss)
        assert np.asarray(params["w"]).tolist() == [-2.0], way
        assert float(state.grad_norm) == 2.0


@pytest.mark.parametrize("average", [True, False])
def test_a_weighted_mean_and_a_device_without_data(make_mesh, average: bool):
    """Cases 15 and 16: the divisor is the weight that there is."""
    mesh = make_mesh(4)
    tx = sgd(mesh, average=average)

    def loss(params, data):
        tokens, real = data
        return (real * (tokens @ params["w"])).sum() / real.sum(), real.sum()

    run = jax.jit(jzero.value_and_grad(loss, weighted=True, zero=tx))
    params = replicated({"w": jnp.zeros(1)}, mesh)
    state = jax.jit(tx.init)(params)
    for tokens, real, want in (
        ([1, 1, 1, 5, 7, 7, 7, 7], [1, 1, 1, 1, 0, 0, 0, 0], 2.0),
        ([1, 1, 1, 1, 1, 1, 9, 9], [1, 1, 1, 1, 1, 1, 0, 0], 1.0),
        ([1, 1, 1, 1, 1, 1, 9, 9], [0, 0, 0, 0, 0, 0, 0, 0], 0.0),
    ):
        data = (jnp.array(tokens, jnp.float32)[:, None], jnp.array(real, jnp.float32))
        value, grads = run(params, split(data, mesh))
        moved, _ = tx.step(grads, state, params)
        assert np.asarray(moved["w"]).tolist() == [-want]
        assert float(value) == 0.0


# ---------------------------------------------------------------- what the types tell


def test_a_bucket_whose_leaves_differ_in_what_is_owed(make_mesh):
    """With the check on: `b` was summed by autodiff, `w` was made varying and was not."""
    for shape in ((4,), (2, 4)):
        mesh = make_mesh(shape)
        tx = sgd(mesh)
        assert len(tx.layout(zeros()).buckets) == 1

        def local(params, state, data):
            varying = jax.lax.pcast(params["w"], mesh.axis_names, to="varying")  # noqa: B023
            grads = jax.grad(linear)({"w": varying, "b": params["b"]}, data)
            assert jax.typeof(grads["b"]).manual_axis_type.varying == frozenset()
            return tx.step(grads, state, params)  # noqa: B023

        state = tx.init(zeros())
        specs = jzero.partition_specs(state)
        step = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), specs, P(mesh.axis_names)), out_specs=(P(), specs)
        )
        params, state = jax.jit(step)(zeros(), state, jnp.ones((8, 4)))
        assert np.asarray(params["w"]).tolist() == [-1.0] * 4
        assert np.asarray(params["b"]).tolist() == [-1.0] * 3
        assert float(state.grad_norm) == pytest.approx(7**0.5, rel=1e-6)


def test_gradients_that_the_user_has_averaged(make_mesh):
    """After pmean inside shard_map nothing is owed: average=False takes them as they are."""
    mesh = make_mesh(4)
    tx = sgd(mesh, average=False)

    def local(params, state, data):
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.pmean(jax.grad(linear)(varying, data), "data")
        return tx.step(grads, state, params)

    state = tx.init(zeros())
    specs = jzero.partition_specs(state)
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    params, _ = jax.jit(step)(zeros(), state, jnp.ones((8, 4)))
    assert np.asarray(params["w"]).tolist() == [-1.0] * 4


@pytest.mark.parametrize("average", [True, False])
def test_gradients_that_are_unreduced_by_their_type(make_mesh, average: bool):
    """On an Explicit mesh jax.grad may leave the sum over the axis to us."""
    mesh = make_mesh(4, types="explicit")
    tx = sgd(mesh, average=average)

    @jax.jit
    def step(params, state, data):
        def loss(w):
            return jnp.mean(data @ w)

        w = jax.reshard(params["w"], P(None, reduced={"data"}))
        grad = jax.grad(loss)(w)
        assert jax.typeof(grad).sharding.spec.unreduced == {"data"}
        return tx.step({"w": grad}, state, params)

    with jax.set_mesh(mesh):
        params = replicated({"w": jnp.zeros(4)}, mesh)
        data = split(jnp.arange(32.0).reshape(8, 4), mesh)
        params, state = step(params, tx.init(params), data)
    want = np.arange(32.0).reshape(8, 4).mean(0)
    assert np.asarray(params["w"]).tolist() == (-want).tolist()
    assert float(state.grad_norm) == pytest.approx(np.linalg.norm(want), rel=1e-6)


# ---------------------------------------------------------------- dtypes on the wire


def each_gets(value: float, dtype: Any, mesh, precision) -> Any:
    """A step in which every device has the gradient `value`."""
    tx = sgd(mesh, precision=precision)
    data = jnp.full((mesh.size, 1), value, jnp.float32)

    def loss(params, data):
        return (params["w"].astype(jnp.float32) * data[0, 0]).sum()

    return train("unchecked", tx, mesh, {"w": jnp.zeros(4, dtype)}, [data], loss)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_the_limits_of_float16_on_the_wire(make_mesh, wire: str):
    """Case 18: we divide after the sum, so 2**-24 survives and eight times 16384 overflows."""
    mesh, precision = make_mesh(8), jzero.Precision(grad_sync=wire)
    params, _ = each_gets(2.0**-24, jnp.float32, mesh, precision)
    assert np.asarray(params["w"]).tolist() == [-(2.0**-24)] * 4
    params, state = each_gets(16384.0, jnp.float32, mesh, precision)
    overflows = wire == "float16"
    assert np.asarray(params["w"]).tolist() == [0.0 if overflows else -16384.0] * 4
    assert int(state.skipped) == overflows
    assert bool(jnp.isinf(state.grad_norm)) == overflows


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_each_leaf_keeps_its_dtype_and_the_wire_is_as_wide_as_asked(make_mesh, names: str):
    """Case 46: a bfloat16 neighbour does not narrow a float32 leaf's gradient."""
    mesh = make_mesh(8)
    narrow, wide = names
    start = {narrow: jnp.zeros(4, jnp.bfloat16), wide: jnp.zeros(4, jnp.float32)}
    data = 1 + jnp.arange(8.0)[:, None] * 2.0**-12

    def loss(params, data):
        return data[0, 0] * params[wide].sum() + params[narrow].sum().astype(jnp.float32)

    params, _ = train("unchecked", sgd(mesh), mesh, start, [data], loss)
    assert np.asarray(params[wide]).tolist() == [-1.0008544921875] * 4
    assert params[narrow].dtype == jnp.bfloat16
    assert np.asarray(params[narrow], np.float32).tolist() == [-1.0] * 4


def test_eager_calls_may_alternate_between_forms_of_gradient(make_mesh):
    """Without jit, programs are kept by what they depend on, the form of the gradient included."""
    mesh = make_mesh(4)
    tx = sgd(mesh)
    params = replicated(zeros(), mesh)
    state = tx.init(params)
    _, shards = jzero.value_and_grad(linear, zero=tx)(params, jnp.ones((8, 4)))
    whole = jax.tree.map(jnp.ones_like, params)
    for grads in (whole, shards, whole, shards):
        moved, after = tx.step(grads, state, params)
        assert np.asarray(moved["w"]).tolist() == [-1.0] * 4
        assert float(after.grad_norm) == pytest.approx(7**0.5, rel=1e-6)
