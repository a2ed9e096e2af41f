"""Lazy sync: shards are the training state, gathered in the loss; equal to optax on one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support import (
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

import jzero

P = jax.P
LAYERS = 3
BATCHES = [batch(i) for i in range(3)]


def deep(stacked: bool = True, dtype: Any = jnp.float32) -> dict[str, Any]:
    """A network of equal layers, in one leaf a kernel or in a list."""
    rng = np.random.default_rng(7)

    def draw(*shape: int):
        values = rng.uniform(0.5, 1.0, shape) * rng.choice([-1, 1], shape)
        return jnp.asarray(values, dtype)

    layers = {"kernel": draw(LAYERS, 8, 8), "bias": draw(LAYERS, 8), "gain": draw(LAYERS)}
    return {
        "first": {"kernel": draw(6, 8)},
        "layers": layers
        if stacked
        else [{k: x[i] for k, x in layers.items()} for i in range(LAYERS)],
        "last": draw(8, 5),
    }


def deep_loss(params, data, gather=lambda x: x, checkpoint=lambda f: f):
    """Mean over the batch of a squared error; ``gather`` where a part is used."""
    x, y = data
    x = x.astype(jnp.bfloat16) if params_dtype(params) == jnp.bfloat16 else x

    @checkpoint
    def layer(x, part):
        p = gather(part)
        return jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"] + x

    x = jnp.tanh(x @ gather(params["first"])["kernel"])
    layers = params["layers"]
    if not isinstance(layers, list) and jax.tree.leaves(layers)[0].ndim > 1:
        x, _ = jax.lax.scan(lambda x, part: (layer(x, part), None), x, layers)
    else:
        for part in layers:
            x = layer(x, part)
    out = x @ gather(params["last"])
    return jnp.mean((out - y.astype(out.dtype)) ** 2)


def params_dtype(params):
    return jax.tree.leaves(params)[0].dtype


lazy_loss = functools.partial(deep_loss, gather=jzero.gather_params)
rematted = functools.partial(lazy_loss, checkpoint=jax.checkpoint)
STACKED = [True, False]
MESHES = {"1": (1,), "2": (2,), "4": (4,), "8": (8,), "2x4": (2, 4)}


def lazy_config(mesh, **options):
    return config_for(mesh, **{"param_sync": "lazy", "bucket_mb": 2**-11, **options})


def shard(params, tx, mesh, stacked: bool):
    return jzero.shard_params(
        replicated(params, mesh), zero=tx, stacked="layers" if stacked else None
    )


def train_lazy(tx, mesh, params, batches, loss, stacked: bool = False, grad_scale=None):
    shards = shard(params, tx, mesh, stacked)
    state = tx.init(shards)

    @jax.jit
    def step(shards, state, data):
        def scaled(shards, data):
            return loss(shards, data) * (grad_scale or 1.0)

        _, grads = jzero.value_and_grad(scaled, zero=tx)(shards, data)
        return tx.step(grads, state, shards, grad_scale=grad_scale)

    for data in batches:
        shards, state = step(shards, state, split(data, mesh))
    return shards, state


# ---------------------------------------------------------------- equal to optax, and to eager


@functools.cache
def by_optax(stacked: bool = True, clip: bool = True, decays: bool = False):
    """What optax makes of the parameters in three steps on one device."""
    rate = optax.linear_schedule(1e-2, 0, 9) if decays else 1e-2
    tx = optax.adamw(rate)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(0.5), tx)
    return train_optax(tx, deep(stacked), BATCHES, deep_loss)[0]


# Unrolled layers on every mesh are among the slow tests, and four devices; here on two meshes.
WAYS_AND_MESHES = [
    pytest.param(
        shape,
        stacked,
        id=f"{name}-{'scanned' if stacked else 'unrolled'}",
        marks=[] if name in ("2", "2x4") or (stacked and name != "4") else [pytest.mark.slow],
    )
    for name, shape in MESHES.items()
    for stacked in STACKED
]


@pytest.mark.parametrize(("shape", "stacked"), WAYS_AND_MESHES)
def test_equal_to_optax_and_to_eager(make_mesh, shape, stacked: bool):
    """With clipping, a loss scale, a schedule and a recomputed backward pass."""
    mesh, params = make_mesh(shape), deep(stacked)
    options = {"learning_rate": optax.linear_schedule(1e-2, 0, 9), "clip_norm": 0.5}
    tx = jzero.adamw(**options, zero=lazy_config(mesh))
    shards, state = train_lazy(tx, mesh, params, BATCHES, rematted, stacked, grad_scale=1024.0)
    have = jzero.gather_params(shards)

    eager = jzero.adamw(**options, zero=config_for(mesh))
    want, eager_state = train("plain", eager, mesh, params, BATCHES, deep_loss)
    assert_close(have, want, 5e-7)
    np.testing.assert_allclose(state.grad_norm, eager_state.grad_norm, rtol=1e-6)
    assert float(state.grad_norm) > 0.5  # it clips

    assert_close(have, by_optax(stacked, decays=True), 5e-6)
    assert int(state.step) == 3


def test_round_trip(make_mesh):
    """Odd leaves, stacked and not, on an axis of 3 and beside replicas."""
    for shape in ((3,), (2, 4)):
        mesh = make_mesh(shape)
        params = {
            **deep(),
            "odd": {"scalar": jnp.float32(2), "none": None, "empty": jnp.zeros((0, 3))},
            "count": jnp.arange(3),
            "key": jax.random.key(3),
            "flag": jnp.array([True, False]),
        }
        shards = jzero.shard_params(params, zero=lazy_config(mesh), stacked="layers")
        assert_bits(jzero.gather_params(shards), params)
        assert_bits(jzero.gather_params(shards["layers"]), params["layers"])
        assert_bits(jzero.gather_params(shards["layers"]["bias"]), params["layers"]["bias"])
        assert_bits(jax.jit(jzero.gather_params)(shards["odd"]), params["odd"])
        again = jax.jit(
            lambda p, mesh=mesh: jzero.shard_params(p, zero=lazy_config(mesh), stacked="layers")
        )(params)
        assert_bits(again, shards)
        # From the host each device gets its part alone: there is no whole array to send.
        arrays = jax.tree.map(
            lambda x: np.asarray(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
        )
        from_host = jzero.shard_params(arrays, zero=lazy_config(mesh), stacked="layers")
        assert_bits(from_host, shards)
        assert [x.sharding for x in from_host.buckets] == [x.sharding for x in shards.buckets]
        for device in mesh.devices.flat:
            held = sum(
                s.data.size
                for x in shards.buckets
                for s in x.addressable_shards
                if s.device == device
            )
            assert held == sum(bucket.shard for bucket in shards.layout.buckets)


# ---------------------------------------------------------------- ways to use it


@pytest.mark.parametrize(
    ("check_vma", "kind"),
    [
        pytest.param(True, "auto", id="checked-auto"),
        pytest.param(True, "explicit", id="checked-explicit", marks=pytest.mark.slow),
        pytest.param(False, "auto", id="unchecked-auto", marks=pytest.mark.slow),
        pytest.param(False, "explicit", id="unchecked-explicit"),
    ],
)
def test_in_the_users_shard_map(make_mesh, check_vma: bool, kind: str):
    """By jax.grad, whose gradient comes in the form of the shards, and by value_and_grad."""
    mesh, params = make_mesh((2, 2), types=kind), deep()
    tx = jzero.adamw(1e-2, clip_norm=0.5, zero=lazy_config(mesh))
    shards = shard(params, tx, mesh, True)
    state = tx.init(shards)
    specs = jzero.partition_specs((shards, state))

    def by_grad(shards, state, data):
        return tx.step(jax.grad(rematted)(shards, data), state, shards)

    def by_value_and_grad(shards, state, data):
        _, grads = jzero.value_and_grad(rematted, zero=tx)(shards, data)
        return tx.step(grads, state, shards)

    for step in (by_grad, by_value_and_grad):
        mapped = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(*specs, batch_axes(mesh)),
                out_specs=specs,
                check_vma=check_vma,
            )
        )
        new = shards, state
        for data in BATCHES:
            new = mapped(*new, split(data, mesh))
        assert_close(jzero.gather_params(new[0]), by_optax(), 5e-6)


def test_plain_jit_without_value_and_grad(make_mesh):
    """Outside of a shard_map the whole parameters come back, and XLA reduces the gradient."""
    mesh, params = make_mesh(4), deep()
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = shard(params, tx, mesh, True)
    state = tx.init(shards)

    @jax.jit
    def step(shards, state, data):
        grads = jax.grad(lambda s: deep_loss(jzero.gather_params(s), data))(shards)
        return tx.step(grads, state, shards)

    for data in BATCHES:
        shards, state = step(shards, state, split(data, mesh))
    assert_close(jzero.gather_params(shards), by_optax(clip=False), 5e-6)


def lion(lr, zero):
    return jzero.zero(optax.lion(lr), zero=zero)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(jzero.adamw, "float32", marks=pytest.mark.slow),
        (jzero.adamw, "bfloat16"),
        (lion, "float32"),
        pytest.param(lion, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_optax_face_and_master_parameters(make_mesh, make, dtype: str):
    """``update`` and ``apply_updates`` give the parameters of ``step``, and of eager sync."""
    mesh, params = make_mesh(4), deep(dtype=dtype)
    tx, eager = make(1e-2, zero=lazy_config(mesh)), make(1e-2, zero=config_for(mesh))
    shards = shard(params, tx, mesh, True)
    state = tx.init(shards)
    value_and_grad = jzero.value_and_grad(lazy_loss, zero=tx)

    @jax.jit
    def both(shards, state, data):
        _, grads = value_and_grad(shards, data)
        updates, _ = tx.update(grads, state, shards)
        return tx.step(grads, state, shards), optax.apply_updates(shards, updates), grads

    for data in BATCHES[:2]:
        (stepped, state), applied, grads = both(shards, state, split(data, mesh))
        assert_bits(applied, stepped)
        shards = stepped
    assert {x.dtype for x in grads.buckets} == {jnp.dtype("float32")}
    assert grads.layout == shards.layout == state.layout == tx.layout(shards)
    want, _ = train("plain", eager, mesh, params, BATCHES[:2], deep_loss)
    assert_close(jzero.gather_params(shards), want, 2e-6 if dtype == "float32" else 2**-7)


def test_accumulated_into_shards(make_mesh):
    mesh, params, steps = make_mesh((2, 2)), deep(), 4
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = shard(params, tx, mesh, True)
    batches = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), BATCHES[0])
    compiled = (
        jax.jit(jzero.accumulate(rematted, steps=steps, sync="every", zero=tx))
        .lower(shards, batches)
        .compile()
    )
    _, grads = compiled(
        *jax.device_put(
            (shards, batches),
            (
                jax.tree.map(lambda x: x.sharding, shards),
                NamedSharding(mesh, P(None, ("replica", "data"))),
            ),
        )
    )
    _, whole = jzero.value_and_grad(lazy_loss, zero=tx)(shards, split(BATCHES[0], mesh))
    for a, b in zip(grads.buckets, whole.buckets, strict=True):
        # Sums of float32 in another order: what cancels is off by the rounding of its terms.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.abs(b).max()))
    # A reduce-scatter a bucket in the loop over micro-batches, none after it.
    assert "reduce-scatter" not in compiled.as_text().split("\nENTRY ")[1]
    with pytest.raises(ValueError, match="sync='every'"):
        jzero.accumulate(lazy_loss, steps=steps, zero=tx)(shards, batches)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["4", "2x2"])
def test_weights(make_mesh, shape):
    """Parts of unequal weight, one of them empty: its mean is 0/0 and counts nothing."""
    mesh, params = make_mesh(shape), deep()
    eager, tx = (jzero.adamw(1e-2, zero=c(mesh)) for c in (config_for, lazy_config))
    weights = jnp.arange(48) % 3 * (jnp.arange(48) >= 12)  # the first device has none

    def weighted(params, data, gather=lambda x: x):
        x, y, w = data
        total = w.sum()
        p = gather(params["first"])["kernel"], gather(params["last"])
        out = jnp.tanh(x @ p[0]) @ p[1]
        return (((out - y) ** 2).mean(-1) * w).sum() / total, total

    data = split((*BATCHES[0], weights.astype(jnp.float32)), mesh)
    want_loss, want = jzero.value_and_grad(weighted, weighted=True, zero=eager)(
        replicated(params, mesh), data
    )
    shards = shard(params, tx, mesh, True)
    loss, grads = jzero.value_and_grad(
        functools.partial(weighted, gather=jzero.gather_params), weighted=True, zero=tx
    )(shards, data)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for zero, have in ((eager, want), (tx, grads)):
        assert np.isfinite(jzero.global_norm(have, zero=zero.config))
    moved, _ = tx.step(grads, tx.init(shards), shards)
    wanted, _ = eager.step(want, eager.init(replicated(params, mesh)), replicated(params, mesh))
    assert_close(jzero.gather_params(moved), wanted, 1e-5)


def test_a_bad_gradient_changes_nothing(make_mesh):
    mesh, params = make_mesh(4), deep()
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = shard(params, tx, mesh, True)
    state = tx.init(shards)
    x, y = BATCHES[0]
    _, grads = jzero.value_and_grad(lazy_loss, zero=tx)(
        shards, split((x.at[-1, 0].set(jnp.inf), y), mesh)
    )
    new, after = tx.step(grads, state, shards)
    assert_bits(new, shards)
    assert_bits(after.inner, state.inner)
    assert (int(after.skipped), int(after.step), bool(after.finite)) == (1, 0, False)


# ---------------------------------------------------------------- groups, frozen leaves


def test_adapters_of_a_frozen_model(make_mesh):
    """LoRA: the base is sharded and gathered, and never reduced; adapters decay or not."""
    mesh = make_mesh(4)
    params: dict[str, Any] = deep()
    rng = np.random.default_rng(3)
    for name, shape in {"a": (LAYERS, 8, 2), "b": (LAYERS, 2, 8)}.items():
        params["layers"][name] = jnp.float32(rng.normal(size=shape))

    def label(path):
        return "adapter" if path in ("layers/a", "layers/b") else "frozen"

    def loss(params, data, gather=lambda x: x):
        def adapted(p):
            if not isinstance(p, dict) or "a" not in p:
                return p
            return {**p, "kernel": p["kernel"] + p["a"] @ p["b"]}

        return deep_loss(params, data, lambda part: adapted(gather(part)))

    options = {
        "param_labels": label,
        "overrides": {"adapter": {"learning_rate": 1e-3}},
        "mask": lambda params: jax.tree.map_with_path(lambda path, _: path[-1].key == "a", params),
        "weight_decay": 0.1,
    }
    tx = jzero.adamw(1e-2, **options, zero=lazy_config(mesh, bucket_mb=1.0))
    shards, state = train_lazy(
        tx, mesh, params, BATCHES, functools.partial(loss, gather=jzero.gather_params), True
    )
    assert len(shards.layout.buckets) == 2  # with and without decay
    assert len(shards.plan.frozen.buckets) == 3
    assert state.layout == shards.layout
    have = jzero.gather_params(shards)
    assert_bits({**have, "layers": None}, {**params, "layers": None})
    assert_bits(have["layers"]["kernel"], params["layers"]["kernel"])
    eager = jzero.adamw(1e-2, **options, zero=config_for(mesh))
    want, _ = train("plain", eager, mesh, params, BATCHES, loss)
    assert_close(have, want, 1e-6)

    updates, _ = jax.jit(tx.update)(
        jax.tree.map(jnp.zeros_like, tx.zero_gradients(shards)), state, shards
    )
    assert_bits(optax.apply_updates(shards, updates).frozen, shards.frozen)

    step = jax.jit(
        jzero.value_and_grad(functools.partial(loss, gather=jzero.gather_params), zero=tx)
    )
    found = by_op(step.lower(shards, split(BATCHES[0], mesh)).compile())
    assert len(found["reduce-scatter"]) == 2
    adapters = {c.sizes for c in found["reduce-scatter"]}
    assert adapters == {(b.row_shard,) for b in shards.layout.buckets}


def test_indexed_like_the_parameters(make_mesh):
    mesh, params = make_mesh(2), deep(stacked=False)
    shards = jzero.shard_params(params, zero=lazy_config(mesh))
    assert len(shards["layers"]) == LAYERS
    assert list(shards) == sorted(params)
    for part, layer in zip(shards["layers"], params["layers"], strict=True):
        assert_bits(jzero.gather_params(part), layer)
    assert_bits(
        jzero.gather_params(shards.select(lambda p: {"x": p["last"], "y": p["layers"][1]})),
        {"x": params["last"], "y": params["layers"][1]},
    )
    # No bucket of one layer holds anything of another.
    for bucket in shards.layout.buckets:
        assert len({slot.path.rsplit("/", 1)[0] for slot in bucket.slots}) == 1
    with pytest.raises(KeyError):
        shards["nothing"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, m: jzero.shard_params(p, zero=m, stacked="layer"), "'layer'.*name no subtree"),
        (
            lambda p, m: jzero.shard_params(
                {"s": {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}}, zero=m, stacked="s"
            ),
            r"'s/b' has shape \(3,\).*leading dim",
        ),
        (lambda p, m: jzero.shard_params(jzero.shard_params(p, zero=m), zero=m), "got shards"),
        (lambda p, m: jzero.gather_params(p), "gather_params needs.*got dict"),
        (
            lambda p, m: jzero.adamw(1e-3, zero=m).init(jzero.shard_params(p, zero=m)["layers"]),
            "a part of what shard_params returned",
        ),
        (
            lambda p, m: jzero.adamw(1e-3, param_labels=lambda path: path, zero=m).init(
                jzero.shard_params(p, zero=m)
            ),
            r"shard_params\(params, zero=tx\)",
        ),
        (
            lambda p, m: jzero.adamw(1e-3, zero=dataclasses.replace(m, bucket_mb=1.0)).init(
                jzero.shard_params(p, zero=m)
            ),
            "bucket_mb=0.00048828125, and this is configured with bucket_mb=1.0",
        ),
    ],
)
def test_errors(make_mesh, call, text: str):
    with pytest.raises(ValueError, match=text):
        call(deep(), lazy_config(make_mesh(2)))


# ---------------------------------------------------------------- gathered one layer ahead


def scanned_ahead(params, data):
    """``deep_loss`` by ``scan_layers``, with arguments beside the parameters."""
    x, y = data

    def layer(x, p, scale, count):
        return jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"] * scale[count] + x

    x = jnp.tanh(x @ jzero.gather_params(params["first"])["kernel"])
    scale = jnp.ones(2) * jnp.mean(jzero.gather_params(params["last"])) ** 0
    x = jzero.scan_layers(layer, x, params["layers"], scale, jnp.int32(1))
    return jnp.mean((x @ jzero.gather_params(params["last"]) - y) ** 2)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1,), marks=pytest.mark.slow),
        (4,),
        pytest.param((2, 4), marks=pytest.mark.slow),
    ],
    ids=["1", "4", "2x4"],
)
def test_layers_gathered_ahead(make_mesh, shape):
    """Equal to the scan that gathers in its body: by probes, weights, and jax.grad."""
    mesh, params = make_mesh(shape), deep()
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = shard(params, tx, mesh, True)

    def heavy(loss):
        return lambda shards, data: (loss(shards, data), jnp.sum(jnp.abs(data[0])))

    def by_grad(loss):
        specs = jzero.partition_specs(shards)
        return jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=(specs, batch_axes(mesh)), out_specs=specs
        )

    for make in (
        lambda loss: jzero.value_and_grad(loss, zero=tx),
        lambda loss: jzero.value_and_grad(heavy(loss), weighted=True, zero=tx),
        by_grad,
    ):
        ways = [make(loss) for loss in (scanned_ahead, rematted)]
        both = jax.jit(lambda s, d: [way(s, d) for way in ways])  # noqa: B023
        have, want = both(shards, split(BATCHES[0], mesh))
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="needs shards of stacked layers alone"):
        jzero.value_and_grad(
            lambda s, _: jzero.scan_layers(lambda x, p: x, jnp.zeros(1), s).sum(), zero=tx
        )(shards, split(BATCHES[0], mesh))
