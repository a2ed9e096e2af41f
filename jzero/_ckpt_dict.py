"""State dicts: a training state as plain numpy arrays by parameter path, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_codec import BLOCK, Stored, decode, decode_param
from jzero._ckpt_format import ArrayEntry, LeafEntry, Manifest, NodeEntry, Piece
from jzero._ckpt_ranges import locate
from jzero._ckpt_restore import restore_view
from jzero._ckpt_save import whole
from jzero._ckpt_source import Source
from jzero._ckpt_stream import Ledger
from jzero._ckpt_view import Node, View, view_of
from jzero._layout import Bucket, Layout, Slot

__all__ = ["load_state_dict", "shapes_of", "state_dict", "stream_of"]

STEP = "step"
INNER = "inner"
KEY = "key"
_RESERVED = (STEP, INNER)
_SCALARS: dict[str, Any] = {
    "grad_norm": np.float32(0),
    "skipped": np.int32(0),
    "finite": np.bool_(True),
}


def state_dict(state: Any, params: Any) -> dict[str, Any]:
    """The training state as numpy arrays in real shapes, without padding or buckets.

    Args:
      state: a ``ZeroState``, or a pytree with one inside.
      params: its parameters.

    Returns:
      ``{"step": int, "layers/0/kernel": {"param", "exp_avg", "exp_avg_sq"}, ...}``. ``param`` is
      the full-precision parameter where a master is kept (float32), else the parameter; moments
      are float32 or wider, scaled ones multiplied out. For other rules the quantities bear the
      names they have in the optax state. Leaves that do not train have ``param`` only, and
      ``key`` if they are PRNG keys. Counters of an optax rule are under ``"inner"``. On every
      process the same, whole: for large states use :func:`save`, or ``write_safetensors``.

    Raises:
      ValueError: as :func:`save`; a parameter called "step" or "inner".

    Collectives: with several processes, an all-gather of each bucket's arrays.
    """
    view = view_of(state, params)
    found: dict[str, Any] = {STEP: int(whole(view.leaves[f"{prefix_of(view)}step"]))}
    for path, entry in stream_of(view):
        found.setdefault(path, {}).update({q: np.array(x) for q, x in entry.items()})
    inner = dict(inner_of(view))
    if inner:
        found[INNER] = inner
    return found


def prefix_of(view: View) -> str:
    """Where in the tree of the state the optimizer's is."""
    name = view.main.name
    return f"state/{name}/" if name else "state/"


def inner_of(view: View) -> Iterator[tuple[str, np.ndarray]]:
    """What the rule keeps beside sharded arrays."""
    prefix = f"{prefix_of(view)}{INNER}/"
    for name, leaf in view.leaves.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), np.array(whole(leaf))


def shapes_of(view: View) -> Iterator[tuple[str, str, tuple[int, ...], np.dtype]]:
    """Path, quantity, shape and dtype of what :func:`stream_of` yields, in its order."""
    for node, bucket in _buckets(view):
        dtypes = _dtypes(node, bucket)
        for slot in bucket.slots:
            for quantity, dtype in dtypes.items():
                yield slot.path, quantity, slot.shape, dtype
    for path, leaf in _others(view):
        yield path, "param", tuple(leaf.shape), np.dtype(leaf.dtype)


