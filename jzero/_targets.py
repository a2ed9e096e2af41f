"""Machines to compile for: their names, what they can do, and how to reach their compilers.

Figures are the makers' peaks, per JAX device. Sources: TPU v4, v5e, v5p, v6e and tpu7x from
docs.cloud.google.com/tpu/docs (system architecture pages) and, for one link of the interconnect in
one direction, jax-ml.github.io/scaling-book; GPUs from NVIDIA's data sheets (dense bfloat16, NVLink
in one direction) and, for memory, XLA's target descriptions (openxla/xla,
xla/backends/gpu/target_config/specs). Latencies are assumptions, of the right order: a microsecond
a hop between TPUs (jax-ml.github.io/scaling-book, "a note on ICI latency"); for GPUs, NCCL's own
model of a ring (NVIDIA/nccl, src/graph/tuning.cc: its figures for NVLink and network).
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

__all__ = ["CHIPS", "Chip", "Target", "target_of"]

Kind = Literal["tpu", "gpu", "cpu"]
GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      memory: bytes.
      flops: bfloat16 operations a second.
      bandwidth: bytes a second of its memory.
      link: bytes a second of one link (TPU) or of all links (GPU) to its neighbours, one way.
      torus: dims of the interconnect (TPU).
      wraps: a dim of so many chips, or of a multiple of it, is closed to a ring (TPU).
      network: bytes a second between hosts, for each device (GPU).
      host: devices in a host (GPU).
      hop: seconds that a ring's step to a neighbour takes, however few the bytes.
    """

    memory: int
    flops: float
    bandwidth: float
    link: float
    torus: int = 0
    wraps: int = 0
    network: float = 0.0
    host: int = 8
    hop: float = 0.0


class _Protocol(NamedTuple):
    """How NCCL sends around a ring, in seconds: to begin, a step in a host, a step between hosts;
    and what share of the bandwidth it has."""

    start: float
    hop: float
    network_hop: float
    share: float


_BULK = _Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0)  # "Simple"
_QUICK = _Protocol(3.6e-6, 0.47e-6, 2.7e-6, 0.25)  # "LL": a flag beside each word
_ICI = 1e-6

