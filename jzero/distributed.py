"""Many processes: starting them together, one mesh, the same values, each its part of the data.

A script for one process or many::

    jzero.distributed.initialize()                 # before anything else of JAX
    mesh = jzero.distributed.make_mesh()
    zero = jzero.ZeroConfig(mesh=mesh)
    params = jzero.broadcast(init(seed), zero=zero)  # process 0's values, whatever the seeds
    rows = jzero.distributed.local_rows(mesh, batch_size)
    for batch in data:
        step(params, state, jzero.distributed.global_batch(batch[rows], mesh))
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Sequence

import jax

from jzero import _processes
from jzero._cluster import find_job, jax_detects, proxy_in_the_way
from jzero._domains import make_mesh
from jzero._meeting import MeetingError, Peer, meet
from jzero._spread import check_same, global_batch, local_rows
from jzero._watch import watch

__all__ = [
    "MeetingError",
    "barrier",
    "check_same",
    "global_batch",
    "initialize",
    "local_rows",
    "make_mesh",
    "shutdown",
]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: float = 100.0,
    shutdown_timeout: float = 300.0,
    coordinator_bind_address: str | None = None,
    meeting: bool = True,
) -> None:
    """Start JAX in this process as one of many; in a lone process, do nothing.

    Finds its place from the arguments; else from ``JZERO_COORDINATOR_ADDRESS``,
    ``JZERO_NUM_PROCESSES`` and ``JZERO_PROCESS_ID`` (which ``jzero launch`` sets), or the same
    with ``JAX_``; else from torchrun's ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE`` and
    ``RANK``; else as JAX detects Open MPI, SLURM, Cloud TPU and Kubernetes. Call it before the
    first use of a device. A second call changes nothing.

    The processes first meet at the coordinator's address and compare their number, their ids and
    their versions of jzero, JAX and Python ([Note: why a meeting before the start] in
    ``_meeting``). From then on an exception that ends one process ends all ([Note: how a failure
    travels] in ``_watch``).

    Args:
      coordinator_address: "host:port" of process 0, the same everywhere.
      num_processes: how many there are. 1: this one alone, whatever the environment says.
      process_id: which one this is, from 0.
      local_device_ids: the accelerators of this host that are this process's; None: all, or one
        each where the launcher counts the processes of a host.
      initialization_timeout: seconds to wait for all processes to be there.
      heartbeat_timeout: seconds without a sign of life after which JAX takes a process for dead
        and ends the others.
      shutdown_timeout: seconds that a process which is done waits for the others.
      coordinator_bind_address: "host:port" at which process 0 listens; None: that port on all
        interfaces.
      meeting: False: leave it all to JAX, for networks where process 0 cannot be reached by a
        plain TCP connection. Then nothing is compared, and failures are left to JAX too.

    Raises:
      ValueError: half of a description, by name; a second call with other numbers; a proxy
        variable that would catch the connection to the coordinator.
      RuntimeError: a device has been used before.
      MeetingError: a RuntimeError, on all processes that could be reached: the coordinator does
        not answer, processes are missing, two have one id, or counts or versions differ.
    """
    for name, seconds in (
        ("initialization_timeout", initialization_timeout),
        ("heartbeat_timeout", heartbeat_timeout),
        ("shutdown_timeout", shutdown_timeout),
    ):
        if isinstance(seconds, bool) or not seconds >= 1 or not math.isfinite(seconds):
            raise ValueError(f"{name}={seconds!r} must be a number of seconds, at least 1")
    if jax.distributed.is_initialized():
        for name, given, have in (
            ("num_processes", num_processes, jax.process_count()),
            ("process_id", process_id, jax.process_index()),
        ):
            if given is not None and given != have:
                raise ValueError(
                    f"{name}={given}, but this process was started with {name}={have}; a process "
                    "is started once, and further calls need no arguments"
                )
        return
    job = find_job(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        env=os.environ,
        detect=lambda: jax_detects(int(initialization_timeout)),
    )
    if job is None:
        return
    if _backends_exist():
        raise RuntimeError(
            "jzero.distributed.initialize() comes too late: a device of JAX has been used. Call it "
            "first, before jax.devices(), jnp.zeros(...), jax.random.key(...) and the like"
        )
    proxy = proxy_in_the_way(job.coordinator, os.environ)
    if proxy is not None:
        host = job.coordinator.rpartition(":")[0].strip("[]")
        raise ValueError(
            f"the variable {proxy}={os.environ[proxy]!r} sends the connection to the coordinator "
            f"{job.coordinator} through a proxy, where it fails or hangs; exempt it with "
            f"no_proxy={host},$no_proxy, or unset {proxy}"
        )
    peers: Sequence[Peer] | None = None
    if meeting:
        facts = {
            "jzero": importlib.metadata.version("jzero"),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "Python": ".".join(map(str, sys.version_info[:2])),
        }
        peers = meet(job, facts, timeout=initialization_timeout, bind=coordinator_bind_address)
    if jax.config.jax_cpu_collectives_implementation in (None, "none"):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=job.coordinator,
        num_processes=job.processes,
        process_id=job.process,
        local_device_ids=job.local_devices,
        cluster_detection_method="deactivate",  # all that it finds is in `job`
        initialization_timeout=math.ceil(initialization_timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat_timeout),
        shutdown_timeout_seconds=math.ceil(shutdown_timeout),
        coordinator_bind_address=coordinator_bind_address,
    )
    if peers is not None:
        watch(_processes.client(), job.process, peers)
    barrier("start", initialization_timeout)


def shutdown() -> None:
    """Leave the other processes; waits for them up to ``shutdown_timeout``. Not needed at the end
    of a script, where JAX does it."""
    jax.distributed.shutdown()


def barrier(name: str, timeout: float = _processes.TIMEOUT) -> None:
    """Wait until every process has come to this point, without a device; nothing in a lone one.

    Gloo (CPU) gives up a reduce-scatter after 30 s for which a process is late: call this before
    the first step where compiling or loading may take some processes much longer than others.

    Args:
      name: the same on all processes; it can be used again.
      timeout: seconds.

    Raises:
      RuntimeError: some process is not here in time.
    """
    _processes.barrier(name, timeout)


def _backends_exist() -> bool:
    try:
        from jax._src import xla_bridge

        return xla_bridge.backends_are_initialized()
    except (ImportError, AttributeError):
        return False  # JAX says it itself
