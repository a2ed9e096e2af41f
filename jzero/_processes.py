"""What processes tell each other outside of any program: through JAX's coordination service.

Nothing here runs on a device, so nothing here can hang in a collective: every wait has a limit,
and what differs between processes is said on all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jzero._layout import Layout

__all__ = ["agree", "agree_on_layout", "barrier", "client"]

TIMEOUT = 300.0
"""Seconds to wait for the other processes: they may still be compiling, or reading a checkpoint."""

_SHOWN = 5


def client() -> Any:
    """JAX's connection to the coordination service; None with one process.

    It has no public name in JAX; Orbax reaches for it in the same way.
    """
    from jax._src import distributed

    return distributed.global_state.client


def barrier(name: str, timeout: float = TIMEOUT, processes: Iterable[int] | None = None) -> None:
    """Wait until every process is here.

    Args:
      name: which meeting it is; it can be used again.
      timeout: seconds.
      processes: those that meet; None: all.

    Raises:
      RuntimeError: they are not here in time, with the number of those that are.
    """
    connection = client()
    if connection is None:
        return
    members = None if processes is None else sorted(processes)
    start = time.monotonic()
    try:
        connection.wait_at_barrier(f"jzero/{name}", int(timeout * 1000), process_ids=members)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"waited {time.monotonic() - start:.1f} of {timeout:g} s at {name!r} for the other "
            "processes; one of them has failed, is slower than that, or does not come here. JAX "
            f"says: {_first_lines(str(error))}"
        ) from error


def agree(
    topic: str,
    facts: Mapping[str, str],
    *,
    timeout: float = TIMEOUT,
    processes: Iterable[int] | None = None,
) -> None:
    """Check that all processes hold the same facts; raise on all of them if not.

    Costs a few small messages; the facts themselves are read only where they differ.

    Args:
      topic: what is compared, for messages; every process must ask about the same topic.
      facts: name to value, e.g. path to shape and dtype.
      timeout: seconds to wait for the others.
      processes: those that compare; None: all.

    Raises:
      ValueError: they differ; it names processes and facts.
      RuntimeError: a process does not come here in time.
    """
    connection = client()
    if connection is None:
        return
    members = sorted(range(jax.process_count()) if processes is None else processes)
    me, first = jax.process_index(), members[0]
    if len(members) < 2:
        return
    where = f"jzero/agree/{topic}"
    text = json.dumps(dict(facts), sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    if me == first:
        connection.key_value_set_bytes(f"{where}/facts", zlib.compress(text), allow_overwrite=True)
        connection.key_value_set(f"{where}/digest", digest, allow_overwrite=True)
    barrier(f"{topic} written", timeout, members)
    if me != first:
        theirs = connection.blocking_key_value_get(f"{where}/digest", int(timeout * 1000))
        if theirs != digest:
            packed = connection.blocking_key_value_get_bytes(f"{where}/facts", int(timeout * 1000))
            said = _difference(json.loads(zlib.decompress(packed)), dict(facts), first, me)
            connection.key_value_set(f"{where}/differs/{me}", said, allow_overwrite=True)
    barrier(f"{topic} compared", timeout, members)
    differing = sorted(text for _, text in connection.key_value_dir_get(f"{where}/differs/"))
    barrier(f"{topic} read", timeout, members)  # before anyone writes about this topic again
    if differing:
        if me == first:
            connection.key_value_delete(f"{where}/differs/")
        more = f"; and {len(differing) - 1} more processes" if len(differing) > 1 else ""
        raise ValueError(f"the processes do not agree on {topic}: {differing[0]}{more}")


def agree_on_layout(
    topic: str, layout: Layout, mesh: Any, dtypes: Mapping[str, Any] | None = None
) -> None:
    """:func:`agree` on each leaf and where it lies, among the processes of a mesh of several.
    ``dtypes``: by path, where the layout's are not those that the user knows."""
    processes = _spanned(mesh)
    if len(processes) > 1:
        facts = {
            slot.path: f"{(dtypes or {}).get(slot.path, slot.dtype)}{list(slot.shape)}"
            for slot in sorted(layout.slots, key=lambda slot: slot.path)
        }
        facts["the layout"] = f"{len(layout.buckets)} buckets ({layout.fingerprint[:12]})"
        agree(topic, facts, processes=processes)


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str], first: int, me: int) -> str:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    shown = "; ".join(
        f"{name!r} is {theirs.get(name, 'absent')} on process {first} and "
        f"{ours.get(name, 'absent')} on process {me}"
        for name in names[:_SHOWN]
    )
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return shown + more


def _first_lines(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _spanned(mesh: Any) -> tuple[int, ...]:
    """The processes whose devices a mesh holds, in order; () for a mesh without devices, or one
    whose devices are described only (no process can run on them)."""
    if client() is None or not isinstance(mesh, jax.sharding.Mesh):
        return ()
    found = sorted({device.process_index for device in mesh.devices.flat})
    ours = {device.id for device in jax.local_devices(backend=mesh.devices.flat[0].platform)}
    return tuple(found) if any(d.id in ours for d in mesh.devices.flat) else ()
