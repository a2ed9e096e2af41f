"""The plan of parameters in either form, and gradients in the form of parameter shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jzero._codec import codec_of
from jzero._config import ZeroConfig
from jzero._layout import path_string
from jzero._mesh import Axes, on_mesh
from jzero._pack import Plan, Stacks, differing_slot, leaf_paths, plan_tree
from jzero._shards import ParamShards, param_specs
from jzero._state import GradShards, partition_specs

__all__ = ["checked_plan", "gradient_shards", "plan_params", "stacks_of"]

Groups = Callable[[Any], dict[str, str | None]]


def plan_params(params: Any, axes: Axes, config: ZeroConfig, groups: Groups | None) -> Plan:
    """The plan of a tree of parameters."""
    if isinstance(params, ParamShards):
        return checked_plan(params, axes, config, groups)
    return plan_tree(
        params,
        shards=axes.shards,
        cap_bytes=config.cap_bytes,
        groups=groups,
        stacks=stacks_of(params, config.stacked),
        apart=config.param_sync == "lazy",
        policy=config.precision.policy,
    )


def stacks_of(params: Any, stacked: str | Sequence[str] | None) -> Stacks:
    """Of which declared stack a leaf is part, checked.

    Raises:
      ValueError: a prefix without leaves; two that cover a leaf; leaves below one whose leading
        dims differ, by path.
    """
    prefixes = [stacked] if isinstance(stacked, str) else list(stacked or ())
    layers: dict[str, tuple[str, Any]] = {}

    def stack(path: str, leaf: Any) -> str | None:
        found = [p for p in prefixes if path == p or path.startswith(f"{p}/")]
        if not found or leaf is None:
            return None
        (prefix, *more), shape = found, jnp.shape(leaf)
        if more:
            raise ValueError(f"stacked={found} both cover {path!r}; name the outer one alone")
        first, count = layers.setdefault(prefix, (path, shape[:1]))
        if shape[:1] != count or count in ((), (0,)):
            raise ValueError(
                f"stacked={prefix!r}: {path!r} has shape {shape} and {first!r} a leading dim of "
                f"{count}; every leaf of a stack needs the same leading dim of layers, at least 1"
            )
        return prefix

    for path, leaf in leaf_paths(params):
        stack(path_string(path), leaf)
    missing = sorted(set(prefixes) - layers.keys())
    if missing:
        names = sorted({path_string(path[:1]) for path, _ in leaf_paths(params)})
        raise ValueError(f"stacked={missing} name no subtree of params, which has {names[:10]}")
    return stack


def checked_plan(
    shards: ParamShards, axes: Axes, config: ZeroConfig, groups: Groups | None
) -> Plan:
    """The plan that shards were made with.

    Raises:
      ValueError: it is not the one that this configuration, these groups and this mesh give.
    """
    ours = dataclasses.asdict(dataclasses.replace(config, mesh=None, param_sync="lazy"))
    theirs = dataclasses.asdict(dataclasses.replace(shards.config, mesh=None, param_sync="lazy"))
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"the shards were made with {name}={theirs[name]!r}, and this is configured with "
                f"{name}={value!r}; make them with shard_params(params, zero=tx)"
            )
    plan, tree = shards.plan, shards.shapes()
    if tuple(path_string(path) for path, _ in leaf_paths(tree)) != plan.paths:
        raise ValueError(
            "these shards are a part of what shard_params returned, or the shards of one layer; "
            "pass them whole"
        )
    stacks = dict(zip(plan.paths, plan.stacks, strict=True))
    new = plan_tree(
        tree,
        shards=axes.shards,
        cap_bytes=config.cap_bytes,
        groups=groups,
        stacks=lambda path, _leaf: stacks[path],
        apart=True,
        policy=config.precision.policy,
    )
    for have, want in ((plan.layout, new.layout), (plan.frozen, new.frozen)):
        if have != want:
            raise ValueError(
                "the shards are cut otherwise than this transformation needs: "
                f"{differing_slot(have, want)}; make them on the mesh in use, with its labels and "
                "mask, by shard_params(params, zero=tx)"
            )
    return plan


def gradient_shards(grads: ParamShards, axes: Axes) -> GradShards:
    """A gradient in the form of parameter shards (of ``jax.grad`` by the user), as float32 ones."""
    layout = grads.plan.layout

    def body(grads: ParamShards) -> GradShards:
        flat = [
            x.reshape(-1).astype(codec_of(bucket, grads.config.precision).state)
            for bucket, x in zip(layout.buckets, grads.buckets, strict=True)
        ]
        return GradShards(tuple(flat), layout, axes.shard)

    grads = dataclasses.replace(grads, frozen=(), others=())
    like = GradShards(grads.buckets, layout, axes.shard)
    return on_mesh(axes, body, (param_specs(grads),), partition_specs(like), grads)
