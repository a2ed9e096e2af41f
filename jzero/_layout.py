"""The plan: which element of which parameter lives where in which flat bucket.

[Note: buckets and shards]
A *bucket* is one flat array that holds whole leaves of one dtype and one group, one after
another, in the order in which a backward pass tends to finish with them (last leaf first).
It is padded with zeros, by itself, so that every device owns an equal slice: its *shard*.
Two leaves of 5 and 6 float32 elements on 4 devices, drawn with an alignment of 2 elements::

    element   0         5           11     16
              |b b b b b|a a a a a a|0 0 0 0 0|      b comes first: reverse leaf order
    shard     |0      |1      |2      |3      |      4 elements each; leaf a lies on 1 and 2

[Note: stacked layers]
Leaves whose first dim counts layers that a scan runs one after another may be *stacked*: a bucket
of ``layers`` rows, each row a bucket of one layer in the sense above, padded and sharded by
itself, so that one layer's parameters can be gathered alone. ``Slot.offset`` and ``Slot.size``
count within a row; ``Bucket.size``, ``padded`` and ``shard`` count all rows. A device holds its
slice of every row, one after another: flat, its shard is (layers * row_shard,).

Nothing here knows which device it runs on, what the values are, or that JAX exists: a layout is
a pure function of (paths, shapes, dtypes, groups, cap, shards). Sizes are Python integers, so
no leaf is too large to plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

__all__ = ["ALIGNMENT", "TILE", "Bucket", "Layout", "Leaf", "Slot", "plan_layout"]

ALIGNMENT = 128
"""Elements that every shard is a multiple of: one row of vector lanes."""

TILE = 1024
"""Elements that a large shard is a multiple of: one (8, 128) float32 tile, so that a TPU sees
the flat shard as rows of whole tiles without a copy."""

NARROW_TILE = 4096
"""Elements that a still larger shard is a multiple of: one (32, 128) tile of 8-bit state."""

PathKey = str | int
_Key = tuple[str, str, str, int, str]  # dtype, group, block, layers, policy


class Leaf(NamedTuple):
    """What the plan needs to know of one trainable array.

    Attributes:
      path: keys from the root of the pytree, e.g. ``("layers", 0, "kernel")``.
      shape: dims, in elements; ``()`` and dims of zero are ordinary.
      dtype: name of the dtype, e.g. ``"bfloat16"``.
      itemsize: bytes of one element.
      group: leaves of different groups never share a bucket.
      block: nor do leaves of different blocks: parts of a model that are gathered apart.
      layers: rows of a stacked leaf, equal to ``shape[0]``; 0 for a leaf that is not stacked.
      policy: nor do leaves of different precision policies.
    """

    path: tuple[PathKey, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    group: str = ""
    block: str = ""
    layers: int = 0
    policy: str = ""


class Slot(NamedTuple):
    """Where one leaf lives: ``size`` elements from ``offset`` in bucket number ``bucket``; of a
    stacked bucket, in each of its ``layers`` rows."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    bucket: int
    offset: int
    size: int
    layers: int = 0

    def __repr__(self) -> str:
        return _repr(self)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one layer of a stacked leaf; else the leaf's shape."""
        return self.shape[1:] if self.layers else self.shape


