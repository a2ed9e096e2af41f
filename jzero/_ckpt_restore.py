"""Restoring: from any layout, number of devices and policy to the one that is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_codec import Kind, Stored, decode_param, encode_param, kind_of, unscale
from jzero._ckpt_format import CheckpointError, NodeEntry
from jzero._ckpt_place import Box, Target, mesh_of, target_of
from jzero._ckpt_source import Run, Source
from jzero._ckpt_stream import Ledger
from jzero._ckpt_view import SCALE, Address, Node, View
from jzero._layout import Bucket

__all__ = ["restore_view"]

Work = tuple[int, Callable[[], Callable[[], None]]]
"""Bytes on the host, and how to start reading; what that returns finishes the work."""


def restore_view(
    source: Source,
    view: View,
    mesh: jax.sharding.Mesh | None,
    *,
    cast: bool,
    hyperparameters: str,
    ledger: Ledger,
) -> Any:
    """``(state, params)`` like the view's, with the checkpoint's values.

    Raises:
      CheckpointError: something that the checkpoint lacks or has otherwise; found before any
        data is read. Data that cannot be read.
    """
    restore = _Restore(source, view, mesh, cast, hyperparameters, ledger)
    restore.check()
    restore.read()
    return view.rebuild(restore.value)


class _Restore:
    def __init__(
        self,
        source: Source,
        view: View,
        mesh: jax.sharding.Mesh | None,
        cast: bool,
        hyperparameters: str,
        ledger: Ledger,
    ) -> None:
        self.source = source
        self.view = view
        self.cast = cast
        self.hyperparameters = hyperparameters
        self.ledger = ledger
        self.kept: dict[Address, Any] = {}
        self.from_leaf: dict[Address, str] = {}
        self.files: dict[str, tuple[str, NodeEntry]] = {}
        main = view.main
        likes = dict(zip(view.addresses, self._likes(), strict=True))
        mesh = mesh_of(likes.values(), main.axis, main.layout.shards, mesh)
        self.targets = {
            a: target_of(like, view.specs[a], mesh, a.what) for a, like in likes.items()
        }
        self.likes = likes

    def _likes(self) -> Iterator[Any]:
        for address in self.view.addresses:
            if address.node is None:
                yield self.view.leaves[address.what]
            elif address.bucket is None:
                params = self.view.nodes[address.node].params
                assert params is not None
                yield params[address.what]
            else:
                yield self.view.nodes[address.node].arrays[address.what][address.bucket]

    def value(self, address: Address) -> Any:
        return self.kept[address] if address in self.kept else self.targets[address].array()

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Everything that can be known from the manifest."""
        wrong: list[str] = []
        for name, node in self.view.nodes.items():
            self.files[name] = self.source.node(name, "grad" in node.arrays)
        for address in self.view.addresses:
            try:
                self._check(address)
            except CheckpointError as error:
                wrong.append(str(error))
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"{self.source.path / 'manifest.json'} does not fit: " + "; ".join(wrong[:5]) + more
            )

    def _check(self, address: Address) -> None:
        target = self.targets[address]
        if address.node is None:
            self._check_leaf(address, target)
        elif address.bucket is None:
            self._check_param(address, target)
        else:
            self._check_bucket(address)

    def _check_param(self, address: Address, target: Target) -> None:
        path = address.what
        assert address.node is not None
        slot = self.files[address.node][1].layout.by_path.get(path)
        if slot is not None:
            self._same(path, slot.shape, slot.dtype, target, target.key)
        elif f"params/{path}" in self.source.manifest.leaves:
            self._check_leaf(Address(f"params/{path}"), target)
            self.from_leaf[address] = f"params/{path}"
        else:
            raise CheckpointError(f"there is no parameter {path!r}")

    def _check_bucket(self, address: Address) -> None:
        assert address.node is not None
        assert address.bucket is not None
        node = self.view.nodes[address.node]
        file = self.files[address.node][1]
        quantity = address.what.removesuffix(SCALE)
        for slot in node.layout.buckets[address.bucket].slots:
            theirs = file.layout.by_path.get(slot.path)
            if theirs is None or theirs.shape != slot.shape:
                have = "nothing" if theirs is None else f"shape {theirs.shape}"
                raise CheckpointError(
                    f"for {quantity} of {slot.path!r}, of shape {slot.shape}, there is {have}"
                    + (
                        " (it was frozen, or is another model's)"
                        if f"params/{slot.path}" in self.source.manifest.leaves
                        else ""
                    )
                )
            if quantity != "master" and self.source.entry(file, quantity, theirs.bucket) is None:
                raise CheckpointError(f"there is no {quantity} of {slot.path!r}")

    def _check_leaf(self, address: Address, target: Target) -> None:
        name = self._file_name(address.what)
        like = self.likes.get(address)
        if (
            "/hyperparams/" in name
            and self.hyperparameters == "new"
            and isinstance(like, (jax.Array, np.ndarray, np.generic, int, float))
        ):
            self.kept[address] = like
            return
        entry = self.source.manifest.leaves.get(name)
        if entry is None:
            slot = self._trained(name)
            if slot is not None:
                self._same(name, slot.shape, slot.dtype, target, None)
                return
            fallback = self._count(name)
            if fallback is None:
                raise CheckpointError(f"there is no {name!r}")
            name, entry = fallback, self.source.manifest.leaves[fallback]
        self.from_leaf[address] = name
        self._same(name, entry.shape, entry.dtype, target, entry.key)

    def _file_name(self, name: str) -> str:
        """A leaf of the state, where the file's state lies elsewhere in its tree."""
        for ours, (theirs, _) in self.files.items():
            prefix = f"state/{ours}/" if ours else "state/"
            if ours != theirs and name.startswith(prefix):
                return (f"state/{theirs}/" if theirs else "state/") + name.removeprefix(prefix)
        return name

    def _trained(self, name: str) -> Any:
        """The slot of a parameter that trained when it was saved and is frozen now."""
        if not name.startswith("params/"):
            return None
        for _, file in self.files.values():
            if "param" in file.arrays and name.removeprefix("params/") in file.layout.by_path:
                return file.layout.by_path[name.removeprefix("params/")]
        return None

    def _count(self, name: str) -> str | None:
        """Where to take a counter of the rule's from, that was saved under other labels or not
        at all: from another label, or the number of completed steps."""
        head, inner, rest = name.partition("/inner/")
        if not inner:
            return None
        tail = rest.partition("/")[2]
        same = [
            n
            for n in self.source.manifest.leaves
            if n.startswith(head + inner) and n.removeprefix(head + inner).partition("/")[2] == tail
        ]
        if same:
            return same[0]
        return f"{head}/step" if tail.split("/")[-1] == "count" else None

    def _same(
        self, name: str, shape: tuple[int, ...], dtype: str, target: Target, key: str | None
    ) -> None:
        if tuple(shape) != target.shape:
            raise CheckpointError(f"{name!r} has shape {tuple(shape)}, and like {target.shape}")
        if key != target.key:
            raise CheckpointError(
                f"{name!r} is {'no PRNG key' if key is None else f'a PRNG key ({key})'}, and like "
                f"{'is none' if target.key is None else f'has {target.key}'}"
            )
        if jnp.dtype(dtype) != target.dtype and not self.cast:
            raise CheckpointError(
                f"{name!r} has dtype {dtype}, and like {target.dtype.name}; pass cast=True to "
                "convert, or make the model in that dtype"
            )

    # ------------------------------------------------------------ reading

    def read(self) -> None:
        """Do all work, with at most one bucket's bytes on the host at any time."""
        works = list(self._works())
        budget = max([count for count, _ in works] + [self._largest()])
        flying: deque[tuple[int, Callable[[], None]]] = deque()
        live = 0
        for count, start in works:
            while flying and live + count > budget:
                live -= self._land(flying)
            self.ledger.add(count)
            live += count
            flying.append((count, start()))
        while flying:
            live -= self._land(flying)

    def _land(self, flying: deque[tuple[int, Callable[[], None]]]) -> int:
        count, finish = flying.popleft()
        finish()
        self.ledger.add(-count)
        return count

    def _largest(self) -> int:
        sizes = [0]
        for node in self.view.nodes.values():
            for bucket in node.layout.buckets:
                arrays = [node.array(q, bucket.number) for q in node.arrays]
                sizes.append(
                    bucket.padded * bucket.itemsize
                    + sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays if a is not None)
                )
        return max(sizes)

    def _works(self) -> Iterator[Work]:
        for node in self.view.nodes.values():
            file = self.files[node.name][1]
            for bucket in node.layout.buckets:
                yield from self._bucket(node, file, bucket)
                for slot in bucket.slots if node.params is not None else ():
                    yield self._param(node, file, bucket, Address(slot.path, node.name))
        for address in self.view.addresses:
            if address.node is None and address not in self.kept:
                target = self.targets[address]
                for box in target.boxes():
                    yield self._plain(address, target, box)

    def _bucket(self, node: Node, file: NodeEntry, bucket: Bucket) -> Iterator[Work]:
        for quantity in node.arrays:
            if quantity.endswith(SCALE) or node.array(quantity, bucket.number) is None:
                continue
            address = Address(quantity, node.name, bucket.number)
            target = self.targets[address]
            for box in target.boxes():
                yield _Range(self, node, file, bucket, quantity, target, box).work()

    def _param(self, node: Node, file: NodeEntry, bucket: Bucket, address: Address) -> Work:
        """A whole parameter: the bytes of the file where the policies are equal."""
        target = self.targets[address]
        size = math.prod(target.shape)

        if address in self.from_leaf:
            zeros = (0,) * len(target.shape)
            read = self.source.leaf(self.from_leaf[address], zeros, target.shape)

            def finish() -> None:
                self._put_whole(target, read().astype(target.dtype))

            return size * target.dtype.itemsize, lambda: finish

        theirs = file.layout.by_path[address.what]
        run = Run(0, theirs.bucket, theirs.offset, size, address.what)
        have = self.source.kind(file, theirs.bucket)
        want = target_kind(node, bucket)

        def start() -> Callable[[], None]:
            param = self.source.stored(file, "param", run)
            master = self.source.stored(file, "master", run) if have != want else lambda: None

            def finish() -> None:
                visible = param()
                assert visible is not None
                values = visible.values
                if have != want and want[0] != "none":
                    full = decode_param(values, master())
                    values, _ = encode_param(values, full, want[0], target.dtype, want[1])
                self._put_whole(target, values.astype(target.dtype, copy=False))

            return finish

        factor = 1 if have == want or want[0] == "none" else 4
        return size * target.dtype.itemsize * factor, start

    def _put_whole(self, target: Target, values: np.ndarray) -> None:
        values = values.reshape(target.shape)
        for box in target.boxes():
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            target.put(box, np.ascontiguousarray(values[index]))

    def _plain(self, address: Address, target: Target, box: Box) -> Work:
        count = target.dtype.itemsize * math.prod(
            b - a for a, b in zip(box.start, box.stop, strict=True)
        )
        name = self.from_leaf.get(address)

        def start() -> Callable[[], None]:
            if name is None:
                read = self._from_bucket(self._file_name(address.what), box, target)
            else:
                read = self.source.leaf(name, box.start, box.stop)
            return lambda: target.put(box, read().astype(target.dtype))

        return count, start

    def _from_bucket(self, name: str, box: Box, target: Target) -> Callable[[], np.ndarray]:
        path = name.removeprefix("params/")
        slot = self._trained(name)
        file = next(f for _, f in self.files.values() if path in f.layout.by_path)
        param = self.source.stored(file, "param", Run(0, slot.bucket, slot.offset, slot.size, path))

        def read() -> np.ndarray:
            found = param()
            assert found is not None
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            return found.values.reshape(target.shape)[index]

        return read


