"""Handwritten digits, 8 x 8 pixels, that scikit-learn ships: no download; and a run's curves."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

Batch = tuple[Array, Array]


class Digits:
    """1,797 images, one in five held out."""

    def __init__(self, seed: int = 0):
        found: Any = load_digits()
        images = np.asarray(found.images, np.float32)[..., None] / 8 - 1
        labels = np.asarray(found.target, np.int32)
        order = np.random.default_rng(seed).permutation(len(labels))
        train, held_out = order[len(order) // 5 :], order[: len(order) // 5]
        self.train = images[train], labels[train]
        self.held_out = jnp.asarray(images[held_out]), jnp.asarray(labels[held_out])

    def batches(self, size: int, epoch: int) -> Iterator[Batch]:
        """Every image once, in another order each epoch; the rest of a batch is left out."""
        order = np.random.default_rng(epoch).permutation(len(self.train[1]))
        for rows in order[: len(order) // size * size].reshape(-1, size):
            images, labels = self.train
            yield jnp.asarray(images[rows]), jnp.asarray(labels[rows])


@dataclasses.dataclass
class Run:
    """What a training run showed.

    Attributes:
      losses: of each step, the mean over all devices.
      accuracies: of held-out images, after each epoch.
    """

    name: str
    epochs: int
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.console = Console(highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(self.name, total=self.epochs, figures="compiling")

    def epoch(self, losses: list[float], accuracy: float) -> None:
        """Record an epoch; on a terminal the bar moves, elsewhere a line is printed."""
        self.losses += losses
        self.accuracies.append(accuracy)
        figures = f"loss {np.mean(losses):.4f}  held-out accuracy {accuracy:.1%}"
        self.bar.update(self.task, advance=1, figures=figures)
        if not self.console.is_terminal:
            done = len(self.accuracies)
            self.console.print(f"{self.name}  epoch {done}/{self.epochs}  {figures}")

    def plot(self, path: Path) -> None:
        """Loss of every step, accuracy after every epoch."""
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (top, bottom) = plt.subplots(
            2, 1, sharex=True, figsize=(8, 6), layout="constrained"
        )
        steps = np.arange(1, len(self.losses) + 1)
        top.plot(steps, self.losses, color="#1f4e9c", lw=1)
        top.set_yscale("log")
        top.set_ylabel("training loss (nats)")
        ends = np.arange(1, len(self.accuracies) + 1) * len(self.losses) // len(self.accuracies)
        bottom.plot(ends, 100 * np.asarray(self.accuracies), "o-", color="#c46a00", ms=5)
        bottom.set_ylabel("held-out accuracy (%)")
        bottom.set_xlabel("step")
        for panel in (top, bottom):
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        plt.close(figure)
