"""Eager sync of stacked layers: their gradients are reduced in the loop that computes them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support import (
    WAYS,
    assert_bits,
    assert_close,
    batch,
    batch_axes,
    by_op,
    config_for,
    replicated,
    split,
    train,
    train_optax,
)
from test_bench import load
from test_lazy import BATCHES, LAYERS, MESHES, deep, deep_loss

import jzero

P = jax.P
STEP = load("step")
METHODS, MODELS = STEP._methods, STEP._models
rematted = functools.partial(deep_loss, checkpoint=jax.checkpoint)
SLOW = pytest.mark.slow
ON = [
    pytest.param(MESHES[name], id=name, marks=[] if name == "2x4" else [SLOW])
    for name in ("1", "2", "8", "2x4")
]


def stacked_config(mesh, **options):
    return config_for(mesh, **{"stacked": "layers", **options})


def placed(compiled) -> list[str]:
    """Of each reduce-scatter: "entry", or "loop"."""
    found, computation = [], ""
    for line in compiled.as_text().splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if " reduce-scatter(" in line or " reduce-scatter-start(" in line:
            found.append("entry" if computation == "ENTRY" else "loop")
    return sorted(found)


def compiled_gradient(mesh, params, loss, data=None, config=None, faced=jzero.value_and_grad):
    """``jzero.value_and_grad``, compiled; one bucket of the stack and at least one beside it."""
    config = stacked_config(mesh, bucket_mb=1.0) if config is None else config
    data = split(batch(), mesh) if data is None else data
    return jax.jit(faced(loss, zero=config)).lower(params, data).compile()


# ---------------------------------------------------------------- equal to optax, and to no stacks


@pytest.mark.parametrize("shape", ON)
def test_equal_to_optax_and_without_stacks(make_mesh, shape):
    """With clipping, a loss scale, a schedule and a recomputed backward pass."""
    mesh, params = make_mesh(shape), deep()
    options = {"learning_rate": optax.linear_schedule(1e-2, 0, 9), "clip_norm": 0.5}

    def trained(config):
        tx = jzero.adamw(**options, zero=config)
        value_and_grad = jzero.value_and_grad(lambda p, d: rematted(p, d) * 1024.0, zero=tx)
        have, state = replicated(params, mesh), tx.init(replicated(params, mesh))

        @jax.jit
        def step(params, state, data):
            _, grads = value_and_grad(params, data)
            return tx.step(grads, state, params, grad_scale=1024.0)

        for data in BATCHES:
            have, state = step(have, state, split(data, mesh))
        return have, state

    have, state = trained(stacked_config(mesh))
    assert {b.layers for b in state.layout.buckets} == {0, LAYERS}
    plain, plain_state = trained(config_for(mesh))
    assert_close(have, plain, 5e-7)
    np.testing.assert_allclose(state.grad_norm, plain_state.grad_norm, rtol=1e-6)
    assert float(state.grad_norm) > 0.5  # it clips

    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(options["learning_rate"]))
    assert_close(have, train_optax(clipped, params, BATCHES, rematted)[0], 5e-6)


def whole_numbers(dtype=jnp.float32):
    """Parameters whose gradients, of :func:`product`, sum to whole numbers below 2**8."""
    layers = {"gain": jnp.asarray([[1, 2, 1], [2, 1, 1]], dtype), "shift": jnp.ones((2, 3), dtype)}
    return {"layers": layers, "last": jnp.asarray([1, 2, 1], dtype)}


def product(params, x):
    def layer(x, part):
        return x * part["gain"][None] + part["shift"][None], None

    x, _ = jax.lax.scan(layer, x.astype(params["last"].dtype), params["layers"])
    return jnp.mean(jnp.sum((x * params["last"][None]).astype(jnp.float32), -1))


@pytest.mark.parametrize(
    ("dtype", "wire"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, "bfloat16")]
)
@pytest.mark.parametrize("shape", ON)
def test_whole_numbers_are_summed_exactly(make_mesh, shape, dtype, wire):
    mesh, params = make_mesh(shape), whole_numbers(dtype)
    x = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (16, 3)), jnp.float32)
    tx = jzero.zero(
        optax.sgd(-16.0),  # parameters plus the sum over the batch
        zero=stacked_config(mesh, precision=jzero.Precision(grad_sync=wire)),
    )
    have, _ = train("plain", tx, mesh, params, [x], product)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    want, _ = train_optax(optax.sgd(-16.0), wide, [x], product)
    assert_bits(have, jax.tree.map(lambda p: p.astype(dtype), want))
    assert not np.array_equal(have["layers"]["gain"], params["layers"]["gain"])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_whole_are_reduced_into_stacks_too(make_mesh, way: str):
    """``jax.grad`` by the user, in each way to use jzero."""
    mesh, params = make_mesh((2, 4)), deep()
    have, state = train(
        way, jzero.adamw(1e-2, zero=stacked_config(mesh)), mesh, params, BATCHES, deep_loss
    )
    want, _ = train_optax(optax.adamw(1e-2), params, BATCHES, deep_loss)
    assert_close(have, want, 1e-5)
    assert int(state.step) == 3


POLICIES = {
    "bfloat16 state": jzero.Precision(state="bfloat16", grad_sync="bfloat16"),
    "remainder": jzero.Precision(master="remainder"),
    "float8 wires": jzero.Precision(grad_sync="float8_e4m3fn", param_sync="float8_e4m3fn"),
    "float8 state": jzero.Precision(state="float8_e4m3fn", scaled=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_every_precision_policy(make_mesh, name: str):
    """Near training without stacks, whose roundings fall elsewhere; and all devices agree."""
    mesh, params = make_mesh(4), deep(dtype=jnp.bfloat16)

    def trained(config):
        tx = jzero.adamw(1e-2, zero=config)
        return train("plain", tx, mesh, params, BATCHES, rematted)

    have, state = trained(stacked_config(mesh, precision=POLICIES[name]))
    want, _ = trained(config_for(mesh, precision=POLICIES[name]))
    assert jzero.first_difference(have, zero=config_for(mesh)) is None
    assert {x.dtype for x in jax.tree.leaves(have)} == {jnp.dtype(jnp.bfloat16)}
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.04)
    assert int(state.step) == 3


# ---------------------------------------------------------------- where the reduction stands


def cast(params, data):
    """Float32 parameters, of which the layers compute in bfloat16."""
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["layers"])
    return rematted({**params, "layers": narrow}, data)


def called(params, data):
    return jax.jit(jax.jit(rematted))(params, data)


def nested(params, data):
    """Layers in a function of its own, called under jit, with a cast between."""
    x, y = data
    run = jax.jit(
        lambda layers, x: jax.lax.scan(
            lambda x, p: (jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"], None),
            x,
            jax.tree.map(lambda p: p.astype(jnp.float32), layers),
        )[0]
    )
    x = run(params["layers"], x @ params["first"]["kernel"])
    return jnp.mean((x @ params["last"] - y) ** 2)


IN_LOOPS = {"remat": rematted, "kept": deep_loss, "cast": cast, "called": called, "nested": nested}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("remat", "nested") else [SLOW]) for n in IN_LOOPS]
)
def test_stacked_layers_are_reduced_in_the_loop(make_mesh, name: str):
    mesh, loss = make_mesh((2, 4)), IN_LOOPS[name]
    config = stacked_config(mesh, bucket_mb=1.0)
    compiled = compiled_gradient(mesh, deep(), loss, config=config)
    assert placed(compiled) == ["entry", "loop"]
    layout = jzero.adamw(1e-2, zero=config).layout(deep())
    assert [b.layers for b in layout.buckets] == [LAYERS, 0]
    found = by_op(compiled)
    assert sorted(c.sizes[0] for c in found["reduce-scatter"]) == sorted(
        b.row_shard for b in layout.buckets
    )
    # Over the replica axis, one layer's shard at a time; the other all-reduce is the loss.
    large = sorted(n for c in found["all-reduce"] for n in c.sizes if n > 1)
    assert large == sorted(b.row_shard for b in layout.buckets)
    check_gradient(mesh, loss)


def test_other_gradients_are_reduced_before_a_loop_that_comes_after_them(make_mesh):
    """That of the last matrix, not left beside all that the loop holds."""
    mesh = make_mesh((2, 4))
    text = compiled_gradient(mesh, deep(), rematted, config=stacked_config(mesh)).as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    found = [m[1] for line in entry if (m := re.search(r" (while|reduce-scatter)\(", line))]
    assert found == ["while", "reduce-scatter", "while", "reduce-scatter"]


def assert_near(have, want, tolerance: float = 1e-5) -> None:
    """For parameters plus a gradient, which may cancel: both are about 1."""
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def check_gradient(mesh, loss, config=None):
    """The gradient is that of one device."""
    config = stacked_config(mesh, bucket_mb=1.0) if config is None else config
    tx = jzero.zero(optax.sgd(-1.0), zero=config)
    have, _ = train("plain", tx, mesh, deep(), BATCHES[:1], loss)
    if loss is cast:  # bfloat16 sums over a device's rows, not over all
        plain = jzero.zero(optax.sgd(-1.0), zero=config_for(mesh))
        want, _ = train("plain", plain, mesh, deep(), BATCHES[:1], loss)
    else:
        want, _ = train_optax(optax.sgd(-1.0), deep(), BATCHES[:1], loss)
    assert_near(have, want)


def twice(params, data):
    """The layers run twice: their gradient is the sum of two loops'."""
    x, y = data
    return deep_loss(params, data) + deep_loss(params, (jnp.flip(x, -1), y))


