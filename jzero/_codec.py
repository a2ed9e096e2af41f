"""How a bucket's parameters are stored, and how they leave the step.

A codec is chosen per bucket before tracing, from the dtypes alone. Two kinds exist:

- the leaf is its own master (float32 in float32): nothing is stored, the update is added to the
  parameter that was handed in;
- a master copy in the state dtype is kept on the shard, and the parameter is its rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jzero._config import Precision
from jzero._layout import Bucket

__all__ = ["Codec", "codec_of"]


@dataclasses.dataclass(frozen=True)
class Codec:
    """Storage of one bucket's parameters.

    Attributes:
      leaf: dtype of the leaves.
      sync: dtype in which updated parameters are gathered.
      grad: dtype in which gradients are reduce-scattered.
      wide: they are added in float32 although ``grad`` is narrower.
      state: dtype of the moments.
      master: dtype of the stored master copy; None where the leaf is its own master.
    """

    leaf: Any
    sync: Any
    grad: Any
    wide: bool
    state: Any
    master: Any | None

    @property
    def compute(self) -> Any:
        """Dtype of the parameter that the update sees."""
        return self.leaf if self.master is None else self.master

    def init(self, param_shard: Array) -> Array | None:
        """The stored form of a (shard,) of parameters."""
        return None if self.master is None else param_shard.astype(self.master)

    def decode(self, stored: Array | None, param_shard: Array) -> Array:
        """The (shard,) of parameters in full precision.

        ``param_shard``, what the user handed in, is the truth: where it is not the rounding of
        the master, the master is reset to it.
        """
        if stored is None:
            return param_shard
        visible = stored.astype(self.sync).astype(self.leaf)
        return jnp.where(visible == param_shard, stored, param_shard.astype(self.master))

    def encode(self, updated: Array) -> Array | None:
        """What to store of the updated (shard,)."""
        return None if self.master is None else updated


def codec_of(bucket: Bucket, precision: Precision) -> Codec:
    """The codec of a bucket under a precision policy."""
    leaf = jnp.dtype(bucket.dtype)
    state = jnp.dtype(precision.state)
    sync = leaf if precision.param_sync is None else jnp.dtype(precision.param_sync)
    exact = leaf.itemsize >= state.itemsize and jnp.promote_types(sync, leaf) == sync
    keep = precision.master == "full" and not exact
    return Codec(
        leaf=leaf,
        sync=sync,
        grad=state if precision.grad_sync is None else jnp.dtype(precision.grad_sync),
        wide=precision.accumulate == "float32",
        state=state,
        master=state if keep else None,
    )
