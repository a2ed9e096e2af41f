"""How a training run shows itself: a progress bar, a plot, a summary on one screen."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table


@dataclasses.dataclass
class Curve:
    """One training run: per step its loss, norm of the gradient and seconds.

    Attributes:
      held_out: held-out loss by number of completed steps.
      param_bytes, state_bytes: allocated on one device for parameters and optimizer state.
    """

    name: str
    param_bytes: int
    state_bytes: int
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Median over all steps but the first, which compiles."""
        return float(np.median(self.seconds[1:] or self.seconds))


class Progress:
    """A bar on a terminal, now and then a line elsewhere; nothing if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def of(self, curve: Curve, steps: int) -> Generator[Callable[[int], None]]:
        """Shows a run while it goes on; yields what to call after each step, with its tokens."""

        def figures(tokens: int) -> str:
            recent = float(np.median((curve.seconds[1:] or curve.seconds)[-20:]))
            held_out = (
                f"  held-out {list(curve.held_out.values())[-1]:.3f}" if curve.held_out else ""
            )
            memory = mebibytes(curve.param_bytes + curve.state_bytes)
            return (
                f"loss {curve.losses[-1]:.3f}{held_out}  {tokens / recent:,.0f} tokens/s  "
                f"{memory}/device"
            )

        if not self.console.is_terminal:
            every = max(1, steps // 10)

            def line(tokens: int) -> None:
                done = len(curve.losses)
                if done in (1, steps) or done % every == 0:
                    self.print(f"{curve.name}  {done}/{steps}  {figures(tokens)}")

            yield line
            return

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
        )
        with Bar(*columns, console=self.console, expand=True) as bar:
            task = bar.add_task(curve.name, total=steps, figures="compiling")
            yield lambda tokens: bar.update(task, advance=1, figures=figures(tokens))


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.2f} MiB"


def summarize(
    ours: Curve, theirs: Curve | None, skipped: int, devices: Sequence[Any], buckets: int
) -> dict[str, Any]:
    """The numbers of a comparison; those of optax are absent without a reference."""
    summary: dict[str, Any] = {
        "devices": len(devices),
        "steps": len(ours.losses),
        "buckets": buckets,
        "skipped": skipped,
        "jzero": _figures(ours),
    }
    # CPU devices keep no account; on the first device optax ran too.
    here = [d for d in devices if d.process_index == devices[0].process_index]
    accounts: list[dict[str, int]] = [d.memory_stats() or {} for d in here[1:] or here]
    if peaks := [account.get("peak_bytes_in_use", 0) for account in accounts if account]:
        summary["peak_bytes"] = max(peaks)
    if theirs is not None:
        losses, norms = (
            np.array([getattr(c, k) for c in (ours, theirs)]) for k in ("losses", "norms")
        )
        summary |= {
            "optax": _figures(theirs),
            "optax_nonfinite": int(np.sum(~np.isfinite(norms[1]))),
            "state_ratio": theirs.state_bytes / ours.state_bytes,
            "loss_difference": float(np.max(np.abs(losses[0] - losses[1]))),
            "norm_difference": float(np.max(np.abs(norms[0] - norms[1]) / norms[1])),
            "held_out_difference": abs(_last(ours.held_out) - _last(theirs.held_out)),
        }
    return summary


def _last(held_out: dict[int, float]) -> float:
    return held_out[max(held_out)]


def _figures(curve: Curve) -> dict[str, Any]:
    return {
        "name": curve.name,
        "first_loss": curve.losses[0],
        "loss": float(np.mean(curve.losses[-10:])),
        "held_out_loss": _last(curve.held_out),
        "grad_norm": curve.norms[-1],
        "param_bytes": curve.param_bytes,
        "state_bytes": curve.state_bytes,
        "step_seconds": curve.step_seconds,
        "first_step_seconds": curve.seconds[0],
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def print_summary(console: Console, summary: dict[str, Any], out: Path) -> None:
    ours, theirs = summary["jzero"], summary.get("optax")
    table = Table(title=f"After {summary['steps']} steps", title_justify="left")
    table.add_column("")
    table.add_column(ours["name"], justify="right")
    if theirs:
        table.add_column(theirs["name"], justify="right")
        table.add_column("", justify="right")

    def row(what: str, key: str, form: Callable[[Any], str], note: str = "") -> None:
        cells = [form(side[key]) for side in (ours, theirs) if side]
        table.add_row(what, *cells, *([note] if theirs else []))

    ratio = f"{summary['state_ratio']:.2f}x less" if theirs else ""
    row("optimizer state per device", "state_bytes", mebibytes, ratio)
    row("parameters per device", "param_bytes", mebibytes)
    row("first loss", "first_loss", "{:.4f}".format)
    row("mean loss of the last 10 steps", "loss", "{:.4f}".format)
    row("held-out loss", "held_out_loss", "{:.4f}".format)
    row("norm of the last gradient", "grad_norm", "{:.4f}".format)
    row("seconds a step (median)", "step_seconds", "{:.3f}".format)
    skipped = [str(summary["skipped"])]
    if theirs:
        skipped += [str(summary["optax_nonfinite"]), ""]
    table.add_row("skipped steps (gradient not finite)", *skipped)
    console.print(table)
    if theirs:
        console.print(
            f"Largest difference over all steps: loss {summary['loss_difference']:.1e} "
            f"(nats a byte), norm of the gradient {summary['norm_difference']:.1e} (relative)."
        )
    if "peak_bytes" in summary:
        console.print(f"Most memory in use on a device: {mebibytes(summary['peak_bytes'])}.")
    console.print(f"Written to {out}: loss.png, sample.txt, summary.json.", markup=False)


def write_plot(path: Path, ours: Curve, theirs: Curve | None) -> None:
    """Both loss curves, and below them how far they are apart."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(
        2 if theirs else 1,
        1,
        sharex=True,
        squeeze=False,
        figsize=(8, 6 if theirs else 4),
        height_ratios=[3, 1] if theirs else None,
        layout="constrained",
    )
    top = axes[0, 0]
    steps = np.arange(1, len(ours.losses) + 1)
    if theirs:  # wide and pale, so that the curve drawn over it leaves it visible
        top.plot(steps, theirs.losses, color="#f2b26b", lw=5, label=f"{theirs.name}: training")
        top.plot(
            theirs.held_out.keys(),
            theirs.held_out.values(),
            "s",
            color="#c46a00",
            ms=10,
            mfc="none",
            label=f"{theirs.name}: held out",
        )
    top.plot(steps, ours.losses, color="#1f4e9c", lw=1.2, label=f"{ours.name}: training")
    top.plot(
        ours.held_out.keys(),
        ours.held_out.values(),
        "o",
        color="#1f4e9c",
        ms=5,
        label=f"{ours.name}: held out",
    )
    top.set_ylabel("loss (nats a byte)")
    top.legend(frameon=False)
    if theirs:
        apart = np.abs(np.subtract(ours.losses, theirs.losses))
        bottom = axes[1, 0]
        # No line through steps that are equal to the last bit: a logarithm has no place for zero.
        drawn = np.isfinite(apart) & (apart > 0)
        bottom.plot(steps[drawn], apart[drawn], ".", color="#555555", ms=4)
        bottom.set_yscale("log")
        if drawn.any():  # whole decades
            low, high = np.floor(np.log10([apart[drawn].min(), apart[drawn].max()]))
            bottom.set_ylim(10**low, 10 ** (high + 1))
        bottom.yaxis.set_minor_formatter(ticker.NullFormatter())
        bottom.set_ylabel("|difference|\n(where not 0)")
    for panel in axes[:, 0]:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