CHIPS: dict[str, Chip] = {
    # Memory of TPUs: what the compiler lets a program have, which is less than the data sheet's 16,
    # 32, 95 and 96 GiB (its message for a program that is too large, libtpu of jax 0.10.2).
    # A chip of v4 and of tpu7x is two devices.
    "v4": Chip(int(15.25 * GIB), 137.5e12, 614e9, 45e9, torus=3, wraps=4, hop=_ICI),
    "v5e": Chip(int(15.75 * GIB), 197e12, 819e9, 45e9, torus=2, wraps=16, hop=_ICI),
    "v5p": Chip(int(95.74 * GIB), 459e12, 2765e9, 90e9, torus=3, wraps=4, hop=_ICI),
    "v6e": Chip(int(31.25 * GIB), 918e12, 1640e9, 90e9, torus=2, wraps=16, hop=_ICI),
    "tpu7x": Chip(int(94.75 * GIB), 1153.5e12, 3690e9, 50e9, torus=3, wraps=4, hop=_ICI),
    "h100": Chip(84_942_979_072, 989e12, 3352e9, 450e9, network=50e9, hop=_BULK.hop),
    "h200": Chip(151_397_597_184, 989e12, 4800e9, 450e9, network=50e9, hop=_BULK.hop),
    "b200": Chip(191_514_411_008, 2250e12, 7672e9, 900e9, network=50e9, hop=_BULK.hop),
    # To be able to show something: no CPU is meant.
    "cpu": Chip(0, 1e12, 50e9, 10e9, host=1 << 30),
}
GPUS = ("h100", "h200", "b200")


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for.

    Attributes:
      name: as it was given, such as ``"tpu:v5e:16x16"``.
      kind: "tpu", "gpu" or "cpu".
      chip: its devices.
      devices: JAX devices, or descriptions of them, in the order of the mesh.
    """

    name: str
    kind: Kind
    chip: Chip
    devices: tuple[Any, ...]

    def mesh(self, axes: dict[str, int]) -> jax.sharding.Mesh:
        """A mesh with these axes, whose types are Auto."""
        shape = tuple(axes.values())
        if int(np.prod(shape)) != len(self.devices):
            raise ValueError(
                f"the mesh {axes} has {int(np.prod(shape))} devices and {self.name} "
                f"{len(self.devices)}; give mesh_shape={{axis: size}} whose product is that"
            )
        return jax.sharding.Mesh(np.array(self.devices).reshape(shape), tuple(axes))

    def seconds(self, wire_bytes: int, group: Sequence[int], rounds: int = 1) -> float:
        """Of a ring collective in which each device of a group sends so many bytes.

        TPU: all links of the torus dims that the group covers carry it, both directions of a
        dim that is closed to a ring, half of that where it is not; data take a hop for each chip
        of the longest way. GPU: NVLink in a host; between hosts the network cards of a host
        together, if that takes longer; of NCCL's protocols the one that is sooner done.

        Args:
          rounds: how often data go around the ring: 2 for an all-reduce.
        """
        members = [self.devices[i] for i in group if i < len(self.devices)]
        if len(members) < 2 or not wire_bytes:
            return 0.0
        chip = self.chip
        if self.kind == "tpu":
            coords = np.array([list(d.coords) for d in members])
            spans = [len(set(coords[:, dim].tolist())) for dim in range(coords.shape[1])]
            wide = [n for n in spans if n > 1]
            links = sum(2 if n % chip.wraps == 0 else 1 for n in wide) or 1
            hops = sum(n // 2 if n % chip.wraps == 0 else n - 1 for n in wide)
            return wire_bytes / (links * chip.link) + rounds * hops * chip.hop
        hosts = len({i // chip.host for i in group})
        sending = wire_bytes / chip.link
        if hosts > 1 and chip.network:
            per_host = min(len(group), chip.host)
            sending = max(sending, wire_bytes * (hosts - 1) / hosts / (per_host * chip.network))
        if not chip.hop:
            return sending
        near, far = len(group) - hosts, hosts - 1
        return min(
            how.start + rounds * (near * how.hop + far * how.network_hop) + sending / how.share
            for how in (_BULK, _QUICK)
        )


def target_of(topology: str) -> Target:
    """Find the compiler for a name.

    Args:
      topology: ``"tpu:v5e:16x16"`` (also v4, v5p, v6e, tpu7x, with a slice shape; two slices:
        ``"tpu:v5e:16x16:2"``), ``"gpu:h200:8"`` (h100, h200, b200; any number that is at most 8 or
        a multiple of 8), or ``"cpu:8"``.

    Raises:
      ValueError: an unknown name; a slice shape that the compiler does not know.
      ModuleNotFoundError: the compiler is not installed; the message names the extra.
      RuntimeError: fewer CPU devices than asked for, or a compiler that cannot be started.
    """
    kind, _, rest = topology.partition(":")
    chip, _, shape = rest.partition(":")
    if kind == "tpu" and chip in CHIPS and chip not in (*GPUS, "cpu"):
        shape, colon, slices = shape.partition(":")
        count = int(slices) if slices.isdigit() else 0 if colon else 1
        if shape and count:
            devices = _tpu_devices(topology, f"{chip}:{shape}", count)
            return Target(topology, "tpu", CHIPS[chip], devices)
    if kind == "gpu" and chip in GPUS and shape.isdigit() and int(shape) > 0:
        return Target(topology, "gpu", CHIPS[chip], _gpu_devices(topology, chip, int(shape)))
    if kind == "cpu" and chip.isdigit() and int(chip) > 0 and not shape:
        return Target(topology, "cpu", CHIPS["cpu"], _cpu_devices(int(chip)))
    tpus = ", ".join(name for name in CHIPS if name not in (*GPUS, "cpu"))
    raise ValueError(
        f"topology={topology!r} is none that jzero.report knows: use 'tpu:CHIP:SHAPE' with CHIP "
        f"one of {tpus}, such as 'tpu:v5e:4x4' (':2' after it: two slices); 'gpu:CHIP:COUNT' with "
        f"CHIP one of {', '.join(GPUS)}, such as 'gpu:h200:8'; or 'cpu:COUNT'"
    )


def _tpu_devices(topology: str, name: str, slices: int) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"compiling for {topology!r} needs libtpu, TPU's compiler: pip install 'jzero[tpu]'"
        )
    chip, _, shape = name.partition(":")
    sides = [int(side) for side in shape.split("x") if side.isdigit()]
    if CHIPS[chip].torus == 2 and max(sides, default=0) > CHIPS[chip].wraps:
        # The compiler describes such a slice, and aborts the process when it compiles for it.
        raise ValueError(
            f"topology={topology!r}: a slice of {chip} has at most 16x16 chips; more of them are "
            f"several slices, such as 'tpu:{chip}:16x16:2'"
        )
    # Compiling looks for no TPU, and another process may do so at the same time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        several = {"num_slices": slices} if slices > 1 else {}
        found = topologies.get_topology_desc(name, "tpu", **several)
    except Exception as error:
        raise ValueError(
            f"TPU's compiler does not know the slice {name!r} ({str(error).splitlines()[0]}); "
            "shapes are such as v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:8x8"
        ) from error
    return tuple(found.devices)


def _gpu_devices(topology: str, chip: str, count: int) -> tuple[Any, ...]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError(
            f"compiling for {topology!r} needs NVIDIA's compilers (no GPU and no driver, some "
            "4.5 GB): pip install 'jzero[cuda]'"
        )
    host = CHIPS[chip].host
    if count > host and count % host:
        raise ValueError(
            f"topology={topology!r}: {count} GPUs are no whole number of hosts of {host}; use a "
            f"multiple of {host}, or at most {host}"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    config = importlib.resources.files("jzero").joinpath("targets", f"{chip}.txtpb").read_text()
    hosts = max(1, count // host)
    try:
        found = topologies.get_topology_desc(
            "", "cuda", target_config=config, topology=f"1x{hosts}x{count // hosts}"
        )
    except Exception as error:
        raise RuntimeError(
            f"NVIDIA's compiler could not be started for {topology!r}: {error}. The CUDA wheels "
            "must be those of the installed jax: pip install 'jzero[cuda]'"
        ) from error
    return tuple(found.devices)


def _cpu_devices(count: int) -> tuple[Any, ...]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(
            f"topology='cpu:{count}' needs {count} CPU devices and this process has "
            f"{len(devices)}: call jax.config.update('jax_num_cpu_devices', {count}) before JAX "
            "is used"
        )
    return tuple(devices[:count])
