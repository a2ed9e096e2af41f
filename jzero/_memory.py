"""What an optimizer keeps on one device, in bytes, from the layout and the policy alone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jzero._codec import Codec, Storage
from jzero._layout import Layout

__all__ = ["Memory", "memory_of"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of AdamW's state for a layout under a precision policy; ``str`` is a table of them.

    Attributes:
      parameters: real elements, in all buckets.
      state_bytes: masters and moments on one device, padding and scales included.
      state_bytes_per_parameter: the same on all devices together, without padding, divided by
        ``parameters``.
      gradient_bytes: reduced float32 gradients on one device, while a step holds them.
      lines: the table.
    """

    parameters: int
    state_bytes: int
    state_bytes_per_parameter: float
    gradient_bytes: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def memory_of(layout: Layout, codecs: tuple[Codec, ...]) -> Memory:
    """The memory of a layout whose buckets are stored by these codecs."""

    def each(codec: Codec, n: int) -> int:
        kept = [codec.mu, codec.nu, *([] if codec.master is None else [codec.master])]
        return sum(storage.bytes(n) for storage in kept)

    head = f"{'bucket':>6} {'leaves':>10} {'elements':>15} {'master':>12} {'moments':>20}"
    lines = [f"{head} {'wire: grad':>13} {'param':>13} {'bytes':>7} {'on a device':>15}"]
    total, exact = 0, 0.0
    for bucket, codec in zip(layout.buckets, codecs, strict=True):
        here = each(codec, bucket.shard)
        total += here
        per_element = each(codec, 128) / 128
        exact += per_element * bucket.size
        lines.append(
            f"{bucket.number:>6} {bucket.dtype:>10} {bucket.size:>15,} {_master(codec):>12} "
            f"{_name(codec.mu):>20} {codec.grad.name:>13} {codec.sync.name:>13} "
            f"{per_element:>7.4g} {here:>15,}"
        )
    size = layout.size
    average = exact / size if size else 0.0
    lines.append(
        f"{size:,} parameters: {average:.4g} bytes of state each, divided among {layout.shards}; "
        f"{total:,} bytes on a device"
    )
    gradients = sum(
        bucket.shard * jnp.dtype(codec.state).itemsize
        for bucket, codec in zip(layout.buckets, codecs, strict=True)
    )
    return Memory(size, total, average, gradients, tuple(lines))


def _name(storage: Storage) -> str:
    return f"{'scaled ' if storage.scaled else ''}{jnp.dtype(storage.dtype).name}"


def _master(codec: Codec) -> str:
    if codec.master is None:
        return "the leaf"
    return "remainder" if codec.kind == "remainder" else _name(codec.master)
