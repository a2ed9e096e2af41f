"""What users of DDP rely on: averages, no_sync, unused and frozen parameters, order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from support import by_op, collectives, replicated
from test_ddp import BUCKETS, MIB, MLP, all_reduces, by_path, data, loss_fn, place, wrap

import jzero


class Scalars(nnx.Module):
    """Parameters of one element or a few, by name; the loss says what they do."""

    def __init__(self, **values: Any):
        for name, value in values.items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))

    def __call__(self, fn: Any) -> Any:
        return fn(self)


def f32(*values: float) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def linear(model: Any, x: jax.Array) -> jax.Array:
    """A loss whose gradient on each device is the mean of its part of x."""
    module = getattr(model, "module", model)
    return jnp.mean(x.astype(module.w[...].dtype)) * module.w[0]


def gradient(grads: Any, path: str = "w") -> np.ndarray:
    return by_path(grads)[path]


# ---------------------------------------------------------------- mean, sum, range


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
def test_mean_is_one_and_sum_is_the_number_of_devices(make_mesh, shape):
    mesh = make_mesh(shape)
    for average, in_collective, want in ((True, False, 1.0), (True, True, 1.0), (False, True, 8.0)):
        ddp = wrap(mesh, Scalars(w=f32(1)), average=average, average_in_collective=in_collective)
        loss, grads = ddp.value_and_grad(linear)(ddp, jnp.ones(8))
        assert gradient(grads) == want
        assert float(loss) == 1  # the mean over devices, whatever the gradients
        if average and in_collective:
            continue  # shards are divided after the sum, always
        tx = jzero.adamw(1.0, zero=ddp._static.options.config)
        _, shards = ddp.value_and_grad(linear, zero=tx)(ddp, jnp.ones(8))
        (shard,) = jax.tree.leaves(nnx.as_pure(shards))
        assert float(shard[0]) == want
        assert not np.asarray(shard[1:]).any()


def test_unequal_counts_by_sum_and_division(make_mesh):
    """Case 15. Three tokens of gradient 1 on one device, one of 5 on the other: 2, not 3."""
    mesh = make_mesh(2)
    ddp = wrap(mesh, Scalars(w=f32(1)), average=False)

    def total_loss(model: Any, batch: Any) -> Any:
        x, weight = batch
        return jnp.sum(x * weight) * model.module.w[0], jnp.sum(weight).astype(jnp.int32)

    batch = f32(1, 1, 1, 5, 9, 9), f32(1, 1, 1, 1, 0, 0)
    (_, count), grads = ddp.value_and_grad(total_loss, has_aux=True)(ddp, batch)
    assert int(count) == 4
    assert gradient(grads) / int(count) == 2


def test_a_device_that_has_run_out_of_data(make_mesh):
    """Case 16. The mean divides by the number of devices, whatever they hold: 3/4. The weighted
    sum divides by what there is: 1."""
    mesh, batch = make_mesh(4), (f32(1, 1, 1, 9), f32(1, 1, 1, 0))

    def masked_mean(model: Any, batch: Any) -> jax.Array:
        x, weight = batch
        return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1) * model.module.w[0]

    def masked_sum(model: Any, batch: Any) -> Any:
        x, weight = batch
        return jnp.sum(x * weight) * model.module.w[0], jnp.sum(weight).astype(jnp.int32)

    ddp = wrap(mesh, Scalars(w=f32(1)))
    loss, grads = ddp.value_and_grad(masked_mean)(ddp, batch)
    assert float(loss) == gradient(grads) == 3 / 4
    ddp = wrap(mesh, Scalars(w=f32(1)), average=False)
    (_, count), grads = ddp.value_and_grad(masked_sum, has_aux=True)(ddp, batch)
    assert int(count) == 3
    assert gradient(grads) / int(count) == 1


@pytest.mark.parametrize(
    ("options", "large", "small"),
    [
        ({"average_in_collective": False}, 16384.0, 0.0),
        ({"average_in_collective": True}, np.inf, 2.0**-24),
        ({"grad_reduce_dtype": jnp.float32}, 16384.0, 2.0**-24),
        ({"grad_reduce_dtype": "float32", "average_in_collective": True}, 16384.0, 2.0**-24),
    ],
    ids=["divide first", "sum first", "float32", "float32 sum first"],
)
def test_each_way_to_average_float16_shows_its_own_limit(make_mesh, options, large, small):
    def fn(model: Any, x: jax.Array) -> jax.Array:
        m = model.module
        return jnp.mean(x[:, 0]) * m.large[...] + jnp.mean(x[:, 1]) * m.small[...]

    half = jnp.float16
    model = Scalars(large=jnp.ones((), half), small=jnp.ones((), half))
    ddp = wrap(make_mesh(8), model, **options)
    x = jnp.asarray([[16384.0, 2.0**-24]] * 8, half)
    _, grads = ddp.value_and_grad(fn)(ddp, x)
    assert gradient(grads, "large").dtype == np.float16
    assert (gradient(grads, "large"), gradient(grads, "small")) == (large, small)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids="".join)
def test_each_dtype_has_its_own_buckets_and_wire(make_mesh, names):
    narrow, wide = names
    model = Scalars(**{narrow: jnp.ones(2, jnp.bfloat16), wide: jnp.ones(2, jnp.float32)})

    def fn(model: Any, x: jax.Array) -> jax.Array:
        m = model.module
        wide_part = jnp.mean(x) * jnp.sum(getattr(m, wide)[...])
        return wide_part + jnp.sum(getattr(m, narrow)[...]).astype(jnp.float32)

    ddp = wrap(make_mesh(8), model, bucket_cap_mb=1)
    x = 1 + jnp.arange(8, dtype=jnp.float32) * 2**-12
    _, grads = ddp.value_and_grad(fn)(ddp, x)
    np.testing.assert_array_equal(gradient(grads, wide), np.float32([1.0008544921875] * 2))
    assert gradient(grads, narrow).dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient(grads, narrow), 1)
    assert [b.dtype for b in ddp.buckets] == (
        ["float32", "bfloat16"] if wide == "b" else ["bfloat16", "float32"]
    )
    ddp = wrap(make_mesh(8), model, grad_reduce_dtype=jnp.float16, bucket_cap_mb=1)
    lowered = nnx.jit(ddp.value_and_grad(fn)).lower(ddp, x)
    assert lowered.as_text().count("stablehlo.all_reduce") == 3  # two buckets and the loss
    _, grads = lowered.compile()(ddp, x)
    assert gradient(grads, wide)[0] == 1  # in float16, every term but the largest two is 1


# ---------------------------------------------------------------- no_sync


def test_nothing_is_communicated_under_no_sync_and_all_at_its_end(make_mesh):
    mesh = make_mesh(8, types="auto")
    ddp = wrap(mesh)
    place(mesh, ddp)
    micro = [data(16, i) for i in range(4)]
    fn = ddp.value_and_grad(loss_fn)
    assert all_reduces(nnx.jit(fn).lower(ddp, micro[0]).compile()) == BUCKETS
    with ddp.no_sync():
        with ddp.no_sync():
            inner = nnx.jit(fn).lower(ddp, micro[0])
        outer = nnx.jit(fn).lower(ddp, micro[0])
        assert inner.as_text() == outer.as_text()
        silent = outer.compile()
        losses, grads = silent(ddp, micro[0])
        for batch in micro[1:3]:
            grads += silent(ddp, batch)[1]
    assert collectives(silent) == []
    assert losses.shape == (8,)
    assert isinstance(grads, jzero.LocalGrads)
    last = nnx.jit(lambda d, b, g: fn(d, b, accumulated=g)).lower(ddp, micro[3], grads).compile()
    assert all_reduces(last) == BUCKETS
    _, have = last(ddp, micro[3], grads)
    # Torch's rule: micro-batches add up.
    parts = [by_path(nnx.grad(loss_fn)(MLP(), batch)) for batch in micro]
    for path, x in by_path(have).items():
        np.testing.assert_array_equal(x, sum(p[path] for p in parts), err_msg=path)
    reduced = by_path(ddp.reduce(grads))
    for path, x in reduced.items():
        np.testing.assert_array_equal(x, sum(p[path] for p in parts[:3]), err_msg=path)
    # An exception leaves the wrapper as it was.
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert isinstance(fn(ddp, micro[0])[1], nnx.State)


def test_accumulated_gradients_reach_a_sharded_optimizer_by_one_reduce_scatter(make_mesh):
    mesh = make_mesh(8, types="auto")
    ddp = wrap(mesh)
    tx = jzero.adamw(0.1, zero=jzero.ZeroConfig(mesh=mesh, bucket_mb=34 / MIB))
    fn = ddp.value_and_grad(loss_fn, zero=tx)

    def step(ddp: Any, one: Any, two: Any) -> Any:
        with ddp.no_sync():
            _, grads = fn(ddp, one)
        return fn(ddp, two, accumulated=grads)[1], ddp.reduce(grads, zero=tx)

    one, two = data(16, 0), data(16, 1)
    compiled = nnx.jit(step).lower(ddp, one, two).compile()
    assert len(by_op(compiled)["reduce-scatter"]) == 2 * 3
    both, first = compiled(ddp, one, two)
    shards = nnx.to_flat_state(nnx.as_pure(both)).leaves[0]
    want = {
        p: x + by_path(nnx.grad(loss_fn)(MLP(), two))[p]
        for p, x in by_path(nnx.grad(loss_fn)(MLP(), one)).items()
    }
    for slot in shards.layout.slots:
        flat = np.asarray(shards.buckets[slot.bucket])[slot.offset : slot.offset + slot.size]
        np.testing.assert_array_equal(flat.reshape(slot.shape), want[slot.path])
    assert nnx.to_flat_state(nnx.as_pure(first)).leaves[0].layout == shards.layout


def test_a_loop_of_micro_batches_communicates_after_it(make_mesh):
    mesh = make_mesh(4, types="auto")
    ddp = wrap(mesh)
    graphdef, state = nnx.split(ddp)
    state = nnx.as_pure(state)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[data(8, i) for i in range(4)])

    def step(state: Any, batches: Any) -> Any:
        model = nnx.merge(graphdef, state)
        first, rest = (jax.tree.map(lambda x, s=s: x[s], batches) for s in (0, slice(1, None)))

        def micro(grads: Any, batch: Any) -> Any:
            inner = nnx.merge(graphdef, state)
            with inner.no_sync():
                loss, new = inner.value_and_grad(loss_fn)(inner, batch)
            return grads + new, loss

        with model.no_sync():
            _, start = model.value_and_grad(loss_fn)(model, first)
        grads, losses = lax.scan(micro, start, rest)
        return nnx.as_pure(model.reduce(grads)), losses

    compiled = jax.jit(step).lower(state, batches).compile()
    assert all_reduces(compiled) == BUCKETS
    bodies = [c for c in compiled.as_text().split("\n\n") if "while" in c.split("\n")[0]]
    assert not any(" all-reduce(" in body for body in bodies)
    have, losses = jax.jit(step)(state, batches)
    assert losses.shape == (3, 4)
    parts = [
        by_path(nnx.grad(loss_fn)(MLP(), jax.tree.map(lambda x, i=i: x[i], batches)))
        for i in range(4)
    ]
    for path, x in by_path(have).items():
        np.testing.assert_array_equal(x, sum(p[path] for p in parts), err_msg=path)


@pytest.mark.parametrize(
    ("find_unused", "static_graph"),
    [(False, True), (True, False), (True, True)],
    ids=["static_graph", "find_unused", "both"],
)
def test_a_parameter_used_only_under_no_sync_is_reduced(make_mesh, find_unused, static_graph):
    """Case 19. Micro-batch 1 uses a, micro-batch 2, which synchronises, uses b; then once more."""
    ddp = wrap(
        make_mesh(2),
        Scalars(a=f32(1), b=f32(1)),
        find_unused_parameters=find_unused,
        static_graph=static_graph,
        bucket_cap_mb=4 / MIB,
    )
    first = ddp.value_and_grad(lambda m, x: jnp.mean(x) * m.module.a[0])
    second = ddp.value_and_grad(lambda m, x: jnp.mean(x) * m.module.b[0])
    for one, two in ((f32(1, 3), f32(10, 30)), (f32(5, 7), f32(2, 4))):
        with ddp.no_sync():
            _, grads = first(ddp, one)
        _, grads = second(ddp, two, accumulated=grads)
        assert by_path(grads) == {"a": np.mean(one), "b": np.mean(two)}
    assert len(ddp.buckets) == 2


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "jzero.zero"])
def test_static_graph_and_no_sync_over_three_steps(make_mesh, sharded):
    """Case 20. After each step, not only the first: all devices equal, as on the big batch."""
    mesh = make_mesh(2)
    ddp = wrap(mesh, static_graph=True)
    config = jzero.ZeroConfig(mesh=mesh, bucket_mb=34 / MIB)
    tx = jzero.zero(optax.sgd(2**-6), zero=config) if sharded else optax.sgd(2**-6)
    optimizer = nnx.Optimizer(ddp, tx, wrt=nnx.Param)
    fn = ddp.value_and_grad(loss_fn, zero=tx if sharded else None)
    model = MLP()
    reference = nnx.Optimizer(model, optax.sgd(2**-6), wrt=nnx.Param)
    place(mesh, ddp, optimizer)

    @nnx.jit
    def train(ddp: Any, optimizer: Any, one: Any, two: Any) -> None:
        with ddp.no_sync():
            _, grads = fn(ddp, one)
        optimizer.update(ddp, fn(ddp, two, accumulated=grads)[1])

    for i in range(3):
        one, two = data(4, 2 * i), data(4, 2 * i + 1)
        train(ddp, optimizer, one, two)
        grads = jax.tree.map(jnp.add, nnx.grad(loss_fn)(model, one), nnx.grad(loss_fn)(model, two))
        reference.update(model, grads)
        assert ddp.first_difference() is None
        ours, theirs = by_path(nnx.state(ddp)), by_path(nnx.state(model))
        for path, x in theirs.items():
            np.testing.assert_allclose(ours[path], x, rtol=1e-6, err_msg=f"step {i}, {path}")


def test_bfloat16_gradients_accumulate_in_float32(make_mesh):
    ddp = wrap(make_mesh(1), Scalars(w=jnp.ones(1, jnp.bfloat16)))
    fn = ddp.value_and_grad(linear)
    with ddp.no_sync():
        _, grads = fn(ddp, jnp.ones(1))
    assert {x.dtype for x in grads.leaves} == {jnp.dtype("float32")}
    many = jax.tree.map(lambda g: g * 511, grads)
    _, total = fn(ddp, jnp.ones(1), accumulated=many)  # 511 + 1: bfloat16 would stop at 256
    assert gradient(total) == 512


# ---------------------------------------------------------------- unused and frozen


class Partly(nnx.Module):
    def __init__(self):
        self.used = nnx.Param(f32(1, 2, 3, 4, 5))
        self.frozen = nnx.Param(f32(*range(7)))
        self.detached = nnx.Param(f32(1, 1))
        self.whole = nnx.Param(jnp.int32(3))
        self.unused = nnx.Param(f32(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jnp.sum(lax.stop_gradient(self.detached[...])) + jnp.sum(self.frozen[...])
        return x[:, None] * self.used[...][None] * scale


def partly_loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum(model(x), axis=1))


def no_frozen(path: Any, _: Any) -> bool:
    return "frozen" not in path


@pytest.mark.parametrize("find", [False, True], ids=["", "find_unused"])
def test_unused_parameters_are_named_and_have_zero_gradient(make_mesh, find):
    mesh = make_mesh(8, types="auto")
    wrt = nnx.All(nnx.Param, no_frozen)
    ddp = wrap(mesh, Partly(), find_unused_parameters=find, bucket_cap_mb=1, wrt=wrt)
    x = jnp.arange(8.0)
    assert ddp.unused_parameters(partly_loss, x) == ("detached", "unused")
    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    optimizer = nnx.Optimizer(ddp, tx, wrt=nnx.All(nnx.Param, no_frozen, nnx.Not(_whole)))
    grads = ddp.value_and_grad(partly_loss)(ddp, x)[1]
    sent = [slot.path for bucket in ddp.buckets for slot in bucket.slots]
    assert sent == (["used"] if find else ["used", "unused", "detached"])
    have = by_path(grads)
    assert have.keys() == {"used", "detached", "unused", "whole"}  # frozen is not trained
    np.testing.assert_array_equal(have["used"], np.full(5, 3.5 * 23, np.float32))
    assert not have["unused"].any()
    assert not have["detached"].any()
    assert have["whole"] == 0
    before = by_path(nnx.state(ddp))
    optimizer.update(ddp, grads)
    after = by_path(nnx.state(ddp))
    # The rule: an unused parameter has a zero gradient; what the optimizer adds (decay) stays.
    np.testing.assert_array_equal(after["unused"], np.float32([0.99]))
    np.testing.assert_array_equal(after["frozen"], before["frozen"])
    assert after["whole"] == 3
    assert ddp.first_difference() is None


def test_unused_parameters_are_named_without_being_asked_to_find_them(make_mesh):
    ddp = wrap(make_mesh(2), Scalars(a=f32(1), b=f32(1), c=f32(1)))
    assert ddp.unused_parameters(lambda m, x: jnp.mean(x) * m.module.b[0], f32(1, 3)) == ("a", "c")


def _whole(path: Any, _: Any) -> bool:
    return "whole" in path


def test_a_parameter_unused_on_some_devices_counts_as_zero_there(make_mesh):
    ddp = wrap(make_mesh(8), Scalars(w=f32(1)), find_unused_parameters=True)

    def fn(model: Any, x: jax.Array) -> jax.Array:
        return lax.cond(x[0] > 0, lambda: x[0] * model.module.w[0], lambda: jnp.float32(0))

    _, grads = ddp.value_and_grad(fn)(ddp, f32(8, 0, 0, 0, 0, 0, 0, 0))
    assert gradient(grads) == 1


def test_nothing_trains(make_mesh):
    ddp = wrap(make_mesh(2), Scalars(w=f32(1)), wrt=nnx.BatchStat)
    loss, grads = ddp.value_and_grad(linear)(ddp, f32(1, 3))
    assert float(loss) == 2
    assert jax.tree.leaves(grads) == []
    assert ddp.buckets == ()


# ---------------------------------------------------------------- order of the backward pass


class Crossed(nnx.Module):
    """Runs c, a, b; by path they are a, b, c."""

    def __init__(self, remat: bool = False, tied: bool = False):
        for name in ("c", "a", "b", "unused"):
            setattr(self, name, nnx.Param(jnp.eye(3)))
        self.stack = nnx.Param(jnp.stack([jnp.eye(3)] * 2))
        self.last = nnx.Param(jnp.eye(3))
        self.remat, self.tied = remat, tied

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(_layer) if self.remat else _layer
        for w in (self.c, self.a, self.b):
            x = layer(x, w[...])
        x, _ = lax.scan(lambda x, w: (_layer(x, w), None), x, self.stack[...])
        return x @ (self.c if self.tied else self.last)[...]


def _layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def order(ddp: Any) -> list[str]:
    return [slot.path for bucket in ddp.buckets for slot in bucket.slots]


@pytest.mark.parametrize(
    ("remat", "tied"), [(False, False), (True, True)], ids=["plain", "remat and tied"]
)
def test_buckets_follow_the_backward_pass(make_mesh, remat, tied):
    mesh, x = make_mesh(2), jnp.linspace(0.1, 1, 12).reshape(4, 3)

    def fn(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    # The gradient of c is there when its first use is reached. Zeros come last.
    expected = ["stack", "b", "a", "c", "unused"]
    expected = [*expected, "last"] if tied else ["last", *expected]
    by_name = ["unused", "stack", "last", "c", "b", "a"]
    found = []
    for static_graph in (True, False):
        options = {"static_graph": static_graph, "bucket_cap_mb": 36 / MIB}
        ddp = wrap(mesh, Crossed(remat, tied), **options)
        assert order(ddp) == by_name  # before a program is seen
        with ddp.no_sync():
            _, local = ddp.value_and_grad(fn)(ddp, x)
        _, grads = ddp.value_and_grad(fn)(ddp, x)
        assert order(ddp) == (expected if static_graph else by_name)
        assert all(len(bucket.slots) == 1 for bucket in ddp.buckets)
        found.append(by_path(grads))
        # Case 21: what was accumulated before the order changed is not lost.
        for path, g in by_path(ddp.reduce(local)).items():
            np.testing.assert_array_equal(g, found[-1][path])
    want = by_path(nnx.grad(fn)(Crossed(remat, tied), x))
    for path, g in want.items():
        np.testing.assert_array_equal(found[0][path], found[1][path])
        np.testing.assert_allclose(found[0][path], g, rtol=1e-5, atol=1e-7, err_msg=path)


# ---------------------------------------------------------------- under other transformations


def test_vmap_remat_and_scan_around_it(make_mesh):
    mesh = make_mesh(2, types="auto")
    ddp = wrap(mesh, Scalars(w=f32(1, 2)))
    graphdef, state = nnx.split(ddp)

    def fn(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(x) * jnp.sum(model.module.w[...] ** 2)

    def grads_of(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return nnx.as_pure(model.value_and_grad(fn)(model, x)[1])

    x = f32(1, 3)
    # Two copies of the model at once.
    copies = jax.tree.map(lambda p: jnp.stack([p, 3 * p]), replicated(nnx.as_pure(state), mesh))
    both = jax.vmap(grads_of, (0, None))(copies, x)
    np.testing.assert_array_equal(np.asarray(both["w"]), [[4, 8], [12, 24]])

    def step(w: jax.Array, x: jax.Array) -> Any:
        grads = grads_of(nnx.State({"w": w}), x)
        return w - 0.125 * grads["w"], None

    w, _ = jax.jit(lambda w, xs: lax.scan(step, w, xs))(f32(1, 2), jnp.stack([x] * 3))
    np.testing.assert_array_equal(np.asarray(w), [0.125, 0.25])

    @nnx.remat
    def block(model: Any, x: jax.Array) -> jax.Array:
        return fn(model, x)

    _, grads = ddp.value_and_grad(block)(ddp, x)
    np.testing.assert_array_equal(gradient(grads), [4, 8])


def test_buckets_that_wait_are_mapped_and_differentiated(make_mesh):
    """What makes a bucket wait for another must not stop a transformation."""
    mesh = make_mesh(2, types="auto")
    ddp = wrap(mesh, Scalars(a=f32(1), b=f32(2), c=f32(3)), bucket_cap_mb=4 / MIB)
    graphdef, state = nnx.split(ddp)
    pure = replicated(nnx.as_pure(state), mesh)
    assert len(ddp.buckets) == 3

    def fn(model: Any, x: jax.Array) -> jax.Array:
        leaves = (model.module.a, model.module.b, model.module.c)
        return jnp.mean(x) * sum(jnp.sum(leaf[...] ** 3) for leaf in leaves)

    def grads_of(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return dict(nnx.as_pure(model.value_and_grad(fn)(model, x)[1]))

    def squares(state: Any, x: jax.Array) -> jax.Array:
        return sum((jnp.sum(g**2) for g in grads_of(state, x).values()), jnp.float32(0))

    x = f32(1, 3)  # mean 2: gradients are 6 w^2, their squares 36 w^4
    copies = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), pure)
    both = jax.jit(jax.vmap(grads_of, (0, None)))(copies, x)
    penalty = jax.jit(jax.grad(squares))(pure, x)
    _, change = jax.jvp(lambda s: grads_of(s, x), (pure,), (jax.tree.map(jnp.ones_like, pure),))
    for name, w in {"a": 1, "b": 2, "c": 3}.items():
        np.testing.assert_array_equal(np.asarray(both[name]), [[6 * w**2], [24 * w**2]])
        np.testing.assert_array_equal(np.asarray(penalty[name]), [144 * w**3])
        np.testing.assert_array_equal(np.asarray(change[name]), [12 * w])


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_per_sample_gradients_inside_shard_map(make_mesh, check):
    """jax#36886: summed over devices, they would not be the samples."""
    mesh = make_mesh(2)
    ddp = wrap(mesh, Scalars(w=f32(1, 2)))
    graphdef, state = nnx.split(ddp)

    def local(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        _, grads = model.value_and_grad(lambda m, x: jnp.mean(x @ m.module.w[...]))(model, x)
        return grads["w"][...]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check
    )
    x = f32(0, 1, 1, 1, 1, 0, 0, 0).reshape(4, 2)
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(state, x)), [0.5, 0.5])
