"""Adam in plain ``jax.numpy``: specification, oracle for the kernels, and the CPU path.

XLA compiles it to one loop fusion that reads and writes each array once; with p, m and v donated
to the enclosing ``jit`` it works in place.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jzero_kernels.adam.math import (
    AdamResult,
    AdamScalars,
    Emit,
    WeightDecayMode,
    adam_step,
    coefficients,
    compute_dtype,
    opaque,
    runtime_zero,
)


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
) -> AdamResult:
    """One step on arrays of any one shape; arguments as :func:`jzero_kernels.adam.adam_update`."""
    finite = scalars.finite
    dtype = compute_dtype(m.dtype, v.dtype)
    new = adam_step(
        p,
        m,
        v,
        g,
        coefficients(scalars, dtype),
        nesterov=nesterov,
        weight_decay_mode=weight_decay_mode,
        dtype=dtype,
        finite=finite,
    )
    # Select after rounding, in the stored dtype: a skipped step hands back the very bits it got,
    # and a NaN in the branch not taken goes nowhere.
    p_new = jnp.where(finite, new.p.astype(p.dtype), p)
    m_new = new.m if m.dtype == dtype else jnp.where(finite, new.m.astype(m.dtype), m)
    v_new = new.v if v.dtype == dtype else jnp.where(finite, new.v.astype(v.dtype), v)
    if emit == "update":
        out = jnp.where(finite, new.u, jnp.full_like(new.u, -0.0)).astype(out_dtype)
    elif p.dtype.itemsize < jnp.dtype(out_dtype).itemsize:
        # Widening the rounded parameter: XLA would drop the round trip and emit excess precision.
        out = opaque(p_new, runtime_zero(scalars.learning_rate)).astype(out_dtype)
    else:
        out = p_new.astype(out_dtype)
    return AdamResult(p_new, m_new, v_new, out)
