"""How long a schedule takes on paper: arithmetic, memory and wire at the makers' peaks.

The schedule is run through with three resources. An instruction that computes takes the longer of
its operations at peak and its bytes at peak. An asynchronous collective has the wire from its
start, if the wire is free; its end waits for it. A synchronous one holds everything up. An
asynchronous copy (TPU: from the device's memory to on-chip memory) has the memory in the same way.
A loop takes its body's time as often as it turns. Nothing else costs anything: no launch, no
contention. So it is a lower bound, and says where time goes rather than how much.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jzero._hlo import Hlo, Op
from jzero._hlo_collectives import Collective, finished, role
from jzero._hlo_cost import FREE, Cost, cost
from jzero._targets import Target

__all__ = ["Event", "Exchange", "Timeline", "simulate"]

Lane = Literal["compute", "wire", "copy"]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something in the timeline; times in seconds from the start of the step, of the first turn of
    the loops around it. ``loops``: turns and seconds a turn of these, the innermost first."""

    lane: Lane
    name: str
    start: float
    seconds: float
    loops: tuple[tuple[int, float], ...] = ()

    def starts(self, most: int) -> list[float]:
        """When its runs begin; of inner loops the first turn alone, if there are more than
        ``most``."""
        loops = list(self.loops)
        while loops and math.prod(turns for turns, _ in loops) > most:
            del loops[0]
        found = [self.start]
        for turns, every in loops:
            found = [start + turn * every for turn in range(turns) for start in found]
        return found


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective in the schedule.

    Attributes:
      collective: which.
      seconds: on the wire, of one run.
      between: computing instructions between its start and its end.
      covered: seconds that these take.
      exposed: seconds for which nothing else happens.
    """

    collective: Collective
    seconds: float
    between: int
    covered: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with times.

    Attributes:
      seconds: of a step.
      flops, bytes: of a step and device, loops counted as often as they turn.
      exchanges: all collectives, in program order.
      events: for a picture.
      unknown_loops: loops that were counted once because the text does not tell their turns.
    """

    seconds: float
    flops: int
    bytes: int
    exchanges: tuple[Exchange, ...]
    events: tuple[Event, ...]
    unknown_loops: int

    @property
    def wire_seconds(self) -> float:
        """All collectives, one after the other."""
        return sum(x.seconds * x.collective.times for x in self.exchanges)

    @property
    def exposed_seconds(self) -> float:
        """What of these nothing hides."""
        return sum(x.exposed * x.collective.times for x in self.exchanges)


@dataclasses.dataclass
class _Clock:
    now: float = 0.0
    wire: float = 0.0
    copy: float = 0.0


@dataclasses.dataclass
class _Open:
    """A collective or copy that has started."""

    collective: Collective | None
    seconds: float
    end: float
    between: int = 0
    covered: float = 0.0


