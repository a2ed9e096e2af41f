"""Finding each array of a target in a checkpoint, and saying what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_format import CheckpointError, NodeEntry
from jzero._ckpt_place import Target
from jzero._ckpt_source import Source
from jzero._ckpt_view import Address, View
from jzero._layout import Slot

__all__ = ["Cast", "Match", "match"]

Cast = bool | Literal["floating"]


@dataclasses.dataclass
class Match:
    """Where everything comes from.

    Attributes:
      files: for each node of the target, the file's node and its name there.
      leaves: for each plain leaf and each parameter that the file has as a plain leaf, its name.
      slots: for each plain parameter that the file has in a bucket, its node.
      kept: what is taken from the target itself.
    """

    files: dict[str, tuple[str, NodeEntry]]
    leaves: dict[str, str] = dataclasses.field(default_factory=dict)
    slots: dict[str, NodeEntry] = dataclasses.field(default_factory=dict)
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)


def match(
    source: Source,
    view: View,
    targets: Mapping[Address, Target],
    likes: Mapping[Address, Any],
    *,
    cast: Cast,
    hyperparameters: str,
) -> Match:
    """Everything that can be known from the manifest.

    Raises:
      CheckpointError: what the file lacks or has otherwise, up to five things by name.
    """
    return _Matching(source, view, targets, likes, cast, hyperparameters).run()


class _Matching:
    def __init__(
        self,
        source: Source,
        view: View,
        targets: Mapping[Address, Target],
        likes: Mapping[Address, Any],
        cast: Cast,
        hyperparameters: str,
    ) -> None:
        self.source = source
        self.view = view
        self.targets = targets
        self.likes = likes
        self.cast = cast
        self.hyperparameters = hyperparameters
        self.wrong: set[str] = set()
        self.match = Match({n: source.node(n, node.kind) for n, node in view.nodes.items()})

    def run(self) -> Match:
        wrong: list[str] = []
        # Parameters first: one that is missing has no moments either, which is said once.
        for address in sorted(self.view.addresses, key=lambda a: a.bucket is not None):
            try:
                self._check(address)
            except CheckpointError as error:
                wrong.append(str(error))
                self.wrong.add(address.what.removeprefix("params/"))
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"{self.source.label} does not fit: " + "; ".join(wrong[:5]) + more
            )
        return self.match

    def _check(self, address: Address) -> None:
        target = self.targets[address]
        if address.node is None and address.what.startswith("params/"):
            path = address.what.removeprefix("params/")
            self._check_param(path, None, target.shape, target.dtype, target.key)
        elif address.node is None:
            self._check_state(address, target)
        elif address.bucket is None:
            path = address.what
            self._check_param(path, address.node, target.shape, target.dtype, target.key)
        else:
            self._check_bucket(address.node, address.what, address.bucket)

    def _check_param(
        self, path: str, node: str | None, shape: tuple[int, ...], dtype: Any, key: str | None
    ) -> None:
        found = self._slot(path, node)
        name = f"params/{path}"
        if found is not None:
            file, slot = found
            if node is None or file is not self.match.files[node][1]:
                self.match.slots[path] = file
            self._same(path, slot.shape, slot.dtype, None, shape, dtype, key)
        elif name in self.source.manifest.leaves:
            entry = self.source.manifest.leaves[name]
            self._same(path, entry.shape, entry.dtype, entry.key, shape, dtype, key)
            self.match.leaves[name] = name
        else:
            raise CheckpointError(f"there is no parameter {path!r}")

    def _slot(self, path: str, node: str | None) -> tuple[NodeEntry, Slot] | None:
        """A parameter in a bucket: of the node itself, or of another."""
        files = [file for _, file in self.source.manifest.nodes.items()]
        if node is not None:
            files.insert(0, self.match.files[node][1])
        for file in files:
            if "param" in file.arrays and path in file.layout.by_path:
                return file, file.layout.by_path[path]
        return None

    def _check_bucket(self, name: str, quantity: str, bucket: int) -> None:
        base = self.view.base_of(quantity)
        if base != quantity:
            return
        node, (_, file) = self.view.nodes[name], self.match.files[name]
        for slot in node.layout.buckets[bucket].slots:
            if slot.path in self.wrong:
                continue
            if quantity == "param":
                self._check_param(slot.path, name, slot.shape, jnp.dtype(slot.dtype), None)
                continue
            if quantity == "master":
                continue  # made of the parameter, if need be
            theirs = file.layout.by_path.get(slot.path)
            if theirs is None or self.source.entry(file, quantity, theirs.bucket) is None:
                frozen = f"params/{slot.path}" in self.source.manifest.leaves
                raise CheckpointError(
                    f"there is no {quantity} of {slot.path!r}" + (" (it was frozen)" * frozen)
                )
            if theirs.shape != slot.shape:
                raise CheckpointError(
                    f"{quantity} of {slot.path!r} has shape {theirs.shape}, and like {slot.shape}"
                )

    def _check_state(self, address: Address, target: Target) -> None:
        name = self._file_name(address.what)
        like = self.likes[address]
        concrete = isinstance(like, (jax.Array, np.ndarray, np.generic, int, float))
        if "/hyperparams/" in name and self.hyperparameters == "new" and concrete:
            self.match.kept[address.what] = like
            return
        if name not in self.source.manifest.leaves:
            fallback = self._count(name)
            if fallback is None:
                raise CheckpointError(f"there is no {name!r}")
            name = fallback
        entry = self.source.manifest.leaves[name]
        self._same(
            name, entry.shape, entry.dtype, entry.key, target.shape, target.dtype, target.key
        )
        self.match.leaves[address.what] = name

    def _file_name(self, name: str) -> str:
        """A leaf of the state, where the file's state lies elsewhere in its tree."""
        for ours, (theirs, _) in self.match.files.items():
            prefix = f"state/{ours}/" if ours else "state/"
            if ours != theirs and name.startswith(prefix):
                return (f"state/{theirs}/" if theirs else "state/") + name.removeprefix(prefix)
        return name

    def _count(self, name: str) -> str | None:
        """Where to take a counter of the rule's from that was saved under other labels, or not
        at all: from another label, or the number of completed steps."""
        head, inner, rest = name.partition("/inner/")
        if not inner:
            return None
        tail = rest.partition("/")[2]
        for other in self.source.manifest.leaves:
            begins = other.startswith(head + inner)
            if begins and other.removeprefix(head + inner).partition("/")[2] == tail:
                return other
        return f"{head}/step" if tail.split("/")[-1] == "count" else None

    def _same(
        self,
        name: str,
        have_shape: tuple[int, ...],
        have_dtype: str,
        have_key: str | None,
        shape: tuple[int, ...],
        dtype: Any,
        key: str | None,
    ) -> None:
        if tuple(have_shape) != tuple(shape):
            raise CheckpointError(f"{name!r} has shape {tuple(have_shape)}, and like {shape}")
        if have_key != key:
            raise CheckpointError(
                f"{name!r} is {f'a PRNG key ({have_key})' if have_key else 'no PRNG key'}, and "
                f"like {f'has {key}' if key else 'is none'}"
            )
        floating = all(jnp.issubdtype(x, jnp.floating) for x in (jnp.dtype(have_dtype), dtype))
        cast = floating if self.cast == "floating" else self.cast
        if jnp.dtype(have_dtype) != dtype and not cast:
            raise CheckpointError(
                f"{name!r} has dtype {have_dtype}, and like {dtype.name}; pass cast=True to "
                "convert, or make the model in that dtype"
            )
