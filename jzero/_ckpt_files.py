"""Checkpoints on disk: save, restore, verify."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import jax
from jax.core import Tracer

from jzero._ckpt_format import MANIFEST, absolute
from jzero._ckpt_restore import restore_view
from jzero._ckpt_save import Saving, start_save
from jzero._ckpt_source import open_source
from jzero._ckpt_stream import Ledger
from jzero._ckpt_view import View, view_of

__all__ = ["exists", "restore", "restore_with", "save", "step_number", "step_of", "verify"]


def save(
    path: str | os.PathLike[str],
    state: Any,
    params: Any,
    *,
    step: int | None = None,
    wait: bool = True,
    timeout: float = 600.0,
) -> Saving:
    """Write a checkpoint: each process its own shards, padding left out, every byte once.

    All processes call it alike, with a folder that all of them see. A checkpoint that the folder
    holds already stays whole until the new one is: whatever interrupts the save, the folder
    restores to one of the two.

    Args:
      path: a folder; made if need be.
      state: the optimizer's state, or a pytree with it inside (an ``optax.chain``'s state,
        ``MultiStepsState``, a tuple with a ``DynamicLossScale``). Arrays outside of buckets are
        stored as they are.
      params: the parameters that belong to it.
      step: the number to save it under. None: the state's completed steps.
      wait: True: returns when the checkpoint counts; the host stages at most one bucket. False:
        copies this process's own shards to its host, then returns, so that the arrays may be
        donated; a thread writes, and the interpreter does not end before it has.
      timeout: seconds to wait for the other processes.

    Returns:
      A :class:`Saving`; with ``wait=False``, call its ``wait()`` before relying on the file.

    Raises:
      CheckpointError: it could not be written, here or on another process.
      ValueError: ``state`` without a ``ZeroState``, ``params`` that are not its, tracers.
      ImportError: TensorStore is not installed.

    Collectives: with several processes, one broadcast of 8 bytes at the start.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, params))):
        raise ValueError(
            "jzero.checkpoint.save writes files, so it cannot run under jit; call it outside"
        )
    view = view_of(state, params)
    number = _completed(view) if step is None else int(step)
    return start_save(absolute(path), view, number, not wait, timeout)


def restore(
    path: str | os.PathLike[str],
    like: Any,
    *,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
    hyperparameters: Literal["new", "file"] = "new",
) -> Any:
    """Read a checkpoint onto another number of devices, bucket size, leaf order or precision.

    Only the bytes that this process's devices need are read, at most one bucket at a time.
    The step count is the file's; learning rates, labels and all other options are the new
    optimizer's.

    Args:
      path: the folder.
      like: ``(state, params)``: what ``tx.init`` gave for the new run, or its
        ``jax.eval_shape``, which allocates nothing. Shapes, dtypes and shardings are taken from
        it, values are not.
      mesh: where to put what has no sharding in ``like``; None: the mesh of the leaves that
        have one, or of ``jax.set_mesh``.
      cast: convert leaves whose dtype differs, instead of refusing.
      hyperparameters: "file" takes the ``optax.inject_hyperparams`` values of the checkpoint
        instead of those in ``like``.

    Returns:
      New ``(state, params)``; ``like`` is untouched. The arrays own their memory and can be
      donated.

    Raises:
      CheckpointError: no checkpoint, a damaged one, or one that does not fit ``like``, naming
        the file and the path of the parameter.
    """
    if hyperparameters not in ("new", "file"):
        raise ValueError(f"hyperparameters={hyperparameters!r}: use 'new' or 'file'")
    return restore_with(
        absolute(path),
        like,
        mesh=mesh,
        cast=cast,
        hyperparameters=hyperparameters,
        ledger=Ledger(),
    )


def restore_with(
    path: Path,
    like: Any,
    *,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
    hyperparameters: str = "new",
    ledger: Ledger,
) -> Any:
    """:func:`restore`, with its staging memory counted in ``ledger``."""
    state, params = _pair(like)
    source = open_source(path.absolute())
    view = view_of(state, params)
    return restore_view(
        source, view, mesh, cast=cast, hyperparameters=hyperparameters, ledger=ledger
    )


def verify(path: str | os.PathLike[str]) -> int:
    """Read a whole checkpoint and compare it with its checksums.

    Returns:
      The step it was saved under.

    Raises:
      CheckpointError: the first file that is missing, cut short, altered or another's.
    """
    source = open_source(absolute(path))
    source.streams.verify()
    return source.manifest.step


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint that counts, for programs that continue from it.

    A folder can be there without: what is left of a first save that was cut off is not a
    checkpoint. A damaged one is, so that ``restore`` says so instead of a run that starts anew.
    Looks on this process only; all see the same where they see the same folder.
    """
    return (absolute(path) / MANIFEST).exists()


def step_of(path: str | os.PathLike[str]) -> int:
    """The step that a checkpoint was saved under; reads the manifest only.

    Raises:
      CheckpointError: there is none, or its manifest is damaged.
    """
    return open_source(absolute(path)).manifest.step


def _pair(like: Any) -> tuple[Any, Any]:
    if not isinstance(like, tuple) or len(like) != 2:
        raise ValueError(f"like must be (state, params), got {type(like).__name__}")
    return like[0], like[1]


def step_number(state: Any, params: Any) -> int:
    """The completed steps of a state."""
    return _completed(view_of(state, params))


def _completed(view: View) -> int:
    name = view.main.name
    return int(view.leaves[f"state/{name}/step" if name else "state/step"])
