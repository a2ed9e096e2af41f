"""What all processes hold alike, and batches to which each brings its part."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import _processes
from jzero._layout import path_string
from jzero._pack import leaf_paths

__all__ = ["check_same", "global_batch", "local_rows"]


def check_same(
    tree: Any, name: str = "params", *, values: bool = False, timeout: float = _processes.TIMEOUT
) -> None:
    """Check that every process holds the same tree; where not, raise on all, naming the leaf.

    Compares fingerprints through the coordination service, not on a device, so that it cannot hang
    on what it is to find. ``tx.init`` on the processes' common mesh does this for its params.

    Args:
      tree: arrays, ``ShapeDtypeStruct`` or plain values (numbers, strings), e.g. of options.
      name: of the tree, for messages; all processes must check the same names in the same order.
      values: also compare the values, of arrays bit by bit: those parts that this process holds
        of an array that is replicated. An array sharded over processes cannot be compared.
      timeout: seconds to wait for the other processes.

    Raises:
      ValueError: they differ; ``values`` of an array that no process holds whole.
      RuntimeError: some process does not come here in time.
    """
    facts = {path_string(path): _fact(path, leaf, values) for path, leaf in leaf_paths(tree)}
    _processes.agree(name, facts, timeout=timeout)


def _fact(path: Any, leaf: Any, values: bool) -> str:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return repr(leaf)
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    if not values or isinstance(leaf, jax.ShapeDtypeStruct):
        return kind
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            raise ValueError(
                f"check_same(values=True): the array at {path_string(path)!r} is sharded over "
                "processes, none of which holds it whole; leave it out, or compare without values"
            )
        leaf = leaf.addressable_data(0)
    data = np.ascontiguousarray(np.asarray(leaf))
    return f"{kind} with sha256 {hashlib.sha256(data.tobytes()).hexdigest()[:16]}"


def local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """Which rows of a global batch this process loads: those of its own devices.

    Args:
      mesh: the batch is split over all of its axes, in mesh order, as ``jzero.value_and_grad``
        does.
      size: rows of the global batch; the mesh's devices must divide it.

    Returns:
      Ascending int64 indices; ``batch[rows]`` goes to :func:`global_batch`. Every row belongs to
      exactly one process. With 2 processes of 2 devices and 8 rows: 0-3 and 4-7.

    Raises:
      ValueError: devices that do not divide ``size``.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 0 or size % mesh.size:
        raise ValueError(
            f"a batch of size={size!r} cannot be split over {mesh.size} devices equally; use a "
            f"multiple of {mesh.size}"
        )
    part = size // mesh.size
    mine = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    firsts = np.asarray(mine, np.int64) * part
    return (firsts[:, None] + np.arange(part)).reshape(-1)


def global_batch(local: Any, mesh: Mesh, *, dim: int = 0) -> Any:
    """One global batch from the parts that the processes have loaded. No communication.

    Args:
      local: a pytree of arrays with this process's rows, in the order of :func:`local_rows`.
      mesh: as for :func:`local_rows`.
      dim: the dim that is split: 0, or 1 for batches of ``jzero.accumulate``, (steps, batch, ...).

    Returns:
      The same pytree of global arrays, ``dim`` split over all axes of the mesh; an array with
      fewer dims is replicated and must be equal on all processes.

    Raises:
      ValueError: a number of rows that this process's devices do not divide, by path.
    """
    here = jax.process_index()
    mine = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == here]
    split = NamedSharding(mesh, P(*[None] * dim, mesh.axis_names))
    devices = [mesh.devices.flat[i] for i in mine]

    def place(path: Any, x: Any) -> Any:
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        if x.ndim <= dim:
            return jax.device_put(x, NamedSharding(mesh, P()))
        rows = x.shape[dim]
        if not mine or rows % len(mine):
            raise ValueError(
                f"the local batch{f' at {path_string(path)!r}' if path else ''} has {rows} rows, "
                f"which the {len(mine)} devices of process {here} do not divide; load those of "
                "jzero.distributed.local_rows"
            )
        part = rows // len(mine)
        shape = (*x.shape[:dim], part * mesh.size, *x.shape[dim + 1 :])
        parts = [
            jax.device_put(lax.slice_in_dim(x, i * part, (i + 1) * part, axis=dim), device)
            if isinstance(x, jax.Array)
            else jax.device_put(np.take(x, range(i * part, (i + 1) * part), axis=dim), device)
            for i, device in enumerate(devices)
        ]
        return jax.make_array_from_single_device_arrays(shape, split, parts)

    flat = [None if x is None else place(path, x) for path, x in leaf_paths(local)]
    treedef = jax.tree.structure(local, is_leaf=lambda x: x is None)
    return treedef.unflatten(flat)