def looked_at(params, data):
    """The layers' parameters are read outside of the loop too."""
    return deep_loss(params, data) + 1e-2 * jnp.sum(params["layers"]["kernel"] ** 2)


def unrolled(params, data):
    layers = [jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(LAYERS)]
    return deep_loss({**params, "layers": layers}, data)


def across(params, data):
    """A loop over another dim than that of layers, which is as long."""
    kernel = jnp.moveaxis(params["layers"]["kernel"], 0, 1)
    zero = jnp.sum(data[0]) * 0
    total, _ = jax.lax.scan(lambda c, k: (c + jnp.sum(jnp.sin(k)), None), zero, kernel)
    return deep_loss(params, data) + total


AFTER_LOOPS = {
    "whole": jax.checkpoint(deep_loss),
    "twice": twice,
    "looked at": looked_at,
    "unrolled": unrolled,
    "across": across,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "looked at" else [SLOW]) for n in AFTER_LOOPS]
)
def test_what_no_single_loop_computes_is_reduced_after_it(make_mesh, name: str):
    mesh, loss = make_mesh((2, 4)), AFTER_LOOPS[name]
    assert placed(compiled_gradient(mesh, deep(), loss)) == ["entry", "entry"]
    check_gradient(mesh, loss)


@pytest.mark.slow
def test_two_stacks_in_one_loop_and_in_two(make_mesh):
    """Stacks share no bucket, and each is reduced in its own loop."""
    mesh = make_mesh(4)
    params = {"a": deep()["layers"], "b": deep()["layers"], "last": deep()["last"]}

    def layer(x, p):
        return jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"]

    def together(params, data):
        x = jnp.pad(data[0], ((0, 0), (0, 2)))
        both = (params["a"], params["b"])
        x, _ = jax.lax.scan(lambda x, p: (layer(layer(x, p[0]), p[1]), None), x, both)
        return jnp.mean((x @ params["last"] - data[1]) ** 2)

    def apart(params, data):
        x = jnp.pad(data[0], ((0, 0), (0, 2)))
        for name in "ab":
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params[name])
        return jnp.mean((x @ params["last"] - data[1]) ** 2)

    config = stacked_config(mesh, stacked=("a", "b"), bucket_mb=1.0)
    for loss in (together, apart):
        assert placed(compiled_gradient(mesh, params, loss, config=config)) == [
            "entry",
            "loop",
            "loop",
        ]
    one = BATCHES[:1]
    have, _ = train("plain", jzero.adamw(1e-2, zero=config), mesh, params, one, together)
    assert_close(have, train_optax(optax.adamw(1e-2), params, one, together)[0], 1e-5)


