"""The programs that the compilers make, for TPU and GPU pods that this machine does not have."""

import functools
import importlib.util
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels.adam_oracle import Hyper

from jzero_kernels import adam
from jzero_kernels.adam.shapes import BUCKET_100MB, POLICIES
from jzero_kernels.adam.tpu import bytes_moved

TPUS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
H200 = pathlib.Path(__file__).with_name("h200.txtpb")  # device numbers alone


def compile_update(topology, n, policy="mixed", check_vma=True, **options) -> Any:
    """The update of a shard of n on every device of a topology, p, m, v donated."""
    policy = POLICIES[policy]
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1), ("data",))

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shards = [struct((n * mesh.size,), t, P("data")) for t in policy[:4]]
    scalars = adam.AdamScalars(*(struct((), x.dtype, P()) for x in Hyper().scalars()))
    step = jax.shard_map(
        functools.partial(adam.adam_update, out_dtype=policy.out, **options),
        mesh=mesh,
        in_specs=(*(P("data"),) * 4, P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    return jax.jit(step, donate_argnums=(0, 1, 2)).lower(*shards, scalars).compile()


def compile_stats(topology, n, **options) -> Any:
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1), ("data",))
    g = jax.ShapeDtypeStruct(
        (n * mesh.size,), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
    )
    step = jax.shard_map(
        lambda g: jax.lax.psum(adam.grad_stats(g, **options), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    return jax.jit(step).lower(g).compile()


def assert_in_place(compiled, n, policy="mixed"):
    memory = compiled.memory_analysis()
    widths = [jnp.dtype(t).itemsize for t in POLICIES[policy][:3]]
    assert memory.alias_size_in_bytes >= n * sum(widths)
    assert memory.temp_size_in_bytes < 2**20  # the kernel's own scratch; a shard is far larger
    text = compiled.as_text()
    assert not re.search(rf"\[{n}\]\S* copy\(", text)
    assert "conditional(" not in text
    assert "all-gather" not in text
    assert "all-reduce" not in text


def tpu_kernels(compiled):
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def sized_operations(compiled, n):
    """HLO operations with a result of the shard's length that do move it."""
    free = r"parameter|bitcast|get-tuple-element|tuple"
    entry = compiled.as_text().split("\nENTRY", 1)[1].split("\n", 1)[1]
    lines = [
        line for line in entry.splitlines() if re.search(rf"[\[,]({n}|{n // 128},128)\]", line)
    ]
    return [x for x in lines if not re.search(rf" ({free})\(", x)][0:9]


@pytest.mark.parametrize("chip", TPUS)
def test_tpu_bucket_of_100_mb(tpu_topology, chip):
    """One kernel, in place, no temporary, and the bytes that must move."""
    n = BUCKET_100MB
    compiled = compile_update(tpu_topology(chip), n)
    assert_in_place(compiled, n)
    assert tpu_kernels(compiled) == 1
    assert len(sized_operations(compiled, n)) == 1
    # XLA takes the kernel's traffic from the kernel; everything else in the program is its own.
    least = bytes_moved(n, *POLICIES["mixed"])
    assert least == 28 * n
    assert compiled.cost_analysis()["bytes accessed"] <= 1.05 * least


@pytest.mark.parametrize("chip", ["v5e:2x2"])
def test_tpu_reference_moves_the_same_bytes(tpu_topology, chip):
    n = 2**20 + 1
    for options in ({"backend": "reference"}, {}):  # auto: no free view, so the reference
        compiled = compile_update(tpu_topology(chip), n, **options)
        assert_in_place(compiled, n)
        assert tpu_kernels(compiled) == 0
        assert compiled.cost_analysis()["bytes accessed"] <= 1.05 * 28 * n


@pytest.mark.parametrize("n", [1, 1000, 2**20 + 1])
def test_tpu_kernel_of_any_length(tpu_topology, n):
    compiled = compile_update(tpu_topology("v5e:2x2"), n, backend="tpu", check_vma=False)
    assert tpu_kernels(compiled) == 1
    if n > 1024:
        assert_in_place(compiled, n)


@pytest.mark.parametrize("policy", ["bfloat16", "no_master", "float8_wire"])
def test_tpu_dtypes(tpu_topology, policy):
    n = 2**20
    compiled = compile_update(tpu_topology("v5e:2x2"), n, policy, emit="update", nesterov=True)
    assert_in_place(compiled, n, policy)
    assert tpu_kernels(compiled) == 1


def test_tpu_vmap(tpu_topology):
    """Batched scalars too; one by name is refused."""
    device = jax.sharding.SingleDeviceSharding(tpu_topology("v5e:2x2").devices[0])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=device)
    policy = POLICIES["mixed"]
    shards = [struct((3, 8192), t) for t in policy[:4]]
    update = functools.partial(adam.adam_update, out_dtype=policy.out)
    scalars = [
        (None, jax.tree.map(lambda x: struct((), x.dtype), Hyper().scalars())),
        (0, jax.tree.map(lambda x: struct((3,), x.dtype), Hyper().scalars())),
    ]
    for axis, operand in scalars:
        batched = jax.vmap(update, in_axes=(0, 0, 0, 0, axis))
        assert tpu_kernels(jax.jit(batched).lower(*shards, operand).compile()) == 0
    named = jax.vmap(functools.partial(update, backend="tpu"), in_axes=(0, 0, 0, 0, None))
    with pytest.raises(ValueError, match="adam_update: `backend` is 'tpu' under vmap; accepted"):
        jax.jit(named).lower(*shards, scalars[0][1])


def test_tpu_takes_no_float16(tpu_topology):
    compiled = compile_update(tpu_topology("v5e:2x2"), 2**16, "float16")
    assert tpu_kernels(compiled) == 0


def test_tpu_over_2_31_elements(tpu_topology):
    n = 2**31 + 1024
    compiled = compile_update(tpu_topology("v5p:2x2x1"), n)
    assert_in_place(compiled, n)
    assert tpu_kernels(compiled) == 1


@pytest.mark.parametrize("backend", ["auto", "tpu"])
def test_tpu_stats_read_once(tpu_topology, backend):
    n = BUCKET_100MB
    compiled = compile_stats(tpu_topology("v5e:2x2"), n, backend=backend)
    assert tpu_kernels(compiled) == (backend == "tpu")
    assert compiled.cost_analysis()["bytes accessed"] <= 1.05 * 2 * n
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("policy", [x for x in POLICIES if not x.startswith("float16")])
@pytest.mark.parametrize("n", [1024, 13 * 1024, 2**20 + 1, 2**22])
def test_tpu_every_combination(tpu_topology, chip, policy, n):
    for mode in ("decoupled", "l2"):
        compiled = compile_update(
            tpu_topology(chip), n, policy, backend="tpu", weight_decay_mode=mode
        )
        assert tpu_kernels(compiled) == 1
        if n > 2**20:
            assert_in_place(compiled, n, policy)
    for backend in ("auto", "tpu"):
        assert tpu_kernels(compile_stats(tpu_topology(chip), n, backend=backend)) <= 1


# --- GPU ---


@pytest.fixture(scope="module")
def h200():
    """Eight H200; needs the CUDA wheels of JAX, no GPU and no driver."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for GPU needs the CUDA wheels: pip install 'jax[cuda13]'")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    return topologies.get_topology_desc(
        "", "cuda", target_config=H200.read_text(), topology="1x1x8"
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("backend", "target"),
    [("auto", None), ("triton", "__gpu$xla.gpu.triton"), ("mosaic_gpu", "mosaic_gpu_v2")],
)
def test_gpu_bucket_of_100_mb(h200, backend, target, check_vma):
    if backend == "mosaic_gpu":
        pytest.importorskip("absl", reason="JAX's Mosaic GPU needs absl-py")
    n = BUCKET_100MB
    compiled = compile_update(h200, n, backend=backend, check_vma=check_vma)
    assert_in_place(compiled, n)
    targets = re.findall('custom_call_target="([^"]*)"', compiled.as_text())
    assert targets == ([target] if target else [])
    assert len(sized_operations(compiled, n)) == 1


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_gpu_unaligned(h200, backend):
    n = 2**20 + 1
    assert_in_place(compile_update(h200, n, backend=backend), n)


def test_gpu_stats_read_once(h200):
    compiled = compile_stats(h200, BUCKET_100MB)
    entry = compiled.as_text().split("ENTRY", 1)[1]
    readers = [x for x in entry.splitlines() if " fusion(%param" in x]
    assert len(readers) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
