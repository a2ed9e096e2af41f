"""How a bucket's parameters and moments are stored, and what travels.

A codec is chosen per bucket before tracing, from dtypes and policy alone. A parameter is kept in
one of three ways:

- ``own``: the leaf is its own master (float32 gathered in float32, or ``master="none"``). Nothing
  is stored; the update is added to the parameter that was handed in.
- ``full``: a copy in a wider dtype is kept on the shard, and the parameter is its rounding.
- ``remainder``: the lower half of a float32 whose upper half is the bfloat16 parameter.

The bit work itself is the kernels' (``jzero_kernels.adam.forms``), which read and write these
forms in the pass of the update.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax

from jzero._layout import Bucket
from jzero._precision import EIGHT_BITS, Precision
from jzero_kernels.adam import BLOCK, Master, Random, Remainder, Scaled, forms
from jzero_kernels.adam.math import runtime_zero

__all__ = ["Codec", "Noise", "Storage", "codec_of"]


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a (shard,) of numbers is kept: in a dtype, with a scale per block or not.

    Attributes:
      dtype: of the values.
      scaled: a float32 scale per block of 128.
      root: scaled values hold the square root, for second moments.
    """

    dtype: Any
    scaled: bool = False
    root: bool = False

    def like(self, leaf: Any) -> Any:
        """``leaf`` in each place of an array of the stored form."""
        return Scaled(leaf, leaf) if self.scaled else leaf

    def _form(self, n: int) -> Any:
        values = jnp.zeros(n, self.dtype)
        return Scaled(values, jnp.zeros(n // BLOCK, jnp.float32)) if self.scaled else values

    def encode(self, x: Array, bits: Array | None = None) -> Any:
        """The stored form of a (shard,); ``bits`` as for stochastic rounding."""
        return forms.write_moment(
            self._form(x.size), x, forms.flat_blocks(x.size), bits, root=self.root
        )

    def decode(self, stored: Any, dtype: Any = jnp.float32) -> Array:
        """The (shard,) that is stored, in ``dtype``."""
        n = forms.parts(stored)[0].size
        return forms.read_moment(stored, jnp.dtype(dtype), forms.flat_blocks(n), root=self.root)

    def bytes(self, n: int) -> int:
        """Bytes of n elements."""
        return n * jnp.dtype(self.dtype).itemsize + (4 * (n // BLOCK) if self.scaled else 0)


class Noise(NamedTuple):
    """Where a bucket's stochastic rounding takes its bits: see ``jzero_kernels`` forms.Random."""

    random: Random | None

    def bits(self, n: int, array: int) -> Array | None:
        """Bits for the elements of the shard's array number ``array``, if rounding needs them."""
        if self.random is None:
            return None
        index = lax.iota(jnp.int32, n) + self.random.offset
        return forms.random_bits(index, self.random.key + jnp.int32(array))


@dataclasses.dataclass(frozen=True)
class Codec:
    """Storage of one bucket, and the dtypes on its wires.

    Attributes:
      leaf: dtype of the leaves.
      sync: dtype in which updated parameters are gathered.
      grad: dtype in which gradients are reduce-scattered.
      wide: they are added in float32 although ``grad`` is narrower.
      state: dtype of the arithmetic, and of reduced gradients.
      kind: how the parameter is kept; see above.
      master: storage of the master copy; None where nothing is stored.
      mu: storage of the first moment, and of the sharded state of optax transformations.
      nu: storage of the second moment.
      seed: of stochastic rounding; None: to nearest.
    """

    leaf: Any
    sync: Any
    grad: Any
    wide: bool
    state: Any
    kind: Literal["own", "full", "remainder"]
    master: Storage | None
    mu: Storage
    nu: Storage
    seed: int | None = None

    @property
    def compute(self) -> Any:
        """Dtype of the parameter that the update sees."""
        if self.master is None:
            return self.leaf
        wide = self.kind == "remainder" or self.master.scaled
        return jnp.dtype(jnp.float32) if wide else self.master.dtype

    @property
    def out(self) -> Any:
        """Dtype in which the update hands out parameters: 8 bits are encoded afterwards."""
        return jnp.dtype(jnp.float32) if _is_narrow(self.sync) else self.sync

    def init(self, param_shard: Array) -> Any:
        """The stored form of a (shard,) of parameters."""
        if self.master is None:
            return None
        if self.kind == "remainder":
            return jnp.zeros_like(param_shard, jnp.int16)
        return self.master.encode(param_shard.astype(self.compute))

    def operand(self, stored: Any, param_shard: Array) -> Any:
        """Stored form and visible parameters as one operand of the update.

        ``param_shard``, what the user handed in, is the truth: where it is not the rounding of
        the master, the master is reset to it. (A remainder is less than half a unit of whatever
        bfloat16 it stands beside, so it always rounds to the parameter.)
        """
        if self.kind == "own":
            return param_shard
        if self.kind == "remainder":
            return Remainder(param_shard, stored)
        if _is_narrow(self.sync):
            return self._reset(stored, param_shard)
        return Master(stored, param_shard)

    def value(self, operand: Any) -> Array:
        """The (shard,) of parameters in full precision, of an :meth:`operand`."""
        first = forms.parts(operand)[0]
        zero = runtime_zero(first[0].astype(jnp.float32))
        return forms.read_param(operand, self.out, zero, forms.flat_blocks(first.size))

    def decode(self, stored: Any, param_shard: Array) -> Array:
        """The (shard,) of parameters in full precision, of stored form and visible parameters."""
        return self.value(self.operand(stored, param_shard))

    def encode(self, updated: Array, noise: Noise = Noise(None)) -> tuple[Any, Array]:  # noqa: B008
        """What to store of an updated (shard,), and what to hand out."""
        if self.kind == "remainder":
            high, low = forms.split(updated)
            return low, high
        if self.master is None:
            return None, updated.astype(self.out)
        stored = self.master.encode(updated, noise.bits(updated.size, 3))
        return stored, self.master.decode(stored, self.compute).astype(self.out)

    def stored(self, new_p: Any) -> Any:
        """What to store of the parameter that an update returned."""
        return None if self.master is None else new_p

    def _reset(self, stored: Any, param_shard: Array) -> Array:
        assert self.master is not None
        value = self.master.decode(stored, self.compute)
        visible = self.received(self.sent(value)).astype(self.leaf)
        return jnp.where(visible == param_shard, value, param_shard.astype(value.dtype))

    # ---------------------------------------------------------------- the wire of parameters

    def sent(self, out: Array) -> Array:
        """Updated parameters [..., shard] as they are gathered: themselves, or bytes."""
        return to_bytes(out, self.sync) if _is_narrow(self.sync) else out

    def received(self, gathered: Array, shards: int = 1) -> Array:
        """The parameters [..., shards * shard] of what was gathered along the last dim."""
        if not _is_narrow(self.sync):
            return gathered
        rows = gathered.reshape(*gathered.shape[:-1], shards, -1)
        return from_bytes(rows, self.sync).reshape(*gathered.shape[:-1], -1)


def _holds(wide: Any, dtype: Any) -> bool:
    """Whether every value of ``dtype`` has an equal in ``wide``."""
    a, b = jnp.finfo(wide), jnp.finfo(dtype)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp


def _is_narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).name in EIGHT_BITS


def to_bytes(x: Array, dtype: Any) -> Array:
    """Numbers [..., n] in 8 bits with scales: uint8[..., n + n / 128], values and then the scales'
    exponents, so that one collective carries both."""
    storage = Storage(jnp.dtype(dtype), scaled=True)
    scaled = cast("Scaled", storage.encode(x.astype(jnp.float32).reshape(-1)))
    exponents = lax.bitcast_convert_type(scaled.scales, jnp.int32) >> 23
    values = lax.bitcast_convert_type(scaled.values, jnp.uint8)
    each = (values, exponents.astype(jnp.uint8))
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in each], axis=-1)


def from_bytes(rows: Array, dtype: Any) -> Array:
    """The float32 numbers [..., n] of what :func:`to_bytes` made."""
    n = rows.shape[-1] * BLOCK // (BLOCK + 1)
    values = lax.bitcast_convert_type(rows[..., :n], jnp.dtype(dtype)).astype(jnp.float32)
    exponents = rows[..., n:].astype(jnp.int32) << 23
    scales = lax.bitcast_convert_type(exponents, jnp.float32)
    blocks = values.reshape(*scales.shape, BLOCK) * scales[..., None]
    return blocks.reshape(values.shape)


def codec_of(bucket: Bucket, precision: Precision) -> Codec:
    """The codec of a bucket under a precision policy.

    Raises:
      ValueError: leaves of a dtype that the policy does not fit, naming the first.
    """
    chosen = precision.under(bucket.policy)
    leaf = jnp.dtype(bucket.dtype)
    state = jnp.dtype(chosen.state)
    sync = leaf if chosen.param_sync is None else jnp.dtype(chosen.param_sync)
    narrow = _is_narrow(state)
    kept = jnp.dtype(jnp.float32) if narrow else state
    exact = jnp.finfo(leaf).nmant >= jnp.finfo(kept).nmant and _holds(sync, leaf)
    kind: Literal["own", "full", "remainder"] = "own"
    master = None
    if chosen.master == "remainder" and leaf.itemsize < 4:
        if leaf != jnp.bfloat16:
            raise ValueError(
                f"Precision(master='remainder') splits float32 masters into bfloat16 leaves, and "
                f"{bucket.slots[0].path!r} is {leaf.name}; use master='full' for it, through "
                "overrides, or cast it to bfloat16"
            )
        kind, master = "remainder", Storage(jnp.dtype(jnp.int16))
    elif chosen.master == "full" and not exact:
        if kept == jnp.float16 and leaf == jnp.bfloat16 and not chosen.scaled:
            raise ValueError(
                f"Precision(state='float16') would keep the master of {bucket.slots[0].path!r}, "
                "which is bfloat16, in a dtype of less range; add scaled=True, or use "
                "master='remainder'"
            )
        kind, master = "full", Storage(kept, scaled=chosen.scaled and not narrow)
    return Codec(
        leaf=leaf,
        sync=sync,
        grad=jnp.dtype(chosen.grad_dtype),
        wide=chosen.accumulate == "float32" or _is_narrow(chosen.grad_dtype),
        state=jnp.dtype(jnp.float32),
        kind=kind,
        master=master,
        mu=Storage(state, chosen.scaled),
        nu=Storage(state, chosen.scaled, root=chosen.scaled),
        seed=chosen.seed if chosen.rounding == "stochastic" else None,
    )
