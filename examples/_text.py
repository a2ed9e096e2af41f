"""Bytes to train on: Python's own library, which every machine has, or a folder of text."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Not the library's own words: what pip installed, and tests, which are mostly tables.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
MOST_BYTES = 16_000_000
HELD_OUT = 10  # every tenth file


class Text:
    """Training and held-out text, split by file, as uint8 arrays.

    Args:
      folder: where to read every text file below; None: the ``.py`` sources of the standard
        library. The same folder gives the same bytes.

    Raises:
      ValueError: no folder, or not enough text in it to train on ``length`` bytes at a time.
    """

    def __init__(self, folder: str | None, length: int) -> None:
        root = Path(folder or sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise ValueError(f"--data {root} is not a folder")
        self.source = str(root) if folder else f"the standard library in {root}"
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for number, text in enumerate(_texts(root, "*" if folder else "*.py")):
            parts[number % HELD_OUT == HELD_OUT - 1].append(text)
        if not parts[1] and parts[0]:  # fewer than ten files: the end of the text instead
            whole = b"\n".join(parts[0])
            cut = len(whole) - len(whole) // HELD_OUT
            parts = ([whole[:cut]], [whole[cut:]])
        self.train, self.held_out = (np.frombuffer(b"\n".join(p), np.uint8) for p in parts)
        if min(self.train.size, self.held_out.size) <= length:
            raise ValueError(
                f"{'--data ' if folder else ''}{root} holds {self.train.size} bytes of text to "
                f"train on and {self.held_out.size} to hold out; each must exceed {length}. "
                "Give --data a folder with more text in it"
            )

    def batches(self, steps: int, batch: int, length: int, seed: int) -> np.ndarray:
        """(steps, batch, length + 1) windows of the training text, at random places."""
        return _windows(self.train, (steps, batch), length, seed)

    def held_out_batch(self, batch: int, length: int) -> np.ndarray:
        """(batch, length + 1) windows of the held-out text; always the same."""
        return _windows(self.held_out, (batch,), length, seed=0)


def _texts(root: Path, pattern: str) -> Iterator[bytes]:
    total = 0
    for path in sorted(root.rglob(pattern)):
        if SKIPPED.intersection(path.relative_to(root).parts[:-1]) or not path.is_file():
            continue
        try:
            text = path.read_bytes()
        except OSError:  # unreadable: leave it out
            continue
        if text and b"\0" not in text:  # a NUL byte: not text
            yield text[: MOST_BYTES - total]
            total += len(text)
        if total >= MOST_BYTES:
            return


def _windows(text: np.ndarray, shape: tuple[int, ...], length: int, seed: int) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(0, text.size - length, shape)
    return text[starts[..., None] + np.arange(length + 1)]
