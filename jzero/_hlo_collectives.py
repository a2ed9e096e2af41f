"""The collectives of a compiled program: what they send, between whom, and when they start and end.

GPU writes ``all-gather-start`` and ``all-gather-done``, or ``async-start`` of a computation. TPU
writes fusions ``async-collective-start.N`` and ``async-collective-done.N``, between which pieces of
the collective sit in fusions that compute, or ``call-start`` of a computation; a reduce-scatter may
be a fusion called ``all-reduce-scatter``. What has no start is synchronous.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Literal

from jzero._hlo import Hlo, Op

__all__ = ["KINDS", "Collective", "collectives", "finished", "role"]

KINDS = (
    "reduce-scatter",
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HOSTS = ("fusion", "custom-call")
_ASYNC = ("async-start", "call-start")  # the second: TPU's, on its sparse core
_START, _DONE = "async-collective-start", "async-collective-done"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, as often as the program runs through it.

    Attributes:
      name: of the instruction.
      kind: of :data:`KINDS`.
      parts: dtype and bytes of each of its arrays at full size: what a reduce-scatter takes, what
        an all-gather gives.
      group: devices (by position in the mesh) of the first group.
      groups: how many groups.
      times: how often a step runs it.
      computation: where it stands.
      asynchronous: it has a start and an end.
    """

    name: str
    kind: str
    parts: tuple[tuple[str, int], ...]
    group: tuple[int, ...]
    groups: int = 1
    times: int = 1
    computation: str = ""
    asynchronous: bool = False

    @property
    def bytes(self) -> int:
        """At full size, of one run."""
        return sum(size for _, size in self.parts)

    @property
    def wire_bytes(self) -> int:
        """That a device sends in one run, by a ring."""
        return sent(self.kind, self.bytes, len(self.group))

    @property
    def rounds(self) -> int:
        """How often its data go around the ring."""
        return _rounds(self.kind)


def sent(kind: str, size: int, devices: int) -> int:
    """Bytes that each device sends for a collective of ``size`` bytes at full size."""
    if devices <= 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return _rounds(kind) * size * (devices - 1) // devices


def _rounds(kind: str) -> int:
    return 2 if kind == "all-reduce" else 1


def role(
    hlo: Hlo, computation: str, op: Op, devices: int
) -> tuple[Literal["", "sync", "start"], Collective | None]:
    """Whether an instruction starts a collective or runs one, and which."""
    base = op.kind.removesuffix("-start")
    if base in KINDS:
        found = _collective(hlo, computation, op, base, devices)
        return ("start" if op.kind.endswith("-start") else "sync"), found
    if op.kind not in (*_HOSTS, *_ASYNC) or not op.called:
        return "", None
    for where, inner in hlo.within(op):
        kind = inner.kind.removesuffix("-start")
        if kind not in KINDS:
            continue
        start = op.kind in _ASYNC or op.name.startswith(_START)
        if not start and (inner.hosted or op.name.startswith(_DONE)):
            return "", None  # a piece of one that started before
        if kind == "all-reduce" and any("all-reduce-scatter" in name for name in op.called):
            kind = "reduce-scatter"
        found = _collective(hlo, where, inner, kind, devices)
        return ("start" if start else "sync"), dataclasses.replace(found, name=op.name)
    return "", None


def finished(hlo: Hlo, computation: str, op: Op) -> str | None:
    """The start that an instruction waits for, or None."""
    if op.name.startswith(_DONE):
        return _START + op.name.removeprefix(_DONE)
    if not op.kind.endswith("-done") or not op.operands:
        return None
    table, name = hlo.tables[computation], op.operands[0]
    while name in table and table[name].kind in ("get-tuple-element", "async-update"):
        name = table[name].operands[0]
    return name


def collectives(hlo: Hlo, devices: int) -> Iterator[Collective]:
    """All that a step runs, in program order. Loops whose turns the text does not tell count
    once."""

    def visit(computation: str, times: int) -> Iterator[Collective]:
        for op in hlo.computations[computation]:
            how, found = role(hlo, computation, op, devices)
            if found is not None:
                yield dataclasses.replace(
                    found, times=times, computation=computation, asynchronous=how == "start"
                )
            for called, trips in hlo.steps(op):
                if called in hlo.computations:
                    yield from visit(called, times * (trips or 1))

    yield from visit(hlo.entry, 1)


def _collective(hlo: Hlo, computation: str, op: Op, kind: str, devices: int) -> Collective:
    group, groups = _groups(op, devices)
    table = hlo.tables[computation]
    operands = [a for name in op.operands if (o := table.get(name)) for a in o.arrays]
    widen = len(group) if kind == "all-gather" else 1
    parts = tuple((a.dtype, a.bytes * widen) for a in operands)
    return Collective(op.name, kind, parts, group, groups)


def _groups(op: Op, devices: int) -> tuple[tuple[int, ...], int]:
    listed = re.search(r"replica_groups=\{(\{[\d,{}\s]*\})\}", op.text)
    if listed:
        groups = re.findall(r"\{([\d,\s]*)\}", listed[1])
        return tuple(int(d) for d in groups[0].split(",") if d.strip()), len(groups)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", op.text)
    if iota:
        count, size = (int(d) for d in iota[1].split(","))
        dims = [int(d) for d in iota[2].split(",")]
        order = [int(d) for d in iota[3].split(",")] if iota[3] else list(range(len(dims)))
        return tuple(_iota(i, dims, order) for i in range(size)), count
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", op.text)
    if named:
        sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", named[1])}
        chosen = re.findall(r"'([^']*)'", named[2])
        dims, names = list(sizes.values()), list(sizes)
        order = [i for i, n in enumerate(names) if n not in chosen]
        order += [names.index(n) for n in chosen]
        size = math.prod(sizes[n] for n in chosen)
        return tuple(_iota(i, dims, order) for i in range(size)), math.prod(dims) // size
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", op.text)
    if pairs:
        return (int(pairs[1]), int(pairs[2])), devices
    return tuple(range(devices)), 1


def _iota(index: int, dims: list[int], order: list[int]) -> int:
    """Element ``index`` of ``arange(prod(dims)).reshape(dims).transpose(order)``."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    value = 0
    for axis in reversed(order):
        index, digit = divmod(index, dims[axis])
        value += digit * strides[axis]
    return value
