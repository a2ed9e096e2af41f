"""One step on forms in registers: read, step, write. What every backend does between its loads and
its stores, in one place."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero_kernels.adam import forms
from jzero_kernels.adam.forms import Blocks, Master, Random, Remainder, Scaled
from jzero_kernels.adam.math import (
    AdamResult,
    Coefficients,
    Emit,
    WeightDecayMode,
    adam_step,
    compute_dtype,
    opaque,
    runtime_zero,
)

Bits = Callable[[int], jax.Array | None]
"""From the number of an array (of the step's three) to random bits for its elements, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The static choices of a step, as the public ``adam_update`` takes them."""

    nesterov: bool
    weight_decay_mode: WeightDecayMode
    out_dtype: Any
    emit: Emit


def bits_of(random: Random | None, index: jax.Array | None) -> Bits:
    """Random bits for the elements numbered ``index`` within the shard."""

    def bits(array: int) -> jax.Array | None:
        if random is None or index is None:
            return None
        return forms.random_bits(index + random.offset, random.key + jnp.int32(array))

    return bits


class Values(NamedTuple):
    """A step's results before the parameter is handed out.

    Attributes:
      stored, m, v: in their forms.
      extra: what ``out`` is made of where that is not ``stored``: the update, the upper half of a
        remainder, or the value of a Scaled master; else None.
    """

    stored: Any
    m: Any
    v: Any
    extra: jax.Array | None


def step(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    c: Coefficients,
    options: Options,
    *,
    blocks: Blocks,
    bits: Bits,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
    finite: jax.Array | None = None,
) -> Values:
    """The results of a step that is taken.

    Args:
      p, m, v, g: forms whose arrays are values.
      c: from ``coefficients``, in the compute dtype.
      options: static choices.
      blocks: how Scaled values lie.
      bits: random bits, or None for rounding to nearest.
      sqrt, finite: as for ``adam_step``.
    """
    zero = runtime_zero(c.minus_learning_rate)
    dtype = compute_dtype(*(x.dtype for x in forms.parts((m, v))))
    new = adam_step(
        forms.read_param(p, options.out_dtype, zero, blocks),
        forms.read_moment(m, dtype, blocks),
        forms.read_moment(v, dtype, blocks, root=True),
        g,
        c,
        nesterov=options.nesterov,
        weight_decay_mode=options.weight_decay_mode,
        dtype=dtype,
        sqrt=sqrt,
        finite=finite,
    )
    m_new = forms.write_moment(m, new.m, blocks, bits(1))
    v_new = forms.write_moment(v, new.v, blocks, bits(2), root=True, sqrt=sqrt)
    if isinstance(p, Remainder):
        high, low = forms.split(new.p)
        return Values(low, m_new, v_new, high)
    noise = bits(3) if isinstance(p, Master) else None
    stored = forms.write_moment(forms.stored_part(p), new.p, blocks, noise)
    extra = new.u if options.emit == "update" else None
    if isinstance(stored, Scaled):
        extra = forms.read_moment(
            Scaled(opaque(stored.values, zero), stored.scales), jnp.float32, blocks
        )
    return Values(stored, m_new, v_new, extra)


def skipped(p: Any, m: Any, v: Any, zero: jax.Array, options: Options, *, blocks: Blocks) -> Values:
    """The results of a step that is not taken: every bit of the moments as it was, and the
    parameter as its user gave it."""
    if isinstance(p, Remainder):
        return Values(p.low, m, v, p.visible)
    value = forms.read_param(p, options.out_dtype, zero, blocks)
    if isinstance(p, Master) and isinstance(p.stored, Scaled):
        return Values(p.stored, m, v, value)
    nothing = jnp.full_like(value, -0.0) if options.emit == "update" else None
    return Values(value, m, v, nothing)


def select(finite: jax.Array, new: Values, old: Values) -> Values:
    """``new`` where ``finite``, else ``old``, in the stored forms: a NaN in the branch not taken
    goes nowhere."""

    def chosen(a: Any, b: Any) -> Any:
        pairs = zip(forms.parts(a), forms.parts(b), strict=True)
        return forms.rebuilt(a, iter([jnp.where(finite, x, y.astype(x.dtype)) for x, y in pairs]))

    return Values(*(None if a is None else chosen(a, b) for a, b in zip(new, old, strict=True)))


def handed_out(values: Values, zero: jax.Array, options: Options) -> AdamResult:
    """The results of a step with ``out``: the cast of what is stored, or of ``extra``."""
    out = values.stored if values.extra is None else values.extra
    # XLA would drop a rounding that is widened again, and emit excess precision.
    if values.extra is None and out.dtype.itemsize < jnp.dtype(options.out_dtype).itemsize:
        out = opaque(out, zero)
    return AdamResult(values.stored, values.m, values.v, out.astype(options.out_dtype))
