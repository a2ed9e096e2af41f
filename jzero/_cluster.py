"""Which process of which job this is: from arguments, environment variables, or as JAX finds out.

Nothing here starts or contacts anything; detection is a function of its arguments.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Job", "find_job", "proxy_in_the_way", "split_address"]

# What a job scheduler would say, by our own launcher (`jzero launch`), by hand in JAX's style, ...
_STYLES = (
    ("jzero launch", "JZERO_COORDINATOR_ADDRESS", "JZERO_NUM_PROCESSES", "JZERO_PROCESS_ID"),
    ("JAX_* variables", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
# ... and in torch's style.
_TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")

Found = tuple[str | None, int | None, int | None, Sequence[int] | None]


class Job(NamedTuple):
    """This process's place among all.

    Attributes:
      coordinator: "host:port" at which process 0 listens.
      processes: how many there are.
      process: which one this is, from 0.
      local_devices: the accelerators of this host that are this process's; None: JAX decides.
      source: where this was found, for messages.
    """

    coordinator: str
    processes: int
    process: int
    local_devices: tuple[int, ...] | None
    source: str


def find_job(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    *,
    env: Mapping[str, str],
    detect: Callable[[], Found] | None = None,
) -> Job | None:
    """Find this process's place: arguments, then ``JZERO_*`` and ``JAX_*`` variables, then
    torchrun's, then what JAX detects (Open MPI, SLURM, Cloud TPU, Kubernetes).

    Args:
      coordinator_address, num_processes, process_id, local_device_ids: what the caller knows.
      env: the environment.
      detect: asks JAX; called only if something is still missing.

    Returns:
      None where nothing says that there is more than this one process.

    Raises:
      ValueError: half of a description, a number that is none, an index out of range; it names
        the variable or argument.
    """
    found = _Partial(coordinator_address, num_processes, process_id, local_device_ids)
    for source, address, count, index in _STYLES:
        if not found.complete and any(name in env for name in (address, count, index)):
            found.add(
                source,
                env.get(address),
                _number(env, count),
                _number(env, index),
                None,
            )
    if not found.complete and all(env.get(name) for name in _TORCH):
        found.add("torchrun's variables", *_torchrun(env))
    if not found.complete and num_processes != 1 and detect is not None:
        found.add("JAX's detection", *detect())
    return found.job()


class _Partial:
    """What is known so far, and from where."""

    def __init__(
        self,
        coordinator: str | None,
        processes: int | None,
        index: int | None,
        devices: Sequence[int] | None,
    ) -> None:
        self.coordinator, self.processes, self.index = coordinator, processes, index
        self.devices = None if devices is None else tuple(devices)
        given = any(x is not None for x in (coordinator, processes, index))
        self.sources = ["arguments"] if given else []

    @property
    def complete(self) -> bool:
        return None not in (self.coordinator, self.processes, self.index)

    def add(
        self,
        source: str,
        coordinator: str | None,
        processes: int | None,
        index: int | None,
        devices: Sequence[int] | None,
    ) -> None:
        """Fill what is missing."""
        if all(x is None for x in (coordinator, processes, index)):
            return
        self.sources.append(source)
        self.coordinator = self.coordinator or coordinator
        self.processes = processes if self.processes is None else self.processes
        self.index = index if self.index is None else self.index
        if self.devices is None and devices is not None:
            self.devices = tuple(devices)

    def job(self) -> Job | None:
        if not self.sources or (self.processes == 1 and self.index in (None, 0)):
            return None
        source = " and ".join(self.sources)
        wanted = {
            "coordinator_address": self.coordinator,
            "num_processes": self.processes,
            "process_id": self.index,
        }
        missing = [name for name, value in wanted.items() if value is None]
        if missing:
            raise ValueError(
                f"{source} give {[name for name in wanted if name not in missing]} but not "
                f"{missing}; pass it to jzero.distributed.initialize, or set JZERO_COORDINATOR_"
                "ADDRESS, JZERO_NUM_PROCESSES and JZERO_PROCESS_ID in each process"
            )
        assert self.coordinator is not None
        assert self.processes is not None
        assert self.index is not None
        for name, value, low in (
            ("num_processes", self.processes, 1),
            ("process_id", self.index, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name}={value!r} (from {source}) must be an integer from {low}")
        if self.index >= self.processes:
            raise ValueError(
                f"process_id={self.index} with num_processes={self.processes} (from {source}): "
                f"ids count from 0 to {self.processes - 1}"
            )
        split_address(self.coordinator)
        return Job(self.coordinator, self.processes, self.index, self.devices, source)


def _torchrun(env: Mapping[str, str]) -> Found:
    # torchrun's own store listens at MASTER_PORT when its agent keeps it, so we take the next.
    port = _number(env, "MASTER_PORT") or 0
    if env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true"):
        port += 1
    host = env["MASTER_ADDR"]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    local = _number(env, "LOCAL_RANK")
    return (
        f"{host}:{env.get('JAX_COORDINATOR_PORT') or port}",
        _number(env, "WORLD_SIZE"),
        _number(env, "RANK"),
        None if local is None else (local,),
    )


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"the variable {name}={text!r} must be an integer") from error


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` in two.

    Raises:
      ValueError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"coordinator_address={address!r} must be host:port, such as 10.0.0.1:1234 or "
            "[fe80::1]:1234, the same in every process"
        )
    return host, int(port)


def proxy_in_the_way(address: str, env: Mapping[str, str]) -> str | None:
    """The proxy variable through which JAX's connection to the coordinator would go, or None.

    gRPC reads the lower-case names only, the first that is set, and asks no proxy for hosts
    that end like an entry of no_grpc_proxy or no_proxy.
    """
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    host, _ = split_address(address)
    exempt = env.get("no_grpc_proxy") or env.get("no_proxy") or ""
    entries = [entry.strip() for entry in exempt.split(",") if entry.strip()]
    return None if any(host.endswith(entry) for entry in entries) else name


def jax_detects(timeout: int) -> Found:
    """What JAX's own detection says of this process; Nones where it says nothing.

    It has no public name: where a later JAX has moved it, jzero's arguments and variables remain.
    """
    try:
        from jax._src.clusters import ClusterEnv

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        return None, None, None, None
    local = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    ids = [int(part) for part in local.split(",")] if local else None
    with warnings.catch_warnings():
        # A pod that is no part of an indexed job has nothing to find out: no need of the package
        # `kubernetes`, whose absence JAX deplores in every pod.
        if "JOB_COMPLETION_INDEX" not in os.environ:
            warnings.filterwarnings("ignore", message="(?s)Kubernetes environment detected")
        try:
            return detect(None, None, None, ids, None, timeout)
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            raise RuntimeError(
                f"JAX sees a cluster but not this process's place in it: {error}. Pass "
                "coordinator_address, num_processes and process_id to jzero.distributed.initialize "
                "(or num_processes=1 for a lone process)"
            ) from error
