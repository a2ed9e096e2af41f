"""Parameters as a device keeps them between steps of lazy parameter sync: its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from jzero._codec import codec_of
from jzero._config import ZeroConfig
from jzero._gather import Gather, gather
from jzero._layout import Bucket, Layout
from jzero._mesh import Axes
from jzero._pack import Plan

__all__ = ["ParamShards", "bucket_spec", "gather_local", "how_to_gather", "param_specs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ParamShards:
    """Parameters, cut into flat buckets that are sharded over one mesh axis: a pytree of arrays,
    made by ``jzero.shard_params`` and turned back by ``jzero.gather_params``.

    It is indexed like the parameters that it was made of: ``shards["layers"]`` holds the buckets
    of that subtree, ``shards["layers"][3]`` those of one layer, ``len`` and ``for`` work as on the
    container itself, and ``shards.select(lambda params: params.layers)`` reaches attributes.
    A subtree of stacked layers may be scanned (``jax.lax.scan`` over it slices every bucket):
    the body sees the shards of one layer.

    Outside ``shard_map`` a bucket is global: (padded,), sharded ``P(axis)``, or, stacked,
    (layers, row / 128, 128), sharded ``P(None, axis)``. Inside, it is this device's part.

    Attributes:
      buckets: of trained leaves, in their own dtype.
      frozen: of frozen floating leaves.
      others: integers, bools, PRNG keys and Nones, as they were, replicated.
      probes: see [Note: gathered in the loss]; None outside of ``jzero.value_and_grad``.
      plan: which leaf is where (static).
      config: axes and precision (static).
    """

    buckets: tuple[Array, ...]
    frozen: tuple[Array, ...]
    others: tuple[Any, ...]
    probes: tuple[Array, ...] | None
    plan: Plan = dataclasses.field(metadata={"static": True})
    config: ZeroConfig = dataclasses.field(metadata={"static": True})
    weighted: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def layout(self) -> Layout:
        """The buckets of trained leaves."""
        return self.plan.layout

    def __repr__(self) -> str:
        frozen = f", frozen {self.plan.frozen!r}" if self.frozen else ""
        return f"ParamShards({self.layout!r}{frozen})"

    def __getitem__(self, key: Any) -> ParamShards:
        return self.select(lambda tree: tree[key])

    def __len__(self) -> int:
        return len(self._leaves())

    def __iter__(self) -> Iterator[Any]:
        tree = self._leaves()
        if isinstance(tree, Mapping):
            return iter(tree)
        return iter([self[i] for i in range(len(tree))])

    def _leaves(self) -> Any:
        return jax.tree.unflatten(self.plan.treedef, map(_Leaf, range(len(self.plan.paths))))

    def select(self, choose: Callable[[Any], Any]) -> ParamShards:
        """The part that ``choose`` picks from the tree of parameters: whole buckets, of which
        ``gather_params`` then gives the leaves that were picked."""
        leaves, treedef = jax.tree.flatten(choose(self._leaves()))
        if not all(isinstance(leaf, _Leaf) for leaf in leaves):
            raise ValueError("ParamShards.select must return a part of the tree it is given")
        chosen = [leaf.index for leaf in leaves]
        old, paths = self.plan, [self.plan.paths[i] for i in chosen]

        def kept(layout: Layout) -> list[int]:
            return [
                i
                for i, bucket in enumerate(layout.buckets)
                if any(slot.path in paths for slot in bucket.slots)
            ]

        def sub(layout: Layout) -> Layout:
            return Layout(tuple(layout.buckets[i] for i in kept(layout)), layout.shards)

        def part(arrays: tuple[Array, ...], layout: Layout) -> tuple[Array, ...]:
            return tuple(arrays[i] for i in kept(layout))

        others = dict(zip(self.other_paths(), self.others, strict=True))
        plan = Plan(
            sub(old.layout),
            treedef,
            tuple(paths),
            tuple(old.trains[i] for i in chosen),
            sub(old.frozen),
            tuple(old.stacks[i] for i in chosen),
        )
        return ParamShards(
            part(self.buckets, old.layout),
            part(self.frozen, old.frozen),
            tuple(others[path] for path in paths if path in others),
            None if self.probes is None else part(self.probes, old.layout),
            plan,
            self.config,
            self.weighted,
        )

    def other_paths(self) -> list[str]:
        """The paths of ``others``."""
        known = self.plan.layout.by_path.keys() | self.plan.frozen.by_path.keys()
        return [path for path in self.plan.paths if path not in known]

    def shapes(self) -> Any:
        """The parameters as ``ShapeDtypeStruct`` (other leaves as they are)."""
        slots = {**self.plan.layout.by_path, **self.plan.frozen.by_path}
        leaves: dict[str, Any] = {
            path: jax.ShapeDtypeStruct(slot.shape, slot.dtype) for path, slot in slots.items()
        }
        return self.rebuilt(leaves)

    def rebuilt(self, leaves: dict[str, Any]) -> Any:
        """The tree of parameters from its floating leaves by path."""
        others = dict(zip(self.other_paths(), self.others, strict=True))
        return self.plan.rebuild({**others, **leaves})


class _Leaf:
    """Stands for leaf number ``index`` while a subtree is chosen."""

    def __init__(self, index: int) -> None:
        self.index = index


def gather_local(shards: ParamShards, axes: Axes) -> Any:
    """The parameters, on each device, inside a ``shard_map`` over ``axes``."""
    plan = shards.plan
    probes: tuple[Array | None, ...] = shards.probes or (None,) * len(shards.buckets)
    leaves: dict[str, Array] = {}
    for bucket, shard, probe in zip(plan.layout.buckets, shards.buckets, probes, strict=True):
        leaves |= gather(how_to_gather(shards, bucket, axes), shard, probe)
    for bucket, shard in zip(plan.frozen.buckets, shards.frozen, strict=True):
        leaves |= gather(how_to_gather(shards, bucket, axes, trains=False), shard, None)
    return shards.rebuilt(leaves)


def how_to_gather(
    shards: ParamShards, bucket: Bucket, axes: Axes, *, trains: bool = True
) -> Gather:
    """The static choices of a bucket's gather."""
    config = shards.config
    codec = codec_of(bucket, config.precision)
    return Gather(bucket, codec, axes, config.average, shards.weighted, trains)


def bucket_spec(bucket: Bucket, axis: str) -> P:
    """How a bucket of parameters lies on the mesh."""
    return P(None, axis) if bucket.layers else P(axis)


def param_specs(shards: ParamShards) -> Any:
    """``shards`` with a PartitionSpec for each array."""
    axis = shards.config.axis

    def of(layout: Layout) -> Any:
        return tuple(bucket_spec(bucket, axis) for bucket in layout.buckets)

    return dataclasses.replace(
        shards,
        buckets=of(shards.plan.layout),
        frozen=of(shards.plan.frozen),
        others=jax.tree.map(lambda _: P(), shards.others),
        probes=None if shards.probes is None else of(shards.plan.layout),
    )
