"""Adam on GPU through Triton: ``pl.pallas_call`` with Triton's compiler parameters.

For NVIDIA chips before compute capability 9.0 and for AMD, while JAX lowers to Triton. One program
a block; each element is loaded once and stored once, with a mask in the last block only if the
length asks for it. p, m and v are aliased to their results. No shared memory and no pipeline: the
many programs on a multiprocessor hide one another's loads.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jzero_kernels.adam import forms
from jzero_kernels.adam.blocks import block_for
from jzero_kernels.adam.body import Options, bits_of, handed_out, select, skipped, step
from jzero_kernels.adam.forms import BLOCK, Random
from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    Coefficients,
    coefficients,
    runtime_zero,
)

DTYPES = ("float32", "bfloat16", "float16")
STORED = (*DTYPES, "int16", "float8_e5m2", "float8_e4m3fn")


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    state = [
        (name, x.dtype) for name, form in (("p", p), ("m", m), ("v", v)) for x in forms.parts(form)
    ]
    wires = [("g", g.dtype), ("out_dtype", jnp.dtype(out_dtype))]
    for names, accepted in ((state, STORED), (wires, DTYPES)):
        for name, dtype in names:
            if jnp.dtype(dtype).name not in accepted:
                return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(accepted)}"
    if g.size >= 2**31:
        return f"`p` has {g.size} elements; accepted: fewer than 2^31, for its 32-bit offsets,"
    return None


def _kernel(
    scalars_ref: Any,
    random_ref: Any,
    *refs: Any,
    inputs: tuple[Any, ...],
    is_scale: tuple[tuple[bool, ...], tuple[bool, ...]],
    n: int,
    block: int,
    options: Options,
) -> None:
    count = len(forms.parts(inputs))
    *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
    c = Coefficients(*values)
    random = None if random_ref is None else Random(random_ref[0], random_ref[1])
    start = pl.program_id(0) * block
    lane = jnp.arange(block, dtype=jnp.int32)

    def at(scale: bool) -> tuple[Any, Any]:
        """Slice and mask of this program's elements, or of their blocks' scales."""
        extent = block // BLOCK if scale else block
        first = pl.program_id(0) * extent
        if n % block == 0:
            return pl.ds(first, extent), None
        last = n // BLOCK if scale else n
        return pl.ds(first, extent), first + jnp.arange(extent, dtype=jnp.int32) < last

    def load(ref: Any, scale: bool) -> jax.Array:
        index, mask = at(scale)
        return plt.load(ref.at[index], mask=mask)

    arrays = [load(ref, s) for ref, s in zip(refs[:count], is_scale[0], strict=True)]
    p, m, v, g = forms.rebuilt(inputs, iter(arrays))
    blocks = forms.flat_blocks(block)
    bits = bits_of(random, None if random is None else start + lane)
    new = step(p, m, v, g, c, options, blocks=blocks, bits=bits)
    zero = runtime_zero(c.minus_learning_rate)
    values = select(finite_value != 0, new, skipped(p, m, v, zero, options, blocks=blocks))
    results = handed_out(values, zero, options)
    for ref, x, s in zip(refs[count:], forms.parts(results), is_scale[1], strict=True):
        index, mask = at(s)
        plt.store(ref.at[index], x, mask=mask)


def adam_update(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    scalars: AdamScalars,
    random: Random | None = None,
    *,
    block: int | None = None,
    interpret: bool = False,
    **options: Any,
) -> AdamResult:
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``."""
    (n,) = g.shape
    chosen = Options(**options)
    out_dtype = jnp.dtype(chosen.out_dtype)
    inputs = (p, m, v, g)
    block = block_for("triton", n, (*forms.names(*inputs), out_dtype.name), block)
    manual = jax.typeof(g).manual_axis_type
    out = cast("jax.Array", jax.ShapeDtypeStruct((n,), out_dtype))
    outputs = AdamResult(forms.stored_part(p), m, v, out)
    arrays_in, arrays_out = forms.parts(inputs), forms.parts(outputs)
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])
    scalar_operands = [packed] + ([] if random is None else [jnp.stack(random)])
    body: Any = functools.partial(
        _kernel,
        inputs=forms.rebuilt(inputs, iter([0] * len(arrays_in))),
        is_scale=forms.scale_flags(n, arrays_in, arrays_out),
        n=n,
        block=block,
        options=chosen,
    )
    results = pl.pallas_call(
        body if random is not None else (lambda scalars_ref, *refs: body(scalars_ref, None, *refs)),
        grid=(pl.cdiv(n, block),),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=manual) for x in arrays_out
        ],
        input_output_aliases=forms.aliases(p, m, v, first=len(scalar_operands)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="jzero_adam",
    )(*scalar_operands, *arrays_in)
    return forms.rebuilt(outputs, iter(results))
