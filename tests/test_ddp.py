"""DistributedDataParallel of nnx models: one device on the big batch, in few collectives."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import by_op, collectives, replicated, split

import jzero

MIB = 2**20


class MLP(nnx.Module):
    """Integer weights, so that integer batches have gradients without rounding; awkward leaves."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(rng.integers(-2, 3, shape), jnp.float32))

        self.layers = nnx.List([nnx.Dict(kernel=draw(3, 4)), nnx.Dict(kernel=draw(4, 2))])
        self.scale = draw()
        self.empty = draw(0, 3)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> dict[str, Any]:
        for layer in self.layers:
            x = x @ layer["kernel"][...]
        self.calls[...] += 1
        return {"out": (x * self.scale[...], [jnp.sum(self.empty[...])])}


def data(size: int = 16, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-3, 4, (size, 3)), rng.integers(-3, 4, (size, 2))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    out, rest = model(x)["out"]
    return jnp.mean(jnp.sum(out * y, axis=1)) + rest[0]


def by_path(state: Any) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.as_pure(state))
    return {"/".join(map(str, path)): np.asarray(x) for path, x in flat}


def assert_same(have: Any, want: Any) -> None:
    ours, theirs = by_path(have), by_path(want)
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        assert ours[path].shape == x.shape, path
        assert ours[path].dtype == x.dtype, path
        np.testing.assert_array_equal(ours[path], x, err_msg=path)


def assert_devices_agree(node: Any) -> None:
    for path, x in nnx.to_flat_state(nnx.as_pure(nnx.state(node))):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        copies = [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
        assert len(copies) == jax.device_count(), path
        assert len(set(copies)) == 1, path


def wrap(mesh: Any, model: Any = None, **options: Any) -> jzero.DistributedDataParallel:
    model = MLP() if model is None else model
    replica = "replica" if "replica" in mesh.axis_names else None
    # Every wrapper would compile its broadcast; it has tests of its own.
    defaults = {"bucket_cap_mb": 34 / MIB, "replica_axis": replica, "init_sync": False}
    return jzero.DistributedDataParallel(model, mesh, **{**defaults, **options})


def place(mesh: Any, *nodes: Any) -> None:
    """Put what lies on one device on all of them, where a step leaves it: it compiles once."""

    def everywhere(x: jax.Array) -> jax.Array:
        return x if len(x.sharding.device_set) == mesh.size else replicated(x, mesh)

    for node in nodes:
        nnx.update(node, jax.tree.map(everywhere, nnx.as_pure(nnx.state(node))))


def all_reduces(compiled: Any) -> list[int]:
    """The size of each all-reduce in a compiled program, without scalars that joined it; there is
    no other collective in it."""
    found = collectives(compiled)
    assert {c.op for c in found} <= {"all-reduce"}
    sizes = [[n for n in c.sizes if n > 1] or [1] for c in found]
    assert all(len(n) == 1 for n in sizes), "buckets were merged"
    return sorted(n for (n,) in sizes)


BUCKETS = [1, 8, 12]  # of MLP with a cap of 34 bytes; the loss's scalar joins one of them


# ---------------------------------------------------------------- equal to the big batch


@pytest.mark.parametrize(
    ("shape", "types", "jit"),
    [
        (1, "auto", True),
        (2, "explicit", True),
        (8, "auto", False),
        (8, "explicit", False),
        ((2, 4), "auto", True),
        ((2, 4), "explicit", True),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_big_batch(make_mesh, shape, types, jit):
    mesh = make_mesh(shape, types=types)
    ddp, batch = wrap(mesh), data()
    fn = ddp.value_and_grad(loss_fn)
    loss, grads = (nnx.jit(fn) if jit else fn)(ddp, batch)
    model = MLP()
    want_loss, want = nnx.value_and_grad(loss_fn)(model, batch)
    assert float(loss) == float(want_loss)
    assert_same(grads, want)
    assert [[slot.path for slot in bucket.slots] for bucket in ddp.buckets] == [
        ["scale"],
        ["layers/1/kernel", "empty"],
        ["layers/0/kernel"],
    ]
    assert int(ddp.module.calls[...]) == 1
    # Native nnx code sees the model through the wrapper.
    with jax.set_mesh(mesh):
        place(mesh, ddp)
        native = nnx.jit(nnx.value_and_grad(loss_fn))
        native_loss, native_grads = native(ddp, split(batch, mesh))
    assert float(native_loss) == float(want_loss)
    assert_same(native_grads, want)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("shape", [1, 8, (2, 4)], ids=str)
def test_inside_the_users_shard_map(make_mesh, shape, check):
    mesh, batch = make_mesh(shape), data()
    ddp = wrap(mesh)
    graphdef, state = nnx.split(ddp)

    def local(state: Any, batch: Any) -> Any:
        inner = nnx.merge(graphdef, state)
        loss, grads = inner.value_and_grad(loss_fn)(inner, batch)
        return loss, nnx.as_pure(grads), inner.module.calls[...]

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(tuple(mesh.axis_names))),
            out_specs=P(),
            check_vma=check,
        )
    )
    state, batch = replicated(nnx.as_pure(state), mesh), split(batch, mesh)
    compiled = step.lower(state, batch).compile()
    loss, grads, calls = compiled(state, batch)
    want_loss, want = nnx.value_and_grad(loss_fn)(MLP(), data())
    assert float(loss) == float(want_loss)
    assert int(calls) == 1
    assert_same(grads, want)
    assert all_reduces(compiled) == (BUCKETS if mesh.size > 1 else [])


