"""What a training loop carries: the optimizer state, and gradients that are already shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from jzero._layout import Layout
from jzero._shards import ParamShards, param_specs

__all__ = ["GradShards", "ZeroState", "partition_specs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ZeroState:
    """Optimizer state, sharded over one mesh axis. A pytree whose structure and dtypes depend
    on static policy only.

    Outside ``shard_map`` every shard array is global: (padded,), sharded ``P(axis)``; inside, it
    is this device's (shard,). Sizes are in ``layout``.

    Attributes:
      step: int32 scalar, replicated: completed steps. A skipped step does not count.
      grad_norm: float32 scalar, replicated: 2-norm of the last gradient, after averaging and
        unscaling and before clipping; inf or nan where the gradient was.
      skipped: int32 scalar, replicated: steps skipped because of a non-finite gradient.
      finite: bool scalar, replicated: every element of the last gradient was finite, before
        unscaling; what ``DynamicLossScale.update`` asks for.
      master: a bucket's master parameters, or None where the leaf is its own master.
      inner: state of the update rule (for AdamW ``Moments(mu, nu)``, an array per bucket).
      layout: the buckets (static).
      axis: the shard axis (static).
      sharded: for each leaf of ``inner``, whether it is sharded (static).
    """

    step: Array
    grad_norm: Array
    skipped: Array
    finite: Array
    master: tuple[Array | None, ...]
    inner: Any
    layout: Layout = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})
    sharded: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"ZeroState(step={self.step}, skipped={self.skipped}, {self.layout!r})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class GradShards:
    """A gradient that has had its one reduction: the mean (or sum), scattered over the axis.

    Outside ``shard_map`` an array per bucket, (padded,) sharded ``P(axis)``: a device holds
    1/shards of the gradient. They add and scale like any pytree, and since padding is zero,
    global norms computed from them under ``jit`` are the gradient's.

    Attributes:
      buckets: flat arrays.
      layout: the buckets (static).
      axis: the shard axis (static).
    """

    buckets: tuple[Array, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"GradShards({self.layout!r})"


def partition_specs(tree: Any) -> Any:
    """PartitionSpecs for ``in_specs``/``out_specs`` of a ``shard_map``, or for checkpoints.

    Args:
      tree: a :class:`ZeroState`, :class:`GradShards`, :class:`ParamShards`, or any pytree that
        contains some, such as the state of an ``optax.chain``; arrays or ``ShapeDtypeStruct``.

    Returns:
      The same tree with ``P(axis)`` in place of each sharded array (``P(None, axis)`` of a stacked
      bucket of parameters) and ``P()`` elsewhere.
    """

    def specs(node: Any) -> Any:
        if isinstance(node, ZeroState):
            leaves, treedef = jax.tree.flatten(node.inner)
            assert len(leaves) == len(node.sharded)
            return dataclasses.replace(
                node,
                step=P(),
                grad_norm=P(),
                skipped=P(),
                finite=P(),
                master=jax.tree.map(lambda _: P(node.axis), node.master),
                inner=treedef.unflatten([P(node.axis) if s else P() for s in node.sharded]),
            )
        if isinstance(node, GradShards):
            return jax.tree.map(lambda _: P(node.axis), node)
        if isinstance(node, ParamShards):
            return param_specs(node)
        return P()

    ours = (ZeroState, GradShards, ParamShards)
    return jax.tree.map(specs, tree, is_leaf=lambda x: isinstance(x, ours))
