"""Meshes that follow the machine: shards where links are fast, replicas across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

__all__ = ["make_mesh"]

Device = Any  # what jax.Device is to type checkers


def make_mesh(
    axis: str = "data",
    replica_axis: str | None = None,
    *,
    shards: int | None = None,
    devices: Sequence[Device] | None = None,
    axis_types: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh for :class:`jzero.ZeroConfig`: shards where links are fast, replicas across them.

    A *domain* is a set of devices with fast links: a slice (TPU; GPUs of one host or NVLink
    domain) as JAX reports it, else (CPU) a process. Devices of a domain stay together in either
    shape, in the order of their ids, or on TPU in the order that suits the torus. A topology that
    is only compiled for may be said to be one slice whatever its hosts: pass ``shards``.

    Without ``replica_axis`` the mesh has one axis over all devices. With it, it has two,
    (replica_axis, axis): the shard axis lies inside a domain, where a step's reduce-scatter and
    all-gather run, and only the all-reduce of a shard crosses domains.

    Args:
      axis: name of the shard axis.
      replica_axis: name of the replica axis, or None.
      shards: size of the shard axis. None: with ``replica_axis`` a domain, else all devices. Must
        divide a domain (several groups in one), or be a multiple of it (groups of whole domains).
      devices: None: all of ``jax.devices()``.
      axis_types: of both axes; ``jax.sharding.AxisType.Auto`` or ``Explicit``.

    Raises:
      ValueError: domains of unequal size with a replica axis; ``shards`` that does not fit, or
        that leaves devices over without a ``replica_axis``.
    """
    chosen = list(jax.devices() if devices is None else devices)
    if not chosen:
        raise ValueError("devices=[] holds no device")
    domains = _domains(chosen)
    order = [device for domain in domains for device in _in_domain(domain)]
    if replica_axis is None:
        if shards not in (None, len(order)):
            raise ValueError(
                f"shards={shards} of {len(order)} devices leaves the others without work; name a "
                "replica_axis, or pass fewer devices"
            )
        return Mesh(np.array(order, dtype=object), (axis,), axis_types=(axis_types,))
    if axis == replica_axis:
        raise ValueError(f"axis and replica_axis are both {axis!r}; give two names")
    sizes = {len(domain) for domain in domains}
    if len(sizes) > 1:
        raise ValueError(
            f"domains of {sorted(sizes)} devices do not make a mesh with a replica axis; leave "
            "replica_axis=None, or pass devices of which each domain has as many"
        )
    size = sizes.pop()
    shards = size if shards is None else shards
    if (
        isinstance(shards, bool)
        or not isinstance(shards, int)
        or shards < 1
        or (size % shards and shards % size)
        or len(order) % shards
    ):
        raise ValueError(
            f"shards={shards!r} must divide the {size} devices of a domain, or be a multiple of "
            f"them that divides all {len(order)}; there are {len(domains)} domains"
        )
    array = np.array(order, dtype=object).reshape(-1, shards)
    return Mesh(array, (replica_axis, axis), axis_types=(axis_types, axis_types))


def _domains(devices: list[Device]) -> list[list[Device]]:
    """Devices that fast links join, domain by domain."""

    def key(device: Device) -> int:
        if device.platform != "cpu":
            for name in ("partition_index", "slice_index"):
                if getattr(device, name, None) is not None:
                    return getattr(device, name)
            if device.platform == "tpu":
                return 0  # one slice, of which JAX does not give the number
        return device.process_index

    found: dict[int, list[Device]] = {}
    for device in sorted(devices, key=lambda d: (key(d), d.process_index, d.id)):
        found.setdefault(key(device), []).append(device)
    return list(found.values())


def _in_domain(domain: list[Device]) -> list[Device]:
    if domain[0].platform != "tpu" or len(domain) == 1:
        return domain
    return list(mesh_utils.create_device_mesh((len(domain),), domain).flat)
