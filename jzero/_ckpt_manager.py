"""The usual loop: a checkpoint every so many steps, the last few kept, resume from the newest."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jzero._ckpt_files import restore, save, step_number, verify
from jzero._ckpt_format import MANIFEST, CheckpointError, absolute, read_manifest
from jzero._ckpt_save import Saving

__all__ = ["Manager"]

_NAME = re.compile(r"step_(\d{10,})")


class Manager:
    """Checkpoints of one run, a folder for each, ``step_0000001000``.

    ::

        with checkpoint.Manager("run", keep=3, every=1000) as manager:
            if manager.latest() is not None:
                state, params = manager.restore((state, params))
            for step in range(int(state.step), steps):
                ...
                manager.save(state, params, step=step + 1)

    With several processes all make the same calls.

    Args:
      folder: of the run, seen by all processes; made at the first save.
      keep: how many whole checkpoints stay; the oldest go once a newer one counts. None: all.
      every: :meth:`save` skips steps that are no multiple of it.
      background: a save copies this process's shards to its host and returns; a thread writes
        while training goes on. False: it returns when the checkpoint counts.
      timeout: seconds that a save waits for the other processes.

    Raises:
      ValueError: ``keep`` or ``every`` below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1,
        background: bool = True,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Manager({name}={value!r}) must be an integer of at least 1")
        self.folder = absolute(folder)
        self.keep = keep
        self.every = every
        self.background = background
        self.timeout = timeout
        self._saving: Saving | None = None

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step_{step:010d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint that counts, ascending; reads manifests only."""
        found: list[int] = []
        for path in sorted(self.folder.glob("step_*")):
            name = _NAME.fullmatch(path.name)
            if name is None:
                continue
            try:
                read_manifest(path)
            except CheckpointError:
                continue  # cut off while it was saved, or damaged
            found.append(int(name[1]))
        return sorted(found)

    def latest(self) -> int | None:
        """The newest of :meth:`steps`, or None."""
        return max(self.steps(), default=None)

    def save(
        self, state: Any, params: Any, *, step: int | None = None, force: bool = False
    ) -> Saving | None:
        """Save, if it is time to.

        Args:
          state: the optimizer's state.
          params: its parameters.
          step: the number to save under. None: the state's completed steps, which waits for it.
          force: save whatever ``every`` says, e.g. at the end.

        Returns:
          The save under way, or None for a step that is skipped or saved already.

        Raises:
          CheckpointError: this save could not begin, or the one before could not be ended.
        """
        number = step_number(state, params) if step is None else int(step)
        if (number % self.every and not force) or number < 0:
            return None
        self.wait()
        if number in self.steps():
            return None
        self._saving = save(
            self.path(number),
            state,
            params,
            step=number,
            wait=not self.background,
            timeout=self.timeout,
        )
        if not self.background:
            self.wait()
        return self._saving

    def wait(self) -> None:
        """Until the save under way, if any, counts; then removes what is not to be kept.

        Raises:
          CheckpointError: it failed; the checkpoints before it are untouched.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        if self.keep is not None and jax.process_index() == 0:
            for step in self.steps()[: -self.keep]:
                # Without its manifest it is none, even if removing it is cut off.
                (self.path(step) / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.path(step), ignore_errors=True)
            for path in self.folder.glob("step_*"):
                name = _NAME.fullmatch(path.name)
                if name and int(name[1]) < saving.step and not (path / MANIFEST).exists():
                    shutil.rmtree(path, ignore_errors=True)

    def restore(
        self, like: Any, *, step: int | None = None, verified: bool = True, **options: Any
    ) -> Any:
        """The newest whole checkpoint.

        Args:
          like: ``(state, params)``, as for ``jzero.checkpoint.restore``.
          step: this one, instead of the newest.
          verified: compare every byte with its checksum first; a damaged checkpoint is passed
            over with a warning, for the one before.
          options: further arguments of ``jzero.checkpoint.restore``.

        Returns:
          ``(state, params)``.

        Raises:
          CheckpointError: there is none, or none that is whole; one that does not fit ``like``.
        """
        self.wait()
        steps = self.steps() if step is None else [step]
        for number in reversed(steps):
            path = self.path(number)
            if verified and step is None:
                try:
                    verify(path)
                except CheckpointError as error:
                    warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
                    continue
            elif verified:
                verify(path)
            return restore(path, like, **options)
        raise CheckpointError(f"{self.folder} holds no whole checkpoint")

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()