def test_the_first_bucket_leaves_early(make_mesh):
    ddp = wrap(make_mesh(2), bucket_cap_mb=1, first_bucket_mb=34 / MIB)
    assert [[slot.path for slot in bucket.slots] for bucket in ddp.buckets] == [
        ["scale"],
        ["layers/1/kernel", "layers/0/kernel", "empty"],
    ]


def test_a_bucket_that_is_complete_late_holds_up_no_other(make_mesh):
    """Each bucket waits for the one before it; that of the biases spans the model and is last."""

    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List(
                [nnx.Dict(w=nnx.Param(jnp.ones(64)), b=nnx.Param(jnp.ones(1))) for _ in range(3)]
            )

    ddp = wrap(make_mesh(2), Deep(), bucket_cap_mb=256 / MIB)
    assert [[slot.path for slot in bucket.slots] for bucket in ddp.buckets] == [
        ["layers/2/w"],
        ["layers/1/w"],
        ["layers/0/w"],
        ["layers/2/b", "layers/1/b", "layers/0/b"],
    ]


def test_leaves_of_a_bucket_leave_together(make_mesh):
    for options in ({}, {"average_in_collective": True}, {"average": False}):
        ddp = wrap(make_mesh(8, types="auto"), Wide(), bucket_cap_mb=100 / MIB, **options)
        compiled = nnx.jit(ddp.value_and_grad(wide_loss)).lower(ddp, jnp.ones((8, 4))).compile()
        sizes = sorted(tuple(sorted(n for n in c.sizes if n > 1)) for c in collectives(compiled))
        assert sizes == [(2, 3, 16), (2, 3, 16), (16,)]


def test_the_mean_takes_no_pass_of_its_own(make_mesh):
    """The next bucket waits for the sum. One that waited for the mean had it written to memory."""

    def accessed(average: bool) -> float:
        model = Equal(4096)
        ddp = wrap(make_mesh(8, types="auto"), model, bucket_cap_mb=16384 / MIB, average=average)

        @nnx.jit
        def step(ddp: Any, x: jax.Array) -> Any:
            _, grads = ddp.value_and_grad(wide_loss)(ddp, x)
            params = nnx.as_pure(nnx.state(ddp, nnx.Param))
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.as_pure(grads))

        compiled = step.lower(ddp, jnp.ones((8, 4))).compile()
        assert all_reduces(compiled) == [4096, 4096, 4096]
        return getattr(compiled, "compiled", compiled).cost_analysis()["bytes accessed"]

    assert abs(accessed(True) - accessed(False)) < 4096 * 4  # less than one leaf, read once


@pytest.mark.parametrize(
    ("platform", "results"), [("cpu", [1, 3]), ("tpu", [1, 1]), ("cuda", [1, 1])]
)
def test_buckets_wait_where_there_is_another_device(make_mesh, platform, results):
    """Three buckets of a leaf each. Only on CPU do the first two wait for the last."""
    for devices in (1, 2):
        ddp = wrap(make_mesh(devices, types="auto"))
        graphdef, state = nnx.split(ddp)

        def step(state: Any, batch: Any, graphdef: Any = graphdef) -> Any:
            model = nnx.merge(graphdef, state)
            return nnx.as_pure(model.value_and_grad(loss_fn)(model, batch)[1])

        traced = jax.jit(step).trace(nnx.as_pure(state), data())
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = re.findall(r"call @jzero_tied.* -> (.*)", text)
        assert [c.count("tensor<") for c in calls] == (results if devices > 1 else [])


