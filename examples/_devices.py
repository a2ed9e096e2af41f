"""Eight devices on any machine: the accelerators that are there, or else CPU devices."""

import contextlib
import os
from typing import Any

import jax

Device = Any  # what jax.Device is to type checkers


def devices(count: int | None = None) -> list[Device]:
    """The first ``count`` devices; without accelerators, simulated ones.

    None: all accelerators, or 8 CPU devices. A number of CPU devices that the user has set, by
    XLA_FLAGS or JAX_NUM_CPU_DEVICES, is left alone.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and jax.config.jax_num_cpu_devices < 1:  # pyright: ignore[reportAttributeAccessIssue]
        # Hides no accelerator: jax.devices() prefers those. Too late, it raises: then what is
        # there must do.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count or 8)
    found = jax.devices()
    if count is not None and count > len(found):
        raise ValueError(f"{count} devices asked for; JAX sees {len(found)} ({found[0].platform})")
    return found[:count]


def bytes_on(device: Device, tree: object) -> int:
    """Bytes that the arrays of ``tree`` occupy on one device, as allocated."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
