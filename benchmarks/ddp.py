"""jzero.DistributedDataParallel against the same training written by hand with pmean in shard_map.

    python benchmarks/ddp.py
    python benchmarks/ddp.py --models mlp --rounds 30

Both ways train one nnx model with one optax optimizer, under `nnx.jit` and, with the model taken
apart by `nnx.split`, under `jax.jit`. They take turns in one process (A B A B ...), each turn a few
steps; quoted are the median over turns, and the median of the ratio by hand / jzero of one turn
(1.02: jzero is 2 % faster), of the clock's time and of the processors', which other programs
disturb less. Compiling is repeated the same way, with JAX's caches emptied, and counts tracing,
lowering and XLA. By hand, XLA merges all all-reduces; jzero keeps its buckets apart, so "mlp" sends
three, and "mlp-one-bucket" one, as by hand. `same_program` says whether the compiled programs have
the same operations, on the same types, in the same order. Both must give the same losses. Writes
JSON.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
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

RESULTS = Path(__file__).parent / "results"
AXIS = "data"


MEASURED = ("step_s", "step_cpu_s", "compile_s", "compile_cpu_s")


class MLP(nnx.Module):
    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class CNN(nnx.Module):
    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.convs = nnx.List([nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(depth)])
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: Array) -> Array:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + nnx.relu(norm(conv(x)))
        return x.mean((1, 2))


def mlp(width: int, depth: int, batch: int) -> Any:
    shape = (batch, width)
    return lambda: MLP(width, depth, nnx.Rngs(0)), shape, shape


def cnn(width: int, depth: int, batch: int) -> Any:
    return lambda: CNN(width, depth, nnx.Rngs(0)), (batch, 16, 16, 3), (batch, width)


# name: a model, shape of the inputs, shape of the targets
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": mlp(1024, 8, 256),  # 8.4 M parameters, 33.6 MB: three buckets
    "mlp-one-bucket": mlp(1024, 8, 256),
    "cnn": cnn(32, 6, 64),  # 57 k parameters and BatchNorm: one bucket
    "tiny": mlp(8, 2, 16),
}
OPTIONS: dict[str, Any] = {"mlp-one-bucket": {"bucket_cap_mb": 1e3, "first_bucket_mb": 1e3}}


def loss_fn(model: Any, batch: Any) -> Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def by_hand(mesh: Mesh, model: str) -> Callable[[Any, Any], Any]:
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


def by_jzero(mesh: Mesh, model: str) -> Callable[[Any, Any], Any]:
    """The wrapper, asked about the module itself, so that both ways train the same object."""

    options = OPTIONS.get(model, {})

    def value_and_grad(model: Any, batch: Any) -> Any:
        ddp = jzero.DistributedDataParallel(model, mesh, init_sync=False, **options)
        return ddp.value_and_grad(loss_fn)(model, batch)

    return value_and_grad


WAYS: dict[str, Callable[[Mesh, str], Callable[[Any, Any], Any]]] = {
    "by hand": by_hand,
    "jzero": by_jzero,
}


class Training:
    """One way to train one model, ready to be compiled and run."""

    def __init__(self, way: str, jit: str, model: str, mesh: Mesh):
        make, x_shape, y_shape = MODELS[model]
        value_and_grad = WAYS[way](mesh, model)
        self.tx = optax.sgd(1e-2, momentum=0.9)
        rng = np.random.default_rng(0)
        split, whole = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
        draw = [rng.normal(size=s).astype(np.float32) for s in (x_shape, y_shape)]
        self.batch = tuple(jax.device_put(x, split) for x in draw)
        self.model = make()
        optimizer = nnx.Optimizer(self.model, self.tx, wrt=nnx.Param)

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
        gc.collect()  # neither way pays for the other's garbage
        began, began_cpu = time.perf_counter(), time.process_time()
        compiled = self.make_step().lower(*self.carried, self.batch).compile()
        return compiled, time.perf_counter() - began, time.process_time() - began_cpu

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
        order = list(ways.items())
        for way, training in order if turn % 2 else order[::-1]:
            programs[way], spent, cpu = training.compile()
            if turn:
                times[way, "compile_s"].append(spent)
                times[way, "compile_cpu_s"].append(cpu)
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for training in ways.values():
        training.start()
    for turn in range(rounds + 1):
        order = list(ways.items())
        for way, training in order if turn % 2 else order[::-1]:
            spent, cpu, seen = training.run(steps)
            losses[way] += seen
            if turn:
                times[way, "step_s"].append(spent)
                times[way, "step_cpu_s"].append(cpu)
    result: dict[str, Any] = {
        way: {key: times[way, key] for key in MEASURED}
        | {"collectives": [vars(c) for c in _hlo.collectives(programs[way].as_text(), mesh.size)]}
        for way in ways
    }
    for key in MEASURED:
        name = key.removesuffix("_s") + "_ratio"
        result[name] = ratio(times["by hand", key], times["jzero", key])
    hand, ours = (instructions(programs[way].as_text()) for way in ("by hand", "jzero"))
    result["same_program"] = hand == ours
    a, b = np.asarray(losses["by hand"]), np.asarray(losses["jzero"])
    result["loss_difference"] = float(np.max(np.abs(a - b) / np.abs(a)))
    result["parameters"] = sum(
        x.size for x in jax.tree.leaves(nnx.state(MODELS[model][0](), nnx.Param))
    )
    return result


def instructions(text: str) -> list[tuple[str, str]]:
    """What a compiled program does, in order: operations and types, without names."""
    return re.findall(r"^ +(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", text, re.MULTILINE)


def ratio(hand: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(hand, ours, strict=True))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write; returns what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["mlp", "mlp-one-bucket", "cnn"]
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--compiles", type=int, default=7, help="times that each is compiled")
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
            hand, ours = result["by hand"], result["jzero"]
            medians = [
                statistics.median(side[key])
                for key in ("step_s", "compile_s")
                for side in (hand, ours)
            ]
            print(
                f"{model}, {jit}: step {medians[0] * 1e3:.2f} ms by hand, {medians[1] * 1e3:.2f} "
                f"jzero, ratio {result['step_ratio']:.3f}; compile {medians[2]:.2f} s, "
                f"{medians[3]:.2f} s, ratio {result['compile_ratio']:.3f}; of processors' time "
                f"{result['step_cpu_ratio']:.3f} and {result['compile_cpu_ratio']:.3f}; "
                f"{'same' if result['same_program'] else 'another'} program; losses differ by "
                f"{result['loss_difference']:.1e}",
                flush=True,
            )
            path.write_text(json.dumps(report, indent=1) + "\n")  # a run cut short leaves that
    print(path)
    return report


if __name__ == "__main__":
    written = main()
    worst = max(r["loss_difference"] for r in written["models"].values())
    sys.exit(0 if worst < 1e-3 else f"the losses differ by {worst}: these are different programs")
