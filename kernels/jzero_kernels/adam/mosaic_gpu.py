"""Adam on NVIDIA chips of compute capability 9.0 or newer: a Mosaic GPU kernel.

One block of the grid is one warpgroup (128 threads), which holds one block of the shard in
registers: each thread loads neighbouring elements as vectors of 8 straight from global memory,
and stores them in place. Nothing is used twice, so shared memory and TMA would only add a copy.
p, m and v are mutable references (``jax.new_ref``), which XLA keeps in their own buffers.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jzero_kernels.adam import forms
from jzero_kernels.adam.blocks import block_for
from jzero_kernels.adam.body import Options, bits_of, handed_out, select, skipped, step
from jzero_kernels.adam.forms import Random, Scaled
from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    Coefficients,
    coefficients,
    runtime_zero,
)

DTYPES = ("float32", "bfloat16", "float16")
ALIGNMENT = 1024  # 128 threads, vectors of 8


def unsupported(p: Any, m: Any, v: Any, g: Any, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these operands, or None if it does."""
    named = {"p": p, "m": m, "v": v, "g": g}
    for name, form in named.items():
        if isinstance(form, Scaled) or isinstance(getattr(form, "stored", None), Scaled):
            return f"`{name}` is Scaled; accepted: arrays and 16-bit remainders"
    dtypes = [(name, x.dtype) for name, form in named.items() for x in forms.parts(form)]
    for name, dtype in (*dtypes, ("out_dtype", out_dtype)):
        if jnp.dtype(dtype).name not in (*DTYPES, "int16"):
            return f"`{name}` is {jnp.dtype(dtype).name}; accepted: {', '.join(DTYPES)}"
    if g.size % ALIGNMENT or g.size >= 2**31:
        return f"`p` has {g.size} elements; accepted: multiples of {ALIGNMENT} below 2^31,"
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
    """One step on a shard of n >= 1 elements; arguments as the public ``adam_update``."""
    plgpu = _plgpu()
    (n,) = g.shape
    chosen = Options(**options)
    out_dtype = jnp.dtype(chosen.out_dtype)
    inputs = (p, m, v, g)
    block = block_for("mosaic_gpu", n, (*forms.names(*inputs), out_dtype.name), block)
    while n % block:  # no partial block: ALIGNMENT divides both
        block -= ALIGNMENT
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=8)
    packed = jnp.stack([*coefficients(scalars), scalars.finite.astype(jnp.float32)])
    arrays = forms.parts(inputs)
    replaced = forms.aliases(p, m, v, first=0)
    scalar_operands = [packed] + ([] if random is None else [jnp.stack(random)])

    def body(scalars_ref: Any, *rest: Any) -> None:
        random_ref, rest = (None, rest) if random is None else (rest[0], rest[1:])
        refs, out = rest[:-1], rest[-1]
        *values, finite_value = (scalars_ref[i] for i in range(len(Coefficients._fields) + 1))
        c = Coefficients(*values)
        start = lax.axis_index("block") * block
        at = pl.ds(start, block)

        def load(ref: Any) -> jax.Array:
            index = (at,) if _BEFORE_0_12 else ()
            return plgpu.load(ref if index else ref.at[at], *index, layout=layout)

        p, m, v, g = forms.rebuilt(inputs, iter([load(ref) for ref in refs]))
        index = None
        seed = None
        if random_ref is not None:
            index = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layout) + start
            seed = Random(random_ref[0], random_ref[1])
        blocks = forms.flat_blocks(block)
        bits = bits_of(seed, index)
        new = step(p, m, v, g, c, chosen, blocks=blocks, bits=bits, sqrt=_sqrt)
        zero = runtime_zero(c.minus_learning_rate)
        old = skipped(p, m, v, zero, chosen, blocks=blocks)
        values = select(finite_value != 0, new, old)
        results = forms.parts(handed_out(values, zero, chosen))
        for i, o in replaced.items():
            refs[i][at] = results[o]
        out[at] = results[-1]

    # pl.kernel and not plgpu.kernel: the latter drops the axes that a result varies over, and its
    # batching rule does not take references.
    kernel: Any = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (n,), out_dtype, manual_axis_type=jax.typeof(g).manual_axis_type
        ),
        mesh=plgpu.Mesh(grid=(n // block,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="jzero_adam",
    )
    operands = [jax.new_ref(x) if i in replaced else x for i, x in enumerate(arrays)]
    out = kernel(*scalar_operands, *operands)
    state = [jax.freeze(cast("Any", operands[i])) for i in replaced]
    return forms.rebuilt(AdamResult(forms.stored_part(p), m, v, g), iter([*state, out]))
