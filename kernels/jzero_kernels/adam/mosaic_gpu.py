"""Adam on NVIDIA chips of compute capability 9.0 or newer: a Mosaic GPU kernel.

One block of the grid is one warpgroup (128 threads), which holds one block of the shard in
registers: each thread loads neighbouring elements as vectors of 8 straight from global memory,
and stores them in place. Nothing is used twice, so shared memory and TMA would only add a copy.
p, m and v are mutable references (``jax.new_ref``), which XLA keeps in their own buffers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
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
ALIGNMENT = 1024  # 128 threads, vectors of 8


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    named = {"p": p.dtype, "m": m.dtype, "v": v.dtype, "g": g.dtype, "out_dtype": out_dtype}
    for name, dtype in named.items():
        if jnp.dtype(dtype).name not in DTYPES:
            return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(DTYPES)}"
    if p.size % ALIGNMENT or p.size >= 2**31:
        return f"`p` has {p.size} elements; accepted: multiples of {ALIGNMENT} below 2^31,"
    return None


def _plgpu() -> Any:
    # Imported where used: JAX's Mosaic GPU needs absl-py, which JAX does not depend on.
    try:
        from jax.experimental.pallas import mosaic_gpu as plgpu
    except ImportError as error:
        raise ValueError(
            "adam_update: `backend` is 'mosaic_gpu', and JAX's Mosaic GPU does not import here "
            f"({error}); accepted: an environment with absl-py. pip install absl-py, or pass "
            "backend='auto'."
        ) from error
    return plgpu


_BEFORE_0_12 = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def _sqrt(x: jax.Array) -> jax.Array:
    """The square root: IEEE where Mosaic GPU has one (jax 0.12), else within 2 ulp."""
    return jnp.where(x > 0, x * lax.rsqrt(x), x) if _BEFORE_0_12 else jnp.sqrt(x)


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
    interpret: Any = False,
) -> AdamResult:
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``."""
    plgpu = _plgpu()
    (n,) = p.shape
    out_dtype = jnp.dtype(out_dtype)
    dtypes = (*(x.dtype.name for x in (p, m, v, g)), out_dtype.name)
    block = block_for("mosaic_gpu", n, dtypes, block)
    while n % block:  # no partial block: ALIGNMENT divides both
        block -= ALIGNMENT
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=8)
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])

    def body(scalars_ref: Any, p_ref: Any, m_ref: Any, v_ref: Any, g_ref: Any, out: Any) -> None:
        *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
        c = Coefficients(*values)
        finite = finite_value != 0
        at = pl.ds(lax.axis_index("block") * block, block)
        refs = (p_ref, m_ref, v_ref)

        def load(ref: Any) -> jax.Array:
            index = (at,) if _BEFORE_0_12 else ()
            return plgpu.load(ref if index else ref.at[at], *index, layout=layout)

        old_p, old_m, old_v = map(load, refs)
        new = adam_step(
            old_p,
            old_m,
            old_v,
            load(g_ref),
            c,
            nesterov=nesterov,
            weight_decay_mode=weight_decay_mode,
            sqrt=_sqrt,
        )
        state = [
            jnp.where(finite, x.astype(o.dtype), o)
            for x, o in zip(new, (old_p, old_m, old_v), strict=False)
        ]
        for ref, x in zip(refs, state, strict=True):
            ref[at] = x
        result = (
            jnp.where(finite, new.u, jnp.full_like(new.u, -0.0)) if emit == "update" else state[0]
        )
        if emit == "param" and result.dtype.itemsize < out_dtype.itemsize:
            result = opaque(result, runtime_zero(c.minus_learning_rate))
        out[at] = result.astype(out_dtype)

    # pl.kernel and not plgpu.kernel: the latter drops the axes that a result varies over, and its
    # batching rule does not take references.
    kernel: Any = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (n,), out_dtype, manual_axis_type=jax.typeof(p).manual_axis_type
        ),
        mesh=plgpu.Mesh(grid=(n // block,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="jzero_adam",
    )
    refs = [jax.new_ref(x) for x in (p, m, v)]
    out = kernel(packed, refs[0], refs[1], refs[2], g)
    return AdamResult(jax.freeze(refs[0]), jax.freeze(refs[1]), jax.freeze(refs[2]), out)
