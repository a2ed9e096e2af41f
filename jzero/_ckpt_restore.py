"""Restoring: from any layout, number of devices and policy to the one that is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_codec import (
    BLOCK,
    Form,
    Stored,
    decode,
    decode_param,
    encode,
    encode_param,
)
from jzero._ckpt_format import NodeEntry
from jzero._ckpt_match import Cast, Match, match
from jzero._ckpt_place import Box, Target, mesh_of, odd_zeros, target_of
from jzero._ckpt_ranges import between, locate, real_ranges, unit
from jzero._ckpt_source import Source
from jzero._ckpt_stream import Ledger
from jzero._ckpt_view import Address, Node, View
from jzero._layout import Bucket

__all__ = ["restore_view"]

Work = tuple[int, Callable[[], Callable[[], None]]]
"""Bytes on the host, and how to start reading; what that returns finishes the work."""


def restore_view(
    source: Source,
    view: View,
    mesh: jax.sharding.Mesh | None,
    *,
    cast: Cast,
    hyperparameters: str,
    ledger: Ledger,
) -> Any:
    """``(state, params)`` like the view's, with the checkpoint's values.

    Raises:
      CheckpointError: something that the checkpoint lacks or has otherwise, found before any
        data is read; data that cannot be read.
    """
    likes = view.arrays()
    main = view.main
    mesh = mesh_of(likes.values(), main.axis, main.layout.shards, mesh)
    targets = {a: target_of(x, view.specs[a], mesh, a.what) for a, x in likes.items()}
    found = match(source, view, targets, likes, cast=cast, hyperparameters=hyperparameters)
    budget = max((_bytes(n, b) for n in view.nodes.values() for b in n.layout.buckets), default=0)
    _do(_Reading(source, view, targets, found).works(), budget, ledger)
    return view.rebuild(
        lambda a: found.kept[a.what] if a.what in found.kept else targets[a].array()
    )


def _bytes(node: Node, bucket: Bucket) -> int:
    arrays = [node.array(q, bucket.number) for q in node.arrays]
    own = bucket.padded * bucket.itemsize if node.params is not None else 0
    return own + sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays if a is not None)


def _do(works: Iterable[Work], budget: int, ledger: Ledger) -> None:
    """All work, as much at once as ``budget`` bytes allow, but at least one piece."""
    flying: deque[tuple[int, Callable[[], None]]] = deque()
    live = 0

    def land() -> None:
        nonlocal live
        count, finish = flying.popleft()
        finish()
        live -= count
        ledger.add(-count)

    for count, start in works:
        while flying and live + count > budget:
            land()
        ledger.add(count)
        live += count
        flying.append((count, start()))
    while flying:
        land()


@dataclasses.dataclass
class _Reading:
    source: Source
    view: View
    targets: dict[Address, Target]
    match: Match

    def works(self) -> Iterator[Work]:
        for node in self.view.nodes.values():
            for bucket in node.layout.buckets:
                for quantity in node.arrays:
                    yield from self._sharded(node, bucket, quantity)
                for slot in bucket.slots if node.params is not None else ():
                    yield self._param(node, bucket, slot.path)
        for address in self.view.addresses:
            if address.node is None and address.what not in self.match.kept:
                yield from self._plain(address)

    # ------------------------------------------------------------ buckets

    def _sharded(self, node: Node, bucket: Bucket, quantity: str) -> Iterator[Work]:
        address = Address(quantity, node.name, bucket.number)
        if address not in self.targets or self.view.base_of(quantity) != quantity:
            return
        form = node.form(quantity, bucket.number)
        beside = Address(quantity + form.scales, node.name, bucket.number)
        scales = self.targets[beside] if form.scales else None
        copied = self._is_copied(node, bucket, quantity)
        target = self.targets[address]
        for box in target.boxes():
            yield self._range(node, bucket, quantity, target, box, scales, copied)

    def _range(
        self,
        node: Node,
        bucket: Bucket,
        quantity: str,
        target: Target,
        box: Box,
        scales: Target | None,
        copied: bool,
    ) -> Work:
        """One device's part of one array of a bucket, and of its scales."""
        dim, each = unit(target.shape)
        lo, hi = box.start[dim] * each, box.stop[dim] * each

        def start() -> Callable[[], None]:
            if copied:
                read = self._copy_range(node, bucket, quantity, target.dtype, lo, hi)
            else:
                full = self._full(node, bucket, quantity, lo, hi)
                read = lambda: self._encoded(node, bucket, quantity, full())  # noqa: E731

            def finish() -> None:
                stored = read()
                target.put(box, stored.values.astype(target.dtype, copy=False))
                if scales is not None:
                    assert stored.scales is not None
                    scales.put(Box((lo // BLOCK,), (hi // BLOCK,), box.devices), stored.scales)

            return finish

        return (hi - lo) * (2 * target.dtype.itemsize if copied else 16), start

    def _copy_range(
        self, node: Node, bucket: Bucket, quantity: str, dtype: np.dtype, lo: int, hi: int
    ) -> Callable[[], Stored]:
        """Start to read [lo, hi) of an array, as the file has it; zeros where there is padding."""
        file = self.match.files[node.name][1]
        reads: list[tuple[int, int, Callable[[], np.ndarray]]] = []
        if quantity == "param":
            for start, size, slot, position in between(bucket, lo, hi):
                one = self._visible(file, slot.path, position, position + size)
                reads.append((start - lo, size, one))
        else:
            for run in self.source.runs(file, bucket, lo, hi):
                entry = self.source.entry(file, quantity, run.bucket)
                assert entry is not None
                stop = run.start + run.size
                one = self.source.elements(entry, run.start, stop, run.path)
                reads.append((run.to - lo, run.size, one))
        scales = self._scales(file, bucket, quantity, node.form(quantity, bucket.number), lo, hi)

        def result() -> Stored:
            if len(reads) == 1 and reads[0][1] == hi - lo:
                out = reads[0][2]()
            else:
                out = odd_zeros(hi - lo, dtype)
                for at, size, read in reads:
                    out[at : at + size] = read()
            return Stored(out, None if scales is None else scales())

        return result

    def _is_copied(self, node: Node, bucket: Bucket, quantity: str) -> bool:
        """Whether an array's bytes are those of the file."""
        what = "master" if quantity == "param" else quantity
        want = node.form(what, bucket.number)
        file = self.match.files[node.name][1]
        for slot in bucket.slots:
            theirs = file.layout.by_path.get(slot.path)
            if theirs is None or slot.path in self.match.slots:
                # From a plain leaf, or from where it was frozen: it has no master.
                if want.dtype is not None:
                    return False
                continue
            have = self.source.form(file, what, theirs.bucket)
            if have != want and (quantity != "param" or want.dtype is not None):
                return False
            if want.scales and not _composed_alike(bucket, file.layout.buckets[theirs.bucket]):
                return False
        return True

    def _scales(
        self, file: NodeEntry, bucket: Bucket, quantity: str, form: Form, lo: int, hi: int
    ) -> Callable[[], np.ndarray] | None:
        if not form.scales or not bucket.slots:
            return None
        path = bucket.slots[0].path
        entry = self.source.entry(file, quantity + form.scales, file.layout.by_path[path].bucket)
        assert entry is not None
        first = lo // BLOCK
        reads = [
            (a - first, self.source.elements(entry, a, b, path))
            for a, b in real_ranges(bucket, first, hi // BLOCK, BLOCK)
        ]

        def result() -> np.ndarray:
            out = odd_zeros((hi - lo) // BLOCK, np.float32)
            for at, read in reads:
                got = read()
                out[at : at + got.size] = got
            return out

        return result

    def _encoded(self, node: Node, bucket: Bucket, quantity: str, full: np.ndarray) -> Stored:
        if quantity not in ("param", "master"):
            return encode(full, node.form(quantity, bucket.number))
        form = node.form("master", bucket.number)
        visible, stored = encode_param(full, form, jnp.dtype(bucket.dtype))
        return Stored(visible) if quantity == "param" else stored

    # ------------------------------------------------------------ values

    def _full(
        self, node: Node, bucket: Bucket, quantity: str, lo: int, hi: int
    ) -> Callable[[], np.ndarray]:
        """Start to read [lo, hi) of a quantity in full precision, zeros where there is padding."""
        file = self.match.files[node.name][1]
        reads: list[tuple[int, int, Callable[[], np.ndarray]]] = []
        for start, size, slot, position in between(bucket, lo, hi):
            one = self._leaf_range(file, quantity, slot.path, position, position + size)
            reads.append((start - lo, size, one))

        def result() -> np.ndarray:
            out = np.zeros(hi - lo, np.float32)
            for at, size, read in reads:
                got = read()
                if got.dtype.itemsize > out.dtype.itemsize:
                    out = out.astype(got.dtype)
                out[at : at + size] = got
            return out

        return result

    def _leaf_range(
        self, file: NodeEntry, quantity: str, path: str, lo: int, hi: int
    ) -> Callable[[], np.ndarray]:
        """Elements [lo, hi) of a parameter's quantity in full precision."""
        if quantity in ("param", "master"):
            owner = self.match.slots.get(path, file)
            visible = self._visible(file, path, lo, hi)
            if path not in owner.layout.by_path:
                return visible
            bucket = owner.layout.by_path[path].bucket
            form = self.source.form(owner, "master", bucket)
            master = self._stored(owner, "master", form, path, lo, hi)
            return lambda: decode_param(visible(), master(), form)
        form = self.source.form(file, quantity, file.layout.by_path[path].bucket)
        stored = self._stored(file, quantity, form, path, lo, hi)

        def result() -> np.ndarray:
            got = stored()
            assert got is not None
            return decode(got, form)

        return result

    def _visible(self, file: NodeEntry, path: str, lo: int, hi: int) -> Callable[[], np.ndarray]:
        """Elements of a parameter as they were visible."""
        owner = self.match.slots.get(path, file)
        if path not in owner.layout.by_path or "param" not in owner.arrays:
            name = f"params/{path}"
            shape = self.source.manifest.leaves[name].shape
            whole = self.source.leaf(name, (0,) * len(shape), shape)
            return lambda: whole().reshape(-1)[lo:hi]
        read = self._stored(owner, "param", Form(None), path, lo, hi)

        def result() -> np.ndarray:
            got = read()
            assert got is not None
            return got.values

        return result

    def _stored(
        self, file: NodeEntry, quantity: str, form: Form, path: str, lo: int, hi: int
    ) -> Callable[[], Stored | None]:
        runs = self.source.leaf_runs(file, path, lo, hi)
        reads = [self.source.stored(file, quantity, form.scales, run) for run in runs]

        def result() -> Stored | None:
            parts: list[Stored] = []
            for read in reads:
                part = read()
                if part is None:
                    return None
                parts.append(part)
            if len(parts) == 1:
                return parts[0]
            scales = [p.scales for p in parts if p.scales is not None]
            return Stored(
                np.concatenate([p.values for p in parts]),
                np.concatenate(scales) if scales else None,
            )

        return result

    # ------------------------------------------------------------ whole arrays

    def _param(self, node: Node, bucket: Bucket, path: str) -> Work:
        """A whole parameter."""
        target = self.targets[Address(path, node.name)]
        size = math.prod(target.shape)
        form = node.form("master", bucket.number)
        file = self.match.files[node.name][1]
        copied = not size or form.dtype is None or self._is_copied(node, bucket, "param")

        def start() -> Callable[[], None]:
            if not size:
                return lambda: self._put_whole(target, np.zeros(0, target.dtype))
            if copied:
                read = self._visible(file, path, 0, size)
                return lambda: self._put_whole(target, read())
            slot = node.layout.by_path[path]
            parts: list[tuple[int, int, int, Callable[[], np.ndarray]]] = []
            for position, first, count in locate(bucket, slot, 0, size):
                # Whole blocks, since neighbours share a scale.
                lo, hi = first // BLOCK * BLOCK, -(-(first + count) // BLOCK) * BLOCK
                full = self._full(node, bucket, "param", lo, hi)
                parts.append((position, first - lo, count, full))

            def finish() -> None:
                out = np.empty(size, target.dtype)
                for position, skip, count, full in parts:
                    visible, _ = encode_param(full(), form, jnp.dtype(bucket.dtype))
                    out[position : position + count] = visible[skip : skip + count]
                self._put_whole(target, out)

            return finish

        return size * (2 * target.dtype.itemsize if copied else 16), start

    def _put_whole(self, target: Target, values: np.ndarray) -> None:
        values = values.astype(target.dtype, copy=False).reshape(target.shape)
        for box in target.boxes():
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            target.put(box, np.ascontiguousarray(values[index]))

    def _plain(self, address: Address) -> Iterator[Work]:
        target = self.targets[address]
        path = address.what.removeprefix("params/")
        if path in self.match.slots and address.what.startswith("params/"):
            size = math.prod(target.shape)
            file = self.match.slots[path]

            def whole() -> Callable[[], None]:
                read = self._visible(file, path, 0, size) if size else lambda: np.zeros(0)
                return lambda: self._put_whole(target, read())

            yield size * target.dtype.itemsize, whole
            return
        name = self.match.leaves[address.what]
        for box in target.boxes():
            shape = [b - a for a, b in zip(box.start, box.stop, strict=True)]

            def start(box: Box = box) -> Callable[[], None]:
                read = self.source.leaf(name, box.start, box.stop)
                return lambda: target.put(box, read().astype(target.dtype, copy=False))

            yield math.prod(shape) * target.dtype.itemsize, start


def _composed_alike(a: Bucket, b: Bucket) -> bool:
    """The same leaves at the same places, so that blocks hold the same elements."""
    if a.layers or b.layers:
        return a == b
    places: list[Sequence[Any]] = [[(s.path, s.offset, s.size) for s in x.slots] for x in (a, b)]
    return places[0] == places[1]