# ---------------------------------------------------------------- means, weights, accumulation


def test_weighted(make_mesh):
    """Each device's weight reaches the loop of its backward pass."""
    mesh, params = make_mesh((2, 4)), deep()
    x, y = batch()
    counts = jnp.asarray(np.random.default_rng(3).integers(0, 4, x.shape[0]), jnp.float32)

    def loss(params, data):
        x, y, counts = data
        each = jax.vmap(lambda x, y: rematted(params, (x[None], y[None])))(x, y)
        weight = jnp.sum(counts)
        return jnp.sum(each * counts) / weight, weight

    def faced(fn, zero):
        return jzero.value_and_grad(fn, weighted=True, zero=zero)

    data = split((x, y, counts), mesh)
    compiled = compiled_gradient(mesh, params, loss, data, faced=faced)
    assert placed(compiled) == ["entry", "loop"]

    tx = jzero.zero(optax.sgd(-1.0), zero=stacked_config(mesh))
    value, grads = jax.jit(faced(loss, tx))(params, data)
    have, _ = tx.step(grads, tx.init(params), params)
    want_value, want = jax.value_and_grad(lambda p: loss(p, (x, y, counts))[0])(params)
    assert_close(value, want_value, 1e-6)
    assert_near(have, jax.tree.map(jnp.add, params, want))


