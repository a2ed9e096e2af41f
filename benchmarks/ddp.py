"""jzero.DistributedDataParallel against the same training written by hand with pmean in shard_map.

    python benchmarks/ddp.py
    python benchmarks/ddp.py --models mlp --rounds 40

Both ways train one nnx model with one optax optimizer, under `nnx.jit` and, with the model taken
apart by `nnx.split`, under `jax.jit`. They take turns in one process, in every order, each turn a
few steps; a third that takes turns is by hand again. Quoted are ratios by hand / jzero (1.02: jzero
is 2 % faster), with both series by hand as one, of the mean of the fastest quarter of the turns,
since what else runs on a machine only ever makes a turn longer, and of the medians. The ratio of
the two series by hand would be 1 on a machine that resolves everything; what it differs from 1 is
what this machine cannot. Compiling is repeated the same way, with JAX's caches emptied, and counts
tracing, lowering and XLA. By hand, XLA merges all all-reduces; jzero keeps its buckets apart. Both
must give the same losses. Writes JSON.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent))  # also when imported by a test
import _hlo

import jzero

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # for models
RESULTS = Path(__file__).parent / "results"
AXIS = "data"
MEASURED = ("step_s", "step_cpu_s", "compile_s", "compile_cpu_s")
Loss = Callable[[Any, Any], Array]


class MLP(nnx.Module):
    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class ResNet18(nnx.Module):
    """For images of 32 x 32: the stem of the paper's CIFAR models, the blocks of its ResNet-18."""

    def __init__(self, rngs: nnx.Rngs):
        from flax_ddp import Block

        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.stem = nnx.Conv(3, widths[0], (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(widths[0], momentum=0.9, rngs=rngs)
        self.blocks = nnx.List(
            [Block(a, b, 1 if a == b else 2, rngs) for a, b in itertools.pairwise(widths)]
        )
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x, train=True)
        return self.head(x.mean((1, 2)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss, a batch of host arrays, and the optimizer."""

    make: Callable[[], Any]
    loss_fn: Loss
    batch: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    tx: optax.GradientTransformation


def squares(model: Any, batch: Any) -> Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def cross_entropy(model: Any, batch: Any) -> Array:
    logits = model(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def mlp(width: int, depth: int, batch: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(rng.normal(size=(batch, width)).astype(np.float32) for _ in range(2))

    sgd = optax.sgd(1e-2, momentum=0.9)
    return Case(lambda: MLP(width, depth, nnx.Rngs(0)), squares, draw, sgd)


def resnet18(batch: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        images = rng.normal(size=(batch, 32, 32, 3)).astype(np.float32)
        return images, rng.integers(0, 10, batch).astype(np.int32)

    sgd = optax.sgd(1e-2, momentum=0.9)
    return Case(lambda: ResNet18(nnx.Rngs(0)), cross_entropy, draw, sgd)


def gpt(batch: int, length: int) -> Case:
    def make() -> Any:
        import _gpt

        size = dataclasses.replace(_gpt.SIZES["medium"], length=length)
        return _gpt.GPT(size, jnp.float32, nnx.Rngs(0))

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        text = rng.integers(0, 256, (batch, length + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]

    return Case(make, cross_entropy, draw, optax.adamw(1e-3))


MODELS: dict[str, Case] = {
    "mlp": mlp(1024, 8, 256),  # 8.4 M parameters
    "resnet18": resnet18(16),  # 11.2 M parameters, BatchNorm
    "gpt": gpt(16, 64),  # 10.8 M parameters: the demo's medium size, for shorter texts
    "tiny": mlp(8, 2, 16),
}


def by_hand(mesh: Mesh, loss_fn: Loss) -> Callable[[Any, Any], Any]:
    """What one writes without a wrapper: loss, gradients and statistics as means over the axis."""

    def value_and_grad(model: Any, batch: Any) -> Any:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def local(params: Any, rest: Any, batch: Any) -> Any:
            def loss_of(params: Any) -> Any:
                inner = nnx.merge(graphdef, params, rest)
                return loss_fn(inner, batch), nnx.as_pure(nnx.state(inner, nnx.Not(nnx.Param)))

            (loss, rest_out), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            return lax.pmean((loss, grads, rest_out), AXIS)

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P(), check_vma=False
        )
        loss, grads, rest = mapped(params, nnx.as_pure(rest), batch)
        nnx.update(model, rest)
        return loss, grads

    return value_and_grad


def by_jzero(mesh: Mesh, loss_fn: Loss) -> Callable[[Any, Any], Any]:
    """The wrapper, asked about the module itself, so that both ways train the same object."""

    def value_and_grad(model: Any, batch: Any) -> Any:
        ddp = jzero.DistributedDataParallel(model, mesh, init_sync=False)
        return ddp.value_and_grad(loss_fn)(model, batch)

    return value_and_grad


WAYS: dict[str, Callable[[Mesh, Loss], Callable[[Any, Any], Any]]] = {
    "by hand": by_hand,
    "jzero": by_jzero,
    "by hand again": by_hand,
}


class Training:
    """One way to train one model, ready to be compiled and run."""

    def __init__(self, way: str, jit: str, model: str, mesh: Mesh):
        case = MODELS[model]
        value_and_grad = WAYS[way](mesh, case.loss_fn)
        split, whole = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
        drawn = case.batch(np.random.default_rng(0))
        self.batch = tuple(jax.device_put(x, split) for x in drawn)
        self.model = case.make()
        optimizer = nnx.Optimizer(self.model, case.tx, wrt=nnx.Param)

        def train(model: Any, optimizer: Any, batch: Any) -> Array:
            loss, grads = value_and_grad(model, batch)
            optimizer.update(model, grads)
            return loss

        if jit == "nnx.jit":
            for node in (self.model, optimizer):
                nnx.update(node, jax.device_put(nnx.as_pure(nnx.state(node)), whole))
            self.carried: tuple[Any, ...] = (self.model, optimizer)
            self.make_step: Callable[[], Any] = lambda: nnx.jit(train)
            return
        graphdef, state = nnx.split((self.model, optimizer))

        def pure(state: Any, batch: Any) -> Any:
            model, optimizer = nnx.merge(graphdef, state)
            loss = train(model, optimizer, batch)
            return nnx.as_pure(nnx.state((model, optimizer))), loss

        self.carried = (jax.device_put(nnx.as_pure(state), whole),)
        self.make_step = lambda: jax.jit(pure, donate_argnums=0)

    def compile(self) -> tuple[Any, float, float]:
        """The compiled program; seconds, and those of processors, of tracing, lowering and XLA."""
        jax.clear_caches()
        gc.collect()
        gc.disable()  # as timeit does: neither way pays for the other's garbage
        began, began_cpu = time.perf_counter(), time.process_time()
        compiled = self.make_step().lower(*self.carried, self.batch).compile()
        spent, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        gc.enable()
        return compiled, spent, cpu

    def start(self) -> None:
        self.step: Any = self.make_step()

    def run(self, steps: int) -> tuple[float, float, list[float]]:
        """Seconds a step, seconds of processors a step, and the losses."""
        losses = []
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            out = self.step(*self.carried, self.batch)
            if len(self.carried) == 1:
                state, loss = out
                self.carried = (state,)
            else:
                loss = out
            losses.append(jax.block_until_ready(loss))
        spent, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        return spent / steps, cpu / steps, [float(x) for x in losses]


def measure(model: str, jit: str, mesh: Mesh, rounds: int, steps: int, compiles: int) -> Any:
    ways = {way: Training(way, jit, model, mesh) for way in WAYS}
    times = {(way, key): list[float]() for way in ways for key in MEASURED}
    programs = {}
    for turn in range(compiles + 1):
        for way in in_turn(turn):
            programs[way], spent, cpu = ways[way].compile()
            if turn:
                times[way, "compile_s"].append(spent)
                times[way, "compile_cpu_s"].append(cpu)
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for training in ways.values():
        training.start()
    for turn in range(rounds + 1):
        for way in in_turn(turn):
            spent, cpu, seen = ways[way].run(steps)
            losses[way] += seen
            if turn:
                times[way, "step_s"].append(spent)
                times[way, "step_cpu_s"].append(cpu)
    result: dict[str, Any] = {
        way: {key: [round(x, 5) for x in times[way, key]] for key in MEASURED}
        | {"collectives": [vars(c) for c in _hlo.collectives(programs[way].as_text(), mesh.size)]}
        for way in ways
    }
    for key in MEASURED:
        hand, ours, again = (times[way, key] for way in WAYS)
        name = key.removesuffix("_s")
        result[f"{name}_ratio"] = ratios(hand + again, ours)
        result[f"{name}_resolution"] = ratios(hand, again)
    a, b = np.asarray(losses["by hand"]), np.asarray(losses["jzero"])
    result["loss_difference"] = float(np.max(np.abs(a - b) / np.abs(a)))
    params = nnx.state(ways["by hand"].model, nnx.Param)
    result["parameters"] = sum(x.size for x in jax.tree.leaves(params))
    return result


def in_turn(turn: int) -> tuple[str, ...]:
    """The ways in the next of all orders: none profits from what ran before it."""
    orders = list(itertools.permutations(WAYS))
    return orders[turn % len(orders)]


def ratios(hand: list[float], other: list[float]) -> dict[str, float]:
    def fastest(times: list[float]) -> float:
        return statistics.mean(sorted(times)[: -(-len(times) // 4)])

    return {
        "fastest quarter": fastest(hand) / fastest(other),
        "median": statistics.median(hand) / statistics.median(other),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write; returns what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "resnet18", "gpt"])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=18, help="turns of each way")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--compiles", type=int, default=18, help="times that each is compiled")
    parser.add_argument("--out", type=Path, help="the JSON file (benchmarks/results/ddp-*.json)")
    args = parser.parse_args(argv)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX runs already, with what it has
            jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = Mesh(np.array(jax.devices()[: args.devices]), (AXIS,))
    report: dict[str, Any] = {
        "command": shlex.join(
            ["python", "benchmarks/ddp.py", *(sys.argv[1:] if argv is None else argv)]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax")},
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "cpu_count": os.cpu_count(),
        "models": {},
    }
    path = args.out or RESULTS / f"ddp-{jax.default_backend()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        for jit in ("jax.jit", "nnx.jit"):
            result = measure(model, jit, mesh, args.rounds, args.steps, args.compiles)
            report["models"][f"{model}, {jit}"] = result
            for what in ("step", "compile"):
                hand, ours, _ = (statistics.median(result[way][f"{what}_s"]) for way in WAYS)
                print(
                    f"{model}, {jit}: {what} {hand:.3f} s by hand, {ours:.3f} jzero; ratio "
                    + "; by hand to itself ".join(
                        ", ".join(f"{x:.3f} ({how})" for how, x in found.items())
                        for found in (result[f"{what}_ratio"], result[f"{what}_resolution"])
                    ),
                    flush=True,
                )
            print(f"  losses differ by {result['loss_difference']:.1e}", flush=True)
            path.write_text(json.dumps(report, indent=1) + "\n")  # a run cut short leaves that
    print(path)
    return report


if __name__ == "__main__":
    written = main()
    worst = max(r["loss_difference"] for r in written["models"].values())
    sys.exit(0 if worst < 1e-3 else f"the losses differ by {worst}: these are different programs")
