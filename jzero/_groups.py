"""Parameter groups: which leaf follows which hyperparameters.

A group is a label plus whether weight decay applies; leaves of one group share buckets, so that
every bucket is updated with one set of scalars. A mask is the case of one label and two groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero._layout import path_string
from jzero._pack import leaf_paths

__all__ = ["FROZEN", "Groups"]

FROZEN = "frozen"
"""The label whose leaves own no state and never move."""

_NO_DECAY = "(no decay)"


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """From a parameter tree to the group of each path.

    Attributes:
      param_labels: pytree prefix of labels, or a function from a path such as
        ``"layers/0/kernel"`` to a label; None: no labels.
      overrides: hyperparameters by label; a label without an entry uses the arguments.
      mask: pytree prefix of bools, or a function from params to one: True where weight decay
        applies. None: everywhere.
    """

    param_labels: Any = None
    overrides: Mapping[str, Any] | None = None
    mask: Any | Callable[[Any], Any] | None = None

    def __call__(self, params: Any) -> dict[str, str | None]:
        """The group of every path; None for a frozen leaf.

        Raises:
          ValueError: labels or a mask that do not fit ``params``, a label that is not a string,
            an override for a label that no parameter has.
        """
        paths = [path_string(path) for path, _ in leaf_paths(params)]
        labels = self._labels(params, paths)
        unknown = set(self.overrides or ()) - {*labels, FROZEN}
        if unknown:
            raise ValueError(
                f"overrides name the labels {sorted(unknown)}, which no parameter has; "
                f"param_labels gives {sorted(set(labels))}"
            )
        decays = self._decays(params, len(paths))
        return {
            path: None if label == FROZEN else label if decay else label + _NO_DECAY
            for path, label, decay in zip(paths, labels, decays, strict=True)
        }

    def hyperparameters(self, group: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with a group's overrides; ``weight_decay`` is 0 outside the mask."""
        label = group.removesuffix(_NO_DECAY)
        merged = {**defaults, **(self.overrides or {}).get(label, {})}
        if group.endswith(_NO_DECAY):
            merged["weight_decay"] = 0.0
        return merged

    def _labels(self, params: Any, paths: list[str]) -> list[str]:
        if self.param_labels is None:
            return [""] * len(paths)
        labels: list[Any]
        if callable(self.param_labels):
            labels = [self.param_labels(path) for path in paths]
        else:
            labels = _broadcast("param_labels", self.param_labels, params)
        for path, label in zip(paths, labels, strict=True):
            if not isinstance(label, str):
                raise ValueError(f"param_labels gives {label!r} for {path!r}; a label is a string")
        return labels

    def _decays(self, params: Any, count: int) -> list[bool]:
        if self.mask is None:
            return [True] * count
        mask = self.mask(params) if callable(self.mask) else self.mask
        return [bool(leaf) for leaf in _broadcast("mask", mask, params)]


def _broadcast(name: str, prefix: Any, params: Any) -> list[Any]:
    """One value per leaf of ``params`` (``None`` leaves too) from a tree prefix of it."""
    try:
        full = jax.tree.map(
            lambda value, sub: jax.tree.map(lambda _: value, sub, is_leaf=lambda x: x is None),
            prefix,
            params,
            is_leaf=lambda x: x is None,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be a pytree prefix of params: {error}") from error
    return jax.tree.leaves(full, is_leaf=lambda x: x is None)
