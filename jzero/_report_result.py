"""A report as a value: a table, JSON, a picture."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from jzero._hlo_collectives import Collective
from jzero._roofline import Timeline, draw
from jzero._targets import Chip

__all__ = ["Memory", "Method", "Report", "Wire", "wires"]

GIB = 2**30
ASSUMPTIONS = (
    "Peak memory is the compiler's own figure for one device. Parameters and state are counted "
    "exactly; gradients are what the plan holds of them at once; activations and temporaries are "
    "what remains of the peak.",
    "Times are a roofline over the compiled schedule at the maker's peaks: {flops:.0f} TFLOP/s "
    "bfloat16, {bandwidth:.0f} GB/s of memory, {link:.0f} GB/s {per}, one way. No launch, no "
    "contention: a lower bound. Collectives send as a ring does, and wait {hop:.1f} us for each "
    "step to a neighbour{more} (assumed).",
    "A collective is overlapped if instructions that compute stand between its start and its end; "
    "exposed is wire time beside which nothing else runs.",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      peak: the most that is held at any time.
      parameters, state: of the arguments.
      gradients: by the plan: full gradients where the backward pass leaves them, and shards.
      temporaries: the rest of the peak: activations, gathered parameters, buffers.
      arguments: all arguments, the batch too.
    """

    peak: int
    parameters: int
    state: int
    gradients: int
    temporaries: int
    arguments: int


