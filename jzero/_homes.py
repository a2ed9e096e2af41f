"""Where parameters live between steps: whole on every device, or as shards.

A home is how a step takes a bucket's parameters and what it does with the updated shard; the path
between is the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jzero._codec import Codec
from jzero._collectives import all_gather, own_shard, settled, whole_bucket
from jzero._layout import Bucket
from jzero._mesh import Axes
from jzero._pack import Plan, pack, unpack_all
from jzero._shards import ParamShards, param_specs
from jzero._update import Emit

__all__ = ["Home", "Replicated", "Sharded", "home_of"]


class Home(Protocol):
    """What a step needs to know of where parameters live. Hashable."""

    def entries(self, params: Any) -> dict[Any, Array]:
        """The arrays of a step: what an element of a gradient belongs to, by key."""
        ...

    def specs(self, params: Any) -> Any:
        """PartitionSpecs of :meth:`entries`."""
        ...

    def keys(self, bucket: Bucket) -> list[Any]:
        """The keys of a bucket's arrays."""
        ...

    def take(self, entries: dict[Any, Array], bucket: Bucket, codec: Codec, axes: Axes) -> Array:
        """This device's (shard,) of a bucket, in the leaves' dtype."""
        ...

    def give(
        self, shard: Array, bucket: Bucket, codec: Codec, axes: Axes, how: Emit
    ) -> dict[Any, Array]:
        """An emitted (shard,) of parameters, or of changes to them, as arrays like those of
        :meth:`entries`."""
        ...

    def others(self, params: Any) -> dict[Any, Any]:
        """What does not train, by path or number."""
        ...

    def rebuild(self, params: Any, new: dict[Any, Array], others: dict[Any, Any]) -> Any:
        """Something like ``params`` with new arrays."""
        ...


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Eager sync: a parameter is whole on every device, and all-gathered at the end of the step."""

    plan: Plan

    def entries(self, params: Any) -> dict[Any, Array]:
        leaves = self.plan.leaves(params)
        return {
            path: jnp.asarray(leaves[path])
            if isinstance(leaves[path], np.ndarray)
            else leaves[path]
            for path, trains in zip(self.plan.paths, self.plan.trains, strict=True)
            if trains
        }

    def specs(self, params: Any) -> Any:
        return P()

    def keys(self, bucket: Bucket) -> list[Any]:
        return [slot.path for slot in bucket.slots]

    def take(self, entries: dict[Any, Array], bucket: Bucket, codec: Codec, axes: Axes) -> Array:
        at = 1 if bucket.layers else 0
        return own_shard(pack(entries, bucket, codec.leaf), axes, at).reshape(-1)

    def give(
        self, shard: Array, bucket: Bucket, codec: Codec, axes: Axes, how: Emit
    ) -> dict[Any, Array]:
        if how == "param" and codec.out != codec.sync:
            rows = shard.reshape(bucket.layers, -1) if bucket.layers else shard
            sent = all_gather(codec.sent(rows), axes, rows.ndim - 1)
            flat = codec.received(sent, axes.shards)
            return dict(unpack_all(flat.astype(codec.leaf), bucket))
        gathered = whole_bucket(shard, bucket, axes)
        if how == "param":
            gathered = gathered.astype(codec.leaf)
        if bucket.dims:
            gathered = settled(gathered, shard, axes)
        return dict(unpack_all(gathered, bucket))

    def others(self, params: Any) -> dict[Any, Any]:
        trains = dict(zip(self.plan.paths, self.plan.trains, strict=True))
        return {path: x for path, x in self.plan.leaves(params).items() if not trains[path]}

    def rebuild(self, params: Any, new: dict[Any, Array], others: dict[Any, Any]) -> Any:
        return self.plan.rebuild({**new, **others})


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Lazy sync: parameters are shards before the step and after it. No communication."""

    def entries(self, params: ParamShards) -> dict[Any, Array]:
        return dict(enumerate(params.buckets))

    def specs(self, params: ParamShards) -> Any:
        return dict(enumerate(param_specs(params).buckets))

    def keys(self, bucket: Bucket) -> list[Any]:
        return [bucket.number]

    def take(self, entries: dict[Any, Array], bucket: Bucket, codec: Codec, axes: Axes) -> Array:
        return entries[bucket.number].reshape(-1)

    def give(
        self, shard: Array, bucket: Bucket, codec: Codec, axes: Axes, how: Emit
    ) -> dict[Any, Array]:
        if how == "param":  # as it would be gathered: what the master is compared with
            shard = codec.received(codec.sent(shard)).astype(codec.leaf)
        return {bucket.number: shard.reshape(bucket.form(shard.size))}

    def others(self, params: ParamShards) -> dict[Any, Any]:
        paths, frozen = params.other_paths(), params.plan.frozen.buckets
        named = zip(paths, params.others, strict=True)
        return {
            **dict(named),
            **{
                f"the frozen bucket of {bucket.slots[0].path}": x
                for bucket, x in zip(frozen, params.frozen, strict=True)
            },
        }

    def rebuild(self, params: ParamShards, new: dict[Any, Array], others: dict[Any, Any]) -> Any:
        values, count = list(others.values()), len(params.others)
        return dataclasses.replace(
            params,
            buckets=tuple(new[i] for i in range(len(params.buckets))),
            others=tuple(values[:count]),
            frozen=tuple(values[count:]),
        )


def home_of(params: Any, plan: Plan) -> Home:
    return Sharded() if isinstance(params, ParamShards) else Replicated(plan)
