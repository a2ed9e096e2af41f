"""jzero's checkpoints inside Orbax's ``CheckpointManager``, for who has one."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jzero._ckpt_files import restore, save

__all__ = ["OrbaxHandler", "orbax_handler"]


class OrbaxHandler(NamedTuple):
    """What Orbax is given: ``Handler`` is its checkpoint handler, ``Save(state, params)`` and
    ``Restore(like)`` are the arguments for ``manager.save`` and ``manager.restore``."""

    Handler: Any
    Save: Any
    Restore: Any


def orbax_handler() -> OrbaxHandler:
    """Classes that let an Orbax ``CheckpointManager`` keep jzero's checkpoints, alone or beside
    other items; Orbax decides when to save, what to keep and when a step counts::

        zero = jzero.checkpoint.orbax_handler()
        options = ocp.CheckpointManagerOptions(max_to_keep=3)
        with ocp.CheckpointManager(folder, options=options) as manager:
            manager.save(step, args=zero.Save(state, params))
            state, params = manager.restore(step, args=zero.Restore(like))

    Every call makes the same classes anew; keep the result.

    Raises:
      ImportError: Orbax is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"jzero.checkpoint.orbax_handler needs Orbax ({error}); install it with "
            "pip install 'jzero[checkpoint]'"
        ) from error

    class Handler(ocp.CheckpointHandler):
        """Writes into the folder that Orbax gives; the save is over when it returns."""

        def save(self, directory: Any, args: Any) -> None:
            save(str(directory), args.state, args.params)

        def restore(self, directory: Any, args: Any = None) -> Any:
            if args is None:
                raise ValueError("pass args=Restore(like), with like=(state, params)")
            return restore(str(directory), args.like, **args.options)

    @ocp.args.register_with_handler(Handler, for_save=True)
    @dataclasses.dataclass
    class Save(ocp.args.CheckpointArgs):
        """Arguments of a save: a jzero state and its parameters."""

        state: Any
        params: Any

    @ocp.args.register_with_handler(Handler, for_restore=True)
    @dataclasses.dataclass
    class Restore(ocp.args.CheckpointArgs):
        """Arguments of a restore: ``(state, params)`` to be like, options of ``restore``."""

        like: Any
        options: dict[str, Any] = dataclasses.field(default_factory=dict)

    return OrbaxHandler(Handler, Save, Restore)
