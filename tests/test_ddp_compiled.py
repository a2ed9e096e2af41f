"""For pods that this machine does not have, too, compilers leave a bucket a bucket."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import collectives
from test_ddp import BUCKETS, MIB, MLP, loss_fn

import jzero
from jzero import _targets
from jzero._hlo import parse
from jzero._roofline import simulate


def compiled_step(
    devices: Any,
    make: Any = MLP,
    loss_fn: Any = loss_fn,
    shapes: Any = ((4, 3), (4, 2)),
    **options: Any,
) -> Any:
    """Loss and gradient; ``shapes`` are those of one device's part of the batch."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(-1), ("data",))
    graphdef, state = nnx.split(nnx.eval_shape(make))
    options = {"bucket_cap_mb": 34 / MIB, **options}

    def struct(x: Any, *spec: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

    def step(state: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, state)
        ddp = jzero.DistributedDataParallel(model, mesh, init_sync=False, **options)
        loss, grads = ddp.value_and_grad(loss_fn)(model, batch)
        return loss, nnx.as_pure(grads)

    batch = tuple(
        struct(jax.ShapeDtypeStruct((rows * mesh.size, *rest), jnp.float32), "data")
        for rows, *rest in shapes
    )
    state = jax.tree.map(struct, nnx.as_pure(state))
    return jax.jit(step).lower(state, batch).compile()


def bucket_sizes(compiled: Any) -> list[int]:
    """Of each all-reduce, what it holds beside the loss."""
    found = collectives(compiled)
    assert {c.op for c in found} == {"all-reduce"}
    return sorted(sum(c.sizes) for c in found)


def test_one_all_reduce_a_bucket_on_tpu(tpu_topology):
    """Barriers alone do not keep them apart there."""
    found = bucket_sizes(compiled_step(tpu_topology("v5e:2x4").devices))
    assert len(found) == len(BUCKETS)
    assert sum(found) == sum(BUCKETS) + 1  # and the loss


def test_one_all_reduce_a_bucket_on_gpu():
    pytest.importorskip("jax_cuda13_plugin", reason="compiling for GPU needs jzero[cuda]")
    found = bucket_sizes(compiled_step(_targets.target_of("gpu:h200:8").devices))
    assert len(found) == len(BUCKETS)
    assert sum(found) == sum(BUCKETS) + 1


@pytest.mark.parametrize("static_graph", [False, True])
def test_gradients_leave_during_the_backward_pass_on_gpu(static_graph):
    """The figures of docs/ddp.md: eight kernels of 64 MiB, and a bucket of all biases."""
    pytest.importorskip("jax_cuda13_plugin", reason="compiling for GPU needs jzero[cuda]")

    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(4096, 4096, rngs=nnx.Rngs(0)) for _ in range(8)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch[0]) - batch[1]) ** 2)

    target = _targets.target_of("gpu:h200:8")
    shapes, options = ((2048, 4096),) * 2, {"bucket_cap_mb": 25, "static_graph": static_graph}
    compiled = compiled_step(target.devices, Deep, loss_fn, shapes, **options)
    found = simulate(parse(compiled.as_text()), target).exchanges
    kernels = [x for x in found if x.collective.bytes > MIB]
    assert [x.collective.bytes >> 20 for x in kernels] == [64] * 8
    assert len(found) == 9
    assert all(x.between for x in kernels)
    # Half is hidden; a quarter if the biases' bucket, which is complete last, were the first.
    assert sum(x.exposed for x in kernels) < 0.55 * sum(x.seconds for x in kernels)
