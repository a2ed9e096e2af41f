"""The arithmetic of one Adam step, element by element: the one specification.

Every backend calls :func:`adam_step`; they differ only in how they move the bytes. The order of
operations is that of ``optax.adamw`` 0.2.8 (``scale_by_adam``, then ``add_decayed_weights``, then
``scale_by_learning_rate``, then ``apply_updates``), so that float32 results agree with it up to
the compiler's freedom to contract ``a * b + c`` into one rounding.

Sources: Kingma & Ba, "Adam: A Method for Stochastic Optimization" (arXiv:1412.6980); Loshchilov &
Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101); Dozat, "Incorporating Nesterov
Momentum into Adam" (ICLR 2016 workshop).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

WeightDecayMode = Literal["decoupled", "l2"]
Emit = Literal["param", "update"]


class AdamScalars(NamedTuple):
    """The scalar operands of one step: device values, so that a new one recompiles nothing.

    Every field is a 0-d float32 array, except ``finite``, a 0-d bool array.

    Attributes:
      learning_rate: step size, positive for descent.
      b1: decay of the first moment.
      one_minus_b1: ``1 - b1``, taken where ``b1`` is still a Python float: computed in float32 it
        would be wrong by up to 3e-5 relative for ``b2 = 0.999``.
      b2: decay of the second moment.
      one_minus_b2: ``1 - b2``.
      eps: added to the root.
      eps_root: added under the root.
      weight_decay: decay coefficient (of the parameter, or of the gradient under "l2").
      bias_correction1: ``1 - b1**t`` for the step ``t >= 1`` being taken; 1 when off.
      bias_correction2: ``1 - b2**t``; 1 when off.
      bias_correction1_next: ``1 - b1**(t + 1)``, read by ``nesterov`` only; 1 when off.
      multiplier: applied to the gradient first: unscale x average x clip coefficient.
      finite: when False the step is skipped and no state bit changes.
    """

    learning_rate: jax.Array
    b1: jax.Array
    one_minus_b1: jax.Array
    b2: jax.Array
    one_minus_b2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    weight_decay: jax.Array
    bias_correction1: jax.Array
    bias_correction2: jax.Array
    bias_correction1_next: jax.Array
    multiplier: jax.Array
    finite: jax.Array


class AdamResult(NamedTuple):
    """What one step gives back, each 1-D of the shard's length.

    Attributes:
      p: new stored parameter: in the form of ``p``, of ``p.stored`` for a ``Master``, or the new
        ``p.low`` of a ``Remainder``.
      m: new first moment, in the form of the argument ``m``.
      v: new second moment, in the form of the argument ``v``.
      out: ``out_dtype``; the parameter to gather, or the update to add (see ``emit``).
    """

    p: Any
    m: Any
    v: Any
    out: jax.Array


class Coefficients(NamedTuple):
    """:class:`AdamScalars` as :func:`adam_step` reads them, each 0-d in the compute dtype."""

    minus_learning_rate: jax.Array
    b1: jax.Array
    one_minus_b1: jax.Array
    b2: jax.Array
    one_minus_b2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    weight_decay: jax.Array
    inverse_correction1: jax.Array
    inverse_correction2: jax.Array
    inverse_correction1_next: jax.Array
    multiplier: jax.Array


class StepValues(NamedTuple):
    """Unrounded results of :func:`adam_step`, in the compute dtype (``p``: at least as wide)."""

    p: jax.Array
    m: jax.Array
    v: jax.Array
    u: jax.Array


def compute_dtype(*moments: DTypeLike) -> jnp.dtype:
    """The dtype of the arithmetic: float32, or float64 when a moment is kept in float64."""
    wide = jnp.dtype(jnp.float64)
    return wide if wide in [jnp.dtype(t) for t in moments] else jnp.dtype(jnp.float32)


def coefficients(scalars: AdamScalars, dtype: DTypeLike = jnp.float32) -> Coefficients:
    """The scalars in the compute dtype, bias corrections as factors.

    XLA replaces a division by a broadcast scalar by a product with its reciprocal (so it does in
    a compiled ``optax.adamw``), or merges it with a second division, as the program around it has
    it. Taking the reciprocals here leaves it no choice, and spares a kernel two divisions an
    element.
    """
    s = AdamScalars(*(x.astype(dtype) for x in scalars[:-1]), finite=scalars.finite)
    return Coefficients(
        minus_learning_rate=-s.learning_rate,
        b1=s.b1,
        one_minus_b1=s.one_minus_b1,
        b2=s.b2,
        one_minus_b2=s.one_minus_b2,
        eps=s.eps,
        eps_root=s.eps_root,
        weight_decay=s.weight_decay,
        inverse_correction1=1 / s.bias_correction1,
        inverse_correction2=1 / s.bias_correction2,
        inverse_correction1_next=1 / s.bias_correction1_next,
        multiplier=s.multiplier,
    )


# A NaN payload that no computation produces. Comparing a runtime scalar with it gives a zero that
# no compiler can prove to be one.
_UNSEEN_NAN = 0x7FA5C3E1


def runtime_zero(scalar: jax.Array) -> jax.Array:
    """An int32 that is always 0 but not a compile-time constant (see :func:`opaque`).

    Args:
      scalar: any 0-d float operand of the program.
    """
    bits = lax.bitcast_convert_type(scalar.astype(jnp.float32), jnp.int32)
    return (bits == _UNSEEN_NAN).astype(jnp.int32)


def opaque(x: jax.Array, zero: jax.Array) -> jax.Array:
    """``x``, bit for bit, through an integer operation that a compiler cannot see through.

    XLA's CPU and GPU backends contract a product and a sum into one fused multiply-add, in one
    program and not in the next, and remove a rounding to a narrower type that is followed by a
    widening. So a result would depend on what it was compiled with, ``p + out == p_new`` would not
    hold exactly for ``emit="update"``, and ``out`` would not be the cast of the *stored*
    parameter. An optimization barrier would stop them too, but it splits the fusion and so costs
    memory traffic; one xor in registers costs none.

    Args:
      x: any float array of 8, 16, 32 or 64 bits an element.
      zero: from :func:`runtime_zero`.
    """
    bits_dtype = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, bits_dtype)
    return lax.bitcast_convert_type(bits ^ zero.astype(bits_dtype), x.dtype)


def adam_step(
    p: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    c: Coefficients,
    *,
    nesterov: bool,
    weight_decay_mode: WeightDecayMode,
    dtype: DTypeLike = jnp.float32,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
    finite: jax.Array | None = None,
) -> StepValues:
    """One Adam step on values already in registers.

    Args:
      p: master parameter, any float dtype, any shape (as all four).
      m: first moment.
      v: second moment.
      g: gradient.
      c: from :func:`coefficients`, in ``dtype``.
      nesterov: use Dozat's look-ahead first moment, as ``optax.scale_by_adam(nesterov=True)``.
      weight_decay_mode: "decoupled" (AdamW) or "l2" (Adam with the decay in the gradient).
      dtype: of the arithmetic.
      sqrt: the square root, for a backend that has none of its own.
      finite: a 0-d bool; when False the moments are held back here, before the update reads them
        (XLA's CPU backend then reuses the stored moments and needs no copy of the old ones). What
        becomes of the rest, and of moments kept in a narrower dtype, is the caller's affair.

    Every product is rounded before it is added (see :func:`opaque`), so that the result is the
    same bits in every program and on every backend with IEEE division and square root.

    Returns:
      The unrounded new values and the update ``u`` with ``p_new == p + u``. A parameter wider
      than ``dtype`` keeps its width in that sum.
    """
    zero = runtime_zero(c.minus_learning_rate)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return opaque(a * b, zero)

    p_wide = p if jnp.dtype(p.dtype).itemsize > jnp.dtype(dtype).itemsize else p.astype(dtype)
    p, m, v, g = (x.astype(dtype) for x in (p, m, v, g))
    g = product(g, c.multiplier)
    if weight_decay_mode == "l2":
        g = g + product(p, c.weight_decay)
    old_m, old_v = m, v
    m = product(g, c.one_minus_b1) + product(m, c.b1)
    v = product(g * g, c.one_minus_b2) + product(v, c.b2)
    if finite is not None:
        m, v = jnp.where(finite, m, old_m), jnp.where(finite, v, old_v)
    if nesterov:
        ahead = product(product(m, c.inverse_correction1_next), c.b1)
        m_hat = ahead + product(product(g, c.inverse_correction1), c.one_minus_b1)
    else:
        m_hat = product(m, c.inverse_correction1)
    root = sqrt(product(v, c.inverse_correction2) + c.eps_root) + c.eps
    # 0 / 0 where eps is 0 and an element has never had a gradient, as in padding: it stays put.
    u = jnp.where((root == 0) & (m_hat == 0), jnp.zeros_like(root), m_hat / root)
    if weight_decay_mode == "decoupled":
        u = u + product(p, c.weight_decay)
    u = product(u, c.minus_learning_rate)
    return StepValues(p_wide + u.astype(p_wide.dtype), m, v, u)
