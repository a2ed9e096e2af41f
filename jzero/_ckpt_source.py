"""What a checkpoint holds, by parameter path: ranges of elements, whatever the layouts."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero._ckpt_codec import ROOT, SCALE, Form, Stored
from jzero._ckpt_format import (
    MANIFEST,
    ArrayEntry,
    CheckpointError,
    LeafEntry,
    Manifest,
    NodeEntry,
    read_manifest,
)
from jzero._ckpt_place import odd_empty
from jzero._ckpt_ranges import between, locate
from jzero._ckpt_stream import StreamReader
from jzero._layout import Bucket, Layout

__all__ = ["Run", "Source", "open_source"]


class Run(NamedTuple):
    """Consecutive elements that are consecutive in the file too: ``size`` from element ``to``
    of a target bucket, from element ``start`` of bucket ``bucket`` in the file."""

    to: int
    bucket: int
    start: int
    size: int
    path: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An open checkpoint; ``label`` names it in errors."""

    path: Path
    manifest: Manifest
    streams: StreamReader
    label: str

    def node(self, name: str, kind: str) -> tuple[str, NodeEntry]:
        """The node of this name; or, where there is only one of the kind, that one.

        Raises:
          CheckpointError: there is none.
        """
        if name in self.manifest.nodes:
            return name, self.manifest.nodes[name]
        if kind == "frozen":  # its leaves are elsewhere in the file
            return name, NodeEntry(Layout((), 1), {})
        same = [(n, e) for n, e in self.manifest.nodes.items() if e.kind == kind]
        if len(same) == 1:
            return same[0]
        raise CheckpointError(
            f"{self.label} has no sharded state at {name or 'the root'!r}; it has "
            f"{sorted(self.manifest.nodes)}"
        )

    def runs(self, node: NodeEntry, bucket: Bucket, lo: int, hi: int) -> list[Run]:
        """Where elements [lo, hi) of a target's bucket lie in the file. Padding is left out."""
        found: list[Run] = []
        for start, size, slot, position in between(bucket, lo, hi):
            for run in self.leaf_runs(node, slot.path, position, position + size):
                _append(found, run._replace(to=start + run.to - position))
        return found

    def leaf_runs(self, node: NodeEntry, path: str, lo: int, hi: int) -> list[Run]:
        """Where elements [lo, hi) of a parameter lie in the file; ``to`` counts in the leaf."""
        slot = node.layout.by_path[path]
        found: list[Run] = []
        for to, start, size in locate(node.layout.buckets[slot.bucket], slot, lo, hi):
            _append(found, Run(to, slot.bucket, start, size, path))
        return found

    def form(self, node: NodeEntry, quantity: str, bucket: int) -> Form:
        """How a quantity of a bucket is stored."""
        entry = self.entry(node, quantity, bucket)
        if entry is None:
            return Form(None)
        for scales in (SCALE, ROOT):
            if self.entry(node, quantity + scales, bucket) is not None:
                return Form(entry.dtype, scales)
        return Form(entry.dtype)

    def entry(self, node: NodeEntry, quantity: str, bucket: int) -> ArrayEntry | None:
        """One array of the file, or None."""
        found = node.arrays.get(quantity)
        return None if found is None else found[bucket]

    def stored(
        self, node: NodeEntry, quantity: str, scales: str, run: Run
    ) -> Callable[[], Stored | None]:
        """Start to read a run of a quantity, with the scale of each element where it has any;
        the result is called for it. None: there is no such array."""
        entry = self.entry(node, quantity, run.bucket)
        if entry is None:
            return lambda: None
        values = self.elements(entry, run.start, run.start + run.size, run.path)
        beside = self.entry(node, quantity + scales, run.bucket) if scales else None
        if beside is None:
            return lambda: Stored(values())
        block = beside.block
        first = run.start // block
        read = self.elements(beside, first, -(-(run.start + run.size) // block), run.path)
        skip = run.start - first * block
        return lambda: Stored(values(), np.repeat(read(), block)[skip : skip + run.size])

    def elements(self, entry: ArrayEntry, lo: int, hi: int, what: str) -> Callable[[], np.ndarray]:
        """Start to read elements [lo, hi) of an array; the result is called for them."""
        dtype = jnp.dtype(entry.dtype)
        size = dtype.itemsize
        at = max(0, bisect.bisect_right(entry.pieces, lo, key=lambda p: p.start) - 1)
        reads: list[Callable[[], object]] = []
        out = odd_empty(max(hi - lo, 0), dtype)
        into = out.view(np.uint8)
        have = lo
        for piece in entry.pieces[at:]:
            a, b = max(have, piece.start), min(hi, piece.start + piece.count)
            if a != have or a >= b:
                break
            offset = piece.offset + (a - piece.start) * size
            window = into[(a - lo) * size : (b - lo) * size]
            reads.append(self.streams.read_into(window, piece.stream, offset, what))
            have = b
        if have < hi:
            raise CheckpointError(f"{self.label} lists {what!r} only up to element {have}")

        def result() -> np.ndarray:
            for read in reads:
                read()
            return out

        return result

    def leaf(
        self, name: str, start: tuple[int, ...], stop: tuple[int, ...]
    ) -> Callable[[], np.ndarray]:
        """Start to read a box of a plain leaf; the result is called for it."""
        entry = self.manifest.leaves[name]
        dtype = jnp.dtype(entry.dtype)
        reads = [
            (block, self.streams.read(*_where(block, dtype.itemsize), name))
            for block in entry.blocks
            if _meet(block[0], block[1], start, stop)
        ]

        def result() -> np.ndarray:
            out = np.empty([b - a for a, b in zip(start, stop, strict=True)], dtype)
            for (origin, shape, _, _), read in reads:
                theirs = read().view(dtype).reshape(shape)
                if origin == start and shape == out.shape:
                    return theirs
                lo = [max(a, o) for a, o in zip(start, origin, strict=True)]
                hi = [min(b, o + n) for b, o, n in zip(stop, origin, shape, strict=True)]
                into, of = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(lo, hi, base, strict=True))
                    for base in (start, origin)
                )
                out[into] = theirs[of]
            return out

        return result

    def leaves(self) -> Iterator[tuple[str, LeafEntry]]:
        """All plain leaves."""
        yield from self.manifest.leaves.items()


def _append(runs: list[Run], run: Run) -> None:
    """Add a run; join it to the last where both sides go on."""
    last = runs[-1] if runs else None
    if (
        last is not None
        and (last.bucket, last.to + last.size) == (run.bucket, run.to)
        and last.start + last.size == run.start
    ):
        runs[-1] = last._replace(size=last.size + run.size)
    else:
        runs.append(run)


def open_source(path: Path) -> Source:
    """Open a checkpoint.

    Raises:
      CheckpointError: see :func:`read_manifest`; a data folder that is missing.
    """
    manifest = read_manifest(path)
    data = path / manifest.data
    if not data.is_dir():
        raise CheckpointError(f"{data} is missing, which {path / MANIFEST} refers to")
    return Source(path, manifest, StreamReader(data, manifest.streams), str(path / MANIFEST))


def _where(block: Any, itemsize: int) -> tuple[int, int, int]:
    _, shape, stream, offset = block
    count = itemsize
    for dim in shape:
        count *= dim
    return stream, offset, count


def _meet(
    origin: tuple[int, ...], shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]
) -> bool:
    return all(
        max(a, o) < min(b, o + n) for a, b, o, n in zip(start, stop, origin, shape, strict=True)
    )