def stream_of(view: View) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each parameter's arrays; a bucket at a time is on the host, and no longer than the caller
    keeps what it was given."""
    for path in {path for path, _, _, _ in shapes_of(view)} & set(_RESERVED):
        raise ValueError(f"a parameter is called {path!r}, which a state dict needs itself")
    for node, bucket in _buckets(view):
        flat = {q: _gathered(node.array(q, bucket.number), node) for q in node.arrays}
        dtypes = _dtypes(node, bucket)
        for slot in bucket.slots:
            entry: dict[str, Any] = {}
            for quantity, dtype in dtypes.items():
                form = node.form("master" if quantity == "param" else quantity, bucket.number)
                if quantity == "param":
                    param = _param(node, bucket, slot, flat)
                    master = _stored(bucket, slot, flat, "master", form.scales)
                    values = decode_param(param, master, form)
                else:
                    stored = _stored(bucket, slot, flat, quantity, form.scales)
                    assert stored is not None
                    values = decode(stored, form)
                entry[quantity] = values.astype(dtype, copy=False).reshape(slot.shape)
            yield slot.path, entry
    for path, leaf in _others(view):
        original = view.leaves[f"params/{path}"]
        entry = {"param": whole(leaf)}
        if leaf is not original:
            entry[KEY] = str(jax.random.key_impl(original))
        yield path, entry


def _buckets(view: View) -> Iterator[tuple[Node, Bucket]]:
    """Of the optimizer's state, and of frozen parameters where these are sharded."""
    for node in view.nodes.values():
        if node is view.main or node.kind == "frozen":
            yield from ((node, bucket) for bucket in node.layout.buckets)


def _dtypes(node: Node, bucket: Bucket) -> dict[str, np.dtype]:
    """Quantities of a bucket, and the dtype of each when it is multiplied out."""
    found: dict[str, np.dtype] = {}
    for quantity in node.quantities():
        if View.base_of(quantity) != quantity or quantity == "master":
            continue
        array = node.array(quantity, bucket.number)
        if quantity == "param":
            leaf = jnp.dtype(bucket.dtype)
            master = node.array("master", bucket.number)
            found[quantity] = leaf if master is None else np.promote_types(leaf, np.float32)
        elif array is not None:
            own = np.dtype(array.dtype)
            found[quantity] = own if own.itemsize >= 4 else np.dtype(np.float32)
    return found


def _others(view: View) -> Iterator[tuple[str, Any]]:
    """Parameters in no bucket; keys as their data."""
    for name, leaf in view.leaves.items():
        if name.startswith("params/"):
            dtype = getattr(leaf, "dtype", None)
            if dtype is None:
                leaf = np.asarray(leaf)
            elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            yield name.removeprefix("params/"), leaf


def _gathered(array: Any, node: Node) -> np.ndarray | None:
    """All of a flat array, on every process; a stacked one device by device, as others are."""
    if array is None:
        return None
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        flat = np.asarray(array)
    else:
        from jax.experimental import multihost_utils

        flat = np.asarray(multihost_utils.process_allgather(array, tiled=True))
    if flat.ndim > 1:
        flat = flat.reshape(len(flat), node.layout.shards, -1).swapaxes(0, 1).reshape(-1)
    return flat


