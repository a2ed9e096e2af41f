"""What an instruction computes and moves: floating-point operations, and bytes of device memory.

Operations are those of matrix products and convolutions; everything else is bounded by memory.
Bytes are what an instruction reads and writes if each of its arrays passes once: of an array of
which only slices are used, the slices; nothing for arrays in on-chip memory, nor for those that an
asynchronous collective works on meanwhile.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jzero._hlo import Hlo, Op

__all__ = ["FREE", "Cost", "cost"]

# Instructions that move nothing.
FREE = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_SLICES = ("dynamic-slice", "slice", "gather")
_SEEN_THROUGH = ("bitcast", "reshape", "copy", "convert")
_LARGE = 1_000_000


class Cost(NamedTuple):
    """Floating-point operations, and bytes of device memory."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: object) -> Cost:
        assert isinstance(other, Cost)
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def cost(hlo: Hlo, computation: str, op: Op) -> Cost:
    """Of one run of an instruction, without what loops and calls in it run."""
    if op.kind in FREE or op.kind in ("while", "call", "conditional"):
        return Cost()
    if op.kind.endswith(("-done", "-update")):
        return Cost()
    return Cost(_flops(hlo, computation, op), _bytes(hlo, computation, op))


def _flops(hlo: Hlo, computation: str, op: Op) -> int:
    total = _product_flops(hlo, computation, op)
    if op.kind == "fusion" or op.kind.startswith("async"):
        total += sum(_product_flops(hlo, where, inner) for where, inner in hlo.within(op))
    return total


def _product_flops(hlo: Hlo, computation: str, op: Op) -> int:
    if op.kind == "dot":
        return 2 * _size(op) * _contracted(hlo, computation, op, r"lhs_contracting_dims=\{([\d,]+)")
    if op.kind == "custom-call" and re.search(r"custom_call_target=\"[^\"]*(gemm|matmul)", op.text):
        pattern = r"\"lhs_contracting_dimensions\":\[([\d\",]+)"
        first = op.arrays[:1]
        size = math.prod(first[0].dims) if first else 0
        return 2 * size * _contracted(hlo, computation, op, pattern)
    if op.kind == "convolution":
        return _convolution(hlo, computation, op)
    return 0


def _size(op: Op) -> int:
    return sum(math.prod(array.dims) for array in op.arrays)


def _contracted(hlo: Hlo, computation: str, op: Op, pattern: str) -> int:
    dims = op.attribute(pattern)
    table = hlo.tables[computation]
    lhs = table.get(op.operands[0]) if op.operands else None
    if dims is None or lhs is None or not lhs.arrays:
        return 1
    numbers = [int(d) for d in re.findall(r"\d+", dims)]
    return math.prod(lhs.arrays[0].dims[d] for d in numbers)


def _convolution(hlo: Hlo, computation: str, op: Op) -> int:
    """TPU writes matrix products as convolutions; a batch dim of one is a window that dilates."""
    table = hlo.tables[computation]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.text)
    operands = [table.get(name) for name in op.operands[:2]]
    if labels is None or None in operands or len(operands) < 2:
        return 0
    lhs, rhs = (o.arrays[0].dims for o in operands if o is not None)
    taps = 1
    for label, size in zip(labels[2], rhs, strict=True):
        if label == "i":
            taps *= size
    window = op.attribute(r"window=\{([^}]*)\}") or ""
    fields = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-]+)", window)}
    ratio = 1.0
    for position, label in enumerate(sorted(c for c in labels[2] if c.isdigit())):
        inp, out = lhs[labels[1].index(label)], op.arrays[0].dims[labels[3].index(label)]
        ratio *= _taps(fields, position, inp, out)
    return round(2 * math.prod(op.arrays[0].dims) * taps * ratio)


def _taps(fields: dict[str, list[str]], position: int, inp: int, out: int) -> float:
    """Kernel elements that meet the input, for the average output position."""

    def field(name: str, default: str) -> str:
        return fields[name][position] if name in fields else default

    size, stride = int(field("size", "1")), int(field("stride", "1"))
    dilate, spread = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    low = int(field("pad", "0_0").split("_")[0])
    if size * out > _LARGE:
        return min(size, inp) if dilate == 1 else max(1, size // dilate)
    reach = (inp - 1) * dilate + 1
    hits = 0
    for o in range(out):
        for k in range(size):
            at = o * stride + k * spread - low
            hits += 0 <= at < reach and at % dilate == 0
    return hits / max(out, 1)


def _bytes(hlo: Hlo, computation: str, op: Op) -> int:
    table = hlo.tables[computation]
    if op.kind.endswith("-start"):  # the result repeats the operand
        return max((_far(o) for name in op.operands if (o := table.get(name))), default=0)
    if op.kind in _SLICES:
        return 2 * _far(op)
    if op.kind == "dynamic-update-slice":
        update = table.get(op.operands[1])
        return 2 * _far(update) if update else 0
    if op.kind == "fusion" and op.called and op.called[0] in hlo.computations:
        return _fusion_bytes(hlo, table, op)
    return _far(op) + sum(_far(o) for name in op.operands if (o := table.get(name)))


def _far(op: Op) -> int:
    return sum(array.bytes for array in op.arrays if not array.near)


def _fusion_bytes(hlo: Hlo, table: dict[str, Op], op: Op) -> int:
    inner = hlo.computations[op.called[0]]
    names = hlo.tables[op.called[0]]
    users: dict[str, list[Op]] = {}
    for o in inner:
        for name in o.operands:
            users.setdefault(name, []).append(o)

    root = inner[-1]
    hosts = any(o.hosted for o in inner)

    def read(name: str, whole: int) -> int:
        total = 0
        for user in users.get(name, []):
            if user.kind in _SEEN_THROUGH and user.operands[0] == name and user.name in users:
                total += read(user.name, whole)
            elif user.kind in _SLICES and user.operands[0] == name:
                total += sum(a.bytes for a in user.arrays)
            elif user.kind == "dynamic-update-slice" and user.operands[0] == name:
                continue  # written in place
            elif hosts and (user is root or user.hosted):
                continue  # the collective's, handed on from piece to piece
            else:
                return whole
        return min(total, whole)

    total = 0
    for o in inner:
        if o.kind != "parameter":
            continue
        index = int(re.search(r"parameter\((\d+)\)", o.text)[1])  # type: ignore[index]
        source = table.get(op.operands[index]) if index < len(op.operands) else None
        far = _far(source) if source else 0
        total += read(o.name, far) if far else 0
    outputs = [names.get(n) for n in root.operands] if root.kind == "tuple" else [root]
    if len(outputs) != len(op.arrays):
        return total + _far(op)
    for array, output in zip(op.arrays, outputs, strict=True):
        if array.near or (hosts and output and (output.kind == "parameter" or output.hosted)):
            continue
        while output is not None and output.kind in _SEEN_THROUGH and output.operands:
            output = names.get(output.operands[0])
        if output is not None and output.kind == "dynamic-update-slice":
            update = names.get(output.operands[1])
            total += sum(a.bytes for a in update.arrays) if update else array.bytes
        else:
            total += array.bytes
    return total
