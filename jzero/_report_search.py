"""The largest batch, or the deepest model, that fits: a search over compilations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._layout import path_string
from jzero._pack import leaf_paths
from jzero._plans import stacks_of
from jzero._report_result import Method

__all__ = ["deeper", "depth_of", "largest", "rows_of", "wider"]


def rows_of(batch: Any, devices: int) -> int:
    """Rows a device of a batch."""
    return max(1, next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim) // devices)


def wider(batch: Any, devices: int, rows: int) -> Any:
    """The batch with another number of rows a device; scalars as they are."""
    unit = rows_of(batch, devices)

    def one(x: Any) -> Any:
        if not x.ndim:
            return x
        return jax.ShapeDtypeStruct((x.shape[0] // unit * rows, *x.shape[1:]), x.dtype)

    return jax.tree.map(one, batch)


def depth_of(params: Any, stacked: str | Sequence[str] | None) -> int:
    """Layers of the stacked leaves.

    Raises:
      ValueError: there are none, or stacks of several depths.
    """
    stack = stacks_of(params, stacked)
    leaves = leaf_paths(params)
    found = {jnp.shape(leaf)[0] for path, leaf in leaves if stack(path_string(path), leaf)}
    if len(found) != 1:
        raise ValueError(
            "largest_depth scales the leading dim of stacked leaves: "
            f"stacked={stacked!r} must name stacks of one number of layers, got {sorted(found)}"
        )
    return found.pop()


def deeper(params: Any, stacked: str | Sequence[str] | None, layers: int) -> Any:
    """The parameters' shapes with another number of stacked layers."""
    stack = stacks_of(params, stacked)

    def one(path: str, leaf: Any) -> Any:
        shape = jnp.shape(leaf)
        if stack(path, leaf):
            shape = (layers, *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    leaves = [one(path_string(p), leaf) for p, leaf in leaf_paths(params) if leaf is not None]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def largest(
    measure: Callable[[int], Method], start: int, known: Method, capacity: int, compilations: int
) -> dict[str, Any]:
    """The largest size found to fit, by at most so many calls of ``measure``.

    Args:
      measure: a size compiled.
      start: the size of ``known``, which was measured already.
      capacity: bytes.
    """
    tried: dict[int, tuple[int, bool]] = {start: (known.memory.peak, bool(known.fits))}
    for _ in range(compilations):
        guess = _guess(tried, capacity)
        if guess is None:
            break
        method = measure(guess)
        tried[guess] = (method.memory.peak, bool(method.fits))
    return {
        "fits": max((n for n, (_, fits) in tried.items() if fits), default=0),
        "smallest_that_does_not_fit": min(
            (n for n, (_, fits) in tried.items() if not fits), default=None
        ),
        "peaks": {size: peak for size, (peak, _) in sorted(tried.items())},
    }


def _guess(tried: dict[int, tuple[int, bool]], capacity: int) -> int | None:
    """What to try next: where a line through the last two peaks meets the capacity, kept between
    what fits and what does not; None where nothing lies between."""
    fitting = max((n for n, (_, fits) in tried.items() if fits), default=0)
    failing = min((n for n, (_, fits) in tried.items() if not fits), default=None)
    if failing is not None and failing - fitting <= 1:
        return None
    if len(tried) == 1:
        return fitting * 2 if fitting else max(1, (failing or 2) // 2)
    (n, low), (m, high) = [(n, tried[n][0]) for n in sorted(tried)][-2:]
    slope = (high - low) / (m - n)
    guess = m + int((capacity - high) // slope) if slope > 0 else 4 * m
    if failing is None:
        return max(guess, fitting + 1)
    return min(max(guess, fitting + 1), failing - 1)
