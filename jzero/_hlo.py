"""A compiled program as data, read from its text: instructions in the order of the schedule.

What runs one after the other are the instructions of the entry and of the computations that loops,
calls and branches run (the *scheduled* ones). A fusion is one instruction; what it holds tells what
it computes, not when.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

__all__ = ["Array", "Hlo", "Op", "parse"]

_ITEM_BYTES = {"pred": 1, "bf16": 2, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_HOSTED = re.compile(r"frontend_attributes=\{[^}]*chain_id=")
_INTEGER = re.compile(r"\b[su]\d+\[\].* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      dtype: as HLO writes it, such as ``"bf16"``.
      dims: its shape.
      near: it lies in on-chip memory (TPU: VMEM), not in the device's memory.
    """

    dtype: str
    dims: tuple[int, ...]
    near: bool = False

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.prod(self.dims) * item_bits(self.dtype) // 8


def item_bits(dtype: str) -> int:
    """Bits of an element of an HLO dtype."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype] * 8
    if dtype.startswith("c"):
        return int(dtype[1:])
    digits = re.search(r"\d+", dtype)  # f8e4m3fn, s4, f32
    return int(digits[0]) if digits else 0


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction.

    Attributes:
      name, kind: its name and its opcode.
      arrays: of its result, tuples flattened.
      operands: names of instructions.
      called: names of computations.
      text: everything after ``=``.
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str

    @property
    def hosted(self) -> bool:
        """Whether it is a piece of an asynchronous collective, in a fusion that computes (TPU)."""
        return _HOSTED.search(self.text) is not None

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the instruction's text."""
        match = re.search(pattern, self.text)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True, eq=False)
class Hlo:
    """A program.

    Attributes:
      computations: instructions by computation, in order.
      entry: the computation that is run.
      scheduled: whether the order is the order of execution.
    """

    computations: dict[str, tuple[Op, ...]]
    entry: str
    scheduled: bool

    @functools.cached_property
    def tables(self) -> dict[str, dict[str, Op]]:
        """Instructions by computation and name."""
        return {c: {op.name: op for op in ops} for c, ops in self.computations.items()}

    def within(self, op: Op) -> Iterator[tuple[str, Op]]:
        """All instructions of the computations that ``op`` calls, and of those that they call,
        each with the name of its computation."""
        for called in op.called:
            for inner in self.computations.get(called, ()):
                yield called, inner
                yield from self.within(inner)

    def trips(self, op: Op) -> int | None:
        """How often a ``while`` turns; None where the text does not tell.

        Without the compiler's word for it, a loop whose condition compares with one integer
        constant is taken to count up to it from 0, as ``lax.scan`` and ``fori_loop`` do.
        """
        known = _TRIPS.search(op.text)
        if known:
            return int(known[1])
        condition = op.attribute(r"condition=%?([\w.\-]+)")
        ops = self.computations.get(condition or "", ())
        everything = [*ops, *(inner for o in ops for _, inner in self.within(o))]
        limits = {int(m[1]) for o in everything if (m := _INTEGER.search(o.text))}
        if len(limits) == 1 and any("direction=LT" in o.text for o in everything):
            return limits.pop()
        return None

    def steps(self, op: Op) -> tuple[tuple[str, int | None], ...]:
        """The scheduled computations that an instruction runs, and how often."""
        if op.kind == "while":
            body = op.attribute(r"body=%?([\w.\-]+)")
            return ((body, self.trips(op)),) if body else ()
        if op.kind in ("call", "conditional"):
            return tuple((called, 1) for called in op.called)
        return ()


def parse(text: str) -> Hlo:
    """Read ``compiled.as_text()``.

    Raises:
      ValueError: the text holds no entry computation.
    """
    computations: dict[str, tuple[Op, ...]] = {}
    entry, name, ops = "", "", list[Op]()
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            name, ops = head[1], []
            if line.startswith("ENTRY "):
                entry = name
        elif line.startswith("}"):
            computations[name] = tuple(ops)
        elif name and (match := _INSTRUCTION.match(line)):
            op = _instruction(match[1], match[2])
            if op is not None:
                ops.append(op)
    if not entry:
        raise ValueError("the text is not a compiled HLO module: it has no ENTRY computation")
    return Hlo(computations, entry, "is_scheduled=true" in text[:4000])


def _instruction(name: str, text: str) -> Op | None:
    opcode = _OPCODE.search(" " + text)
    if opcode is None:
        return None
    type_text, rest = text[: opcode.start()], text[opcode.end() - 1 :]
    inside = rest.split("), ", 1)[0]
    called = list(_CALLED.findall(rest))
    for group in _CALLED_LIST.findall(rest):
        called += _NAME.findall(group)
    kind = opcode[1]
    operands = () if kind in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Op(name, kind, _arrays(type_text), operands, tuple(called), text)


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(
            dtype,
            tuple(int(d) for d in dims.split(",") if d),
            any(f"S({space})" in layout for space in "1234"),
        )
        for dtype, dims, layout in _ARRAY.findall(text)
    )