@pytest.mark.parametrize("sync", ["every", pytest.param("last", marks=SLOW)])
def test_accumulation(make_mesh, sync: str):
    mesh, params, steps = make_mesh((2, 4)), deep(), 2
    x, y = batch()
    micro = jax.tree.map(lambda a: a.reshape(steps, -1, *a.shape[1:]), (x, y))
    config = stacked_config(mesh, bucket_mb=1.0)
    accumulate = functools.partial(jzero.accumulate, steps=steps, sync=sync)
    compiled = compiled_gradient(mesh, params, rematted, micro, config, accumulate)
    assert placed(compiled) == (["loop", "loop"] if sync == "every" else ["entry", "entry"])
    tx = jzero.zero(optax.sgd(-1.0), zero=config)
    loss, grads = jax.jit(accumulate(rematted, zero=tx))(params, micro)
    have, _ = tx.step(grads, tx.init(params), params)
    want_loss, want = jax.value_and_grad(rematted)(params, (x, y))
    assert_close(loss, want_loss, 1e-6)
    assert_near(have, jax.tree.map(jnp.add, params, want))


@pytest.mark.slow
def test_aux_and_arrays_that_the_loss_closes_over(make_mesh):
    mesh, params = make_mesh((2, 4)), deep()
    tx = jzero.zero(optax.sgd(-1.0), zero=stacked_config(mesh))

    @jax.jit
    def run(params, data, factor):
        def loss(params, data):
            value = rematted(params, data) * factor
            return value, {"twice": value * 2, "each": data[0][:, 0], "count": 1}

        out, grads = jzero.value_and_grad(loss, has_aux=True, zero=tx)(params, data)
        return out, tx.step(grads, tx.init(params), params)[0]

    (loss, aux), have = run(params, split(batch(), mesh), jnp.float32(3))
    want_loss, want = jax.value_and_grad(lambda p: rematted(p, batch()) * 3)(params)
    assert_close((loss, aux["twice"]), (want_loss, want_loss * 2), 1e-6)
    assert int(aux["count"]) == 8
    np.testing.assert_array_equal(aux["each"], batch()[0][:, 0])
    assert_near(have, jax.tree.map(jnp.add, params, want))


@pytest.mark.slow
def test_in_a_shard_map_of_the_user_with_and_without_types(make_mesh):
    mesh, params = make_mesh((2, 4)), deep()
    tx = jzero.zero(optax.sgd(-1.0), zero=stacked_config(mesh, bucket_mb=1.0))

    for check in (True, False):

        def local(params, data):
            _, grads = jzero.value_and_grad(rematted, zero=tx)(params, data)
            return tx.step(grads, tx.init(params), params)[0]

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), batch_axes(mesh)), out_specs=P(), check_vma=check
        )
        step = jax.jit(mapped)
        data = split(batch(), mesh)
        assert placed(step.lower(params, data).compile()) == ["entry", "loop"]
        want = jax.grad(rematted)(params, batch())
        assert_near(step(params, data), jax.tree.map(jnp.add, params, want))


def test_frozen_leaves_of_a_stack(make_mesh):
    """Adapters in a frozen stack: no gradient of the base is computed, or reduced."""
    mesh, params = make_mesh(4), deep()
    tx = jzero.adamw(
        1e-2,
        param_labels=lambda path: "frozen" if path == "layers/kernel" else "trained",
        zero=stacked_config(mesh, bucket_mb=1.0),
    )
    compiled = compiled_gradient(mesh, params, rematted, config=tx)
    assert placed(compiled) == ["entry", "loop"]
    have, _ = train("plain", tx, mesh, params, BATCHES, rematted)
    assert_bits(have["layers"]["kernel"], params["layers"]["kernel"])
    assert not np.array_equal(have["layers"]["bias"], params["layers"]["bias"])


# ---------------------------------------------------------------- flax


