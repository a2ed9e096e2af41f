"""Which elements of a bucket's flat array are which elements of which leaf."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

from jzero._layout import Bucket, Slot

__all__ = ["Segment", "between", "locate", "real_ranges", "unit"]


class Segment(NamedTuple):
    """``size`` elements from ``start`` of a bucket's array: those from ``position`` of a leaf."""

    start: int
    size: int
    slot: Slot
    position: int


@functools.lru_cache(maxsize=256)
def segments(bucket: Bucket) -> tuple[Segment, ...]:
    """Everything in a bucket but padding, by ``start``."""
    found: list[Segment] = []
    for slot in bucket.slots:
        position = 0
        for start, size in bucket.runs(slot):
            if size:
                found.append(Segment(start, size, slot, position))
            position += size
    return tuple(sorted(found, key=lambda s: s.start))


def between(bucket: Bucket, lo: int, hi: int) -> Iterator[Segment]:
    """The parts of segments that lie in [lo, hi)."""
    every = segments(bucket)
    first = max(0, bisect.bisect_right(every, lo, key=lambda s: s.start) - 1)
    for start, size, slot, position in every[first:]:
        a, b = max(lo, start), min(hi, start + size)
        if start >= hi:
            return
        if a < b:
            yield Segment(a, b - a, slot, position + a - start)


def real_ranges(bucket: Bucket, lo: int, hi: int, block: int = 1) -> list[tuple[int, int]]:
    """[lo, hi) of an array with one element per ``block`` of a bucket's, without those that
    belong to padding alone."""
    found: list[tuple[int, int]] = []
    for start, size, _, _ in between(bucket, lo * block, hi * block):
        a, b = start // block, -(-(start + size) // block)
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return found


@functools.lru_cache(maxsize=4096)
def _positions(bucket: Bucket, slot: Slot) -> tuple[tuple[int, int, int], ...]:
    """Position in the leaf, start in the bucket and size of each run of a slot."""
    found: list[tuple[int, int, int]] = []
    position = 0
    for start, size in bucket.runs(slot):
        if size:
            found.append((position, start, size))
        position += size
    return tuple(found)


def locate(bucket: Bucket, slot: Slot, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Where elements [lo, hi) of a leaf are: (position in the leaf, start, size) in order."""
    every = _positions(bucket, slot)
    first = max(0, bisect.bisect_right(every, lo, key=lambda r: r[0]) - 1)
    for position, start, size in every[first:]:
        if position >= hi:
            return
        a, b = max(lo, position), min(hi, position + size)
        if a < b:
            yield a, start + a - position, b - a


def unit(shape: tuple[int, ...]) -> tuple[int, int]:
    """The dim over which a bucket's array is sharded, and how many elements one index of it
    stands for. A stacked bucket's parameters are (layers, ..) with the second dim sharded; device
    by device, they lie like the flat array of its state."""
    dim = min(1, len(shape) - 1)
    size = 1
    for i, n in enumerate(shape):
        size *= n if i != dim else 1
    return dim, size
