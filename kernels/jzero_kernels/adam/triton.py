"""Adam on GPU through Triton: ``pl.pallas_call`` with Triton's compiler parameters.

For NVIDIA chips before compute capability 9.0 and for AMD, while JAX lowers to Triton. One program
a block; each element is loaded once and stored once, with a mask in the last block only if the
length asks for it. p, m and v are aliased to their results. No shared memory and no pipeline: the
many programs on a multiprocessor hide one another's loads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jzero_kernels.adam.blocks import block_for
from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    Coefficients,
    Emit,
    WeightDecayMode,
    adam_step,
    coefficients,
    opaque,
    runtime_zero,
)

DTYPES = ("float32", "bfloat16", "float16")


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    named = {"p": p.dtype, "m": m.dtype, "v": v.dtype, "g": g.dtype, "out_dtype": out_dtype}
    for name, dtype in named.items():
        if jnp.dtype(dtype).name not in DTYPES:
            return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(DTYPES)}"
    if p.size >= 2**31:
        return f"`p` has {p.size} elements; accepted: fewer than 2^31, for its 32-bit offsets,"
    return None


def _kernel(
    scalars_ref: Any,
    *refs: Any,
    n: int,
    block: int,
    nesterov: bool,
    weight_decay_mode: WeightDecayMode,
    emit: Emit,
) -> None:
    inputs, outputs = refs[:4], refs[4:]
    *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
    c = Coefficients(*values)
    finite = finite_value != 0
    start = pl.program_id(0) * block
    at = pl.ds(start, block)
    mask = None if n % block == 0 else start + jnp.arange(block, dtype=jnp.int32) < n
    p, m, v, g = (plt.load(ref.at[at], mask=mask) for ref in inputs)
    new = adam_step(p, m, v, g, c, nesterov=nesterov, weight_decay_mode=weight_decay_mode)
    state = [
        jnp.where(finite, x.astype(old.dtype), old) for x, old in zip(new, (p, m, v), strict=False)
    ]
    if emit == "update":
        out = jnp.where(finite, new.u, jnp.full_like(new.u, -0.0))
    else:
        out = state[0]
        if out.dtype.itemsize < outputs[3].dtype.itemsize:
            out = opaque(out, runtime_zero(c.minus_learning_rate))
    for ref, x in zip(outputs, (*state, out), strict=True):
        plt.store(ref.at[at], x.astype(ref.dtype), mask=mask)


def adam_update(
    p: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scalars: AdamScalars,
    *,
    nesterov: bool,
    weight_decay_mode: WeightDecayMode,
    out_dtype: DTypeLike,
    emit: Emit,
    block: int | None = None,
    interpret: bool = False,
) -> AdamResult:
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``."""
    (n,) = p.shape
    out_dtype = jnp.dtype(out_dtype)
    dtypes = (*(x.dtype.name for x in (p, m, v, g)), out_dtype.name)
    block = block_for("triton", n, dtypes, block)
    manual = jax.typeof(p).manual_axis_type
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])
    results = pl.pallas_call(
        functools.partial(
            _kernel,
            n=n,
            block=block,
            nesterov=nesterov,
            weight_decay_mode=weight_decay_mode,
            emit=emit,
        ),
        grid=(pl.cdiv(n, block),),
        out_shape=[
            jax.ShapeDtypeStruct((n,), t, manual_axis_type=manual)
            for t in (p.dtype, m.dtype, v.dtype, out_dtype)
        ],
        input_output_aliases={1: 0, 2: 1, 3: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="jzero_adam",
    )(packed, p, m, v, g)
    return AdamResult(*results)
