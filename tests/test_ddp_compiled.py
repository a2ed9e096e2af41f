"""For pods that this machine does not have, too, compilers leave a bucket a bucket."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import collectives
from test_ddp import BUCKETS, MIB, MLP, loss_fn

import jzero


def compiled_step(topology: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1), ("data",))
    graphdef, state = nnx.split(nnx.eval_shape(MLP))

    def struct(x: Any, *spec: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

    def step(state: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, state)
        ddp = jzero.DistributedDataParallel(model, mesh, init_sync=False, bucket_cap_mb=34 / MIB)
        loss, grads = ddp.value_and_grad(loss_fn)(model, batch)
        return loss, nnx.as_pure(grads)

    batch = tuple(struct(jnp.zeros((4 * mesh.size, n)), "data") for n in (3, 2))
    state = jax.tree.map(struct, nnx.as_pure(state))
    return jax.jit(step).lower(state, batch).compile()


def bucket_sizes(compiled: Any) -> list[int]:
    """Of each all-reduce, what it holds beside the loss."""
    found = collectives(compiled)
    assert {c.op for c in found} == {"all-reduce"}
    return sorted(sum(c.sizes) for c in found)


def test_one_all_reduce_a_bucket_on_tpu(tpu_topology):
    """Barriers alone do not keep them apart there."""
    found = bucket_sizes(compiled_step(tpu_topology("v5e:2x4")))
    assert len(found) == len(BUCKETS)
    assert sum(found) == sum(BUCKETS) + 1  # and the loss


def test_one_all_reduce_a_bucket_on_gpu(monkeypatch):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for GPU needs CUDA libraries: pip install 'jzero[cuda]'")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description = (Path(jzero.__file__).parent / "targets" / "h200.txtpb").read_text()
    found = bucket_sizes(
        compiled_step(
            topologies.get_topology_desc("", "cuda", target_config=description, topology="1x1x8")
        )
    )
    assert len(found) == len(BUCKETS)
    assert sum(found) == sum(BUCKETS) + 1
