"""What a checkpoint says of itself: the manifest, and which bytes lie where.

[Note: a checkpoint on disk]
A checkpoint is a folder with one small file that counts and a folder of data::

    ckpt/
      manifest.json           what there is, where it lies, sha256 of itself
      data-<nonce>/
        00000/                all bytes that process 0 wrote: a zarr v3 array of uint8
        00001/                those of process 1

Every process writes its own *stream*: the pieces that it owns, end to end, bucket by bucket. The
manifest lists the pieces, so any range of any leaf is a few byte ranges of a few streams, however
many devices there are when it is read. Blocks of a stream carry a CRC-32C each.

``manifest.json`` is replaced in one rename, after every stream is on disk. Whatever happens before
that, the folder still holds the checkpoint that it held; data folders that the manifest does not
name are leftovers, and the next save removes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jzero._layout import Bucket, Layout, Slot

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "LeafEntry",
    "Manifest",
    "NodeEntry",
    "Piece",
    "StreamEntry",
    "absolute",
    "read_manifest",
    "write_manifest",
]

FORMAT = "jzero-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit what it is to be restored onto. The
    message names the file and the parameter's path; nothing has been changed."""


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder or file.

    Raises:
      ValueError: a URL such as ``gs://bucket/run``, which as a path would be a folder of this
        machine: each process would write into its own.
    """
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):  # Path("gs://a") has lost a slash
        raise ValueError(
            f"a checkpoint's path must lie in a file system that is mounted, got the URL {text!r}; "
            "mount the bucket or a shared disk on every host and give the path there"
        )
    return Path(text).absolute()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive elements in a stream: ``count`` of them from element ``start`` of a bucket's
    array, at byte ``offset`` of the stream of process ``stream``."""

    start: int
    count: int
    stream: int
    offset: int


@dataclasses.dataclass(frozen=True)
class StreamEntry:
    """One process's stream: bytes in all, bytes of a file, bytes under one checksum, and the
    CRC-32 of the bytes of each file."""

    bytes: int
    file: int
    block: int
    crc32: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of a bucket: its dtype, the elements that share one (1, or the block of a scale),
    and its pieces in order of ``start``. Padding is not stored."""

    dtype: str
    block: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """One sharded part of the state, such as a ``ZeroState``: its layout and, by quantity
    (``param``, ``master``, ``exp_avg`` ...), an array per bucket or None. ``kind``: "state",
    "grads" (accumulated ones) or "frozen" (parameters that are sharded and do not train)."""

    layout: Layout
    arrays: Mapping[str, tuple[ArrayEntry | None, ...]]
    kind: str = "state"


@dataclasses.dataclass(frozen=True)
class LeafEntry:
    """One array that lies in no bucket, in blocks ``(start, shape, stream, offset)``.

    ``key`` is the implementation of a typed PRNG key, whose data is what is stored.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None
    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int], ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All of it.

    Attributes:
      step: the number the checkpoint was saved under.
      data: name of the data folder.
      streams: one per process.
      nodes: by name.
      leaves: by name; ``params/...`` are parameters, ``state/...`` what else the state holds.
      created: versions and processes, for people.
    """

    step: int
    data: str
    streams: tuple[StreamEntry, ...]
    nodes: Mapping[str, NodeEntry]
    leaves: Mapping[str, LeafEntry]
    created: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of data."""
        return sum(stream.bytes for stream in self.streams)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest in place, in one step that a crash cannot split."""
    body = {"format": FORMAT, "version": VERSION, **_encode(manifest)}
    text = json.dumps({**body, "sha256": _digest(body)}, separators=(",", ":"))
    temporary = folder / f".{MANIFEST}-{manifest.data}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
      CheckpointError: no folder, no manifest, one that is cut short, altered, foreign, or of
        another version; the message names the file.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; there is no checkpoint") from None
        raise CheckpointError(
            f"{path} is missing: {folder} holds no jzero checkpoint, or one whose saving was "
            "cut off before it counted"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is damaged or no manifest of jzero: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a jzero checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {body.get('version')!r}, and this jzero reads {VERSION}; "
            "use the jzero that wrote it, or a newer one"
        )
    if body.pop("sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: its sha256 does not match")
    try:
        return _decode(body)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be understood: {error!r}") from error


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _encode(m: Manifest) -> dict[str, Any]:
    return {
        "step": m.step,
        "data": m.data,
        "created": dict(m.created),
        "streams": [[s.bytes, s.file, s.block, list(s.crc32)] for s in m.streams],
        "nodes": {
            name: {
                "kind": node.kind,
                "fingerprint": node.layout.fingerprint,
                "shards": node.layout.shards,
                "buckets": [_encode_bucket(b) for b in node.layout.buckets],
                "arrays": {
                    quantity: [
                        a
                        and {
                            "dtype": a.dtype,
                            "block": a.block,
                            "pieces": [[p.start, p.count, p.stream, p.offset] for p in a.pieces],
                        }
                        for a in arrays
                    ]
                    for quantity, arrays in node.arrays.items()
                },
            }
            for name, node in m.nodes.items()
        },
        "leaves": {
            name: {
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "key": leaf.key,
                "blocks": [
                    [list(a), list(b), stream, offset] for a, b, stream, offset in leaf.blocks
                ],
            }
            for name, leaf in m.leaves.items()
        },
    }


def _decode(body: Mapping[str, Any]) -> Manifest:
    nodes: dict[str, NodeEntry] = {}
    for name, node in body["nodes"].items():
        layout = _layout(node["buckets"], node["shards"])
        arrays = {
            quantity: tuple(
                a and ArrayEntry(a["dtype"], a["block"], tuple(Piece(*p) for p in a["pieces"]))
                for a in entries
            )
            for quantity, entries in node["arrays"].items()
        }
        nodes[name] = NodeEntry(layout, arrays, node["kind"])
    leaves = {
        name: LeafEntry(
            tuple(leaf["shape"]),
            leaf["dtype"],
            leaf["key"],
            tuple((tuple(a), tuple(b), stream, at) for a, b, stream, at in leaf["blocks"]),
        )
        for name, leaf in body["leaves"].items()
    }
    streams = tuple(
        StreamEntry(size, file, block, tuple(crc32)) for size, file, block, crc32 in body["streams"]
    )
    data = body["data"]
    if not isinstance(data, str) or Path(data).name != data:
        raise ValueError(f"the data folder {data!r} is not a plain name")
    return Manifest(body["step"], data, streams, nodes, leaves, body["created"])


# What a bucket says of all its slots, and a slot by its place in the list.
_SHARED = ("dtype", "group", "bucket")


def _encode_bucket(bucket: Bucket) -> dict[str, Any]:
    slots = [
        {name: value for name, value in slot._asdict().items() if name not in _SHARED}
        for slot in bucket.slots
    ]
    return {**bucket._asdict(), "slots": slots}


def _layout(buckets: list[dict[str, Any]], shards: int) -> Layout:
    made: list[Bucket] = []
    for fields in buckets:
        shared = {"dtype": fields["dtype"], "group": fields["group"], "bucket": fields["number"]}
        slots = tuple(
            Slot(**{**slot, "shape": tuple(slot["shape"])}, **shared) for slot in fields["slots"]
        )
        own: dict[str, Any] = {**fields, "slots": slots}
        made.append(Bucket(**own))
    return Layout(tuple(made), shards)
