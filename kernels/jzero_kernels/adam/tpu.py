"""Adam on TPU: a Mosaic kernel through ``pl.pallas_call``.

The grid runs over blocks of the shard; Pallas streams them from HBM through VMEM, double-buffered,
so each byte is read once and written once. p, m and v are aliased to their results, and so is the
parameter that is used (``visible``) to ``out`` of its dtype.

A flat array of a multiple of 1,024 elements is seen as ``(n / 128, 128)``: XLA tiles the one by
1,024 and the other by (8, 128), the same order of bytes, so the reshape is free. (As ``(n / 1024,
1024)`` it is not: compiled for v5e that view moves 96 bytes a parameter in copies alone.) Any
other length is taken in one dimension, also in place and without a temporary, with a partial last
block; Pallas needs to know the chip for that, so ahead-of-time compilation must happen under a
mesh of the target's devices (inside ``shard_map``, say).
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jzero_kernels.adam import forms
from jzero_kernels.adam.blocks import block_for
from jzero_kernels.adam.body import Options, Values, bits_of, handed_out, skipped, step
from jzero_kernels.adam.forms import Blocks, Random, Scaled
from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    Coefficients,
    coefficients,
    runtime_zero,
)

LANES = 128
# Elements handled at a time inside a block: four float32 registers (8 x 128) an operand, so that
# one iteration lives in the 64 registers, and a whole tile of any dtype down to 8 bits.
CHUNK = 32 * LANES
# With scales a row of the view is a block, and one row of 128 scales belongs to 128 rows.
SCALED_CHUNK = LANES * LANES

STATE_DTYPES = ("float32", "bfloat16", "int16")
SCALED_DTYPES = ("bfloat16", "float8_e5m2", "float8_e4m3fn")
WIRE_DTYPES = ("float32", "bfloat16", "float8_e5m2", "float8_e4m3fn")


def _scaled(form: Any) -> list[Scaled]:
    """The Scaled forms among those of one operand."""
    if isinstance(form, Scaled):
        return [form]
    return [x for part in form for x in _scaled(part)] if isinstance(form, tuple) else []


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    for name, operand in (("p", p), ("m", m), ("v", v)):
        for scaled in _scaled(operand):
            dtype = jnp.dtype(scaled.values.dtype).name
            if dtype not in SCALED_DTYPES:
                return f"`{name}` is Scaled {dtype}; accepted: {', '.join(SCALED_DTYPES)}"
            if scaled.values.size % 4096 or scaled.values.size < 8 * SCALED_CHUNK:
                return (
                    f"`{name}` is Scaled with {scaled.values.size} values; accepted: multiples of "
                    f"4096 from {8 * SCALED_CHUNK}"
                )
    plain = [
        (name, array.dtype, STATE_DTYPES)
        for name, operand in (("p", p), ("m", m), ("v", v))
        if not _scaled(operand)
        for array in forms.parts(operand)
    ]
    wires = [("g", g.dtype, WIRE_DTYPES), ("out_dtype", jnp.dtype(out_dtype), WIRE_DTYPES)]
    for name, dtype, accepted in (*plain, *wires):
        if jnp.dtype(dtype).name not in accepted:
            return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(accepted)}"
    return None


def is_aligned(n: int, *operands: Any) -> bool:
    """Whether flat arrays of n elements, in these forms or dtypes, have the free (n / 128, 128)
    view."""
    dtypes = [jnp.dtype(getattr(x, "dtype", x)) for x in forms.parts(operands)]
    # 8-bit types are tiled by (32, 128).
    return n % (CHUNK if any(t.itemsize == 1 for t in dtypes) else 8 * LANES) == 0


class _View(NamedTuple):
    """How the kernel sees arrays of n elements: two dimensions if aligned, or one."""

    shape: tuple[int, ...]
    spec: pl.BlockSpec
    chunk: int  # leading extent
    scales: pl.BlockSpec


def _view(n: int, block: int, aligned: bool, scaled: bool) -> _View:
    chunk = min(SCALED_CHUNK if scaled else CHUNK, block)
    scales = pl.BlockSpec((max(block // LANES, 1),), lambda i: (i,))
    if aligned:
        spec = pl.BlockSpec((block // LANES, LANES), lambda i: (i, 0))
        return _View((n // LANES, LANES), spec, chunk // LANES, scales)
    return _View((n,), pl.BlockSpec((block,), lambda i: (i,)), chunk, scales)


def _blocks() -> Blocks:
    """Blocks of a chunk of (128, 128): its rows. Their scales travel as a row of 128 lanes, which
    a mask by the diagonal turns into a column and back, exactly."""
    square = (LANES, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(
        jnp.int32, square, 1
    )

    def turned(x: jax.Array, dim: int) -> jax.Array:
        wide = jnp.broadcast_to(x, square)
        return jnp.max(jnp.where(diagonal, wide, jnp.zeros_like(wide)), axis=dim, keepdims=True)

    def largest(x: jax.Array) -> jax.Array:
        return turned(jnp.max(x, axis=1, keepdims=True), 0)

    def spread(s: jax.Array) -> jax.Array:
        return jnp.broadcast_to(turned(s, 1), square)

    return Blocks(largest, spread)


def _adam_kernel(
    scalars_ref: Any,
    random_ref: Any,
    *refs: Any,
    inputs: tuple[Any, ...],
    is_scale: tuple[tuple[bool, ...], tuple[bool, ...]],
    chunk: int,
    options: Options,
) -> None:
    count = len(forms.parts(inputs))
    in_refs, out_refs = refs[:count], refs[count:]
    *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
    c = Coefficients(*values)
    finite = finite_value != 0
    chunks = in_refs[-1].shape[0] // chunk
    grid_step = pl.program_id(0)
    blocks = _blocks()
    random = None if random_ref is None else Random(random_ref[0], random_ref[1])

    def at(i: Any, scale: bool) -> Any:
        extent = LANES if scale else chunk
        return pl.ds(pl.multiple_of(i * extent, extent), extent)

    def load(i: Any) -> Any:
        arrays = []
        for ref, scale in zip(in_refs, is_scale[0], strict=True):
            x = ref[at(i, scale)]
            arrays.append(x.reshape(1, LANES) if scale else x)
        return forms.rebuilt(inputs, iter(arrays))

    zero = runtime_zero(c.minus_learning_rate)

    def store(i: Any, values: Values) -> None:
        results = forms.parts(handed_out(values, zero, options))
        for ref, x, scale in zip(out_refs, results, is_scale[1], strict=True):
            ref[at(i, scale)] = x.reshape(LANES) if scale else x

    def index(i: Any) -> jax.Array | None:
        if random is None:
            return None
        shape = (chunk, LANES)[: len(in_refs[-1].shape)]
        start = (grid_step * chunks + i) * math.prod(shape)
        number = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        if len(shape) == 2:
            number = number + lax.broadcasted_iota(jnp.int32, shape, 0) * LANES
        return number + start

    # Two bodies, and not one with selects: a skipped step does no arithmetic, so nothing that g
    # holds and no flushing of subnormals can change a bit.
    @pl.when(finite)
    def _() -> None:
        @pl.loop(0, chunks)
        def _(i: Any) -> None:
            p, m, v, g = load(i)
            bits = bits_of(random, index(i))
            store(i, step(p, m, v, g, c, options, blocks=blocks, bits=bits))

    @pl.when(jnp.logical_not(finite))
    def _() -> None:
        @pl.loop(0, chunks)
        def _(i: Any) -> None:
            p, m, v, _ = load(i)
            store(i, skipped(p, m, v, zero, options, blocks=blocks))


def adam_update(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    scalars: AdamScalars,
    random: Random | None = None,
    *,
    block: int | None = None,
    interpret: Any = False,
    **options: Any,
) -> AdamResult:
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``.

    Args:
      interpret: False to compile, True for Pallas' interpreter, or a
        ``pltpu.InterpretParams`` for the simulator of TPU memory.
    """
    (n,) = g.shape
    chosen = Options(**options)
    out_dtype = jnp.dtype(chosen.out_dtype)
    inputs = (p, m, v, g)
    manual = jax.typeof(g).manual_axis_type
    out = jax.ShapeDtypeStruct((n,), out_dtype)
    outputs = AdamResult(forms.stored_part(p), m, v, cast("jax.Array", out))
    scaled = forms.has_scales(inputs)
    names = (*forms.names(*inputs), out_dtype.name)
    block = block_for("tpu", n, names, block, scaled=scaled)
    view = _view(n, block, is_aligned(n, *inputs, out_dtype), scaled)
    arrays_in, arrays_out = forms.parts(inputs), forms.parts(outputs)
    is_scale = forms.scale_flags(n, arrays_in, arrays_out)
    # One small array in scalar memory, so one transfer before the first step and not thirteen.
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])
    smem = [pl.BlockSpec(memory_space=pltpu.SMEM)]
    scalar_operands = [packed] + ([] if random is None else [jnp.stack(random)])
    body = functools.partial(
        _adam_kernel,
        inputs=forms.rebuilt(inputs, iter([0] * len(arrays_in))),
        is_scale=is_scale,
        chunk=view.chunk,
        options=chosen,
    )
    kernel = body if random is not None else (lambda s, *refs: body(s, None, *refs))
    # The simulator (of 0.10.2) hands aliased results back as long as whole blocks: a test that
    # uses it sees the same kernel without the aliases.
    simulated = isinstance(interpret, pltpu.InterpretParams)
    aliases = {} if simulated else forms.aliases(p, m, v, first=len(scalar_operands))
    seen = next((i for i, x in enumerate(arrays_in) if x is getattr(p, "visible", None)), None)
    if seen is not None and aliases and arrays_in[seen].dtype == out_dtype:
        # The old parameter gives way to the new one. Where its memory is donated for that (lazy
        # sync), XLA would otherwise copy it first, long before it is due, and keep the copy.
        aliases[len(scalar_operands) + seen] = len(arrays_out) - 1
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, block),),
        in_specs=[
            *smem * len(scalar_operands),
            *(view.scales if s else view.spec for s in is_scale[0]),
        ],
        out_specs=[view.scales if s else view.spec for s in is_scale[1]],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape if s else view.shape, x.dtype, manual_axis_type=manual)
            for x, s in zip(arrays_out, is_scale[1], strict=True)
        ],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=20 * n,
            transcendentals=n,
            bytes_accessed=sum(
                x.size * jnp.dtype(x.dtype).itemsize for x in (*arrays_in, *arrays_out)
            ),
        ),
        interpret=interpret,
        name="jzero_adam",
    )(
        *scalar_operands,
        *(x if s else x.reshape(view.shape) for x, s in zip(arrays_in, is_scale[0], strict=True)),
    )
    return forms.rebuilt(outputs, iter([x.reshape(-1) for x in results]))


def bytes_moved(n: int, p: str, m: str, v: str, g: str, out: str) -> int:
    """Bytes that one update must move: p, m, v read and written, g read, out written."""
    width = {name: jnp.dtype(name).itemsize for name in (p, m, v, g, out)}
    return n * (2 * (width[p] + width[m] + width[v]) + width[g] + width[out])