class Bucket(NamedTuple):
    """One flat array, number ``number``. ``size`` counts real elements, ``padded`` all of them,
    ``shard`` a device's slice: ``padded == shard * shards``. ``layers``: its rows, see [Note:
    stacked layers]; 0 for a bucket that is not stacked, which is one row."""

    number: int
    dtype: str
    itemsize: int
    group: str
    slots: tuple[Slot, ...]
    size: int
    padded: int
    shard: int
    layers: int = 0
    policy: str = ""

    def __repr__(self) -> str:
        return _repr(self)

    @property
    def rows(self) -> int:
        return max(1, self.layers)

    @property
    def row(self) -> int:
        """Elements of a row, padding included."""
        return self.padded // self.rows

    @property
    def row_shard(self) -> int:
        """Elements of a row on one device."""
        return self.shard // self.rows

    def form(self, elements: int) -> tuple[int, ...]:
        """The shape in which so many elements of it, a shard or all, are kept as parameters:
        flat, or stacked (layers, rows of ALIGNMENT, ALIGNMENT), which is the same order. A layer
        is then contiguous on a TPU, and flattening moves nothing."""
        if not self.layers:
            return (elements,)
        return (self.layers, elements // self.layers // ALIGNMENT, ALIGNMENT)

    @property
    def dims(self) -> tuple[int, int] | None:
        """(rows, columns) of a row that is one leaf of two dims or more, its leading dims joined,
        if the shards split these rows evenly: then a shard is whole rows, and collectives can move
        the leaf as it lies in memory, where a flat array would lie otherwise (TPU)."""
        if len(self.slots) != 1 or self.row != self.slots[0].size:
            return None
        shape = self.slots[0].row_shape
        rows = math.prod(shape[:-1])
        return (rows, shape[-1]) if len(shape) > 1 and rows % self.shards == 0 else None

    @property
    def shards(self) -> int:
        return self.padded // self.shard

    def runs(self, slot: Slot) -> Iterator[tuple[int, int]]:
        """Where a slot's elements are, in the leaf's order: (start, count) in a global flat array
        of the bucket, (padded,) split over the shards, such as an optimizer's state."""
        for layer in range(self.rows):
            at, left = slot.offset, slot.size
            while left:
                device, column = divmod(at, self.row_shard)
                count = left if self.rows == 1 else min(left, self.row_shard - column)
                yield device * self.shard + layer * self.row_shard + column, count
                at, left = at + count, left - count


def _repr(value: Slot | Bucket) -> str:
    """Fingerprints are made of it: layouts without stacked layers keep the ones they always had."""
    fields = zip(value._fields, value, strict=True)
    shown = [f"{name}={x!r}" for name, x in fields if x or name not in ("layers", "policy")]
    return f"{type(value).__name__}({', '.join(shown)})"


class Layout:
    """All buckets of a model for a number of shards. Immutable, hashable, rank-free.

    Attributes:
      buckets: in the order of their first leaf, or of their last (see ``plan_layout``).
      shards: devices on the shard axis.
      fingerprint: sha256 of everything above; equal layouts have equal fingerprints, on every
        process and in every run.
    """

    __slots__ = ("__dict__", "buckets", "shards")
    buckets: tuple[Bucket, ...]
    shards: int

    def __init__(self, buckets: tuple[Bucket, ...], shards: int) -> None:
        object.__setattr__(self, "buckets", buckets)
        object.__setattr__(self, "shards", shards)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is immutable; cannot set {name!r}")

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot, bucket by bucket."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def by_path(self) -> dict[str, Slot]:
        """The slot of each path."""
        return {slot.path: slot for slot in self.slots}

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.shards, self.buckets)).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Real elements in all buckets."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def padded(self) -> int:
        """Elements in all buckets, padding included."""
        return sum(bucket.padded for bucket in self.buckets)

    @property
    def utilisation(self) -> float:
        """Real elements / all elements; 1.0 for a layout without buckets."""
        return self.size / self.padded if self.buckets else 1.0

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.slots)} leaves, {self.size:,} elements, "
            f"{len(self.buckets)} buckets x {self.shards} shards, "
            f"{self.utilisation:.1%} used, {self.fingerprint[:12]})"
        )

    def summary(self) -> str:
        """A table with a line per bucket; sizes in elements."""
        lines = [f"{'bucket':>6} {'dtype':>9} {'leaves':>6} {'elements':>15} {'shard':>13}  used"]
        for b in self.buckets:
            group = f"  {b.group}" if b.group else ""
            lines.append(
                f"{b.number:>6} {b.dtype:>9} {len(b.slots):>6} {b.size:>15,} {b.shard:>13,} "
                f"{b.size / b.padded:>5.1%}{group}"
            )
        return "\n".join([*lines, repr(self)])


def path_string(path: Sequence[PathKey]) -> str:
    """``("layers", 0, "kernel")`` as ``"layers/0/kernel"``."""
    return "/".join(map(str, path))


