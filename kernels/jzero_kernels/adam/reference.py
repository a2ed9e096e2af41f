"""Adam in plain ``jax.numpy``: specification, oracle for the kernels, and the CPU path.

XLA compiles it to fusions that read and write each array once; with the state donated to the
enclosing ``jit`` it works in place. (Scaled forms need the largest magnitude of a block before its
first element can be written, which XLA makes two passes.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero_kernels.adam import forms
from jzero_kernels.adam.body import Options, bits_of, handed_out, select, skipped, step
from jzero_kernels.adam.forms import Random
from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    coefficients,
    compute_dtype,
    runtime_zero,
)


def adam_update(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    scalars: AdamScalars,
    random: Random | None = None,
    **options: Any,
) -> AdamResult:
    """One step on flat arrays; arguments as :func:`jzero_kernels.adam.adam_update`."""
    chosen = Options(**options)
    dtype = compute_dtype(*(x.dtype for x in forms.parts((m, v))))
    blocks = forms.flat_blocks(g.size)
    index = None if random is None else lax.iota(jnp.int32, g.size)
    c = coefficients(scalars, dtype)
    new = step(
        p,
        m,
        v,
        g,
        c,
        chosen,
        blocks=blocks,
        bits=bits_of(random, index),
        finite=scalars.finite,
    )
    zero = runtime_zero(c.minus_learning_rate)
    values = select(scalars.finite, new, skipped(p, m, v, zero, chosen, blocks=blocks))

    # Moments in the dtype of the arithmetic have been held back in the step itself.
    def held(new: Any, selected: Any) -> Any:
        return new if not isinstance(new, tuple) and new.dtype == dtype else selected

    values = values._replace(m=held(new.m, values.m), v=held(new.v, values.v))
    return handed_out(values, zero, chosen)
