"""What a compiled program holds, read from its text: its collectives.

A collective in a loop counts as often as the loop turns where the text says so (CPU, GPU), and
once where it does not (TPU).
"""

import dataclasses
import math
import re

KINDS = ("reduce-scatter", "all-gather", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Of one kind and dtype: how many a step, and the bytes of their largest arrays (what a
    reduce-scatter takes, what an all-gather or all-reduce gives)."""

    kind: str
    dtype: str
    count: int
    bytes: int


def collectives(text: str, devices: int) -> list[Collectives]:
    """All collectives that a step runs."""
    computations = _computations(text)
    found: dict[tuple[str, str], list[int]] = {}
    seen: set[str] = set()  # TPU: the fusions that run parts of one collective share its channel
    entry = _entry(text)
    for name, times in _times(computations, entry).items():
        # TPU: a reduce-scatter is an all-reduce fused with the slice that it feeds.
        fused = "all-reduce-scatter" in name
        for line in computations[name]:
            match = _COLLECTIVE.search(line)
            if match is None:
                continue
            channel = re.search(r"channel_id=\d+", line)
            if channel and name != entry and "fus" in name:
                if channel[0] in seen:
                    continue
                seen.add(channel[0])
            kind = "reduce-scatter" if fused else match["kind"]
            widen = devices if match["kind"] == "reduce-scatter" else 1
            arrays = _arrays(match["type"])
            if match["start"] and kind != "all-reduce":  # a tuple of operand and result
                arrays = [max(arrays, key=lambda array: array[1])]
            for dtype, size in arrays:
                totals = found.setdefault((kind, dtype), [0, 0])
                totals[0] += times
                totals[1] += times * size * widen
    return [Collectives(*key, *totals) for key, totals in sorted(found.items())]


def _arrays(type_text: str) -> list[tuple[str, int]]:
    """Dtype and bytes of each array of a type."""
    return [
        (dtype, math.prod(int(d) for d in dims.split(",") if d) * _BYTES.get(dtype, 4))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def _entry(text: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith("ENTRY "))
    return line.split()[1].lstrip("%")


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            lines = found[match[1]] = []
        elif " = " in line:
            lines.append(line)
    return found


def _times(computations: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation that the entry reaches is run."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in computations[name]:
            trips = _TRIPS.search(line)
            each = count * (int(trips[1]) if trips and " while(" in line else 1)
            for called in _CALLED.findall(line):
                if called in computations:
                    visit(called, each)

    visit(entry, 1)
    return times