def plan_layout(
    leaves: Iterable[Leaf],
    *,
    shards: int,
    cap_bytes: int,
    alignment: int | None = None,
    order: Sequence[str] | None = None,
    first_cap_bytes: int | None = None,
    whole_stacks: bool = False,
    by_last: bool = False,
) -> Layout:
    """Distribute leaves over buckets.

    Leaves are taken in reverse order of their paths (integers in a path compare as numbers), so
    the result does not depend on the order in which they are passed. Each (dtype, group, block,
    layers, policy) fills a bucket until the next leaf would take it over the cap, then starts
    another. A leaf of at least the cap has a bucket of its own and leaves the open one open. A
    zero-size leaf joins the open bucket. Every bucket is sized to its content, so a large cap
    costs a small model nothing.

    Args:
      leaves: the trainable arrays.
      shards: devices on the shard axis.
      cap_bytes: most bytes of leaves, at their own dtype and without padding, in a bucket.
      alignment: elements that each shard is a multiple of. None: the largest of
        ``NARROW_TILE``, ``TILE`` and ``ALIGNMENT`` that pads a bucket by less than 1/16.
      order: path strings, first to be placed first, instead of the reverse path order. Must
        name each leaf once.
      first_cap_bytes: a smaller cap of the first bucket of each such key, so that its
        communication starts early. None: ``cap_bytes``.
      whole_stacks: of stacked leaves the bytes of all layers count, for they travel together at
        times; else those of one layer.
      by_last: buckets are in the order of their last leaf, when the bucket is complete; else in
        that of their first.

    Returns:
      The layout; an empty one for no leaves.

    Raises:
      ValueError: two leaves with one path string; ``order`` that is not a permutation of the
        paths; ``shards``, ``cap_bytes``, ``alignment`` or ``first_cap_bytes`` below 1.
    """
    numbers = {
        "shards": shards,
        "cap_bytes": cap_bytes,
        "alignment": alignment,
        "first_cap_bytes": first_cap_bytes,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    # A key -> members of the bucket being filled, and their bytes so far.
    members: list[list[tuple[str, Leaf, int]]] = []
    open_bucket: dict[_Key, int] = {}
    filled: list[int] = []
    cap_of: dict[_Key, int] = {}  # of the open bucket; unset before the first
    first_cap = cap_bytes if first_cap_bytes is None else min(first_cap_bytes, cap_bytes)
    complete: dict[int, int] = {}  # a bucket -> the position of its last leaf that is not empty
    for position, (path, leaf) in enumerate(_in_order(list(leaves), order)):
        size = math.prod(leaf.shape[1:] if leaf.layers else leaf.shape)
        nbytes = size * leaf.itemsize * (leaf.layers if whole_stacks and leaf.layers else 1)
        key = (leaf.dtype, leaf.group, leaf.block, leaf.layers, leaf.policy)
        index = open_bucket.get(key)
        if nbytes >= cap_bytes:
            index = len(members)
            members.append([])
            filled.append(0)
            cap_of.setdefault(key, cap_bytes)  # this was the first
        elif index is None or (nbytes and filled[index] + nbytes > cap_of[key]):
            index = open_bucket[key] = len(members)
            members.append([])
            filled.append(0)
            cap_of[key] = cap_bytes if key in cap_of else first_cap
        members[index].append((path, leaf, size))
        filled[index] += nbytes
        if nbytes or index not in complete:
            complete[index] = position
    if by_last:
        members = [members[i] for i in sorted(complete, key=complete.__getitem__)]
    return Layout(
        tuple(_bucket(i, content, shards, alignment) for i, content in enumerate(members)), shards
    )


def _bucket(
    number: int, content: list[tuple[str, Leaf, int]], shards: int, alignment: int | None
) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for path, leaf, size in content:
        slots.append(
            Slot(path, leaf.shape, leaf.dtype, leaf.group, number, offset, size, leaf.layers)
        )
        offset += size
    if alignment is None:
        fits = (unit for unit in (NARROW_TILE, TILE) if offset >= 16 * unit * shards)
        alignment = next(fits, ALIGNMENT)
    # A bucket of zero-size leaves alone still gets one unit, so that no stage meets an empty array.
    first = content[0][1]
    rows = max(1, first.layers)
    shard = max(1, -(-offset // (shards * alignment))) * alignment * rows
    return Bucket(
        number,
        first.dtype,
        first.itemsize,
        first.group,
        tuple(slots),
        offset * rows,
        shard * shards,
        shard,
        first.layers,
        first.policy,
    )


def _in_order(leaves: list[Leaf], order: Sequence[str] | None) -> list[tuple[str, Leaf]]:
    named = [(path_string(leaf.path), leaf) for leaf in leaves]
    by_name = dict(named)
    if len(by_name) != len(named):
        seen: set[str] = set()
        twice = next(name for name, _ in named if name in seen or seen.add(name))
        raise ValueError(
            f"two parameters share the path {twice!r}; rename a key so that paths joined by '/' "
            "are distinct"
        )
    if order is not None:
        if sorted(order) != sorted(by_name):
            odd = sorted(set(order) ^ set(by_name)) or sorted(order)
            raise ValueError(
                f"order must name each parameter path exactly once; it differs at {odd[:5]}"
            )
        return [(name, by_name[name]) for name in order]
    # Strings and integers do not compare, so each key carries its kind; numbers sort as numbers.
    return sorted(
        named,
        key=lambda item: [
            (0, key, "") if isinstance(key, int) else (1, 0, key) for key in item[1].path
        ],
        reverse=True,
    )
