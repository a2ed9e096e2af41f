"""The forms in which a kernel finds parameters and moments, and how each is read and written.

Everything here works on values in registers, element by element or block by block, and is shared
by every backend. A form is an array, or one of three tuples of arrays:

=============  ==================================================================  ===============
form           value                                                               bytes an element
=============  ==================================================================  ===============
array          itself                                                              its dtype's
``Scaled``     ``values * scale of the block`` (a second moment: that, squared)    1 or 2, + 4/128
``Master``     ``stored`` where it rounds to ``visible``, else ``visible``         stored + visible
``Remainder``  the float32 whose halves ``visible`` and ``low`` are                2 + 2
=============  ==================================================================  ===============

``visible`` is the parameter that the model uses, and the truth: a user may have changed it since
the last step.

[Note: 16-bit remainders]
A float32 is split into the nearest bfloat16, ties away from zero, and a signed 16-bit rest: with
``low`` the lower half of the bits as an int16, ``high = bits - low`` has its lower half zero and is
that bfloat16. So joining is one integer addition, and nothing is lost (NVIDIA Apex's
``store_param_remainders`` has this rule). Two kinds of patterns need care, which Apex does not
take: the upper half of a NaN may round over into a zero, so every NaN is made the canonical one
first; and a parameter set to zero by its user, beside an old negative rest, would join to a NaN,
so a zero ignores a negative rest (no split makes that pair).

[Note: scales]
A block is ``BLOCK`` neighbouring elements. Its scale is a power of two, so that scaling is exact
and a value that has been stored once is stored again without a change. The block's largest
magnitude comes to lie in the highest binades that leave the low precision room to round up. A
block of zeros has scale 0. What exceeds the range is held at its end, which decodes to infinity
where a float32 would have overflowed as well.

The second moment is stored as its root: that halves its dynamic range in bits, and the root is
what divides the step. A root that is not zero never becomes zero by rounding, since a division by
``eps`` alone would follow.

[Note: stochastic rounding]
A moment in 8 or 16 bits stands still when ``(1 - b) * (g - m)`` is below half a unit in its last
place. Rounded up with the probability of the cut-off fraction, it is right in the mean. The bits
come from a hash of the element's number, of its array and of a key (the step's, say): no state,
and the same on any number of devices. The hash is Wellons' ``lowbias32`` with the key between its
rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero_kernels.adam.math import opaque

BLOCK = 128
"""Elements that share a scale."""


class Scaled(NamedTuple):
    """Low-precision values with a float32 scale for each block: [n] and [n / BLOCK]."""

    values: jax.Array
    scales: jax.Array


class Master(NamedTuple):
    """A high-precision parameter beside the one that is used: ``stored`` is an array or Scaled."""

    stored: Any
    visible: jax.Array


class Remainder(NamedTuple):
    """A float32 parameter in halves: ``visible`` bfloat16, ``low`` int16 (see the note above)."""

    visible: jax.Array
    low: jax.Array


class Random(NamedTuple):
    """Where stochastic rounding takes its bits: 0-d int32 ``key``, and ``offset``, the number of
    the shard's first element."""

    key: jax.Array
    offset: jax.Array


class Blocks(NamedTuple):
    """How a backend sees blocks: ``largest`` takes [..] to one value a block, ``spread`` back."""

    largest: Callable[[jax.Array], jax.Array]
    spread: Callable[[jax.Array], jax.Array]