@dataclasses.dataclass(frozen=True)
class Wire:
    """Collectives of one kind, axis and dtype, in one step.

    Attributes:
      kind, axis, dtype: which; axis: names of mesh axes, joined by ``x``.
      count: how often one runs.
      bytes: that each device sends, by a ring.
      overlapped: share of these bytes with computation between start and end.
      between: computing instructions between start and end, on average over the bytes.
      seconds, exposed: on the wire, and of these with nothing else to do.
      in_loops: share of the bytes sent from inside a loop.
    """

    kind: str
    axis: str
    dtype: str
    count: int
    bytes: int
    overlapped: float
    between: float
    seconds: float
    exposed: float
    in_loops: float


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train, compiled.

    Attributes:
      name: of it.
      memory: of one device.
      fits: in the device's memory; None where that is not known (CPU).
      timeline: the schedule with times; None where the compiler gave up for lack of memory.
      wire: what goes over the wire.
      compile_seconds: to trace and compile.
      gradients: bytes, by the plan.
    """

    name: str
    memory: Memory
    fits: bool | None
    timeline: Timeline | None
    wire: tuple[Wire, ...]
    compile_seconds: float
    gradients: int = 0

    @property
    def seconds(self) -> float | None:
        """Of a step, by the roofline."""
        return None if self.timeline is None else self.timeline.seconds


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``jzero.report`` found. ``print`` it (rich prints a table), or use ``to_json()``,
    ``picture(path)``, ``report["jzero"]``.

    Attributes:
      topology: the machine.
      devices: how many.
      mesh: sizes of the mesh axes.
      chip: what one device can do.
      methods: ways to train; the first is the one asked for.
      largest_batch: what the search for it found (``fits``: rows a device), or None.
      largest_depth: likewise, in stacked layers.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    chip: Chip
    methods: tuple[Method, ...]
    largest_batch: dict[str, Any] | None = None
    largest_depth: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Method:
        for method in self.methods:
            if method.name == name:
                return method
        raise KeyError(f"{name!r}; this report has {[m.name for m in self.methods]}")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on."""
        chip = self.chip
        per = "a link" if chip.torus else "a device"
        values = {
            "flops": chip.flops / 1e12,
            "bandwidth": chip.bandwidth / 1e9,
            "link": chip.link / 1e9,
            "per": per,
            "hop": chip.hop * 1e6,
            "more": "" if chip.torus or not chip.hop else ", or as NCCL sends little, if sooner",
        }
        return tuple(text.format(**values) for text in ASSUMPTIONS)

    def to_json(self, indent: int | None = 1) -> str:
        """All figures as JSON, in bytes and seconds. ``indent``: as for ``json.dumps``."""
        methods: list[dict[str, Any]] = []
        for method in self.methods:
            entry: dict[str, Any] = {
                "name": method.name,
                "memory": dataclasses.asdict(method.memory),
                "fits": method.fits,
                "compile_seconds": method.compile_seconds,
                "wire": [dataclasses.asdict(w) for w in method.wire],
            }
            if method.timeline is not None:
                entry |= {
                    "step_seconds": method.timeline.seconds,
                    "bounds_seconds": bounds(method.timeline, self.chip),
                    "flops": method.timeline.flops,
                    "bytes": method.timeline.bytes,
                    "unknown_loops": method.timeline.unknown_loops,
                }
            methods.append(entry)
        value = {
            "topology": self.topology,
            "devices": self.devices,
            "mesh": self.mesh,
            "chip": dataclasses.asdict(self.chip),
            "methods": methods,
            "largest_batch": self.largest_batch,
            "largest_depth": self.largest_depth,
            "assumptions": self.assumptions,
        }
        return json.dumps(value, indent=indent)

    def picture(self, path: Any) -> None:
        """Draw the schedules, what computes above what is on the wire, into a file (PNG, SVG).

        Raises:
          ModuleNotFoundError: no matplotlib; the message names the extra.
        """
        draw({m.name: m.timeline for m in self.methods if m.timeline is not None}, path)

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        memory = [
            [
                m.name,
                *(_gib(getattr(m.memory, part)) for part in _PARTS),
                {True: "yes", False: "NO", None: "?"}[m.fits],
            ]
            for m in self.methods
        ]
        times = [
            [
                m.name,
                *(f"{1e3 * s:.2f}" for s in bounds(m.timeline, self.chip).values()),
                f"{1e3 * m.timeline.exposed_seconds:.2f}",
                f"{1e3 * m.timeline.seconds:.2f}",
                f"{m.timeline.flops / max(m.timeline.seconds, 1e-30) / self.chip.flops:.0%}",
            ]
            for m in self.methods
            if m.timeline is not None
        ]
        wire = [
            [
                m.name,
                w.kind,
                w.axis,
                w.dtype,
                str(w.count),
                f"{w.bytes / 2**20:,.1f}",
                f"{w.in_loops:.0%}",
                f"{w.overlapped:.0%}",
                f"{w.between:.1f}",
                f"{1e3 * w.exposed:.2f} of {1e3 * w.seconds:.2f}",
            ]
            for m in self.methods
            for w in m.wire
        ]
        limit = f" (it has {self.chip.memory / GIB:.2f})" if self.chip.memory else ""
        return [
            (f"Memory of a device, GiB{limit}", ["", *_PARTS, "fits"], memory),
            (
                "Time of a step, ms",
                ["", "arithmetic", "memory", "wire", "exposed", "step", "of peak"],
                times,
            ),
            (
                "On the wire, each device, each step",
                ["", *_COLUMNS],
                wire,
            ),
        ]

    def _notes(self) -> list[str]:
        notes: list[str] = []
        for what, unit, found in (
            ("Largest batch", "rows a device", self.largest_batch),
            ("Deepest model", "stacked layers", self.largest_depth),
        ):
            if found is not None:
                limit = found["smallest_that_does_not_fit"]
                notes.append(
                    f"{what} found to fit: {found['fits']} {unit}"
                    + (f" ({limit} does not)" if limit else "")
                )
        for m in self.methods:
            if m.timeline is None:
                notes.append(f"{m.name}: the compiler gave up, out of memory; no schedule")
            elif m.timeline.unknown_loops:
                notes.append(f"{m.name}: {m.timeline.unknown_loops} loops of unknown length, once")
        if self.topology.count(":") == 3:
            notes.append(
                "What slices send each other goes through their hosts: neither its bytes nor its "
                "time are counted."
            )
        return notes + list(self.assumptions)

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in self.mesh.items())
        lines = [f"{self.topology}: {self.devices} devices, {axes}"]
        for title, head, rows in self._tables():
            table = [head, *rows]
            widths = [max(len(row[i]) for row in table) for i in range(len(head))]
            lines += ["", title]
            lines += [
                "  ".join(
                    cell.ljust(w) if i < 1 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in table
            ]
        return "\n".join([*lines, "", *self._notes()])

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Table

        axes = ", ".join(f"{name}={n}" for name, n in self.mesh.items())
        yield f"[bold]{self.topology}[/bold]: {self.devices} devices, {axes}"
        for title, head, rows in self._tables():
            table = Table(title=title, title_justify="left")
            for i, name in enumerate(head):
                table.add_column(name, justify="right" if i else "left")
            for row in rows:
                table.add_row(*row)
            yield table
        yield from self._notes()


_COLUMNS = (
    "kind",
    "axis",
    "dtype",
    "count",
    "MiB",
    "in loops",
    "overlapped",
    "ops between",
    "exposed ms",
)
_PARTS = ("peak", "parameters", "state", "gradients", "temporaries")


def bounds(timeline: Timeline, chip: Chip) -> dict[str, float]:
    """Seconds that each resource alone needs."""
    return {
        "arithmetic": timeline.flops / chip.flops,
        "memory": timeline.bytes / chip.bandwidth,
        "wire": timeline.wire_seconds,
    }


def wires(timeline: Timeline, mesh: jax.sharding.Mesh) -> tuple[Wire, ...]:
    """The collectives of a timeline, summed by kind, axis and dtype."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for x in timeline.exchanges:
        c = x.collective
        axis, whole = axis_of(c, mesh), max(c.bytes, 1)
        dtypes: dict[str, int] = {}
        for dtype, size in c.parts:
            dtypes[dtype] = dtypes.get(dtype, 0) + size
        for dtype, size in dtypes.items():
            share = size / whole
            sent = c.wire_bytes * share * c.times
            row = sums.setdefault((c.kind, axis, dtype), [0.0] * 7)
            values = (
                c.times,
                sent,
                sent if x.between else 0.0,
                sent * x.between,
                x.seconds * share * c.times,
                x.exposed * share * c.times,
                sent if c.times > 1 else 0.0,
            )
            for i, value in enumerate(values):
                row[i] += value
    return tuple(
        Wire(
            kind,
            axis,
            dtype,
            round(row[0]),
            round(row[1]),
            row[2] / max(row[1], 1),
            row[3] / max(row[1], 1),
            row[4],
            row[5],
            row[6] / max(row[1], 1),
        )
        for (kind, axis, dtype), row in sorted(sums.items())
    )


def axis_of(collective: Collective, mesh: jax.sharding.Mesh) -> str:
    """The mesh axes along which the members of a group differ."""
    shape = tuple(mesh.shape.values())
    places: list[list[int]] = []
    for device in collective.group:
        place: list[int] = []
        for n in reversed(shape):
            device, digit = divmod(device, n)
            place.insert(0, digit)
        places.append(place)
    names = [
        name for i, name in enumerate(mesh.axis_names) if len({place[i] for place in places}) > 1
    ]
    return "x".join(str(name) for name in names) or "-"


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"
