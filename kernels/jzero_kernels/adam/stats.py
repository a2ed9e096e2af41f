"""Overflow- and underflow-safe sums of squares, in float32 and in one pass.

Blue's algorithm ("A Portable Fortran Program to Find the Euclidean Norm of a Vector", ACM TOMS
1978; as LAPACK's ``nrm2``) keeps three sums, one for each range of magnitude, so that no square
leaves the range of float32. The four sums add up across devices (one ``psum``), and
:func:`norm_from_stats` turns the total into the 2-norm.
"""

import jax
import jax.numpy as jnp
from jax import lax

# |g| below SMALL is scaled up by SCALE before it is squared, |g| above BIG is scaled down by it.
# SMALL: squares of the middle range stay above 2^-100, far from underflow (2^-126).
# BIG: 2^48 squares of the middle range still fit (2^80 * 2^48 = 2^128); scaled squares start at
# 2^-48. The sum over the large ones overflows exactly when the norm itself is over 2^128.
SMALL = 2.0**-50
BIG = 2.0**40
SCALE = 2.0**64

# Terms that one plain float32 sum may add: rounding grows with the length of a sum, and a running
# sum of equal terms stops growing at 2^24 terms.
_ROW = 4096


def stat_terms(g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The four terms of each element, float32, of g's shape: small, middle, large, non-finite.

    An infinity is large and a NaN is middle, so each also shows in the sums themselves.
    """
    x = g.astype(jnp.float32)
    size = jnp.abs(x)
    small, big = size < SMALL, size > BIG
    zero = jnp.zeros_like(x)
    up, down = x * SCALE, x * (1.0 / SCALE)
    return (
        jnp.where(small, up * up, zero),
        jnp.where(small | big, zero, x * x),
        jnp.where(big, down * down, zero),
        jnp.where(size < jnp.inf, zero, jnp.ones_like(x)),
    )


def _sum(x: jax.Array) -> jax.Array:
    """Sum of a 1-D float32 array in levels of at most ``_ROW`` terms each; no padded copy."""
    while x.size > _ROW:
        rows = x.size // _ROW
        head = x[: rows * _ROW].reshape(rows, _ROW).sum(axis=1)
        tail = x[rows * _ROW :].sum()
        x = jnp.concatenate([head, tail[None]]) if x.size % _ROW else head
    return x.sum()


def grad_stats(g: jax.Array) -> jax.Array:
    """Reference of :func:`jzero_kernels.adam.grad_stats`."""
    return jnp.stack([_sum(term) for term in stat_terms(g)])


def norm_from_stats(stats: jax.Array) -> jax.Array:
    """The 2-norm from (a sum over devices of) :func:`grad_stats`.

    Args:
      stats: float32[4].

    Returns:
      float32 scalar: within a few ulp of the true norm whenever that lies between 2^-126 and
      2^128; inf or NaN when an element was, or when the norm itself is over the largest float32.

    Raises:
      ValueError: if ``stats`` is not float32[4].
    """
    if stats.shape != (4,) or stats.dtype != jnp.float32:
        raise ValueError(
            f"norm_from_stats: `stats` is {stats.dtype}{list(stats.shape)}; expected float32[4]. "
            "Pass the array that grad_stats returned, summed over devices with lax.psum."
        )
    # Each class's own norm is in range; combine them like hypot, relative to the largest. (Scaling
    # the sums instead would need the factor 2^-128, a subnormal that TPUs flush to zero.)
    norms = lax.sqrt(stats[:3]) * jnp.array([1.0 / SCALE, 1.0, SCALE], jnp.float32)
    largest = norms.max()
    ratios = norms / jnp.where(largest > 0, largest, jnp.ones_like(largest))
    combined = largest * lax.sqrt(jnp.square(ratios).sum())
    return jnp.where(largest < jnp.inf, combined, largest)