def test_more_buckets_take_no_more_memory_on_cpu(make_mesh):
    """An update that need not wait for the backward pass had the old parameter copied first."""

    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(0)) for _ in range(6)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    mesh = make_mesh(8, types="auto")
    x = split(jnp.ones((64, 32)), mesh)

    def compiled(**options: Any) -> Any:
        ddp = wrap(mesh, Deep(), **options)
        optimizer = nnx.Optimizer(ddp, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        graphdef, state = nnx.split((ddp, optimizer))

        def step(state: Any, x: jax.Array) -> Any:
            ddp, optimizer = nnx.merge(graphdef, state)
            loss, grads = ddp.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(ddp, x)
            optimizer.update(ddp, grads)
            return nnx.as_pure(nnx.state((ddp, optimizer))), loss

        state = replicated(nnx.as_pure(state), mesh)
        return jax.jit(step, donate_argnums=0).lower(state, x).compile()

    one, many = compiled(bucket_cap_mb=1, first_bucket_mb=1), compiled(bucket_cap_mb=9000 / MIB)
    assert (len(collectives(one)), len(collectives(many))) == (1, 3)
    # A bias that the loss reads again may be; a kernel may not.
    assert not re.search(r"f32\[32,32\]\S* copy\(", many.as_text())
    temporary = [program.memory_analysis().temp_size_in_bytes for program in (one, many)]
    assert temporary[1] - temporary[0] < 32 * 32 * 4  # less than a kernel; pointers


class Equal(nnx.Module):
    def __init__(self, size: int):
        self.groups = nnx.List([nnx.Param(jnp.arange(float(size))) for _ in range(3)])


class Wide(nnx.Module):
    def __init__(self):
        self.groups = nnx.List([nnx.Param(jnp.ones(n)) for n in (3, 2, 16, 3, 2, 16, 16)])


def wide_loss(model: Any, x: jax.Array) -> jax.Array:
    return sum(jnp.sum(w[...] ** 2) for w in model.module.groups) * jnp.mean(x)


def test_fifty_steps_leave_the_devices_bit_identical_and_match_one_device(make_mesh):
    mesh = make_mesh(8, types="auto")

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(3, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, axis_name=None, rngs=rngs)
            self.last = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(nnx.relu(self.norm(self.first(x))))

    def mse(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch[0]) - batch[1]) ** 2)

    with jax.numpy_rank_promotion("allow"):  # flax's own broadcasting
        ddp = wrap(mesh, nnx.jit(lambda: Net(nnx.Rngs(0)))(), init_sync=True)
        optimizer = nnx.Optimizer(ddp, optax.adam(1e-2), wrt=nnx.Param)
        place(mesh, optimizer)

        @nnx.jit
        def step(ddp: Any, optimizer: Any, batch: Any) -> jax.Array:
            loss, grads = ddp.value_and_grad(mse)(ddp, batch)
            optimizer.update(ddp, grads)
            return loss

        losses = [float(step(ddp, optimizer, data(16, i % 4))) for i in range(50)]
    assert losses[-1] < losses[0]
    assert_devices_agree(ddp)
    assert_devices_agree(optimizer)


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "jzero.adamw"])
def test_training_matches_one_device(make_mesh, sharded):
    mesh = make_mesh(8, types="auto")
    ddp = wrap(mesh)
    arguments = {"learning_rate": 0.05, "eps": 1e-3, "weight_decay": 0.01}
    if sharded:
        config = jzero.ZeroConfig(mesh=mesh, bucket_mb=34 / MIB)
        tx = jzero.adamw(**arguments, zero=config)
    else:
        tx = optax.adamw(**arguments)
    optimizer = nnx.Optimizer(ddp.module, tx, wrt=nnx.Param)

    def train(ddp: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = ddp.value_and_grad(loss_fn, zero=tx if sharded else None)(ddp, batch)
        optimizer.update(ddp, grads)
        return loss

    def alone(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    place(mesh, ddp, optimizer)
    step = nnx.jit(train).lower(ddp, optimizer, data()).compile()
    found = by_op(step)
    buckets = len(ddp.buckets)
    assert buckets == 3
    if sharded:
        # One reduce-scatter a bucket; what is all-reduced are the loss and the norm's scalars.
        assert len(found["reduce-scatter"]) == buckets
        assert sum(n for c in found["all-reduce"] for n in c.sizes) < 8
    else:
        assert all_reduces(step) == BUCKETS

    model = MLP()
    reference = nnx.Optimizer(model, optax.adamw(**arguments), wrt=nnx.Param)
    reference_step = nnx.jit(alone)
    for i in range(5):
        loss = step(ddp, optimizer, data(16, i))
        want = reference_step(model, reference, data(16, i))
        assert float(loss) == pytest.approx(float(want), rel=1e-5, abs=1e-5)
    ours, theirs = by_path(nnx.state(ddp)), by_path(nnx.state(model))
    for path, x in theirs.items():
        np.testing.assert_allclose(ours[path], x, rtol=2e-5, atol=1e-6, err_msg=path)
    assert_devices_agree(ddp)


@pytest.mark.parametrize("sync", ["eager", "lazy"])
def test_shards_are_cut_as_the_optimizer_cuts_them(make_mesh, sync):
    """Else its step would gather the gradient and cut it anew. Lazy buckets hold a layer each."""
    mesh = make_mesh(4)
    tx = jzero.adamw(1e-2, zero=jzero.ZeroConfig(mesh=mesh, param_sync=sync))
    ddp = jzero.DistributedDataParallel(MLP(), mesh)
    _, grads = ddp.value_and_grad(loss_fn, zero=tx)(ddp, split(data(), mesh))

    def is_shards(x: Any) -> bool:
        return isinstance(x, jzero.GradShards)

    (shards,) = filter(is_shards, jax.tree.leaves(grads, is_leaf=is_shards))
    assert shards.layout == tx.layout(ddp.params)
    assert (len(shards.layout.buckets) > 1) == (sync == "lazy")
