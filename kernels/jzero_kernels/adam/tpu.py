"""Adam on TPU: a Mosaic kernel through ``pl.pallas_call``.

The grid runs over blocks of the shard; Pallas streams them from HBM through VMEM, double-buffered,
so each byte is read once and written once. p, m and v are aliased to their results.

A flat array of a multiple of 1,024 elements is seen as ``(n / 128, 128)``: XLA tiles the one by
1,024 and the other by (8, 128), the same order of bytes, so the reshape is free. (As ``(n / 1024,
1024)`` it is not: compiled for v5e that view moves 96 bytes a parameter in copies alone.) Any
other length is taken in one dimension, also in place and without a temporary, with a partial last
block; Pallas needs to know the chip for that, so ahead-of-time compilation must happen under a
mesh of the target's devices (inside ``shard_map``, say).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
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
)

LANES = 128
# Elements handled at a time inside a block: four float32 registers (8 x 128) an operand, so that
# one iteration lives in the 64 registers, and a whole tile of any dtype down to 8 bits.
CHUNK = 32 * LANES

STATE_DTYPES = ("float32", "bfloat16")
WIRE_DTYPES = (*STATE_DTYPES, "float8_e5m2", "float8_e4m3fn")


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    for name, dtype, accepted in (
        ("p", p.dtype, STATE_DTYPES),
        ("m", m.dtype, STATE_DTYPES),
        ("v", v.dtype, STATE_DTYPES),
        ("g", g.dtype, WIRE_DTYPES),
        ("out_dtype", jnp.dtype(out_dtype), WIRE_DTYPES),
    ):
        if jnp.dtype(dtype).name not in accepted:
            return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(accepted)}"
    return None


def is_aligned(n: int, *dtypes: DTypeLike) -> bool:
    """Whether flat arrays of n elements and these dtypes have the free (n / 128, 128) view."""
    # 8-bit types are tiled by (32, 128).
    return n % (CHUNK if any(jnp.dtype(t).itemsize == 1 for t in dtypes) else 8 * LANES) == 0


def _view(n: int, block: int, aligned: bool) -> tuple[tuple[int, ...], pl.BlockSpec, int]:
    """Array shape, block spec and leading extent of a chunk: two dimensions if aligned, or one."""
    chunk = min(CHUNK, block)
    if aligned:
        spec = pl.BlockSpec((block // LANES, LANES), lambda i: (i, 0))
        return (n // LANES, LANES), spec, chunk // LANES
    return (n,), pl.BlockSpec((block,), lambda i: (i,)), chunk


def _adam_kernel(
    scalars_ref: Any,
    p_ref: Any,
    m_ref: Any,
    v_ref: Any,
    g_ref: Any,
    p_out: Any,
    m_out: Any,
    v_out: Any,
    out: Any,
    *,
    chunk: int,
    nesterov: bool,
    weight_decay_mode: WeightDecayMode,
    emit: Emit,
) -> None:
    *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
    finite = finite_value != 0
    chunks = p_ref.shape[0] // chunk

    def put_param(at: Any, new: Any) -> None:
        # Where out is the wider, read the rounded parameter back, so that out is its cast.
        stored = p_out[at] if out.dtype.itemsize > p_out.dtype.itemsize else new
        out[at] = stored.astype(out.dtype)

    # Two bodies, and not one with selects: a skipped step does no arithmetic, so nothing that g
    # holds and no flushing of subnormals can change a bit.
    @pl.when(finite)
    def _() -> None:
        @pl.loop(0, chunks)
        def _(i: Any) -> None:
            at = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
            new = adam_step(
                p_ref[at],
                m_ref[at],
                v_ref[at],
                g_ref[at],
                Coefficients(*values),
                nesterov=nesterov,
                weight_decay_mode=weight_decay_mode,
            )
            p_out[at] = new.p.astype(p_out.dtype)
            m_out[at] = new.m.astype(m_out.dtype)
            v_out[at] = new.v.astype(v_out.dtype)
            if emit == "update":
                out[at] = new.u.astype(out.dtype)
            else:
                put_param(at, new.p.astype(p_out.dtype))

    @pl.when(jnp.logical_not(finite))
    def _() -> None:
        @pl.loop(0, chunks)
        def _(i: Any) -> None:
            at = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
            p = p_ref[at]
            p_out[at] = p
            m_out[at] = m_ref[at]
            v_out[at] = v_ref[at]
            kept = jnp.full(p.shape, -0.0, out.dtype) if emit == "update" else p.astype(out.dtype)
            out[at] = kept


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
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``.

    Args:
      interpret: False to compile, True for Pallas' interpreter, or a
        ``pltpu.InterpretParams`` for the simulator of TPU memory.
    """
    (n,) = p.shape
    aligned = is_aligned(n, p.dtype, m.dtype, v.dtype, g.dtype, out_dtype)
    dtypes = tuple(jnp.dtype(t).name for t in (p.dtype, m.dtype, v.dtype, g.dtype, out_dtype))
    block = block_for("tpu", n, dtypes, block)
    shape, spec, chunk = _view(n, block, aligned)
    manual = jax.typeof(p).manual_axis_type
    operands = [x.reshape(shape) for x in (p, m, v, g)]
    # One small array in scalar memory, so one transfer before the first step and not thirteen.
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])
    # The simulator (of 0.10.2) hands aliased results back as long as whole blocks: a test that
    # uses it sees the same kernel without the aliases.
    aliases = {} if isinstance(interpret, pltpu.InterpretParams) else {1: 0, 2: 1, 3: 2}
    results = pl.pallas_call(
        functools.partial(
            _adam_kernel,
            chunk=chunk,
            nesterov=nesterov,
            weight_decay_mode=weight_decay_mode,
            emit=emit,
        ),
        grid=(pl.cdiv(n, block),),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), spec, spec, spec, spec],
        out_specs=[spec, spec, spec, spec],
        out_shape=[
            jax.ShapeDtypeStruct(shape, t, manual_axis_type=manual)
            for t in (p.dtype, m.dtype, v.dtype, jnp.dtype(out_dtype))
        ],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=20 * n,
            transcendentals=n,
            bytes_accessed=bytes_moved(n, *dtypes),
        ),
        interpret=interpret,
        name="jzero_adam",
    )(packed, *operands)
    return AdamResult(*(x.reshape(n) for x in results))


def bytes_moved(n: int, p: str, m: str, v: str, g: str, out: str) -> int:
    """Bytes that one update must move: p, m, v read and written, g read, out written."""
    width = {name: jnp.dtype(name).itemsize for name in (p, m, v, g, out)}
    return n * (2 * (width[p] + width[m] + width[v]) + width[g] + width[out])
