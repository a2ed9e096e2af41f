"""Losses and gradients of a data-parallel batch, reduce-scattered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jzero._codec import codec_of
from jzero._collectives import mean, total, vary
from jzero._config import ZeroConfig
from jzero._layout import path_string
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import Plan, leaf_paths, plan_tree
from jzero._state import GradShards
from jzero._step import reduce_gradients

__all__ = ["value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int = 0,
    has_aux: bool = False,
    *,
    zero: Any = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for a loss that is a mean over a batch split over the mesh.

    ``loss_fn`` runs on each device with the replicated parameters and its part of the batch. The
    gradient leaves as :class:`GradShards`: summed over all devices by one reduce-scatter a bucket
    (and one all-reduce of the shard a bucket over the replica axis), divided by their number if
    ``average``, and scattered: 4/shards bytes a parameter and device, plus padding. It is never
    reduced to full size. Pass it to ``tx.update`` or ``tx.step`` of a transformation with the
    same ``zero``; it adds and scales like any pytree.

    Works under ``jit`` and without, and inside a ``shard_map`` over the axis (then on local
    arrays), with ``check_vma`` on or off.

    Args:
      loss_fn: ``loss_fn(params, batch, ...) -> loss`` (or ``(loss, aux)``), a scalar mean over
        the part of the batch it is given.
      argnums: position of the parameters, an integer.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      zero: a :class:`ZeroConfig`, or the transformation that will get the gradients, whose
        labels and masks then shape the buckets too. With a plain config, a transformation with
        labels or a mask re-cuts the shards at the cost of an all-gather of the gradient.

    Returns:
      A function of the same arguments that returns ``(loss, grads)`` or ``((loss, aux), grads)``.
      Of the other arguments, each array is split along dim 0 over the axis (and the replica
      axis); scalars (and scalar PRNG keys) are given to every device as they are. ``loss`` is
      the mean over all devices. Of ``aux``, floating scalars are averaged, integer scalars
      summed, and arrays concatenated along dim 0.

    Raises:
      ValueError: a batch dim that the devices do not divide, by path; a loss that is not a
        scalar; ``argnums`` that is not one position; no mesh.
    """
    config, groups = _config_and_groups(zero)
    if isinstance(argnums, bool) or not isinstance(argnums, int) or argnums < 0:
        raise ValueError(
            f"argnums={argnums!r} must be the position of the parameters, one integer from 0; "
            "put several trees into one"
        )
    compiled: dict[Any, Callable[..., Any]] = {}

    def wrapped(*args: Any) -> Any:
        if argnums >= len(args):
            raise ValueError(f"argnums={argnums}, but the function was called with {len(args)}")
        axes = resolve_axes(config)
        params = args[argnums]
        plan = plan_tree(params, shards=axes.shards, cap_bytes=config.cap_bytes, groups=groups)
        specs = [
            P() if i == argnums else batch_specs(arg, axes, f"argument {i}")
            for i, arg in enumerate(args)
        ]
        body = _body(loss_fn, argnums, has_aux, plan, axes, config)
        # How aux leaves come out depends on their shapes, which are those of one device.
        aux_specs = _aux_specs(body, args, specs, axes) if has_aux else None
        grad_specs = GradShards(
            (P(axes.shard),) * len(plan.layout.buckets), plan.layout, axes.shard
        )  # type: ignore[arg-type]
        loss, aux, grads = on_mesh(
            axes,
            body,
            tuple(specs),
            (P(), aux_specs, grad_specs),
            *args,
            cache=compiled,
            key=(plan, axes, jax.tree.structure(args), jax.tree.leaves(specs).__repr__()),
        )
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return wrapped


def _body(
    loss_fn: Callable[..., Any],
    argnums: int,
    has_aux: bool,
    plan: Plan,
    axes: Axes,
    config: ZeroConfig,
) -> Callable[..., Any]:
    def body(*args: Any) -> Any:
        loss, aux, grads = local_gradients(loss_fn, args, argnums, has_aux, plan, axes)
        shards = scatter(grads, plan, axes, config, config.average)
        return mean(loss, axes), jax.tree.map(lambda x: _merged(x, axes), aux), shards

    return body


def local_gradients(
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int,
    has_aux: bool,
    plan: Plan,
    axes: Axes,
) -> tuple[Array, Any, dict[str, Array]]:
    """This device's loss, aux, and partial gradient by path. No communication."""
    leaves = plan.leaves(args[argnums])
    trained = {p: leaves[p] for p, trains in zip(plan.paths, plan.trains, strict=True) if trains}

    def loss_of(trained: dict[str, Array]) -> tuple[Array, Any]:
        rebuilt = plan.rebuild({**leaves, **trained})
        result = loss_fn(*args[:argnums], rebuilt, *args[argnums + 1 :])
        loss, aux = result if has_aux else (result, None)
        if jnp.shape(loss) != ():
            raise ValueError(
                f"loss_fn must return a scalar loss, got shape {jnp.shape(loss)}"
                + ("" if has_aux else "; for (loss, aux) pass has_aux=True")
            )
        return loss, aux

    # Varying parameters: autodiff then leaves the partial sum alone, to be scattered once.
    (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(vary(trained, axes))
    return loss, aux, grads


def scatter(
    grads: dict[str, Array], plan: Plan, axes: Axes, config: ZeroConfig, average: bool
) -> GradShards:
    """Reduce-scatter a partial gradient; float32 shards of the mean or the sum."""
    codecs = [codec_of(bucket, config.precision) for bucket in plan.layout.buckets]
    shards = reduce_gradients(
        grads, plan.layout, axes, tuple(c.grad for c in codecs), owed=frozenset(axes.names)
    )
    shards = tuple(s.astype(c.state) for s, c in zip(shards, codecs, strict=True))
    if average and axes.size > 1:
        shards = tuple(s / jnp.asarray(axes.size, s.dtype) for s in shards)
    return GradShards(shards, plan.layout, axes.shard)


def batch_specs(tree: Any, axes: Axes, what: str, dim: int = 0) -> Any:
    """Specs that split ``dim`` of every array over all devices, and leave scalars whole."""

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


def _merged(x: Any, axes: Axes) -> Any:
    x = jnp.asarray(x)
    if x.ndim:
        return vary(x, axes)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return mean(vary(x, axes), axes)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return total(vary(x, axes), axes)
    raise ValueError(
        f"aux holds a scalar of dtype {x.dtype}, which has no sum over devices; return it as an "
        "array with a leading batch dim, or as a number"
    )


def _aux_specs(body: Any, args: tuple[Any, ...], specs: list[Any], axes: Axes) -> Any:
    if axes.manual:
        return None
    shapes: list[Any] = []

    def record(*local: Any) -> None:
        _, aux, _ = jax.eval_shape(body, *local)
        shapes.append(jax.tree.map(lambda x: P(axes.batch) if x.ndim else P(), aux))

    jax.eval_shape(
        lambda *a: on_mesh(axes, record, tuple(specs), None, *a),
        *args,
    )
    return shapes[0]


def _config_and_groups(zero: Any) -> tuple[ZeroConfig, Callable[[Any], Any] | None]:
    if zero is None:
        return ZeroConfig(), None
    if isinstance(zero, ZeroConfig):
        return zero, None
    config, groups = getattr(zero, "config", None), getattr(zero, "groups", None)
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"zero={zero!r} must be a jzero.ZeroConfig, or made by jzero.adamw")
    return config, groups