def flat_blocks(n: int) -> Blocks:
    """Blocks of a one-dimensional array of n elements, a multiple of BLOCK."""

    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(x.reshape(n // BLOCK, BLOCK), axis=1)

    def spread(s: jax.Array) -> jax.Array:
        return jnp.broadcast_to(s[:, None], (s.size, BLOCK)).reshape(n)

    return Blocks(largest, spread)


# ---------------------------------------------------------------- forms as lists of arrays


def parts(form: Any) -> list[jax.Array]:
    """The arrays of a form, in order; of a tuple of forms, of each in turn."""
    if not isinstance(form, tuple):
        return [form]
    return [array for part in cast("tuple[Any, ...]", form) for array in parts(part)]


def rebuilt(form: Any, arrays: Any) -> Any:
    """A form like ``form`` of the next arrays of an iterator."""
    if not isinstance(form, tuple):
        return next(arrays)
    inner = [rebuilt(part, arrays) for part in cast("tuple[Any, ...]", form)]
    make: Any = type(form)
    return make(*inner) if hasattr(form, "_fields") else tuple(inner)


def stored_part(p: Any) -> Any:
    """The part of a parameter's form that a step replaces; the parameter that it hands out is
    ``out``."""
    if isinstance(p, Master):
        return p.stored
    return p.low if isinstance(p, Remainder) else p


def aliases(p: Any, m: Any, v: Any, *, first: int) -> dict[int, int]:
    """Which array of the operands (numbered from ``first``) becomes which of the results: all but
    ``visible``, which goes on living in the model, and g."""
    replaced = [True for _ in parts(p)]
    if isinstance(p, Master):
        replaced = [*(True for _ in parts(p.stored)), False]
    elif isinstance(p, Remainder):
        replaced = [False, True]
    replaced += [True for _ in parts((m, v))]
    inputs = [first + i for i, stored in enumerate(replaced) if stored]
    return {i: output for output, i in enumerate(inputs)}


def scale_flags(n: int, *groups: list[Any]) -> Any:
    """For each array of each list, whether it holds scales: it has not n elements."""
    return tuple(tuple(x.shape != (n,) for x in arrays) for arrays in groups)


def has_scales(form: Any) -> bool:
    """Whether there is a Scaled in it."""
    if isinstance(form, Scaled):
        return True
    return isinstance(form, tuple) and any(map(has_scales, cast("tuple[Any, ...]", form)))


def names(*forms: Any) -> tuple[str, ...]:
    """A name for each form, of its dtypes."""

    def name(form: Any) -> str:
        dtypes = "+".join(jnp.dtype(x.dtype).name for x in parts(form))
        return dtypes if not isinstance(form, tuple) else f"{type(form).__name__}({dtypes})"

    return tuple(map(name, forms))


# ---------------------------------------------------------------- reading


def read_moment(form: Any, dtype: Any, blocks: Blocks, *, root: bool = False) -> jax.Array:
    """A moment in ``dtype``; ``root`` for the second one, whose root a Scaled holds."""
    if not isinstance(form, Scaled):
        return form.astype(dtype)
    value = form.values.astype(dtype) * blocks.spread(form.scales.astype(dtype))
    return value * value if root else value


def read_param(p: Any, wire: Any, zero: jax.Array, blocks: Blocks) -> jax.Array:
    """A parameter in full precision.

    Args:
      p: an array, :class:`Master` or :class:`Remainder`.
      wire: dtype that ``visible`` was gathered in: stored values that round to it are not stale.
      zero: from :func:`~jzero_kernels.adam.math.runtime_zero`.
      blocks: how Scaled values lie.
    """
    if isinstance(p, Remainder):
        return join(p.visible, p.low)
    if not isinstance(p, Master):
        return p
    stored = p.stored
    if isinstance(stored, Scaled):
        stored = read_moment(stored, jnp.float32, blocks)
    # Through integers: XLA drops a rounding that is only compared, or widened again.
    rounded = opaque(stored.astype(wire), zero).astype(p.visible.dtype)
    same = _bits(rounded) == _bits(p.visible)
    return jnp.where(same, stored, p.visible.astype(stored.dtype))


def _bits(x: jax.Array) -> jax.Array:
    kinds = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}
    return lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])


def join(high: jax.Array, low: jax.Array) -> jax.Array:
    """The float32 of bfloat16 and int16 halves."""
    bits = _bits(high.astype(jnp.float32))
    rest = low.astype(jnp.int32)
    # By its bits: where subnormals count as zeros, a comparison would take them for one.
    is_zero = (bits & jnp.int32(0x7FFFFFFF)) == 0
    rest = jnp.where(is_zero & (rest < 0), jnp.zeros_like(rest), rest)
    return lax.bitcast_convert_type(bits + rest, jnp.float32)