@pytest.mark.slow
def test_flax_scans(make_mesh):
    nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    mesh = make_mesh(4)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(Layer)(rngs.split(LAYERS))
            self.last = nnx.Linear(6, 5, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return layer(x)

            return self.last(run(x, self.layers))

    graphdef, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def nnx_loss(params, data):
        return jnp.mean((nnx.merge(graphdef, params)(data[0]) - data[1]) ** 2)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + jnp.tanh(nn.Dense(6)(x)), None

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            return nn.Dense(5)(scan(name="layers")(x, None)[0])

    linen = Linen()
    variables = linen.init(jax.random.key(0), batch()[0])

    def linen_loss(variables, data):
        return jnp.mean((linen.apply(variables, data[0]) - data[1]) ** 2)

    for tree, loss, prefix in (
        (params, nnx_loss, "layers"),
        (variables, linen_loss, "params/layers"),
    ):
        config = stacked_config(mesh, stacked=prefix, bucket_mb=1.0)
        compiled = compiled_gradient(mesh, tree, loss, config=config)
        assert placed(compiled) == ["entry", "loop"], prefix
        have, _ = train("plain", jzero.adamw(1e-2, zero=config), mesh, tree, BATCHES, loss)
        want, _ = train_optax(optax.adamw(1e-2), tree, BATCHES, loss)
        assert_close(have, want, 1e-4)


@pytest.mark.slow
def test_shards_of_a_wrapped_flax_module(make_mesh):
    """``DistributedDataParallel`` reduces them after its loop, for the same optimizer."""
    nnx = pytest.importorskip("flax.nnx")
    mesh = make_mesh(4)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.split(LAYERS))
            self.last = nnx.Linear(6, 5, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return x + jnp.tanh(layer(x))

            return self.last(run(x, self.layers))

    model = Model(nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    params = jax.tree.map(jnp.copy, params)
    tx = jzero.adamw(1e-2, zero=stacked_config(mesh))
    ddp = jzero.DistributedDataParallel(model, mesh=mesh)

    def ddp_loss(model, data):
        return jnp.mean((model(data[0]) - data[1]) ** 2)

    _, grads = ddp.value_and_grad(ddp_loss, zero=tx)(ddp, split(batch(), mesh))
    have, _ = tx.step(grads, tx.init(params), params)

    def loss(params, data):
        return ddp_loss(nnx.merge(graphdef, params), data)

    want, _ = train_optax(optax.adamw(1e-2), params, [batch()], loss)
    assert_close(have, want, 1e-4)


# ---------------------------------------------------------------- state, shards, checkpoints


def test_a_checkpoint_restores_with_stacks_without_and_as_shards(make_mesh, tmp_path):
    """On other devices too; all three go on to the same parameters."""
    mesh, other = make_mesh(8), make_mesh(2)
    tx = jzero.adamw(1e-2, zero=stacked_config(mesh))
    params, state = train("plain", tx, mesh, deep(), BATCHES[:2], rematted)
    jzero.checkpoint.save(tmp_path / "one", state, params)

    def resumed(config, target):
        tx, held = jzero.adamw(1e-2, zero=config), replicated(deep(), target)
        if config.param_sync == "lazy":
            held = jzero.shard_params(held, zero=tx)
        state, held = jzero.checkpoint.restore(tmp_path / "one", like=(tx.init(held), held))
        gather = jzero.gather_params if config.param_sync == "lazy" else (lambda x: x)
        loss = functools.partial(rematted, gather=gather)

        @jax.jit
        def step(held, state, data):
            _, grads = jzero.value_and_grad(loss, zero=tx)(held, data)
            return tx.step(grads, state, held)

        held, state = step(held, state, split(BATCHES[2], target))
        assert int(state.step) == 3
        return jzero.gather_params(held) if config.param_sync == "lazy" else held

    want, _ = train("plain", tx, mesh, deep(), BATCHES, rematted)
    assert_bits(resumed(stacked_config(mesh), mesh), want)
    for config in (
        stacked_config(other),
        config_for(other),
        stacked_config(other, param_sync="lazy"),
    ):
        assert_close(resumed(config, other), want, 2e-6)


def test_shard_params_takes_the_stacks_of_the_config(make_mesh):
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, zero=stacked_config(mesh, param_sync="lazy"))
    assert {s.layers for s in jzero.shard_params(deep(), zero=tx).layout.slots} == {0, LAYERS}
    none = jzero.shard_params(deep(), zero=tx, stacked=())
    assert {s.layers for s in none.layout.slots} == {0}


def test_norms_of_parts_of_stacks(make_mesh):
    """Leaves that begin and end inside of a device's part of a row."""
    mesh = make_mesh(2)
    sizes = {"a": 1, "b": 3, "c": 4}
    tree = {"layers": {n: jnp.full((2, 128 * k), k, jnp.float32) for n, k in sizes.items()}}
    tx = jzero.adamw(1e-2, zero=stacked_config(mesh, bucket_mb=1.0))
    shards = tx.reduce(tree, tree)
    (bucket,) = shards.layout.buckets
    assert bucket.row_shard == 512
    for chosen in ("a", "b", "c", "ab", "bc", "ac"):
        paths = [f"layers/{name}" for name in chosen]
        want = np.sqrt(sum(float(jnp.sum(tree["layers"][n] ** 2)) for n in chosen))
        have = jzero.global_norm(shards, paths, zero=tx.config)
        assert float(have) == pytest.approx(want, rel=1e-6), chosen


@pytest.mark.slow
def test_shards_reduced_for_other_buckets_are_cut_anew(make_mesh):
    """A stacked gradient for a transformation without stacks, and the other way round."""
    mesh, params = make_mesh((2, 4)), deep()
    configs = stacked_config(mesh), config_for(mesh)
    want, _ = train_optax(optax.adamw(1e-2), params, BATCHES[:1], rematted)
    for made, used in (configs, configs[::-1]):
        tx = jzero.adamw(1e-2, zero=used)
        _, grads = jax.jit(jzero.value_and_grad(rematted, zero=made))(params, split(batch(), mesh))
        have, _ = jax.jit(tx.step)(grads, tx.init(params), params)
        assert_close(have, want, 1e-5)


def test_a_wrong_declaration_is_named(make_mesh):
    mesh = make_mesh(2)
    assert stacked_config(mesh, stacked=None) == config_for(mesh)
    for bad in (3, "", ("a", "")):
        with pytest.raises(ValueError, match="must be a path prefix such as 'layers'"):
            stacked_config(mesh, stacked=bad)
    assert stacked_config(mesh, stacked=["a", "b"]) == stacked_config(mesh, stacked=("a", "b"))
    with pytest.raises(ValueError, match=r"stacked=\['layer'\] name no subtree of params"):
        jzero.adamw(1e-2, zero=stacked_config(mesh, stacked="layer")).init(deep())
    odd = {"layers": {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}}
    with pytest.raises(ValueError, match="every leaf of a stack needs the same leading dim"):
        jzero.value_and_grad(rematted, zero=stacked_config(mesh))(odd, split(batch(), mesh))


# ---------------------------------------------------------------- memory


def test_no_full_gradient_of_the_stack_exists(make_mesh):
    """Of 8 matrices of 256 KiB: beside whole gradients stacked, one at a time is enough."""
    mesh, layers, each = make_mesh(8), 8, 2**18
    params = {"layers": jax.ShapeDtypeStruct((layers, 256, 256), jnp.float32)}
    data = jax.ShapeDtypeStruct((8, 256), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x**2)

    def temporary(config):
        compiled = compiled_gradient(mesh, params, loss, data, config)
        return compiled.memory_analysis().temp_size_in_bytes

    plain, stacked = temporary(config_for(mesh)), temporary(stacked_config(mesh))
    assert plain >= layers * each
    assert stacked <= plain - (layers - 2) * each


# ---------------------------------------------------------------- compiled for TPU, beside optax


def peak_and_bytes(topology, size, method: str) -> tuple[int, float]:
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1), ("data",))
    program = METHODS.METHODS[method](size, mesh)
    compiled, _ = STEP.compile_program(program, size, mesh)
    numbers = STEP.describe(compiled, mesh)
    return numbers["peak_bytes"], numbers["bytes_accessed"]


def compare_with_annotation(topology, size) -> None:
    peak, moved = peak_and_bytes(topology, size, "jzero")
    their_peak, they_moved = peak_and_bytes(topology, size, "annotated")
    assert peak <= their_peak, (peak / 2**20, their_peak / 2**20)
    assert moved <= they_moved, (moved / 2**20, they_moved / 2**20)


@pytest.mark.slow
def test_no_worse_than_annotation_for_a_pod(tpu_topology):
    """The GPT of benchmarks/step.py, 534 M parameters on 16 chips."""
    compare_with_annotation(tpu_topology("v5e:4x4"), MODELS.SIZES["gpt-534m"])
