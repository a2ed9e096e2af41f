"""Saving: who writes which pieces, from the state's own shards to a stream per process."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_commit import (
    agree,
    await_manifest,
    await_mark,
    created,
    mark,
    mark_failed,
    remove_leftovers,
    say_counted,
)
from jzero._ckpt_format import (
    ArrayEntry,
    CheckpointError,
    LeafEntry,
    Manifest,
    NodeEntry,
    Piece,
    sync_folder,
    write_manifest,
)
from jzero._ckpt_ranges import between, real_ranges, unit
from jzero._ckpt_stream import Ledger, plan_stream, tensorstore, write_stream
from jzero._ckpt_view import Node, View
from jzero._layout import Bucket

__all__ = ["Saving", "start_save"]

Part = Callable[[], np.ndarray]
"""Some bytes of the own stream, fetched when they are due."""


class Saving:
    """A save that is under way, or done.

    Attributes:
      path: the checkpoint's folder.
      step: the number it is saved under.
      bytes: bytes of data that this process writes.
      peak_bytes: most staging memory that was alive at once on this process's host, in bytes;
        final once :meth:`wait` has returned.
    """

    def __init__(self, path: Path, step: int, count: int, ledger: Ledger) -> None:
        self.path = path
        self.step = step
        self.bytes = count
        self._ledger = ledger
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def peak_bytes(self) -> int:
        """See the class."""
        return self._ledger.peak

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the checkpoint counts.

        Raises:
          CheckpointError: it could not be written, on this process or another. What the folder
            held before is untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None], background: bool) -> None:
        """Do the work, here or in a thread that the interpreter waits for at its end."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        if background:
            self._thread = threading.Thread(target=guarded, name="jzero-save", daemon=False)
            self._thread.start()
        else:
            work()

    def __repr__(self) -> str:
        how = "done" if self.done else "under way"
        return f"Saving({str(self.path)!r}, step={self.step}, {self.bytes:,} bytes, {how})"


def start_save(path: Path, view: View, step: int, background: bool, timeout: float) -> Saving:
    """Plan, copy what must be copied, and write: all processes call it alike."""
    tensorstore()
    plan = _Plan(view)
    nonce = agree(secrets.token_hex(8))
    data = f"data-{nonce}"
    own, count = jax.process_index(), jax.process_count()
    largest = max(
        (_bucket_bytes(n, b) for n in view.nodes.values() for b in n.layout.buckets), default=0
    )
    streams = tuple(plan_stream(size, largest) for size in plan.sizes)
    ledger = Ledger()
    saving = Saving(path, step, streams[own].bytes, ledger)
    parts: Iterable[np.ndarray]
    if background:
        # The loop goes on and may donate its arrays, so their bytes are taken now.
        kept = [np.array(part(), copy=True) for part in plan.parts]
        plan.parts.clear()
        ledger.add(sum(part.nbytes for part in kept))
        parts = _releasing(kept, ledger)
    else:
        parts = (part() for part in plan.parts)

    def work() -> None:
        folder = path / data
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            entry = write_stream(folder / f"{own:05d}", streams[own], parts, ledger)
            mark(folder, own, entry)
            if own == 0:
                written = [await_mark(folder, k, timeout) for k in range(count)]
                sync_folder(folder)
                manifest = Manifest(
                    step, data, tuple(written), plan.nodes, plan.leaves, created(count)
                )
                write_manifest(path, manifest)
                say_counted(folder)
                remove_leftovers(path, data)
            else:
                await_manifest(folder, timeout)
        except BaseException as error:
            mark_failed(folder, own, error)
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, CheckpointError):
                raise CheckpointError(f"{path} could not be saved: {error}") from error
            raise

    saving.run(work, background)
    return saving


def _releasing(kept: list[np.ndarray], ledger: Ledger) -> Iterator[np.ndarray]:
    kept.reverse()
    while kept:
        part = kept.pop()
        yield part
        ledger.add(-part.nbytes)


def _bucket_bytes(node: Node, bucket: Bucket) -> int:
    arrays = [node.array(q, bucket.number) for q in node.arrays]
    own = bucket.padded * bucket.itemsize if node.params is not None else 0
    return own + sum(a.size * a.dtype.itemsize for a in arrays if a is not None)


# ---------------------------------------------------------------- who writes what


class _Plan:
    """Every process's pieces, and the parts of this one. Equal on all processes."""

    def __init__(self, view: View) -> None:
        self.sizes = [0] * jax.process_count()
        self.parts: list[Part] = []
        self._host = _Host()
        self.nodes: dict[str, NodeEntry] = {}
        self.leaves: dict[str, LeafEntry] = {}
        for name, node in view.nodes.items():
            arrays: dict[str, list[ArrayEntry | None]] = {q: [] for q in node.quantities()}
            for bucket in node.layout.buckets:
                for quantity, entries in arrays.items():
                    entries.append(self._array(node, bucket, quantity))
            self.nodes[name] = NodeEntry(
                node.layout, {q: tuple(e) for q, e in arrays.items()}, node.kind
            )
        for number, (name, leaf) in enumerate(view.leaves.items()):
            self.leaves[name] = self._leaf(leaf, number)

    def _place(self, process: int, count: int, part: Part) -> int:
        offset = self.sizes[process]
        self.sizes[process] += count
        if process == jax.process_index():
            self.parts.append(part)
        return offset

    def _array(self, node: Node, bucket: Bucket, quantity: str) -> ArrayEntry | None:
        array = node.array(quantity, bucket.number)
        if array is None and quantity == "param" and node.params is not None:
            block, dtype = 1, np.dtype(bucket.dtype)
            owners = _beside_state(node, bucket)
            part = functools.partial(self._host.params, node, bucket)
        elif array is None:
            return None
        else:
            block, dtype = bucket.padded // array.size, np.dtype(array.dtype)
            owners = _owners(array, bucket)
            part = functools.partial(self._host.flat, array, bucket)
        pieces: list[Piece] = []
        for lo, hi, process in owners:
            for a, b in real_ranges(bucket, lo, hi, block):  # padding is not stored
                count = (b - a) * dtype.itemsize
                offset = self._place(process, count, functools.partial(part, lo, a, b))
                pieces.append(Piece(a, b - a, process, offset))
        pieces.sort(key=lambda piece: piece.start)
        return ArrayEntry(dtype.name, block, tuple(pieces))

    def _leaf(self, leaf: Any, number: int) -> LeafEntry:
        key = None
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf)
        blocks: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = []
        for start, stop, process in _blocks(leaf, number):
            shape = tuple(b - a for a, b in zip(start, stop, strict=True))
            count = math.prod(shape) * leaf.dtype.itemsize
            part = functools.partial(_block_part, leaf, start, stop)
            blocks.append((start, shape, process, self._place(process, count, part)))
        return LeafEntry(tuple(leaf.shape), np.dtype(leaf.dtype).name, key, tuple(blocks))