def _cut(bucket: Bucket, slot: Slot, flat: np.ndarray) -> np.ndarray:
    """A slot's elements out of a bucket's array."""
    parts = [
        flat[start : start + size] for _, start, size in locate(bucket, slot, 0, slot_size(slot))
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([flat[:0], *parts])


def slot_size(slot: Slot) -> int:
    """Elements of the whole leaf."""
    return math.prod(slot.shape)


def _stored(
    bucket: Bucket,
    slot: Slot,
    flat: Mapping[str, np.ndarray | None],
    quantity: str,
    scales: str,
) -> Stored | None:
    values = flat.get(quantity)
    if values is None:
        return None
    if not scales:
        return Stored(_cut(bucket, slot, values))
    blocks = flat[quantity + scales]
    assert blocks is not None
    parts: list[np.ndarray] = []
    for _, start, size in locate(bucket, slot, 0, slot_size(slot)):
        first = start // BLOCK
        each = np.repeat(blocks[first : -(-(start + size) // BLOCK)], BLOCK)
        parts.append(each[start - first * BLOCK :][:size])
    return Stored(_cut(bucket, slot, values), np.concatenate([blocks[:0], *parts]))


def _param(
    node: Node, bucket: Bucket, slot: Slot, flat: Mapping[str, np.ndarray | None]
) -> np.ndarray:
    packed = flat.get("param")
    if packed is not None:
        return _cut(bucket, slot, packed)
    assert node.params is not None
    return whole(node.params[slot.path]).reshape(-1)


# ---------------------------------------------------------------- back


def load_state_dict(d: Mapping[str, Any], state: Any, params: Any) -> tuple[Any, Any]:
    """Put a state dict into a training state.

    Args:
      d: as :func:`state_dict` returns it; arrays of any floating dtype. Read from another
        format, e.g. by ``from_torch``.
      state: the state to be like (arrays or ``ShapeDtypeStruct``), in any layout and policy.
      params: its parameters, likewise.

    Returns:
      New ``(state, params)``; the arguments are untouched. ``grad_norm`` and ``skipped`` are 0.

    Raises:
      CheckpointError: a parameter or moment that ``d`` lacks or has in another shape, by path.
      ValueError: ``d`` without "step".
    """
    if not isinstance(d, Mapping) or STEP not in d:
        raise ValueError('d must be a state dict with a "step" and an entry per parameter')
    view = view_of(state, params)
    return restore_view(
        _Arrays(d).source(),
        view,
        None,
        cast="floating",
        hyperparameters="new",
        ledger=Ledger(),
    )


class _Arrays:
    """A state dict as a checkpoint in memory: every array is a stream."""

    def __init__(self, d: Mapping[str, Any]) -> None:
        self.streams: list[np.ndarray] = []
        self.leaves: dict[str, LeafEntry] = {}
        buckets: list[Bucket] = []
        arrays: dict[str, list[ArrayEntry | None]] = {}
        for path, entry in d.items():
            if path in _RESERVED:
                continue
            if not isinstance(entry, Mapping) or "param" not in entry:
                raise ValueError(f"the state dict has no 'param' of {path!r}")
            if KEY in entry:
                self._leaf(f"params/{path}", entry["param"], entry[KEY])
                continue
            param = np.asarray(entry["param"])
            number, shape, size = len(buckets), tuple(param.shape), math.prod(param.shape)
            dtype = param.dtype
            slot = Slot(path, shape, dtype.name, "", number, 0, size)
            buckets.append(
                Bucket(number, dtype.name, dtype.itemsize, "", (slot,), size, size, size)
            )
            for quantity, values in entry.items():
                array = np.asarray(values)
                if array.shape != shape:
                    raise ValueError(
                        f"the state dict's {quantity} of {path!r} has shape {array.shape}, its "
                        f"param {shape}"
                    )
                column = arrays.setdefault(quantity, [])
                column.extend([None] * (number - len(column)))
                piece = Piece(0, size, self._stream(array), 0)
                column.append(ArrayEntry(array.dtype.name, 1, (piece,)))
        for column in arrays.values():
            column.extend([None] * (len(buckets) - len(column)))
        arrays.setdefault("param", [])
        node = NodeEntry(Layout(tuple(buckets), 1), {q: tuple(c) for q, c in arrays.items()})
        self._leaf("state/step", np.int32(d[STEP]), None)
        for name, value in _SCALARS.items():
            self._leaf(f"state/{name}", value, None)
        for name, value in d.get(INNER, {}).items():
            self._leaf(f"state/{INNER}/{name}", value, None)
        self.manifest = Manifest(int(d[STEP]), "", (), {"": node}, self.leaves, {})

    def source(self) -> Source:
        reader: Any = self
        return Source(Path("(a state dict)"), self.manifest, reader, "the state dict")

    def read(self, stream: int, offset: int, count: int, what: str) -> Callable[[], np.ndarray]:
        """What ``StreamReader.read`` does."""
        return lambda: self.streams[stream][offset : offset + count]

    def read_into(
        self, into: np.ndarray, stream: int, offset: int, what: str
    ) -> Callable[[], np.ndarray]:
        """What ``StreamReader.read_into`` does."""
        into[:] = self.streams[stream][offset : offset + into.size]
        return lambda: into

    def _stream(self, array: np.ndarray) -> int:
        self.streams.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return len(self.streams) - 1

    def _leaf(self, name: str, value: Any, key: str | None) -> None:
        array = np.asarray(value)
        shape = tuple(array.shape)
        block = ((0,) * array.ndim, shape, self._stream(array), 0)
        self.leaves[name] = LeafEntry(shape, array.dtype.name, key, (block,))
