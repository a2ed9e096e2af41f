"""What the compilers make of the forms, for TPU and GPU pods that this machine does not have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels.adam_forms import CASES, ON_TPU, Case, options_of, random_of
from kernels.adam_oracle import Hyper
from kernels.test_adam_compiled import (
    TPUS,
    h200,  # noqa: F401  # pyright: ignore[reportUnusedImport]  (a fixture)
    tpu_kernels,
)

from jzero_kernels import adam
from jzero_kernels.adam import forms

N = 2**17 * 382  # of a bfloat16 bucket of 100 MB


def structs(case: Case, n: int) -> tuple[Any, ...]:
    """p, m, v, g of a case without values."""

    def array(dtype: Any, size: int = n) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.dtype(dtype))

    def moment(kind: str) -> Any:
        if not kind.startswith("scaled "):
            return array(kind)
        return adam.Scaled(array(kind.removeprefix("scaled ")), array("float32", n // 128))

    moments = moment(case.moments), moment(case.moments)
    if case.parameter == "float32":
        return array("float32"), *moments, array(case.grad)
    if case.parameter == "remainder":
        p: Any = adam.Remainder(array("bfloat16"), array("int16"))
    else:
        kept = moment("float32" if case.parameter == "master" else case.parameter)
        p = adam.Master(kept, array("bfloat16"))
    return p, *moments, array(case.grad)


def compile_case(
    topology, case: Case, n: int, replaced: bool = False, **options: Any
) -> tuple[Any, float]:
    """The compiled update on every device, its stored parts donated (``replaced``: the parameter
    that is used too, where it has the dtype of ``out``), and the least bytes it can move per
    parameter."""
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1), ("data",))

    def placed(tree: Any, spec: P, times: int) -> Any:
        def place(x: Any) -> jax.ShapeDtypeStruct:
            shape = tuple(times * dim for dim in x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree)

    p, m, v, g = structs(case, n)
    stored = forms.stored_part(p)
    visible = getattr(p, "visible", g)

    def update(stored, m, v, visible, g, scalars, *random):
        form = stored
        if isinstance(p, adam.Master):
            form = adam.Master(stored, visible)
        elif isinstance(p, adam.Remainder):
            form = adam.Remainder(visible, stored)
        chosen = options_of(case, **options)
        return adam.adam_update(form, m, v, g, scalars, *random, **chosen)

    random = random_of(case)
    step = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(*(P("data"),) * 5, P(), *(P() for _ in random)),
        out_specs=P("data"),
    )
    shards = placed((stored, m, v, visible, g), P("data"), mesh.size)
    scalars = placed((Hyper().scalars(), *random), P(), 1)
    gives_way = replaced and hasattr(p, "visible") and visible.dtype == jnp.dtype(case.out)
    donated = (0, 1, 2, 3) if gives_way else (0, 1, 2)
    compiled = jax.jit(step, donate_argnums=donated).lower(*shards, *scalars).compile()
    read = forms.parts((p, m, v, g))
    written = forms.parts((stored, m, v))
    moved = sum(x.size * x.dtype.itemsize for x in (*read, *written))
    return compiled, moved / n + jnp.dtype(case.out).itemsize


@pytest.mark.parametrize(
    ("chip", "name"),
    [("v5e:2x2", name) for name in ON_TPU] + [(chip, "remainder_e4m3") for chip in TPUS[1:]],
)
def test_tpu_one_kernel_moves_the_least(tpu_topology, chip, name):
    """A 100 MB bucket of bfloat16 parameters: 14.1 bytes a parameter with remainders and 8 bits,
    where float32 state needs 30."""
    compiled, least = compile_case(tpu_topology(chip), CASES[name], N, replaced=True)
    assert tpu_kernels(compiled) == 1
    assert compiled.cost_analysis()["bytes accessed"] / N <= 1.05 * least
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    if name == "remainder_e4m3":
        assert least == 14.125


@pytest.mark.parametrize("name", ["remainder", "remainder_e4m3", "float16"])
def test_tpu_takes_the_reference_where_the_kernel_cannot(tpu_topology, name):
    """Shards too short for whole blocks of scales, and float16: by "auto" the reference, by name
    an error."""
    n = 2**17 + 1024 if name == "float16" else 4096
    compiled, _ = compile_case(tpu_topology("v5e:2x2"), CASES[name], n)
    assert tpu_kernels(compiled) == (name == "remainder")
    if name != "remainder":
        with pytest.raises(ValueError, match=r"`backend` is 'tpu', and `.` is Scaled"):
            compile_case(tpu_topology("v5e:2x2"), CASES[name], n, backend="tpu")


@pytest.mark.parametrize("backend", ["auto", "triton", "mosaic_gpu"])
@pytest.mark.parametrize("name", CASES)
def test_gpu_in_place_without_a_temporary(h200, name, backend):  # noqa: F811
    if backend == "mosaic_gpu":
        pytest.importorskip("absl", reason="JAX's Mosaic GPU needs absl-py")
    scaled = "scaled" in CASES[name].moments
    n = 2**22
    if backend == "mosaic_gpu" and scaled:
        with pytest.raises(ValueError, match="is Scaled; accepted: arrays and 16-bit remainders"):
            compile_case(h200, CASES[name], n, backend=backend)
        return
    compiled, _ = compile_case(h200, CASES[name], n, backend=backend)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16
    kernels = compiled.as_text().count("custom-call(")
    assert kernels == (backend != "auto" or scaled)
