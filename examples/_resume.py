"""A run that can be stopped and go on later, on as many devices as there are then."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from _report import Curve

from jzero import checkpoint

CURVE = "curve.json"


class Resume:
    """Checkpoints of a run, and its curve beside them.

    Args:
      folder: of both; None: nothing is saved or found.
      every: steps between checkpoints.
    """

    def __init__(self, folder: str | None, every: int) -> None:
        self._folder = None if folder is None else Path(folder)
        self._manager = None if folder is None else checkpoint.Manager(folder, keep=2, every=every)

    def load(self, params: Any, state: Any, curve: Curve) -> tuple[Any, Any]:
        """Parameters and state of the newest checkpoint, if there is one; fills in the curve."""
        if self._folder is None or self._manager is None or self._manager.latest() is None:
            return params, state
        state, params = self._manager.restore((state, params))
        done = int(state.step) + int(state.skipped)
        past = json.loads((self._folder / CURVE).read_text(encoding="utf-8"))
        for name in ("losses", "norms", "seconds"):
            getattr(curve, name).extend(past[name][:done])
        curve.held_out |= {int(k): v for k, v in past["held_out"].items() if int(k) <= done}
        return params, state

    def save(self, params: Any, state: Any, curve: Curve, last: bool) -> None:
        """Save if it is time to, while training goes on; or because it is the last step."""
        if self._folder is None or self._manager is None:
            return
        step = len(curve.losses)
        if step % self._manager.every and not last:
            return
        if jax.process_index() == 0:  # before the checkpoint counts: never shorter than it
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f".{CURVE}"
            temporary.write_text(json.dumps(dataclasses.asdict(curve)), encoding="utf-8")
            temporary.replace(self._folder / CURVE)
        self._manager.save(state, params, step=step, force=last)
        if last:
            self._manager.wait()
