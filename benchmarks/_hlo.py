"""What a compiled program holds: its collectives, summed by kind and dtype."""

import dataclasses

from jzero._hlo import parse
from jzero._hlo_collectives import KINDS
from jzero._hlo_collectives import collectives as each_collective

__all__ = ["KINDS", "Collectives", "collectives"]


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Of one kind and dtype: how many a step, and the bytes of their largest arrays (what a
    reduce-scatter takes, what an all-gather or all-reduce gives). One in a loop counts as often as
    the loop turns; buckets that the compiler has merged into one instruction count as many."""

    kind: str
    dtype: str
    count: int
    bytes: int


def collectives(text: str, devices: int) -> list[Collectives]:
    """All collectives that a step runs."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in each_collective(parse(text), devices):
        for dtype, size in one.parts:
            totals = found.setdefault((one.kind, dtype), [0, 0])
            totals[0] += one.times
            totals[1] += one.times * size
    return [Collectives(*key, *totals) for key, totals in sorted(found.items())]
