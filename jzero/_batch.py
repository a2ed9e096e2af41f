"""A batch split over the mesh on its way into a loss, and what the loss returns on its way out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jzero._collectives import total, vary
from jzero._layout import path_string
from jzero._mesh import Axes
from jzero._pack import leaf_paths

__all__ = ["batch_specs", "check_loss", "merged"]


def batch_specs(tree: Any, axes: Axes, what: str, dim: int) -> Any:
    """Specs that split ``dim`` of every array over all devices, and leave smaller ones whole."""

    def spec(path: Any, x: Any) -> P:
        shape = jnp.shape(x)
        if len(shape) <= dim:
            return P()
        if not axes.manual and shape[dim] % axes.size:
            name = path_string(path)
            raise ValueError(
                f"{what}{f'[{name!r}]' if name else ''} has {shape[dim]} elements in dim {dim}, "
                f"which {axes.size} devices ({' x '.join(axes.batch)}) do not divide; pad or drop "
                "the rest of the batch"
            )
        return P(*[None] * dim, axes.batch)

    flat = [spec(path, leaf) for path, leaf in leaf_paths(tree) if leaf is not None]
    return jax.tree.unflatten(jax.tree.structure(tree), flat)


def check_loss(loss: Any, has_aux: bool) -> None:
    """Refuse a loss that is no floating scalar."""
    if jnp.shape(loss) == () and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        return
    hint = "" if has_aux else "; for (loss, aux) pass has_aux=True"
    raise ValueError(
        f"loss_fn must return a floating scalar, got shape {jnp.shape(loss)} and dtype "
        f"{jnp.result_type(loss)}{hint}"
    )


def merged(x: Any, axes: Axes, dim: int) -> Any:
    """One aux leaf of all devices; ``dim`` dims in front of it count micro-batches."""
    x = vary(jnp.asarray(x), axes)
    if x.ndim > dim:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return total(x, axes) / jnp.asarray(axes.size, x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return total(x, axes)
    raise ValueError(
        f"aux holds a scalar of dtype {x.dtype}, which has no sum over devices; return it as an "
        "array with a leading batch dim, or as a number"
    )