# ---------------------------------------------------------------- writing


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nearest bfloat16 of a float32, ties away from zero, and the int16 rest."""
    x = jnp.where(x != x, jnp.full_like(x, jnp.nan), x)
    bits = _bits(x)
    rest = lax.shift_right_arithmetic(lax.shift_left(bits, _i32(16, bits)), _i32(16, bits))
    high = lax.bitcast_convert_type(bits - rest, jnp.float32)
    return high.astype(jnp.bfloat16), rest.astype(jnp.int16)


def write_moment(
    like: Any,
    x: jax.Array,
    blocks: Blocks,
    bits: jax.Array | None = None,
    *,
    root: bool = False,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
) -> Any:
    """``x`` in the form of ``like``; rounded to nearest, or stochastically with ``bits``."""
    if not isinstance(like, Scaled):
        return rounded(x, like.dtype, bits)
    x = x.astype(jnp.float32)
    if root:
        x = sqrt(x)
    scales, inverses = scale(blocks.largest(jnp.abs(x)), like.values.dtype)
    x = x * blocks.spread(inverses)
    info = jnp.finfo(like.values.dtype)
    top, least = x.dtype.type(info.max), x.dtype.type(info.smallest_subnormal)
    x = jnp.where(x > top, top, jnp.where(x < -top, -top, x))
    if root:
        x = jnp.where((x > 0) & (x < least), least, x)
    return Scaled(rounded(x, like.values.dtype, bits), scales)


def scale(largest: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The scale of blocks whose largest magnitude is given, and its inverse (1 for a 0)."""
    room = _ROOM[jnp.dtype(dtype).name]
    bits = _bits(largest)
    exponent = lax.shift_right_logical(bits, _i32(23, bits))
    exponent = jnp.minimum(jnp.maximum(exponent, room + 1), 254) - room

    def power(e: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(e, _i32(23, e)), jnp.float32)

    nothing = largest == 0
    return (
        jnp.where(nothing, jnp.zeros_like(largest), power(exponent)),
        jnp.where(nothing, jnp.ones_like(largest), power(254 - exponent)),
    )


_TINY = np.float32(2**-24)

# The largest magnitude of a block is scaled to at least 2**room and below twice that, which every
# rounding leaves representable.
_ROOM = {
    "float16": 14,
    "bfloat16": 1,
    "float8_e5m2": 14,
    "float8_e4m3fn": 7,
    "float8_e4m3": 6,
}
SCALABLE = tuple(_ROOM)


def random_bits(index: jax.Array, key: jax.Array) -> jax.Array:
    """32 bits an element, of int32 ``index`` and a 0-d int32 ``key``."""

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return x ^ lax.shift_right_logical(x, _i32(by, x))

    x = shifted(index, 16) * jnp.int32(0x7FEB352D)
    x = shifted(x ^ key, 15) * jnp.int32(0x846CA68B - 2**32)
    return shifted(x, 16)


def _i32(value: int, like: jax.Array) -> jax.Array:
    return jnp.full_like(like, value)


def rounded(x: jax.Array, dtype: Any, bits: jax.Array | None) -> jax.Array:
    """``x`` in ``dtype``: to nearest, ties to even; or stochastically, with 32 ``bits`` each."""
    dtype = jnp.dtype(dtype)
    if bits is None or dtype.itemsize >= 4:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    info = jnp.finfo(dtype)
    dropped = jnp.finfo(x.dtype).nmant - info.nmant
    noise = lax.shift_right_logical(bits, _i32(32 - dropped, bits))
    raw = _bits(x)
    up = lax.bitcast_convert_type((raw + noise) & jnp.int32(-(1 << dropped)), x.dtype)
    if info.minexp > jnp.finfo(x.dtype).minexp:
        # Below its normal range the low precision has fixed steps.
        step = x.dtype.type(info.smallest_subnormal)
        uniform = lax.shift_right_logical(bits, _i32(8, bits)).astype(x.dtype) * x.dtype.type(
            2**-24
        )
        down = jnp.floor(jnp.abs(x) / step + uniform) * step
        down = jnp.where(x < 0, -down, down)
        up = jnp.where(jnp.abs(x) < x.dtype.type(info.smallest_normal), down, up)
    # A value at the top of the range must not round out of it, nor an infinity or NaN into a NaN.
    top = x.dtype.type(info.max)
    return jnp.where(jnp.abs(up) <= top, up, x).astype(dtype)