def _blocks(leaf: Any, number: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Start, stop and process of each distinct part of an array."""
    local = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if local and (jax.process_count() > 1 or not isinstance(leaf, jax.Array)):
        # Every process has one of its own; they are one array only if they are equal.
        return [((0,) * leaf.ndim, tuple(leaf.shape), 0)]
    return _distinct(leaf.sharding, tuple(leaf.shape), number)


def _owners(array: Any, bucket: Bucket) -> list[tuple[int, int, int]]:
    """Start, stop and process of each shard of a flat array; of a stacked one, in the order
    in which a flat one has it: device by device."""
    dim, each = unit(array.shape)
    found = _blocks(array, bucket.number)
    return [(a[dim] * each, b[dim] * each, process) for a, b, process in found]


def _distinct(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], number: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Each distinct index of a sharding with one of the processes that hold it: another one for
    every ``number``, so that replicas share the work."""
    holders: dict[Any, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        holders.setdefault(bounds, set()).add(device.process_index)
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for i, (bounds, processes) in enumerate(sorted(holders.items())):
        ordered = sorted(processes)
        owner = ordered[(number + i) % len(ordered)]
        found.append((tuple(b[0] for b in bounds), tuple(b[1] for b in bounds), owner))
    return found


def _beside_state(node: Node, bucket: Bucket) -> list[tuple[int, int, int]]:
    """Owners of parameters that all have whole: who owns the state of the same elements, or,
    where there is none, each process in turn."""
    for quantity in node.arrays:
        flat = node.array(quantity, bucket.number)
        if flat is not None:
            per = bucket.padded // flat.size
            return [(a * per, b * per, process) for a, b, process in _owners(flat, bucket)]
    shards, processes = node.layout.shards, jax.process_count()
    return [
        (i * bucket.shard, (i + 1) * bucket.shard, i * processes // shards) for i in range(shards)
    ]


# ---------------------------------------------------------------- device to host


def host_copy(x: Any) -> np.ndarray:
    """A single-device array on the host: a view where its memory is the host's already."""
    if isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu":
        # np.asarray would keep its copy for as long as the array lives.
        with contextlib.suppress(RuntimeError):  # no CPU backend was enabled
            x = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return np.asarray(x)


def _block_part(leaf: Any, start: tuple[int, ...], stop: tuple[int, ...]) -> np.ndarray:
    if not isinstance(leaf, jax.Array):
        return leaf.reshape(-1)
    for shard in leaf.addressable_shards:
        bounds = [s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)]
        if tuple(b[0] for b in bounds) == start and tuple(b[1] for b in bounds) == stop:
            return np.ascontiguousarray(host_copy(shard.data)).reshape(-1)
    return np.asarray(leaf).reshape(-1)


class _Host:
    """Parts of buckets on the host. The last array that was copied there is kept, since the next
    part often comes from it."""

    def __init__(self) -> None:
        self._last: tuple[Any, int, np.ndarray] | None = None

    def params(self, node: Node, bucket: Bucket, _: int, lo: int, hi: int) -> np.ndarray:
        """Elements [lo, hi) of a bucket, from whole leaves."""
        assert node.params is not None
        parts: list[np.ndarray] = []
        for _, size, slot, position in between(bucket, lo, hi):
            leaf = node.params[slot.path]
            flat = self._copy(leaf, 0, lambda leaf=leaf: whole(leaf))
            parts.append(flat[position : position + size])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def flat(self, array: Any, bucket: Bucket, start: int, lo: int, hi: int) -> np.ndarray:
        """Elements [lo, hi) of a bucket's array, from the shard that begins at ``start``."""
        dim, each = unit(array.shape)
        for shard in array.addressable_shards:
            first, _, _ = shard.index[dim].indices(array.shape[dim])
            if first * each == start:
                flat = self._copy(array, start, lambda shard=shard: host_copy(shard.data))
                return flat[lo - start : hi - start]
        raise AssertionError("a process was given a shard that it does not hold")

    def _copy(self, array: Any, start: int, fetch: Part) -> np.ndarray:
        if self._last is None or self._last[0] is not array or self._last[1] != start:
            self._last = None
            self._last = array, start, fetch().reshape(-1)
        return self._last[2]


def whole(leaf: Any) -> np.ndarray:
    """All of an array on the host."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return host_copy(leaf.addressable_data(0))
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    raise CheckpointError(
        f"a parameter of shape {leaf.shape} is sharded as {leaf.sharding} over processes; jzero "
        "trains parameters that every process has whole"
    )
