"""The plan of parameters in either form, and gradients in the form of parameter shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jzero._codec import codec_of
from jzero._config import ZeroConfig
from jzero._layout import path_string
from jzero._mesh import Axes, on_mesh
from jzero._pack import Plan, differing_slot, leaf_paths, plan_tree
from jzero._shards import ParamShards, param_specs
from jzero._state import GradShards, partition_specs

__all__ = ["checked_plan", "gradient_shards", "plan_params"]

Groups = Callable[[Any], dict[str, str | None]]


def plan_params(params: Any, axes: Axes, config: ZeroConfig, groups: Groups | None) -> Plan:
    """The plan of a tree of parameters."""
    if isinstance(params, ParamShards):
        return checked_plan(params, axes, config, groups)
    stacks = None if config.param_sync == "eager" else lambda _path, _leaf: None
    return plan_tree(
        params,
        shards=axes.shards,
        cap_bytes=config.cap_bytes,
        groups=groups,
        stacks=stacks,
        policy=config.precision.policy,
    )


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
