"""Norms of gradients: every element once, in float32, whatever its size and wherever it lies.

References are numpy in float64. A leaf longer than 128 elements spans several of 8 shards.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import batch, by_op, collectives, config_for, loss_fn, model, replicated, split, train

import jzero

SIZES = {"a": (37,), "b": (3, 101), "c": (), "d": (200,), "e": (0, 4)}
ORDERS = [2, math.inf]


def values(scale: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: np.asarray(scale * rng.normal(size=shape), np.float32) for k, shape in SIZES.items()}


def norm(tree, order: float = 2) -> float:
    flat = np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])
    return float(np.abs(flat).max(initial=0) if order == math.inf else np.sqrt((flat**2).sum()))


def close(have, want: float, rel: float = 1e-6) -> None:
    assert have.dtype == jnp.float32
    assert have.shape == ()
    assert float(have) == pytest.approx(want, rel=rel)


def shards_of(tree, config: jzero.ZeroConfig, **options) -> jzero.GradShards:
    """A tree's values as the gradient of a loss that is linear in its parameters."""
    tx = jzero.adamw(1e-2, zero=config, **options)
    params = jax.tree.map(jnp.zeros_like, tree)
    return jax.jit(tx.reduce)(jax.tree.map(jnp.asarray, tree), params)


# ---------------------------------------------------------------- shards and trees


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [1, 3, (2, 4)], ids=str)
def test_the_norm_of_shards_is_the_norm_of_the_tree(make_mesh, shape, order):
    mesh = make_mesh(shape)
    config = config_for(mesh)
    shards = shards_of(values(), config)
    assert len(shards.layout.buckets) > 1
    close(jzero.global_norm(shards, ord=order, zero=config), norm(values(), order))
    under_jit = jax.jit(lambda s: jzero.global_norm(s, ord=order, zero=config))
    close(under_jit(shards), norm(values(), order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("shape", [1, (2, 4)], ids=str)
def test_the_norm_of_shards_inside_shard_map(make_mesh, shape, check, order):
    mesh = make_mesh(shape)
    config = config_for(mesh)
    shards = shards_of(values(), config)

    def local(shards):
        return jzero.global_norm(shards, ord=order, zero=config)

    specs = (jzero.partition_specs(shards),)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check)
    have = jax.jit(mapped)(shards)
    close(have, norm(values(), order))
    assert {float(s.data) for s in have.addressable_shards} == {float(have)}


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_a_plain_tree(order):
    """No mesh is needed; leaves that are no gradients do not count."""
    tree = {**values(), "n": np.arange(5), "key": jax.random.key(3), "none": None}
    close(jzero.global_norm(tree, ord=order), norm(values(), order))
    close(jax.jit(lambda t: jzero.global_norm(t, ord=order))(tree), norm(values(), order))
    close(jzero.global_norm({}, ord=order), 0)
    close(jzero.global_norm({"n": np.arange(5)}, ord=order), 0)


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_global_sharded_arrays(make_mesh, order):
    """Outside of shard_map an array is global, however it lies."""
    mesh = make_mesh((2, 4))
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    for spec in (jax.P(), jax.P("data"), jax.P(("replica", "data"))):
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        close(jax.jit(lambda t: jzero.global_norm(t, ord=order))({"x": placed}), norm(x, order))


@pytest.mark.parametrize("shape", [4, (2, 4)], ids=str)
def test_replicated_gradients_count_once(make_mesh, shape):
    """Case 33: [3, 0, 0, 0] sharded beside a replicated 4 is 5, not sqrt(73); with replicas
    too."""
    mesh = make_mesh(shape)
    config = config_for(mesh)
    tree = {"sharded": jnp.array([3.0, 0, 0, 0]), "whole": jnp.array([4.0])}
    specs = ({"sharded": jax.P("data"), "whole": jax.P()},)
    for order, want in ((2, 5.0), (math.inf, 4.0)):

        def local(tree, order=order):
            return jzero.global_norm(tree, ord=order, zero=config)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
        close(jax.jit(mapped)(tree), want)


def test_without_types_a_plain_array_is_refused(make_mesh):
    mesh = make_mesh(4)
    mapped = jax.shard_map(
        jzero.global_norm, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )
    with pytest.raises(ValueError, match="cannot tell a shard from a replicated"):
        jax.eval_shape(mapped, {"x": jnp.ones(4)})


def test_one_reduction_of_four_scalars(make_mesh):
    mesh = make_mesh(8)
    config = config_for(mesh)
    shards = shards_of(values(), config)
    for order, elements in ((2, 4), (math.inf, 2)):
        fn = jax.jit(lambda s, order=order: jzero.global_norm(s, ord=order, zero=config))
        found = collectives(fn.lower(shards).compile())
        assert [c.op for c in found] == ["all-reduce"]
        assert sum(found[0].sizes) <= elements


# ---------------------------------------------------------------- a part of the tree


@pytest.mark.parametrize("cap", [2**-13, 1.0], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("order", ORDERS)
def test_paths_choose_what_counts(make_mesh, order, cap):
    """A third of all subsets, of leaves that begin and end inside shards."""
    mesh = make_mesh(8)
    config = config_for(mesh, bucket_mb=cap)
    tree = {name: x + np.float32(3) for name, x in values().items()}
    shards = shards_of(tree, config)
    names = list(SIZES)
    subsets = [[n for i, n in enumerate(names) if bits >> i & 1] for bits in range(0, 2**5, 3)]

    @jax.jit
    def every(shards, tree):
        return [
            (
                jzero.global_norm(shards, chosen, ord=order, zero=config),
                jzero.global_norm(tree, chosen, ord=order),
                jzero.global_norm(shards, lambda p, c=chosen: p in c, ord=order, zero=config),
            )
            for chosen in subsets
        ]

    for chosen, have in zip(subsets, every(shards, tree), strict=True):
        want = norm([tree[name] for name in chosen] or [np.zeros(0)], order)
        for one in have:
            assert float(one) == pytest.approx(want, rel=1e-6), chosen


def test_nothing_of_one_norm_remains_in_the_next(make_mesh):
    """The norm of a part, then of all (Apex's cache gave the part's for both)."""
    config = config_for(make_mesh(2))
    shards = shards_of(values(), config)
    close(jzero.global_norm(shards, ["a"], zero=config), norm(values()["a"]))
    close(jzero.global_norm(shards, zero=config), norm(values()))


def test_a_nan_outside_of_the_chosen_paths_does_not_count(make_mesh):
    config = config_for(make_mesh(8), bucket_mb=1.0)
    tree = values()
    tree["b"][2, 50] = np.nan
    shards = shards_of(tree, config)
    close(jzero.global_norm(shards, ["a", "d"], zero=config), norm([tree["a"], tree["d"]]))
    assert math.isnan(jzero.global_norm(shards, ["b"], zero=config))


def test_an_unknown_path_is_named(make_mesh):
    config = config_for(make_mesh(2))
    for tree in (shards_of(values(), config), values()):
        with pytest.raises(ValueError, match=r"\['nope'\] name no gradient.*'a'"):
            jzero.global_norm(tree, ["a", "nope"], zero=config)


@pytest.mark.parametrize("order", [1, 0, -math.inf, 3, "inf"])
def test_another_order_is_named(order):
    with pytest.raises(ValueError, match="ord="):
        jzero.global_norm(values(), ord=order)


# ---------------------------------------------------------------- range and precision

EXTREMES = {
    "finite 2e19": 2e19,
    "over 2**126": 1e38,
    "all 1e-25": 1e-25,
    "smallest normal": 1.2e-38,
    "one": 1.0,
}


@pytest.mark.parametrize("name", EXTREMES)
def test_no_size_of_element_overflows_or_vanishes(make_mesh, name):
    value = EXTREMES[name]
    config = config_for(make_mesh(8))
    n = 11 if value > 1e37 else 700
    tree = {"x": np.full(n, value, np.float32), "y": np.zeros(300, np.float32)}
    have = jzero.global_norm(shards_of(tree, config), zero=config)
    # Equal terms round alike: a row of 256 of them may be 256 * 2**-25 off, its root half of that.
    close(have, norm(tree), 4e-6)
    close(jzero.global_norm(tree), norm(tree), 4e-6)


def test_small_elements_beside_large_ones():
    tree = {"x": np.array([3e20, 4e20, 1e-30, 1.0], np.float32)}
    close(jzero.global_norm(tree), 5e20)


def test_bfloat16_ones_are_summed_in_float32(make_mesh):
    """Case 38: 1024 ones have norm 32; a bfloat16 running sum stops at 256."""
    mesh = make_mesh(8)
    ones = {"w": jnp.ones(1024, jnp.bfloat16)}
    assert float(jzero.global_norm(ones)) == 32
    config = config_for(mesh)
    tx = jzero.adamw(1e-2, zero=config)
    state = jax.jit(tx.init)(ones)
    _, state = jax.jit(tx.step)(ones, state, ones)
    assert float(state.grad_norm) == 32
    assert float(jzero.global_norm(shards_of(ones, config), zero=config)) == 32


def test_float16_elements_whose_squares_overflow():
    assert float(jzero.global_norm({"w": jnp.full(4, 6e4, jnp.float16)})) == pytest.approx(
        2 * float(jnp.float16(6e4)), rel=1e-6
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_shows(make_mesh, bad, order):
    """Wherever it lies: first and last element, and inside each shard."""
    config = config_for(make_mesh(8), bucket_mb=1.0)
    tx = jzero.adamw(1e-2, zero=config)

    @jax.jit
    def norms(tree):
        shards = tx.reduce(tree, tree)
        return jzero.global_norm(shards, ord=order, zero=config), jzero.global_norm(tree, ord=order)

    for place in [0, 1020, *range(64, 1021, 128)]:
        x = np.ones(1021, np.float32)
        x[place] = bad
        for have in norms({"x": x}):
            assert math.isnan(have) if math.isnan(bad) else float(have) == math.inf, place


# ---------------------------------------------------------------- the norm that a step reports


@pytest.mark.parametrize("way", ["plain", "unchecked"])
def test_the_norm_in_the_state_is_that_of_the_mean_gradient(make_mesh, way):
    mesh = make_mesh((2, 4))
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    _, state = train(way, tx, mesh, model(), [batch()])
    close(state.grad_norm, norm(jax.grad(loss_fn)(model(), batch())))


def test_a_tied_parameter_counts_once(make_mesh):
    """Case 35: kept once and used twice, its gradient is one array of norm sqrt(800)."""
    mesh = make_mesh(8)
    tx = jzero.adamw(1e-2, clip_norm=1.0, zero=config_for(mesh))
    params = {"embedding": jnp.ones(800)}

    def loss(params, data):
        read = write = params["embedding"]
        return 0.25 * read.sum() + 0.75 * write.sum() + 0 * data.mean()

    grads = jzero.value_and_grad(loss, zero=tx)(params, jnp.ones(8))[1]
    close(jzero.global_norm(grads, zero=tx.config), math.sqrt(800))
    _, state = tx.step(grads, tx.init(params), params)
    close(state.grad_norm, math.sqrt(800))


def test_one_array_in_two_places_is_refused(make_mesh):
    w = jnp.ones(8)
    for tx in (
        jzero.adamw(1e-2, zero=config_for(make_mesh(2))),
        jzero.zero(optax.sgd(1e-2), zero=config_for(make_mesh(2))),
    ):
        with pytest.raises(ValueError, match=r"'embedding'.*'head'.*one array"):
            tx.init({"embedding": w, "head": w})


def test_frozen_leaves_do_not_count(make_mesh):
    mesh = make_mesh(4)
    labels = {"layers": ["frozen", "train"], "scale": "train", "shift": "frozen"}
    tx = jzero.adamw(1e-2, param_labels=labels, zero=config_for(mesh))
    params, data = replicated(model(), mesh), split(batch(), mesh)
    state = jax.jit(tx.init)(params)
    full = jax.grad(loss_fn)(model(), batch())
    want = norm([full["layers"][1], full["scale"]])
    _, shards = jax.jit(jzero.value_and_grad(loss_fn, zero=tx))(params, data)
    close(jzero.global_norm(shards, zero=tx.config), want)
    for grads in (shards, full):
        close(jax.jit(tx.step)(grads, state, params)[1].grad_norm, want)
    # Shards made without the labels hold every leaf; the step still counts only those it trains.
    _, shards = jax.jit(jzero.value_and_grad(loss_fn, zero=tx.config))(params, data)
    close(jzero.global_norm(shards, zero=tx.config), norm(full))
    close(jax.jit(tx.step)(shards, state, params)[1].grad_norm, want)


def test_a_step_sums_its_norm_in_one_reduction(make_mesh):
    """On replicas too: no factor of theirs, and no second all-reduce of scalars."""
    mesh = make_mesh((2, 4))
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    _, grads = jax.jit(jzero.value_and_grad(loss_fn, zero=tx))(params, split(batch(), mesh))
    compiled = jax.jit(tx.step).lower(grads, state, params).compile()
    reduces = by_op(compiled).get("all-reduce", [])
    assert [r.sizes for r in reduces] == [(4,)]


@pytest.mark.parametrize("value", [1.0, 0.0, -3e6])
@pytest.mark.parametrize("way", ["plain", "drop-in"])
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_that_are_constants_of_the_program(make_mesh, shards, way, value):
    """The zeros of an unused parameter, and of a linear loss: XLA folds what it knows, and once
    folded the scaled squares of zeros into NaN (jax 0.10.2), which clipping spread to all."""
    tx = jzero.adamw(1e-2, clip_norm=1.0, zero=config_for(make_mesh(shards)))
    params = {"used": jnp.ones(300), "unused": jnp.ones(300)}
    state = tx.init(params)

    def loss(params, data):
        return value * params["used"].sum()

    @jax.jit
    def step(params, state):
        if way == "plain":
            grads = jzero.value_and_grad(loss, zero=tx)(params, jnp.ones(8))[1]
        else:
            grads = jax.grad(loss)(params, None)
        return tx.step(grads, state, params)

    new, state = step(params, state)
    close(state.grad_norm, abs(value) * math.sqrt(300))
    # Adam's first step has size one, after weight decay.
    used = 1 - 1e-2 * (np.sign(value) + 1e-4)
    np.testing.assert_allclose(new["used"], np.full(300, used), rtol=1e-6)
    np.testing.assert_allclose(new["unused"], np.full(300, 1 - 1e-6), rtol=1e-7)
