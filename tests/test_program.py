"""What the compiled program holds: which collectives, how many bytes, which copies."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support import (
    DTYPES,
    WAYS,
    assert_bits,
    assert_close,
    batch,
    batch_axes,
    by_op,
    collectives,
    config_for,
    counting,
    loss_fn,
    model,
    plain_jit,
    replicated,
    split,
    train,
    train_optax,
    varying,
)

import jzero

P = jax.P


def compiled_step(tx, mesh, way: str, dtype=jnp.float32, donate: bool = False):
    """A compiled step with its state and parameters, from shapes alone."""
    whole = NamedSharding(mesh, P())
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), model(dtype=dtype)
    )
    data = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, batch_axes(mesh))
        ),
        batch(),
    )
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        jzero.partition_specs(state),
    )
    ways = {**WAYS, "varying": varying}
    step = jax.jit(ways[way](tx, mesh), donate_argnums=(0, 1) if donate else ())
    return step.lower(params, state, data).compile(), state, params


@functools.cache
def on_one_device(steps: int, seed: int = 0):
    """Parameters after steps of optax.adamw(1e-2) on batch(0), batch(1), ..., of one device."""
    return train_optax(optax.adamw(1e-2), model(seed), [batch(i) for i in range(steps)])[0]


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("way", "world"), [("plain", 3), ("plain", 8), ("varying", 8), ("unchecked", 3)]
)
def test_one_reduce_scatter_and_one_all_gather_a_bucket(make_mesh, way: str, world: int):
    mesh = make_mesh(world)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    compiled, state, _ = compiled_step(tx, mesh, way)
    buckets = state.layout.buckets
    assert len(buckets) == 3
    found = by_op(compiled)
    assert set(found) == {"reduce-scatter", "all-gather", "all-reduce"}
    assert sorted(c.sizes for c in found["reduce-scatter"]) == sorted((b.shard,) for b in buckets)
    assert sorted(c.sizes for c in found["all-gather"]) == sorted((b.padded,) for b in buckets)
    assert {c.dtypes for op in ("reduce-scatter", "all-gather") for c in found[op]} == {("f32",)}
    # The loss, and four sums for the norm: scalars, never a gradient.
    assert sum(n for c in found["all-reduce"] for n in c.sizes) <= 5
    assert len(found["all-reduce"]) <= 2


@pytest.mark.parametrize("way", ["plain", "unchecked"])
def test_replicas_add_an_all_reduce_of_the_shard(make_mesh, way: str):
    mesh = make_mesh((2, 4))
    compiled, state, _ = compiled_step(jzero.adamw(1e-2, zero=config_for(mesh)), mesh, way)
    buckets, found = state.layout.buckets, by_op(compiled)
    assert sorted(c.sizes for c in found["reduce-scatter"]) == sorted((b.shard,) for b in buckets)
    assert sorted(c.sizes for c in found["all-gather"]) == sorted((b.padded,) for b in buckets)
    large = sorted(n for c in found["all-reduce"] for n in c.sizes if n > 4)
    assert large == sorted(b.shard for b in buckets)


def test_the_drop_in_slices_what_xla_has_reduced(make_mesh):
    mesh = make_mesh(4)
    compiled, state, params = compiled_step(
        jzero.adamw(1e-2, zero=config_for(mesh)), mesh, "drop-in"
    )
    found = by_op(compiled)
    assert len(found["all-gather"]) == len(state.layout.buckets)
    assert "reduce-scatter" not in found
    gradient = sum(x.size for x in jax.tree.leaves(params))
    assert sum(n for c in found["all-reduce"] for n in c.sizes) <= gradient + 5


@pytest.mark.parametrize("way", ["plain", "varying", "unchecked", "drop-in"])
def test_one_device_does_not_communicate(make_mesh, way: str):
    mesh = make_mesh(1)
    compiled, _, _ = compiled_step(jzero.adamw(1e-2, zero=config_for(mesh)), mesh, way)
    assert collectives(compiled) == []


def test_unreduced_gradients_are_scattered_once(make_mesh):
    mesh = make_mesh(4, types="explicit")
    tx = jzero.adamw(1e-2, zero=config_for(mesh))

    def step(params, state, data):
        w = jax.reshard(params["w"], P(None, reduced={"data"}))
        return tx.step({"w": jax.grad(lambda w: jnp.mean(data @ w))(w)}, state, params)

    with jax.set_mesh(mesh):
        params = replicated({"w": jnp.zeros(4)}, mesh)
        lowered = jax.jit(step).lower(params, tx.init(params), split(jnp.ones((8, 4)), mesh))
    found = by_op(lowered.compile())
    assert [c.sizes for c in found["reduce-scatter"]] == [(128,)]
    assert sum(n for c in found.get("all-reduce", []) for n in c.sizes) <= 4


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("leaf", ["float32", "bfloat16"])
def test_the_wire_has_the_dtype_asked_for(tpu_topology, wire: str, leaf: str):
    """Compiled for TPU: the CPU backend widens 16-bit collectives, and XLA may drop casts."""
    devices = np.array(tpu_topology("v5e:2x2").devices).reshape(-1)
    mesh = jax.sharding.Mesh(devices, ("data",))
    precision = jzero.Precision(grad_sync=wire, param_sync="bfloat16")
    tx = jzero.adamw(1e-2, zero=config_for(mesh, bucket_mb=1.0, precision=precision))
    compiled, state, _ = compiled_step(tx, mesh, "unchecked", dtype=leaf)
    # A small reduce-scatter on TPU is an all-reduce followed by a slice.
    (reduced,) = [
        (dtype, n * DTYPES[dtype])
        for op in ("reduce-scatter", "all-reduce")
        for c in by_op(compiled).get(op, [])
        for dtype, n in zip(c.dtypes, c.sizes, strict=True)
        if n > 4
    ]
    (bucket,) = state.layout.buckets
    # float16 travels in pairs, one 32-bit word each: TPUs have no such type.
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "u32"}
    assert reduced == (names[wire], bucket.padded * jnp.dtype(wire).itemsize)
    (gathered,) = by_op(compiled)["all-gather"]
    assert (gathered.dtypes, gathered.sizes) == (("bf16",), (bucket.padded,))


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 4)], ids=["1", "3", "8", "2x4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_device_holds_its_shard_of_the_state(make_mesh, shape, dtype: str):
    mesh = make_mesh(shape)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    state = tx.init(replicated(model(dtype=dtype), mesh))
    copies = 2 if dtype == "float32" else 3  # two moments; a master where the leaf is narrower
    want = sum(bucket.shard * 4 * copies for bucket in state.layout.buckets)
    large = [x for x in jax.tree.leaves(state) if x.ndim]
    assert len(large) == copies * len(state.layout.buckets)
    for device in mesh.devices.flat:
        held = sum(
            shard.data.nbytes
            for x in large
            for shard in x.addressable_shards
            if shard.device == device
        )
        assert held == want
    shards = mesh.shape["data"]
    assert want * shards == sum(bucket.padded * 4 * copies for bucket in state.layout.buckets)


@pytest.mark.parametrize("way", WAYS)
def test_donated_state_and_parameters_are_updated_in_place(make_mesh, way: str):
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    compiled, state, params = compiled_step(tx, mesh, way, donate=True)
    shards = sum(b.shard * 4 * 2 for b in state.layout.buckets)
    leaves = sum(x.size * 4 for x in jax.tree.leaves(params))
    assert compiled.memory_analysis().alias_size_in_bytes >= shards + leaves
    entry = compiled.as_text().split("\nENTRY ")[1]
    sizes = {b.shard for b in state.layout.buckets}
    copies = re.findall(r"= (f32\[(\d+)\]\S*) copy\(", entry)
    assert [c for c, n in copies if int(n) in sizes] == []


# ---------------------------------------------------------------- compilations


def types(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type, jax.typeof(x).sharding.spec, x.sharding.spec),
        jax.tree.leaves(tree),
    )


OPTIMIZERS = {
    "adamw": lambda zero: jzero.adamw(1e-2, zero=zero),
    "schedule": lambda zero: jzero.adamw(
        optax.linear_schedule(1e-2, 0, 9), clip_norm=1.0, zero=zero
    ),
    "injected": lambda zero: jzero.zero(optax.inject_hyperparams(optax.adam)(1e-2), zero=zero),
    "momentum": lambda zero: jzero.zero(optax.sgd(1e-2, momentum=0.9), zero=zero),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", "auto"),
        ("adamw", "explicit"),
        ("schedule", "explicit"),
        ("injected", "auto"),
        ("momentum", "explicit"),
    ],
)
def test_ten_steps_compile_once(make_mesh, name: str, kind: str):
    mesh = make_mesh(2, types=kind)
    tx = OPTIMIZERS[name](config_for(mesh))
    params = replicated(model(dtype=jnp.bfloat16), mesh)
    state = jax.jit(tx.init)(params)
    traces = []

    @jax.jit
    def step(params, state, data):
        traces.append(1)
        return plain_jit(tx, mesh)(params, state, data)

    data = split(batch(), mesh)
    jax.block_until_ready(data)
    with counting() as names:
        for _ in range(10):
            params, new_state = step(params, state, data)
            assert jax.tree.structure(new_state) == jax.tree.structure(state)
            assert types(new_state) == types(state)
            state = new_state
    assert len(traces) == 1
    assert [name for name in names if "step" in name] == ["jit(step)"]
    assert len(names) == 1, names


@pytest.mark.parametrize("face", ["step", "update"])
def test_eager_calls_compile_once(make_mesh, face: str):
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    value_and_grad = jzero.value_and_grad(loss_fn, zero=tx)
    params = replicated(model(), mesh)
    state, counts = tx.init(params), []
    for i in range(4):
        with counting() as names:
            _, grads = value_and_grad(params, split(batch(i), mesh))
            out, state = getattr(tx, face)(grads, state, params)
        params = out if face == "step" else optax.apply_updates(params, out)
        counts.append(len(names))
    assert counts[0] > 0
    assert counts[2:] == [0, 0]
    assert_close(params, on_one_device(4))


def test_init_gives_the_same_in_jit_and_out_of_it(make_mesh):
    mesh = make_mesh(4)
    for tx in (
        jzero.adamw(1e-2, zero=config_for(mesh)),
        jzero.zero(optax.adagrad(1e-2), zero=config_for(mesh)),
    ):
        params = replicated(model(dtype=jnp.bfloat16), mesh)
        one, two = tx.init(params), jax.jit(tx.init)(params)
        assert_bits(one, two)
        assert types(one) == types(two)


# ---------------------------------------------------------------- under transformations of jax


@pytest.mark.parametrize("way", ["plain", "checked", "drop-in"])
def test_steps_in_a_scan(make_mesh, way: str):
    mesh, batches = make_mesh(4), [batch(i) for i in range(3)]
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    stacked = jax.device_put(stacked, NamedSharding(mesh, P(None, "data")))
    step = WAYS[way](tx, mesh)

    @jax.jit
    def three(carry, data):
        return jax.lax.scan(lambda c, x: (step(*c, x), None), carry, data)[0]

    params, state = three((params, state), stacked)
    assert_close(params, on_one_device(3))
    assert int(state.step) == 3


@pytest.mark.parametrize("way", ["plain", "checked", "unchecked"])
def test_a_loss_that_is_recomputed(make_mesh, way: str):
    mesh, batches = make_mesh(4), [batch(i) for i in range(2)]
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    have, _ = train(way, tx, mesh, model(), batches, jax.checkpoint(loss_fn))
    assert_close(have, on_one_device(2))


@pytest.mark.parametrize("way", ["plain", "checked"])
def test_two_models_under_vmap(make_mesh, way: str):
    """Case 61."""
    mesh, batches = make_mesh(4), [batch(i) for i in range(2)]
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    both = jax.tree.map(lambda *x: jnp.stack(x), model(0), model(1))
    step = WAYS[way](tx, mesh)

    @jax.jit
    def run(params):
        state = jax.vmap(tx.init)(params)
        for data in batches:
            params, state = jax.vmap(step, (0, 0, None))(params, state, data)
        return params, state

    params, state = run(both)
    assert state.step.tolist() == [2, 2]
    for i in range(2):
        assert_close(jax.tree.map(lambda x: x[i], params), on_one_device(2, i))  # noqa: B023


def test_debug_nans(make_mesh):
    """No 0/0 in the padding, which would raise here."""
    mesh = make_mesh(4)
    with jax.debug_nans(True):
        for way in ("plain", "drop-in"):
            tx = jzero.adamw(1e-2, zero=config_for(mesh))
            params, _ = train(way, tx, mesh, model(), [batch(), batch(1)])
        assert_close(params, on_one_device(2))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_with_64_bit_types(make_mesh, dtype: str):
    mesh, batches = make_mesh(4), [batch(0), batch(1)]
    with jax.enable_x64(True):
        tx = jzero.adamw(1e-2, weight_decay=0.1, zero=config_for(mesh))
        params, state = train("plain", tx, mesh, model(dtype=dtype), batches)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert {x.dtype for x in jax.tree.leaves(state.inner)} == {jnp.dtype("float32")}
        assert (state.step.dtype, state.grad_norm.dtype) == (jnp.int32, jnp.float32)
        if dtype != "bfloat16":
            want, _ = train_optax(optax.adamw(1e-2, weight_decay=0.1), model(dtype=dtype), batches)
            assert_close(params, want)


def test_a_mesh_that_is_set_and_a_mesh_that_is_given_do_the_same(make_mesh):
    mesh = make_mesh(4)
    given = jzero.adamw(1e-2, zero=config_for(mesh))
    ambient = jzero.adamw(1e-2, zero=config_for(mesh, mesh=None))
    one, _ = train("plain", given, mesh, model(), [batch()])
    with jax.set_mesh(mesh):
        two, _ = train("plain", ambient, mesh, model(), [batch()])
        three, _ = train("checked", ambient, mesh, model(), [batch()])
    assert_bits(two, one)
    assert_close(three, one, 5e-7)


def test_an_axis_beside_those_of_jzero(make_mesh):
    """Model axes that the step does not use stay with XLA."""
    mesh = make_mesh((4, 2), ("data", "model"))
    tx = jzero.adamw(1e-2, zero=jzero.ZeroConfig(mesh=mesh))
    params = replicated(model(), mesh)
    data = jax.device_put(batch(), NamedSharding(mesh, P("data")))
    params, _ = jax.jit(plain_jit(tx, mesh))(params, jax.jit(tx.init)(params), data)
    assert_close(params, on_one_device(1))
