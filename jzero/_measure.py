"""What a step must know of the whole gradient: its norm, and whether every element is finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jzero._collectives import psum
from jzero._mesh import Axes
from jzero_kernels import adam

__all__ = ["Measured", "measure"]


class Measured(NamedTuple):
    """Two replicated scalars: the 2-norm of the reduced gradient in float32, and finiteness of
    its elements (a finite gradient may have any norm)."""

    norm: Array
    finite: Array


def measure(grad_shards: Sequence[Array], axes: Axes) -> Measured:
    """Norm and finiteness over all shards: one ``psum`` of four float32 scalars.

    Each element is counted once: padding is zero, and replicas hold the same shards.
    """
    if not grad_shards:
        return Measured(jnp.float32(0), jnp.bool_(True))
    stats = psum(
        sum((adam.grad_stats(g) for g in grad_shards[1:]), adam.grad_stats(grad_shards[0])), axes
    )
    return Measured(adam.norm_from_stats(stats), stats[3] == 0)
