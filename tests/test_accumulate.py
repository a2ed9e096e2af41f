"""Micro-batches equal the big batch; when they communicate, and in what they are summed."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    arrays,
    assert_bits,
    assert_close,
    batch,
    batch_axes,
    config_for,
    loss_fn,
    model,
    replicated,
    train_optax,
)

import jzero

SYNCS = ["last", "every"]


def micro_batches(steps: int, size: int = 16) -> tuple[jax.Array, jax.Array]:
    """(steps, size, ...) and the big batch that it is a part of."""
    parts = [batch(i, size) for i in range(steps)]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def big(batches: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def gradient(shards: jzero.GradShards) -> dict[str, np.ndarray]:
    """Every leaf by path, from global shards."""
    return {
        s.path: np.asarray(shards.buckets[s.bucket])[s.offset : s.offset + s.size].reshape(s.shape)
        for s in shards.layout.slots
    }


def by_path(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(x) for k, x in flat}


def assert_gradients(have: jzero.GradShards, want: Any, rtol: float = 2e-6) -> None:
    """Each leaf within ``rtol`` of its largest element."""
    ours, theirs = gradient(have), by_path(want)
    assert ours.keys() == theirs.keys()
    for path, g in theirs.items():
        assert np.abs(ours[path] - g).max() <= rtol * np.abs(g).max(), path
    for bucket, x in zip(have.layout.buckets, have.buckets, strict=True):
        assert not np.asarray(x)[bucket.size :].any()


# ---------------------------------------------------------------- equal to the big batch


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("steps", "shape"), [(1, 8), (2, 1), (4, (2, 4)), (7, 8), (7, (2, 4))], ids=str
)
def test_micro_batches_are_the_big_batch(make_mesh, steps, shape, sync):
    mesh, batches = make_mesh(shape), micro_batches(steps)
    fn = jzero.accumulate(loss_fn, steps=steps, sync=sync, zero=config_for(mesh))
    loss, grads = jax.jit(fn)(model(), batches)
    want_loss, want = jax.value_and_grad(loss_fn)(model(), big(batches))
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
    assert len(grads.layout.buckets) > 1
    assert_gradients(grads, want)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("sync", SYNCS)
def test_micro_batches_inside_shard_map(make_mesh, sync, check):
    mesh, batches = make_mesh((2, 4)), micro_batches(4)
    tx = jzero.adamw(1e-2, eps=0.1, zero=config_for(mesh))
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)

    def local(params, state, batches):
        loss, grads = jzero.accumulate(loss_fn, steps=4, sync=sync, zero=tx)(params, batches)
        return loss, grads, *tx.step(grads, state, params)

    specs = jzero.partition_specs(state)
    shards = jax.eval_shape(jax.jit(tx.zero_gradients), params)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P(None, *batch_axes(mesh))),
        out_specs=(jax.P(), jzero.partition_specs(shards), jax.P(), specs),
        check_vma=check,
    )
    loss, grads, params, _ = jax.jit(mapped)(params, state, batches)
    want_loss, want = jax.value_and_grad(loss_fn)(model(), big(batches))
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
    assert_gradients(grads, want)
    assert_close(params, train_optax(optax.adamw(1e-2, eps=0.1), model(), [big(batches)])[0])


def test_sums_instead_of_means(make_mesh):
    """average=False sums over devices; micro-batches are averaged all the same."""
    mesh, batches = make_mesh(4), micro_batches(2)
    for sync in SYNCS:
        mean, total = (
            jzero.accumulate(loss_fn, steps=2, sync=sync, zero=config_for(mesh, average=average))(
                model(), batches
            )
            for average in (True, False)
        )
        assert_close(total[0], mean[0])
        assert_close(gradient(total[1]), {k: 4 * g for k, g in gradient(mean[1]).items()})


# ---------------------------------------------------------------- compiled programs


def computations(text: str) -> dict[str, str]:
    """The computations of an HLO module by name."""
    found = re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    return {m[1]: m[2] for m in found}


def reached(text: str, caller: str) -> str:
    """All that is computed inside instructions of a kind: "while" or "conditional"."""
    known = computations(text)
    calls = re.compile(r"%([\w.\-]+)")
    todo = {
        name
        for body in known.values()
        for line in body.splitlines()
        if f" {caller}(" in line
        for name in calls.findall(line.split(f" {caller}(", 1)[1])
        if name in known
    }
    done: set[str] = set()
    while todo:
        name = todo.pop()
        done.add(name)
        todo |= {n for n in calls.findall(known[name]) if n in known} - done
    return "\n".join(known[name] for name in sorted(done))


def count(text: str, op: str) -> int:
    return len(re.findall(rf" {op}(?:-start)?\(", text))


def outside(text: str, op: str, caller: str) -> int:
    return count(text, op) - count(reached(text, caller), op)


COLLECTIVES = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]


def compiled_accumulation(mesh, sync: str):
    config = config_for(mesh)
    fn = jzero.accumulate(loss_fn, steps=5, sync=sync, zero=config)
    params = replicated(model(), mesh)
    batches = jax.device_put(
        micro_batches(5), jax.NamedSharding(mesh, jax.P(None, *batch_axes(mesh)))
    )
    layout = jzero.adamw(1e-2, zero=config).layout(params)
    return jax.jit(fn).lower(params, batches).compile().as_text(), layout


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
def test_last_communicates_once_after_the_loop(make_mesh, shape):
    """Case 24: nothing in the loop; one reduce-scatter a bucket after it (and one all-reduce of
    the shard over replicas)."""
    text, layout = compiled_accumulation(make_mesh(shape), "last")
    loop = reached(text, "while")
    assert " dot(" in loop or "custom-call" in loop or "fusion" in loop  # it is the loop
    assert {op: count(loop, op) for op in COLLECTIVES} == dict.fromkeys(COLLECTIVES, 0)
    assert count(text, "reduce-scatter") == len(layout.buckets) > 1
    assert count(text, "all-gather") == 0


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
def test_every_scatters_in_the_loop(make_mesh, shape):
    """A reduce-scatter a bucket in the loop and none after it; beside the parameters themselves,
    the loop carries no array as large as one."""
    mesh = make_mesh(shape)
    text, layout = compiled_accumulation(mesh, "every")
    loop = reached(text, "while")
    assert count(loop, "reduce-scatter") == count(text, "reduce-scatter") == len(layout.buckets)
    assert count(text, "all-gather") == 0
    last, _ = compiled_accumulation(mesh, "last")
    for kernel in (6 * 7, 7 * 5):
        assert carried_floats(text).count(kernel) == 1
        assert carried_floats(last).count(kernel) == 2  # so the check can tell
    assert carried_floats(text).count(128) >= len(layout.buckets)


def carried_floats(text: str) -> list[int]:
    types = re.findall(r"= (\([^\n]*?\)) while\(", text)
    assert len(types) == 1
    return [size for dtype, size in arrays(types[0]) if dtype == "f32"]


@pytest.mark.parametrize("sync", SYNCS)
def test_what_is_accumulated(make_mesh, sync):
    """Of a bfloat16 model: a float32 loss, weight, and gradient; whole leaves, or a shard a
    bucket."""
    config = config_for(make_mesh(8))
    fn = jzero.accumulate(loss_fn, steps=5, sync=sync, zero=config)
    params = model(dtype=jnp.bfloat16)
    (scan,) = scans(jax.make_jaxpr(fn)(params, micro_batches(5)).jaxpr)
    carried = [v.aval for v in scan.outvars]  # without aux nothing else leaves the loop
    assert {x.dtype for x in carried} == {jnp.dtype(jnp.float32)}
    shapes = sorted(x.shape for x in carried)
    layout = jzero.adamw(1e-2, zero=config).layout(params)
    parts = [s.shape for s in layout.slots]
    assert shapes == sorted(
        [(), ()] + (parts if sync == "last" else [(b.shard,) for b in layout.buckets])
    )


def scans(jaxpr: Any) -> list[Any]:
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and eqn.primitive.name != "scan":
                found += scans(inner)
    return found


# ---------------------------------------------------------------- in what it is summed


@pytest.mark.parametrize("sync", SYNCS)
def test_bfloat16_gradients_add_up_in_float32(make_mesh, sync):
    """Case 26: 1024 micro-batches of g = 1; a bfloat16 sum stops at 256."""
    mesh, steps = make_mesh(8), 1024
    fn = jzero.accumulate(
        lambda p, x: p["w"].sum() * x.mean().astype(jnp.bfloat16),
        steps=steps,
        sync=sync,
        zero=config_for(mesh),
    )
    _, grads = jax.jit(fn)({"w": jnp.zeros(3, jnp.bfloat16)}, jnp.ones((steps, 8)))
    assert grads.buckets[0].dtype == jnp.float32
    assert (gradient(grads)["w"] * steps).tolist() == [1024.0] * 3


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_each_leaf_is_summed_as_its_own_dtype_allows(make_mesh, names, sync):
    """Case 46: a bfloat16 leaf beside a float32 one, whose gradients 1 + r/4096 need float32."""
    mesh, (low, full) = make_mesh(8), names
    params = {low: jnp.ones(3, jnp.bfloat16), full: jnp.ones(3)}

    def loss(p, r):
        return p[low].sum().astype(jnp.float32) + p[full].sum() * r.mean()

    r = 1 + jnp.arange(8.0) * 2**-12
    fn = jzero.accumulate(loss, steps=2, sync=sync, zero=config_for(mesh))
    grads = gradient(jax.jit(fn)(params, jnp.stack([r, r]))[1])
    assert grads[full].tolist() == [1.0008544921875] * 3
    assert grads[low].tolist() == [1.0] * 3


@pytest.mark.parametrize("sync", SYNCS)
def test_the_gradient_of_an_embedding(make_mesh, sync):
    """Case 28: rows looked up twice, in one micro-batch, in both, and on several devices."""
    mesh, rng = make_mesh(4), np.random.default_rng(0)
    table = jnp.zeros((96, 35, 256))
    ids = rng.integers(0, 5, (2, 8))
    ids[0, :2] = ids[1, 3] = 95
    weights = rng.integers(-4, 5, (2, 8, 35, 256)).astype(np.float32)  # so that sums are exact

    def loss(table, data):
        ids, weights = data
        return (table[ids] * weights).sum() / ids.shape[0]

    want = np.zeros(table.shape, np.float32)
    np.add.at(want, ids.reshape(-1), weights.reshape(-1, 35, 256) / 16)
    fn = jzero.accumulate(loss, steps=2, sync=sync, zero=config_for(mesh))
    grads = jax.jit(fn)(table, (jnp.asarray(ids), jnp.asarray(weights)))[1]
    (have,) = gradient(grads).values()
    assert_bits(have, want + 0.0)


# ---------------------------------------------------------------- the wire


def reduced(mesh, per_device: np.ndarray, **precision: Any) -> np.ndarray:
    """The mean over devices of a gradient that is another on each, sent as told."""
    config = config_for(mesh, bucket_mb=1.0, precision=jzero.Precision(**precision))
    tx = jzero.adamw(1e-2, zero=config)
    params = {"w": jnp.zeros(per_device.shape[1], per_device.dtype)}
    shards = jax.eval_shape(jax.jit(tx.zero_gradients), params)
    mapped = jax.shard_map(
        lambda g: tx.reduce({"w": g[0]}, params),
        mesh=mesh,
        in_specs=batch_axes(mesh),
        out_specs=jzero.partition_specs(shards),
        check_vma=False,
    )
    return gradient(jax.jit(mapped)(per_device))["w"]


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_narrow_wire_and_a_wide_sum(make_mesh, wire, shape):
    """Megatron-LM's test: 100,000 elements of U[0, 1): the float32 sum, which a narrow one is
    not."""
    mesh = make_mesh(shape)
    draws = np.random.default_rng(0).random((8, 100_000), np.float32)
    grads = np.asarray(jnp.asarray(draws, wire))
    exact = grads.astype(np.float64).mean(0)
    wide = reduced(mesh, grads, grad_sync=wire, accumulate="float32")
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-8)
    narrow = reduced(mesh, grads, grad_sync=wire)
    assert not np.allclose(narrow, exact)
    assert np.abs(narrow - exact).mean() > 100 * np.abs(wide - exact).mean()


@pytest.mark.parametrize("value", [16384.0, 2.0**-24])
def test_a_wide_sum_has_neither_limit_of_float16(make_mesh, value):
    """Case 18: eight of them overflow a float16 sum; an eighth of the other is zero in it."""
    grads = np.full((8, 40), value, np.float16)
    wide = reduced(make_mesh(8), grads, grad_sync="float16", accumulate="float32")
    assert wide.tolist() == [value] * 40


def test_a_wide_sum_sends_narrow_elements(make_mesh):
    """One all-to-all of two bytes an element a bucket, and no reduce-scatter."""
    mesh = make_mesh(8)
    config = config_for(
        mesh, precision=jzero.Precision(grad_sync=jnp.bfloat16, accumulate="float32")
    )
    fn = jzero.value_and_grad(loss_fn, zero=config)
    params, data = replicated(model(), mesh), batch()
    buckets = jzero.adamw(1e-2, zero=config).layout(params).buckets
    # XLA's CPU backend widens 16-bit collectives, so this looks at what it is given.
    text = jax.jit(fn).lower(params, data).as_text()
    sent = re.findall(r"all_to_all.*?-> tensor<([^>]*)>", text, re.S)
    assert len(sent) == len(buckets)
    assert all(one.endswith("xbf16") for one in sent)
    assert "reduce_scatter" not in text
    _, grads = jax.jit(fn)(params, data)
    assert_gradients(grads, jax.grad(loss_fn)(model(), data), 2**-7)


def test_a_wide_sum_of_float32_is_refused():
    with pytest.raises(ValueError, match=r"accumulate='float32'.*grad_sync is float32"):
        jzero.Precision(accumulate="float32")


# ---------------------------------------------------------------- weights


def token_loss(params: Any, data: Any) -> tuple[jax.Array, jax.Array]:
    """Mean over the tokens that count, 0/0 where there is none, and their number."""
    values, mask = data
    tokens = mask.sum()
    return (jnp.sin(params["w"][None, None] * values) * mask).sum() / tokens, tokens


@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("sync", SYNCS)
def test_token_counts_that_differ(make_mesh, sync, average):
    """Cases 15, 16: over devices and micro-batches; some have none, whose mean is NaN."""
    mesh, rng = make_mesh((2, 4)), np.random.default_rng(0)
    values = rng.normal(size=(3, 16, 5)).astype(np.float32)
    mask = (rng.random((3, 16, 5)) < 0.5).astype(np.float32)
    mask[1, 4:6] = 0  # one device in one micro-batch
    mask[:, 10:12] = 0  # one device in all of them
    mask[2] = 0  # a whole micro-batch: the last one was short
    params = {"w": jnp.float32(0.7)}
    fn = jzero.accumulate(
        token_loss, steps=3, sync=sync, weighted=True, zero=config_for(mesh, average=average)
    )
    loss, grads = jax.jit(fn)({"w": params["w"]}, (values, mask))
    v = values[mask > 0].astype(np.float64)
    assert float(loss) == pytest.approx(np.sin(0.7 * v).mean(), rel=2e-6)
    assert float(gradient(grads)["w"]) == pytest.approx((v * np.cos(0.7 * v)).mean(), rel=2e-6)


@pytest.mark.parametrize("sync", SYNCS)
def test_no_weight_at_all_is_no_gradient(make_mesh, sync):
    mesh = make_mesh(4)
    fn = jzero.accumulate(token_loss, steps=2, sync=sync, weighted=True, zero=config_for(mesh))
    data = (jnp.ones((2, 8, 5)), jnp.zeros((2, 8, 5)))
    loss, grads = jax.jit(fn)({"w": jnp.float32(0.7)}, data)
    assert float(loss) == 0
    assert_bits(gradient(grads)["w"], np.float32(0))


def test_nan_where_there_is_weight_is_not_hidden(make_mesh):
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    fn = jzero.accumulate(token_loss, steps=2, weighted=True, zero=tx)
    values = jnp.ones((2, 8, 5)).at[1, 3, 2].set(jnp.nan)
    params = {"w": jnp.float32(0.7)}
    _, grads = fn(params, (values, jnp.ones((2, 8, 5))))
    new, state = tx.step(grads, tx.init(params), params)
    assert_bits(jax.device_get(new), jax.device_get(params))
    assert int(state.skipped) == 1


# ---------------------------------------------------------------- aux and arguments


@pytest.mark.parametrize("sync", SYNCS)
def test_aux_of_every_micro_batch(make_mesh, sync):
    mesh, x = make_mesh(4), jnp.arange(24.0).reshape(3, 8)

    def loss(params, data):
        aux = {"mean": data.mean(), "count": jnp.int32(data.size), "rows": 2 * data}
        return params["w"] * data.mean(), aux

    fn = jzero.accumulate(loss, steps=3, sync=sync, has_aux=True, zero=config_for(mesh))
    (value, aux), grads = jax.jit(fn)({"w": jnp.float32(1)}, x)
    assert float(value) == float(gradient(grads)["w"]) == 11.5
    assert aux["mean"].tolist() == [3.5, 11.5, 19.5]
    assert aux["count"].tolist() == [8, 8, 8]
    assert_bits(jax.device_get(aux["rows"]), np.asarray(2 * x))


def test_small_arrays_go_whole_to_each_device(make_mesh):
    """One element a step, such as a PRNG key or a coefficient."""
    mesh = make_mesh(4)

    def loss(params, data):
        x, factor = data
        assert factor.shape == ()
        return params["w"] * x.mean() * factor

    fn = jzero.accumulate(loss, steps=2, zero=config_for(mesh))
    data = (jnp.ones((2, 8)), jnp.array([3.0, 5.0]))
    assert gradient(fn({"w": jnp.float32(1)}, data)[1])["w"] == 4


@pytest.mark.parametrize("steps", [0, -1, True, 2.0])
def test_steps_is_a_count(make_mesh, steps):
    with pytest.raises(ValueError, match="steps="):
        jzero.accumulate(loss_fn, steps=steps)
    with pytest.raises(ValueError, match="steps="):
        jzero.MultiSteps(jzero.adamw(1e-2), steps)


def test_wrong_batches_are_named(make_mesh):
    zero = config_for(make_mesh(4))
    with pytest.raises(ValueError, match="sync='first': use 'last' or 'every'"):
        jzero.accumulate(loss_fn, steps=2, sync="first")
    fn = jzero.accumulate(lambda p, b: p.sum() * b["x"].mean(), steps=2, zero=zero)
    with pytest.raises(ValueError, match=r"batches\['x'\] has shape \(3, 8\).*steps=2"):
        fn(jnp.ones(3), {"x": jnp.ones((3, 8))})
    with pytest.raises(ValueError, match=r"'x'\] has 6 elements in dim 1, which 4 devices"):
        fn(jnp.ones(3), {"x": jnp.ones((2, 6))})
    with pytest.raises(ValueError, match="for others there is optax"):
        jzero.MultiSteps(optax.sgd(1.0), 2)


# ---------------------------------------------------------------- MultiSteps


def scanned(tx: Any, face: str = "update", grad_scale: bool = False) -> Any:
    """A jitted scan over micro-batches of a drop-in program, gradients scaled if asked."""

    def body(carry, data):
        params, state = carry
        scale, data = data
        grads = jax.grad(lambda p, d: loss_fn(p, d) * scale)(params, data)
        extra = {"grad_scale": scale} if grad_scale else {}
        if face == "step":
            return tx.step(grads, state, params, **extra), None
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda params, state, data: jax.lax.scan(body, (params, state), data)[0])


STEPS = 3


@pytest.mark.parametrize("face", ["update", "step"])
def test_multi_steps_in_a_scan(make_mesh, face):
    """As optax.MultiSteps and as big batches: two windows and one micro-batch over."""
    mesh, batches = make_mesh(4), micro_batches(7)
    ones = jnp.ones(7)
    optimizer = optax.MultiSteps(optax.adamw(1e-2), STEPS)
    want, _ = scanned(optimizer)(model(), optimizer.init(model()), (ones, batches))
    windows = [jax.tree.map(lambda x, i=i: x[3 * i : 3 * i + 3], batches) for i in range(2)]
    large, _ = train_optax(optax.adamw(1e-2), model(), [big(w) for w in windows])
    tx = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), STEPS)
    params = replicated(model(), mesh)
    params, state = scanned(tx, face)(params, jax.jit(tx.init)(params), (ones, batches))
    assert_close(params, want)
    assert_close(params, large)
    assert (int(state.micro_step), int(state.inner.step)) == (1, 2)
    assert_gradients(
        state.grads, jax.grad(loss_fn)(large, jax.tree.map(lambda x: x[6], batches)), 1e-5
    )


def test_multi_steps_with_a_scale_that_changes(make_mesh):
    """Each micro-batch is divided by the scale that it had."""
    mesh, batches = make_mesh(4), micro_batches(6)
    tx = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), STEPS)
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    scales = jnp.asarray(2.0 ** np.array([10, 9, 9, 9, 8, 12]))
    have, _ = scanned(tx, "step", grad_scale=True)(params, state, (scales, batches))
    want, _ = scanned(tx, "step")(params, state, (jnp.ones(6), batches))
    assert_close(have, want)


def test_a_nan_skips_its_window_and_no_other(make_mesh):
    """Case 44: the second of three micro-batches."""
    mesh, (x, y) = make_mesh(4), micro_batches(9)
    bad = (x, y.at[4, 7, 1].set(jnp.nan))
    tx = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), STEPS)
    params = replicated(model(), mesh)
    start = jax.jit(tx.init)(params)
    have, state = scanned(tx, "step")(params, start, (jnp.ones(9), bad))
    good = jax.tree.map(lambda x: jnp.concatenate([x[:3], x[6:]]), (x, y))
    want, clean = scanned(tx, "step")(params, start, (jnp.ones(6), good))
    assert_bits(have, want)
    assert_bits(state.inner.inner, clean.inner.inner)
    assert (int(state.inner.step), int(state.inner.skipped)) == (2, 1)
    assert all(np.isfinite(np.asarray(b)).all() for b in state.grads.buckets)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_multi_steps_inside_shard_map(make_mesh, check):
    """A Python loop; partition_specs knows the state, whose accumulator is a shard."""
    mesh, batches = make_mesh((2, 4)), micro_batches(2 * STEPS)
    tx = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), STEPS)
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)
    specs = jzero.partition_specs(state)
    assert specs.micro_step == jax.P()
    assert set(specs.grads.buckets) == {jax.P("data")}

    def local(params, state, data):
        return tx.step(jax.grad(loss_fn)(params, data), state, params)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), specs, batch_axes(mesh)),
        out_specs=(jax.P(), specs),
        check_vma=check,
    )
    step = jax.jit(mapped)
    for i in range(2 * STEPS):
        before = params
        params, state = step(params, state, jax.tree.map(lambda x, i=i: x[i], batches))
        if (i + 1) % STEPS:
            assert_bits(params, before)
    windows = [jax.tree.map(lambda x, i=i: x[3 * i : 3 * i + 3], batches) for i in range(2)]
    want, _ = train_optax(optax.adamw(1e-2), model(), [big(w) for w in windows])
    assert_close(params, want)


def test_multi_steps_gathers_at_the_end_of_a_window_only(make_mesh):
    """Each call reduce-scatters; the update and its all-gather are behind the condition."""
    mesh = make_mesh(8)
    inner = jzero.adamw(1e-2, zero=config_for(mesh))
    tx = jzero.MultiSteps(inner, STEPS)
    params = replicated(model(), mesh)
    state = jax.jit(tx.init)(params)

    def step(params, state, data):
        _, grads = jzero.value_and_grad(loss_fn, zero=inner)(params, data)
        return tx.step(grads, state, params)

    text = jax.jit(step).lower(params, state, batch()).compile().as_text()
    buckets = len(state.grads.layout.buckets)
    behind = reached(text, "conditional")
    assert outside(text, "all-gather", "conditional") == 0
    assert count(behind, "all-gather") == buckets
    assert outside(text, "reduce-scatter", "conditional") == buckets
    assert count(behind, "reduce-scatter") == 0


def test_multi_steps_adds_in_float32(make_mesh):
    """Case 26 for a loop: bfloat16 parameters, 1024 calls."""
    mesh = make_mesh(2)
    tx = jzero.MultiSteps(jzero.zero(optax.sgd(1.0), zero=config_for(mesh)), 1024)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    ones = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def run(params, state):
        def body(_, carry):
            return tx.step(ones, carry[1], carry[0])

        return jax.lax.fori_loop(0, 1023, body, (params, state))

    params, state = run(replicated(params, mesh), tx.init(params))
    assert gradient(state.grads)["w"].tolist() == [1023.0] * 3
    params, state = tx.step(ones, state, params)
    assert params["w"].tolist() == [0.0] * 3
