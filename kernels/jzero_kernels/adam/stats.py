"""Overflow- and underflow-safe sums of squares, in float32 and in one pass.

Blue's algorithm ("A Portable Fortran Program to Find the Euclidean Norm of a Vector", ACM TOMS
1978; as LAPACK's ``nrm2``) keeps three sums, one for each range of magnitude, so that no square
leaves the range of float32. The four sums add up across devices (one ``psum``), and
:func:`norm_from_stats` turns the total into the 2-norm.
"""

import jax
import jax.numpy as jnp
from jax import lax

# |g| below SMALL is multiplied by UP before it is squared, |g| above BIG by DOWN.
# SMALL: squares of the middle range stay above 2^-100, far from underflow (2^-126).
# BIG: 2^48 squares of the middle range still fit (2^80 * 2^48 = 2^128); scaled squares start at
# 2^-48. The sum over the large ones overflows exactly when the norm itself is over 2^128.
# UP: the square of a constant must be finite too. Where XLA knows the gradient (the zeros of an
# unused parameter), it makes (g * UP) * (g * UP) into (g * g) * (UP * UP), and 0 * inf is NaN.
SMALL = 2.0**-50
BIG = 2.0**40
UP = 2.0**63
DOWN = 2.0**-64

# Terms that one plain float32 sum may add: rounding grows with the length of a sum, and a running
# sum of equal terms stops growing at 2^24 terms.
_ROW = 256

# On CPU: elements whose terms are folded onto each other at a time, and the parts of each fold.
_CHUNK = 2**14
_PARTS = 16

_Terms = tuple[jax.Array, ...]


def stat_terms(g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The four terms of each element, float32, of g's shape: small, middle, large, non-finite.

    An infinity is large and a NaN is middle, so each also shows in the sums themselves.
    """
    x = g.astype(jnp.float32)
    size = jnp.abs(x)
    small, big = size < SMALL, size > BIG
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    scaled = x * jnp.where(small, one * UP, jnp.where(big, one * DOWN, one))
    square = scaled * scaled
    return (
        jnp.where(small, square, zero),
        jnp.where(small | big, zero, square),
        jnp.where(big, square, zero),
        jnp.where(size < jnp.inf, zero, one),
    )


def _sum_together(terms: _Terms) -> _Terms:
    """Sums over axis 1 in one loop over all the terms."""
    zero = jnp.zeros((), jnp.float32)
    varying = jax.typeof(terms[0]).manual_axis_type.varying
    if varying:
        zero = lax.pcast(zero, tuple(sorted(varying, key=str)), to="varying")

    def add(a: _Terms, b: _Terms) -> _Terms:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    return tuple(lax.reduce(terms, (zero,) * len(terms), add, (1,)))


def _sum_in_levels(terms: _Terms) -> jax.Array:
    """Sums of 1-D float32 arrays, at most ``_ROW`` terms at a time; no padded copy."""
    while (n := terms[0].size) > 1:
        rows, rest = divmod(n, _ROW)
        levels: list[_Terms] = []
        if rows:
            levels.append(_sum_together(tuple(x[: n - rest].reshape(rows, _ROW) for x in terms)))
        if rest:
            levels.append(_sum_together(tuple(x[n - rest :].reshape(1, rest) for x in terms)))
        terms = tuple(jnp.concatenate(parts) for parts in zip(*levels, strict=True))
    return jnp.concatenate(terms)


def _sum_in_chunks(g: jax.Array) -> jax.Array:
    """The four sums on CPU, where XLA adds the elements of a reduction one after another, a few
    cycles each. Sums of whole arrays it makes with vector instructions, so a chunk is folded onto
    a part of it, twice, before what is left is reduced."""
    chunks, rest = divmod(g.size, _CHUNK)
    # Slices of 16-bit numbers XLA takes from a float32 copy; an offset must fit into an int32.
    if not chunks or g.dtype.itemsize < 4 or g.size >= 2**31:
        return _sum_in_levels(stat_terms(g))

    def fold(terms: _Terms) -> _Terms:
        part = terms[0].size // _PARTS
        parts = [tuple(t[i * part :][:part] for t in terms) for i in range(_PARTS)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [tuple(x + y for x, y in zip(a, b, strict=True)) for a, b in pairs]
        return parts[0]

    def one(_: None, i: jax.Array) -> tuple[None, _Terms]:
        return None, fold(fold(stat_terms(lax.dynamic_slice_in_dim(g, i * _CHUNK, _CHUNK))))

    _, folded = lax.scan(one, None, jnp.arange(chunks, dtype=jnp.int32))
    levels = [tuple(t.reshape(-1) for t in folded)]
    if rest:
        levels.append(stat_terms(g[g.size - rest :]))
    return _sum_in_levels(tuple(jnp.concatenate(parts) for parts in zip(*levels, strict=True)))


def grad_stats(g: jax.Array) -> jax.Array:
    """Reference of :func:`jzero_kernels.adam.grad_stats`, for n >= 1.

    XLA fuses four sums over one operand into one pass on TPU and GPU, where a sum is also spread
    over thousands of lanes. Its CPU backend does neither (40 bytes an element, and four
    temporaries of g's length): there they are sums of vectors, in levels.
    """
    return lax.platform_dependent(
        g,
        cpu=_sum_in_chunks,
        default=lambda x: jnp.stack([term.sum() for term in stat_terms(x)]),
    )


def norm_from_stats(stats: jax.Array) -> jax.Array:
    """The 2-norm from (a sum over devices of) :func:`grad_stats`.

    Args:
      stats: float32[4].

    Returns:
      float32 scalar: within about ten ulp of the true norm whenever that lies between 2^-126 and
      2^128; inf or NaN when an element was, or when the norm itself is over the largest float32.

    Raises:
      ValueError: if ``stats`` is not float32[4].
    """
    if stats.shape != (4,) or stats.dtype != jnp.float32:
        raise ValueError(
            f"norm_from_stats: `stats` is {stats.dtype}{list(stats.shape)}; expected float32[4]. "
            "Pass the array that grad_stats returned, summed over devices with lax.psum."
        )
    # Each class's own norm is in range; combine them like hypot, relative to the larger. (Scaling
    # the sums instead would need the factor 2^-128, a subnormal that TPUs flush to zero.) The
    # result is scaled up last: see UP for why no constant may be squared that has no square.
    small, middle, large = lax.sqrt(stats)[:3]
    low = _hypot(middle, small * (1.0 / UP))
    return jnp.where(large == 0, low, _hypot(large, low * DOWN) * (1.0 / DOWN))


def _hypot(larger: jax.Array, other: jax.Array) -> jax.Array:
    """The norm of two numbers >= 0, of which the first is 0 or not much smaller."""
    safe = jnp.where(larger == 0, jnp.ones_like(larger), larger)
    return jnp.where(larger == 0, other, larger * lax.sqrt(1 + jnp.square(other / safe)))