def target_kind(node: Node, bucket: Bucket) -> tuple[Kind, str | None]:
    """How the target stores a bucket's master, and its dtype."""
    master = node.array("master", bucket.number)
    scaled = node.array("master" + SCALE, bucket.number) is not None
    dtype = None if master is None else np.dtype(master.dtype).name
    return kind_of(None if dtype is None else jnp.dtype(dtype), scaled), dtype


@dataclasses.dataclass
class _Range:
    """One device's part of one array of a bucket (and of its scales)."""

    restore: _Restore
    node: Node
    file: NodeEntry
    bucket: Bucket
    quantity: str
    target: Target
    box: Box

    def work(self) -> Work:
        lo, hi = self.box.start[0], self.box.stop[0]
        source, quantity = self.restore.source, self.quantity
        runs = source.runs(self.file, self.bucket, lo, hi)
        copied = all(self._raw(run) for run in runs)
        names = ["param", "master"] if quantity == "master" and not copied else [quantity]

        def start() -> Callable[[], None]:
            reads = [[source.stored(self.file, name, run) for name in names] for run in runs]

            def finish() -> None:
                out = np.zeros(hi - lo, self.target.dtype)
                for run, read in zip(runs, reads, strict=True):
                    got = [one() for one in read]
                    at = run.to - lo
                    out[at : at + run.size] = self._values(got, copied)
                self.target.put(self.box, out)

            return finish

        wide = 1 if copied else 3
        return (hi - lo) * max(4 if not copied else 0, self.target.dtype.itemsize) * wide, start

    def _raw(self, run: Run) -> bool:
        source = self.restore.source
        if self.quantity == "master":
            return source.kind(self.file, run.bucket) == target_kind(self.node, self.bucket)
        entry = source.entry(self.file, self.quantity, run.bucket)
        assert entry is not None
        return jnp.dtype(entry.dtype) == self.target.dtype

    def _values(self, got: list[Stored | None], copied: bool) -> np.ndarray:
        if self.quantity == "master" and not copied:
            param, master = got
            assert param is not None
            full = decode_param(param.values, master)
            kind, dtype = target_kind(self.node, self.bucket)
            leaf = jnp.dtype(self.bucket.dtype)
            _, stored = encode_param(param.values, full, kind, leaf, jnp.dtype(dtype))
            assert stored is not None
            return stored
        (values,) = got
        assert values is not None
        return values.values if copied else unscale(values).astype(self.target.dtype)
