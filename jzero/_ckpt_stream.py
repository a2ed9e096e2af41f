"""Streams of bytes on disk: written once in order, read by range, checked block by block.

A stream is a zarr v3 array of uint8 in files of many blocks (codec ``sharding_indexed``), each
block with its CRC-32C, read and written by TensorStore.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jzero._ckpt_format import CheckpointError, StreamEntry

__all__ = ["Ledger", "StreamReader", "plan_stream", "write_stream"]

_BLOCK = 2**20
_FILE = 16 * 2**20
_IN_FLIGHT = 3


class Ledger:
    """How many bytes of staging memory are alive, and how many there ever were at once."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Memory was allocated, or with a negative ``count`` released."""
        with self._lock:
            self.live += count
            self.peak = max(self.peak, self.live)


def tensorstore() -> Any:
    """The module, or an error that says how to install it."""
    try:
        import tensorstore as ts
    except ImportError as error:
        raise ImportError(
            f"jzero.checkpoint reads and writes with TensorStore ({error}); install it with "
            "pip install 'jzero[checkpoint]'"
        ) from error
    return ts


def plan_stream(size: int, staging: int) -> StreamEntry:
    """Files and blocks for ``size`` bytes, such that what is in memory while the stream is
    written stays below ``staging`` bytes, or a few kilobytes if that is more."""
    # In flight are files being filled and written, each twice (TensorStore encodes a copy).
    most = staging // (2 * _IN_FLIGHT)
    block = _power(min(size // 16, most, _BLOCK))
    file = max(block, _power(min(size, most, _FILE)))
    return StreamEntry(size, file, block)


def _power(n: int) -> int:
    """The largest power of two that is at most ``n``, and at least 4096."""
    return max(4096, 1 << (max(n, 1).bit_length() - 1))


def _spec(folder: Path, entry: StreamEntry) -> dict[str, Any]:
    checked = [{"name": "bytes"}, {"name": "crc32c"}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {
            "shape": [entry.bytes],
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [entry.file]}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [entry.block],
                        "codecs": checked,
                        "index_codecs": index,
                    },
                }
            ],
        },
        # A block of zeros is stored, so that a missing one is an error and not zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def write_stream(
    folder: Path, entry: StreamEntry, parts: Iterable[np.ndarray], ledger: Ledger
) -> StreamEntry:
    """Write all of a stream, and say what was written.

    Args:
      folder: of the stream; created.
      entry: from :func:`plan_stream`.
      parts: flat arrays whose bytes follow one another; ``entry.bytes`` in all.
      ledger: counts the staging memory.

    Returns:
      ``entry`` with the checksums of its files.
    """
    array = tensorstore().open(_spec(folder, entry), create=True, open=False).result()
    flying: list[tuple[Any, Future[int], int]] = []
    sums: list[int] = []
    start = filled = 0
    buffer: np.ndarray | None = None

    def land(most: int) -> None:
        while len(flying) > most:
            written, checksum, count = flying.pop(0)
            try:
                written.result()
                sums.append(checksum.result())
            finally:
                ledger.add(-count)

    def send() -> None:
        nonlocal start, filled, buffer
        assert buffer is not None
        window = array[start : start + filled]
        written = window.write(buffer, can_reference_source_data_indefinitely=True)
        flying.append((written, sums_of.submit(zlib.crc32, buffer.data), 2 * buffer.size))
        start, filled, buffer = start + filled, 0, None

    with ThreadPoolExecutor(1) as sums_of:
        try:
            for part in parts:
                rest = part.reshape(-1).view(np.uint8)
                while rest.size:
                    if buffer is None:
                        land(_IN_FLIGHT - 1)
                        size = min(entry.file, entry.bytes - start)
                        ledger.add(2 * size)
                        buffer = np.empty(size, np.uint8)
                    take = min(rest.size, buffer.size - filled)
                    buffer[filled : filled + take] = rest[:take]
                    filled, rest = filled + take, rest[take:]
                    if filled == buffer.size:
                        send()
            assert buffer is None, "a stream ended early"
            assert start == entry.bytes, (start, entry.bytes)
        finally:
            land(0)
    return dataclasses.replace(entry, crc32=tuple(sums))


class StreamReader:
    """Reads byte ranges of the streams of one checkpoint."""

    def __init__(self, data: Path, entries: tuple[StreamEntry, ...]) -> None:
        self._data = data
        self._entries = entries
        self._open: dict[int, Any] = {}

    def folder(self, stream: int) -> Path:
        """Where a stream lies."""
        return self._data / f"{stream:05d}"

    def read(self, stream: int, offset: int, count: int, what: str) -> Callable[[], np.ndarray]:
        """Start to read; the result is called for the (count,) bytes. Raises: as
        :meth:`read_into`."""
        return self.read_into(np.empty(count, np.uint8), stream, offset, what)

    def read_into(
        self, into: np.ndarray, stream: int, offset: int, what: str
    ) -> Callable[[], np.ndarray]:
        """Start to fill ``into``; the result is called for it.

        Raises:
          CheckpointError: (when called) bytes that are missing, cut short or altered, naming
            ``what`` and the file.
        """
        if not into.size:
            return lambda: into
        try:
            source = self._array(stream)[offset : offset + into.size]
            future = tensorstore().array(into).write(source)
        except (ValueError, OSError) as error:
            raise self._error(stream, what, error) from error

        def result() -> np.ndarray:
            try:
                future.result()
            except (ValueError, OSError) as error:
                raise self._error(stream, what, error) from error
            return into

        return result

    def verify(self) -> None:
        """Read everything and compare it with the checksums of the manifest.

        Raises:
          CheckpointError: the first file that differs.
        """
        for stream, entry in enumerate(self._entries):
            for number, start in enumerate(range(0, entry.bytes, entry.file)):
                count = min(entry.file, entry.bytes - start)
                found = self.read(stream, start, count, "the checkpoint")()
                if number >= len(entry.crc32) or zlib.crc32(found.data) != entry.crc32[number]:
                    raise CheckpointError(
                        f"{self.folder(stream) / 'c' / str(number)} is not the file that was "
                        "saved: its checksum is not the manifest's"
                    )

    def _array(self, stream: int) -> Any:
        if stream not in self._open:
            spec = _spec(self.folder(stream), self._entries[stream])
            self._open[stream] = tensorstore().open(spec, open=True).result()
        return self._open[stream]

    def _error(self, stream: int, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{what!r} cannot be read from {self.folder(stream)}: a file is missing, cut short or "
            f"damaged: {error}"
        )
