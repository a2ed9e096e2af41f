"""How processes agree on a save, and when it counts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jzero._ckpt_format import MANIFEST, CheckpointError, StreamEntry

__all__ = [
    "agree",
    "await_manifest",
    "await_mark",
    "created",
    "mark",
    "mark_failed",
    "remove_leftovers",
    "say_counted",
]

_POLL = 0.02
_COUNTED = "counted"


def agree(nonce: str) -> str:
    """Process 0's nonce, on every process."""
    if jax.process_count() == 1:
        return nonce
    from jax.experimental import multihost_utils

    raw = np.frombuffer(bytes.fromhex(nonce), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(raw), np.uint8)).hex()


def created(processes: int) -> dict[str, Any]:
    return {
        "jzero": importlib.metadata.version("jzero"),
        "jax": jax.__version__,
        "processes": processes,
        "devices": jax.device_count(),
    }


def mark(folder: Path, process: int, entry: StreamEntry) -> None:
    """Say that a stream is on disk, in one rename."""
    temporary = folder / f".{process:05d}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump([entry.bytes, entry.file, entry.block, list(entry.crc32)], file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / f"{process:05d}.done")


def mark_failed(folder: Path, process: int, error: BaseException) -> None:
    """Tell the other processes; they wait otherwise."""
    with contextlib.suppress(OSError):
        (folder / f"{process:05d}.failed").write_text(str(error), encoding="utf-8")


def _await(found: Callable[[], Any], folder: Path, timeout: float, what: str) -> Any:
    end = time.monotonic() + timeout
    while (value := found()) is None:
        for failed in sorted(folder.glob("*.failed")):
            raise CheckpointError(
                f"{folder.parent} could not be saved: process {failed.stem} failed: "
                f"{failed.read_text(encoding='utf-8')}"
            )
        if time.monotonic() > end:
            raise CheckpointError(
                f"{folder.parent} could not be saved: {what} did not come within {timeout:g} s. "
                "Do all processes see this folder?"
            )
        time.sleep(_POLL)
    return value


def await_mark(folder: Path, process: int, timeout: float) -> StreamEntry:
    def found() -> StreamEntry | None:
        try:
            text = (folder / f"{process:05d}.done").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        size, file, block, crc32 = json.loads(text)
        return StreamEntry(size, file, block, tuple(crc32))

    return _await(found, folder, timeout, f"the data of process {process}")


def await_manifest(folder: Path, timeout: float) -> None:
    def found() -> bool | None:
        # Gone: a later save has counted since, and removed it.
        return True if (folder / _COUNTED).exists() or not folder.exists() else None

    _await(found, folder, timeout, "the manifest of process 0")


def remove_leftovers(path: Path, data: str) -> None:
    """What earlier saves left, whole or not: the manifest has counted this one."""
    for other in path.glob("data-*"):
        if other.name != data:
            shutil.rmtree(other, ignore_errors=True)
    for other in path.glob(f".{MANIFEST}-*"):
        other.unlink(missing_ok=True)


def say_counted(folder: Path) -> None:
    """Tell the other processes that the manifest is in place."""
    (folder / _COUNTED).touch()
