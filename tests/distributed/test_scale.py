"""What a step is for 8 devices, it is for thousands: the same plan, the same program."""

import collections
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays

import jzero
from jzero._layout import NARROW_TILE

LAYERS, WIDTH = 12, 1024
H200 = Path(__file__).parents[1] / "kernels" / "h200.txtpb"


def params() -> Any:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"in": array(WIDTH, 4 * WIDTH), "out": array(4 * WIDTH, WIDTH), "bias": array(WIDTH)}
    return {"layers": [layer] * LAYERS, "scale": array()}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["in"]) @ layer["out"] + layer["bias"][None]
    return jnp.mean((x * params["scale"]) ** 2)


def traced(mesh: Any, replica: str | None = None) -> tuple[jzero.ZeroState, Any]:
    """Shapes of the state, and a step traced for a mesh; a row of the batch a device."""
    zero = jzero.ZeroConfig(mesh=mesh, replica_axis=replica, bucket_mb=64)
    tx = jzero.adamw(1e-3, clip_norm=1.0, zero=zero)
    value_and_grad = jzero.value_and_grad(loss_fn, zero=tx)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(params, batch)
        return *tx.step(grads, state, params), loss

    def placed(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    shapes = params()
    state = jax.eval_shape(tx.init, shapes)
    batch = jax.ShapeDtypeStruct((mesh.size, WIDTH), jnp.float32)
    arguments = (
        placed(shapes, jax.tree.map(lambda _: P(), shapes)),
        placed(state, jzero.partition_specs(state)),
        placed(batch, P(tuple(mesh.axis_names))),
    )
    return state, jax.jit(step, donate_argnums=(0, 1)).trace(*arguments)


def equations(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_plan_and_trace_do_not_grow():
    plans: list[Any] = []
    programs: list[Any] = []
    for size in (8, 256, 2048, 65536):
        mesh = AbstractMesh((size,), ("data",), axis_types=(AxisType.Auto,))
        state, trace = traced(mesh)
        layout = state.layout
        assert layout.shards == size
        plans.append([(slot.path, slot.bucket, slot.offset) for slot in layout.slots])
        programs.append(collections.Counter(equations(trace.jaxpr.jaxpr)))
        # Padding stays below one tile a shard.
        for bucket in layout.buckets:
            assert bucket.padded - bucket.size < NARROW_TILE * size
    buckets = len(state.layout.buckets)
    assert buckets > 5
    assert all(plan == plans[0] for plan in plans)
    # Nothing is done once a device: a few operations more where a shard does not end with a chunk
    # of the norm's, and fewer where it is shorter than one.
    totals = [program.total() for program in programs]
    assert max(totals) <= 1.05 * totals[0]
    assert totals[3] < totals[0]
    for program in programs:
        assert program["reduce_scatter"] == program["all_gather_invariant"] == buckets
        assert program["psum_invariant"] == programs[0]["psum_invariant"]


_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def moved(compiled: Any) -> collections.Counter[str]:
    """How many arrays (but for scalars and the like) each kind of collective moves; XLA may move
    several at once."""
    count: collections.Counter[str] = collections.Counter()
    for line in compiled.as_text().splitlines():
        if match := _COLLECTIVE.search(line):
            results = [n for _, n in arrays(match[1]) if n > 1024]
            # The result of an asynchronous one holds its operands too, but for an all-reduce.
            both = match[3] and match[2] != "all-reduce"
            count[match[2]] += len(results) // 2 if both else len(results)
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pod", "size"), [("v5e:16x16", 256), ("v5p:8x16x16", 2048)], ids=["v5e-256", "v5p-2048"]
)
def test_compiled_for_a_pod(pod: str, size: int, tpu_topology: Any):
    mesh = jzero.distributed.make_mesh(devices=tpu_topology(pod).devices)
    assert mesh.size == size
    state, trace = traced(mesh)
    compiled = trace.lower().compile()
    buckets = len(state.layout.buckets)
    # What TPUs make of a reduce-scatter here is an all-reduce of which each keeps its part, and for
    # 2,048 chips of an all-gather too.
    have = moved(compiled)
    assert have.total() == 2 * buckets
    assert set(have) <= {"reduce-scatter", "all-reduce", "all-gather"}
    shard = 2 * 4 * sum(bucket.shard for bucket in state.layout.buckets)
    whole = 4 * sum(slot.size for slot in state.layout.slots)
    arguments = compiled.memory_analysis().argument_size_in_bytes
    assert whole + shard <= arguments < 1.05 * (whole + shard) + 2**20


@pytest.mark.slow
def test_compiled_for_64_hosts_of_8_gpus():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for GPU needs the CUDA wheels: pip install 'jax[cuda13]'")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=H200.read_text(), topology="64x1x8"
    )
    # Without a machine all are said to be one slice; with one, each host is.
    mesh = jzero.distributed.make_mesh(replica_axis="replica", shards=8, devices=topology.devices)
    assert dict(mesh.shape) == {"replica": 64, "data": 8}
    assert all(len({d.process_index for d in row}) == 1 for row in mesh.devices)
    state, trace = traced(mesh, "replica")
    compiled = trace.lower().compile(
        # XLA would merge the buckets again.
        {
            f"xla_gpu_{op}_combine_threshold_bytes": "0"
            for op in ("reduce_scatter", "all_gather", "all_reduce")
        }
    )
    buckets = len(state.layout.buckets)
    assert moved(compiled) == {
        "reduce-scatter": buckets,  # inside a host
        "all-reduce": buckets,  # of a shard, across hosts
        "all-gather": buckets,
    }
    text = compiled.as_text()
    for op, groups in (
        ("reduce-scatter", "{0,1,2,3,4,5,6,7},{8,"),
        ("all-gather", "{0,1,2,3,4,5,6,7},{8,"),
        ("all-reduce", "{0,8,16,24,32,40,48,"),
    ):
        assert re.search(rf" {op}(-start)?\(.*replica_groups={{{re.escape(groups)}", text)