@dataclasses.dataclass
class _Walk:
    hlo: Hlo
    target: Target
    exchanges: list[Exchange] = dataclasses.field(default_factory=list[Exchange])
    events: list[Event] = dataclasses.field(default_factory=list[Event])
    total: Cost = dataclasses.field(default_factory=Cost)
    unknown: int = 0

    def run(self, computation: str, times: int, clock: _Clock) -> None:
        opened: dict[str, _Open] = {}
        for op in self.hlo.computations[computation]:
            self._op(op, computation, times, clock, opened)
        for left in opened.values():  # never waited for here
            if left.collective is not None:
                self._close(left, clock)

    def _op(
        self, op: Op, computation: str, times: int, clock: _Clock, opened: dict[str, _Open]
    ) -> None:
        how, found = role(self.hlo, computation, op, len(self.target.devices))
        if found is not None:
            here = dataclasses.replace(
                found, times=times, computation=computation, asynchronous=how == "start"
            )
            seconds = self.target.seconds(here.wire_bytes, here.group, here.rounds)
            begin = max(clock.now, clock.wire)
            started = _Open(here, seconds, begin + seconds)
            clock.wire = started.end
            self.events.append(Event("wire", op.name, begin, seconds))
            if how == "start":
                opened[op.name] = started
            else:
                self._close(started, clock)
            return
        name = finished(self.hlo, computation, op)
        if name is not None:
            waited = opened.pop(name, None)
            if waited is not None:
                self._close(waited, clock)
            return
        steps = [s for s in self.hlo.steps(op) if s[0] in self.hlo.computations]
        if steps:
            before = clock.now
            for called, trips in steps:
                self.unknown += trips is None
                self._loop(called, trips or 1, times, clock)
            self._cover(opened, clock.now - before)
            return
        self._compute(op, computation, times, clock, opened)

    def _compute(
        self, op: Op, computation: str, times: int, clock: _Clock, opened: dict[str, _Open]
    ) -> None:
        one = cost(self.hlo, computation, op)
        if op.kind in FREE or one == (0, 0):
            return
        self.total += Cost(one.flops * times, one.bytes * times)
        chip = self.target.chip
        seconds = max(one.flops / chip.flops, one.bytes / chip.bandwidth)
        if op.kind.endswith("-start"):
            begin = max(clock.now, clock.copy)
            clock.copy = begin + seconds
            opened[op.name] = _Open(None, seconds, clock.copy)
            self.events.append(Event("copy", op.name, begin, seconds))
            return
        self.events.append(Event("compute", op.name, clock.now, seconds))
        clock.now += seconds
        self._cover(opened, seconds)

    def _loop(self, called: str, trips: int, times: int, clock: _Clock) -> None:
        first, begin = len(self.events), clock.now
        self.run(called, times * trips, clock)
        turn = clock.now - begin
        for i in range(first, len(self.events)):
            event = self.events[i]
            self.events[i] = dataclasses.replace(event, loops=(*event.loops, (trips, turn)))
        clock.now = begin + turn * trips
        clock.wire, clock.copy = max(clock.wire, clock.now), max(clock.copy, clock.now)

    def _cover(self, opened: dict[str, _Open], seconds: float) -> None:
        for one in opened.values():
            one.between += 1
            one.covered += seconds

    def _close(self, one: _Open, clock: _Clock) -> None:
        waited = max(0.0, one.end - clock.now)
        clock.now += waited
        if one.collective is not None:
            exposed = min(waited, one.seconds)
            self.exchanges.append(
                Exchange(one.collective, one.seconds, one.between, one.covered, exposed)
            )


def simulate(hlo: Hlo, target: Target) -> Timeline:
    """Run through a schedule (see the top of this module)."""
    walk, clock = _Walk(hlo, target), _Clock()
    walk.run(hlo.entry, 1, clock)
    return Timeline(
        seconds=max(clock.now, clock.wire),
        flops=walk.total.flops,
        bytes=walk.total.bytes,
        exchanges=tuple(walk.exchanges),
        events=tuple(walk.events),
        unknown_loops=walk.unknown,
    )


def draw(timelines: dict[str, Timeline], path: Any) -> None:
    """A picture of schedules, one above the other, at the same scale.

    Raises:
      ModuleNotFoundError: no matplotlib; the message names the extra.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "the picture of a schedule needs matplotlib: pip install 'jzero[report]'"
        ) from error
    figure = Figure(figsize=(11, 0.9 + 1.3 * len(timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    colours = {"compute": "tab:blue", "wire": "tab:orange", "copy": "tab:grey"}
    for plot, (name, timeline) in zip(plots, timelines.items(), strict=True):
        for height, lane in enumerate(("copy", "wire", "compute")):
            plot.broken_barh(
                [
                    (start * 1e3, event.seconds * 1e3)
                    for event in timeline.events
                    if event.lane == lane
                    for start in event.starts(_TURNS)
                ],
                (height, 0.8),
                facecolors=colours[lane],
            )
        plot.set_yticks([0.4, 1.4, 2.4], ["copies", "wire", "compute"])
        plot.set_title(f"{name}: {timeline.seconds * 1e3:.2f} ms", loc="left", fontsize=9)
        plot.set_ylim(0, 3)
    plots[0].set_xlim(0, 1e3 * max(timeline.seconds for timeline in timelines.values()))
    plots[-1].set_xlabel("milliseconds of a step, at the maker's peaks")
    figure.savefig(path, dpi=130)


_TURNS = 4000  # of the loops around an instruction that are drawn
