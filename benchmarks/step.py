"""One training step of jzero, of replicated optax.adamw and of optax.adamw sharded by annotation.

    python benchmarks/step.py                                # runs, on 8 CPU devices
    python benchmarks/step.py --models tiny --rounds 20
    python benchmarks/step.py --compile-only tpu:v5e:4x4     # compiles for a pod; needs libtpu
    python benchmarks/step.py --compile-only gpu:h200:8      # for GPUs; needs jax[cuda13]

Times: the methods take turns in one process (A B C A B C ...), each turn a few steps; quoted are
the median over turns and the ratio to jzero of the same turn, so that a busy machine slows all
alike. `call` is the host's time to start a step (the call of the jitted function, before anything
is waited for). Memory is the compiler's figure for one device, and so is the traffic, in which the
body of a loop counts once, however often it turns. Writes JSON.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Compiling for a TPU looks for none, and another process may do so at the same time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent))  # also when imported by a test
import _hlo
import _methods
import _models

from jzero._targets import target_of

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
# Largest difference of a loss between methods, relative. Adam magnifies the rounding of sums.
AGREE = {"float32": 1e-4, "bfloat16": 2e-2}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--models", nargs="+", choices=_models.SIZES, metavar="MODEL", help=", ".join(_models.SIZES)
    )
    p.add_argument("--methods", nargs="+", choices=_methods.METHODS, default=list(_methods.METHODS))
    p.add_argument("--devices", type=int, default=8, help="CPU devices to simulate (%(default)s)")
    p.add_argument("--rounds", type=int, default=10, help="turns of each method (%(default)s)")
    p.add_argument("--steps", type=int, default=5, help="steps in a turn (%(default)s)")
    p.add_argument(
        "--compile-only",
        metavar="PLATFORM:TOPOLOGY",
        help="run nothing; compile for e.g. tpu:v5e:4x4 and report memory, bytes and collectives",
    )
    p.add_argument("--hlo", type=Path, metavar="DIR", help="write each program's HLO text there")
    p.add_argument("--out", type=Path, help="the JSON file (benchmarks/results/step-*.json)")
    return p


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write; returns what was written."""
    args = parser().parse_args(argv)
    if args.compile_only:
        mesh = topology_mesh(args.compile_only)
        models, name = args.models or ["gpt-534m"], args.compile_only.replace(":", "-")
    else:
        mesh = local_mesh(args.devices)
        models, name = args.models or ["noop-unrolled", "small"], jax.default_backend()
    results: dict[str, Any] = {}
    report = {**provenance(argv, mesh), "models": results}
    for model in models:
        size = _models.SIZES[model]
        programs = {m: _methods.METHODS[m](size, mesh) for m in args.methods}
        compiled = {m: compile_program(p, size, mesh) for m, p in programs.items()}
        results[model] = {
            "size": vars(size) | {"parameters": size.parameters},
            "methods": {m: describe(c, mesh) | seconds for m, (c, seconds) in compiled.items()},
        }
        for m, (c, _) in compiled.items() if args.hlo else ():
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{model}-{m.replace(' ', '-')}.txt").write_text(c.as_text())
        del compiled
        if not args.compile_only:
            measured = run(programs, size, mesh, args.rounds, args.steps)
            for m, numbers in measured.items():
                results[model]["methods"][m] |= numbers
            results[model]["losses_agree"] = agreement(results[model])
        print_table(model, results[model])
    path = args.out or RESULTS / f"step-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{path}")
    return report


# ---------------------------------------------------------------- where


def local_mesh(devices: int) -> Mesh:
    """The accelerators that are there, or else so many CPU devices."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX runs already, with what it has
            jax.config.update("jax_num_cpu_devices", devices)
    return Mesh(np.array(jax.devices()[:devices]), (_methods.AXIS,))  # Auto axes, as most code has


def topology_mesh(name: str) -> Mesh:
    jax.config.update("jax_platforms", "cpu")
    return Mesh(np.array(target_of(name).devices).reshape(-1), (_methods.AXIS,))


def provenance(argv: Sequence[str] | None, mesh: Mesh) -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = ("jax", "jaxlib", "libtpu", "optax", "numpy", "jzero")
    return {
        "command": shlex.join(
            ["python", "benchmarks/step.py", *(sys.argv[1:] if argv is None else argv)]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "host": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


# ---------------------------------------------------------------- compiling


def _each(specs: Any, tree: Any) -> Any:
    """A spec for every array of ``tree``."""
    return jax.tree.map(lambda _: specs, tree) if isinstance(specs, P) else specs


def compile_program(
    program: _methods.Program, size: _models.Size, mesh: Mesh
) -> tuple[Any, dict[str, float]]:
    def struct(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.eval_shape(program.prepare, _models.shapes(size))
    params = jax.tree.map(struct, params, _each(program.param_specs, params))
    state = jax.tree.map(struct, jax.eval_shape(program.init, params), program.specs)
    shape = _models.batch_shape(size, mesh.size)
    args = (params, state, struct(jax.ShapeDtypeStruct(shape, jnp.int32), P(_methods.AXIS)))
    start = time.perf_counter()
    lowered = program.step.lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    return compiled, {"trace_s": middle - start, "compile_s": end - middle}


def describe(compiled: Any, mesh: Mesh) -> dict[str, Any]:
    """What the compiler knows, for one device."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}  # GPU: no cost
    return {
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_accessed": cost.get("bytes accessed"),  # a loop's body counts once
        "flops": cost.get("flops"),
        "collectives": [
            dataclasses.asdict(c) for c in _hlo.collectives(compiled.as_text(), mesh.size)
        ],
    }


# ---------------------------------------------------------------- running


def run(
    programs: dict[str, _methods.Program], size: _models.Size, mesh: Mesh, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Losses, seconds and bytes of each method, taking turns."""
    shape = _models.batch_shape(size, mesh.size)
    tokens = np.random.default_rng(0).integers(0, size.vocab, shape, dtype=np.int32)
    batch = jax.device_put(tokens, NamedSharding(mesh, P(_methods.AXIS)))
    init = jax.jit(functools.partial(_models.init, size), out_shardings=NamedSharding(mesh, P()))

    def start(program: _methods.Program) -> Any:
        named = jax.tree.map(lambda s: NamedSharding(mesh, s), program.specs)
        params = program.prepare(init())
        return params, jax.jit(program.init, out_shardings=named)(params)

    carried = {m: start(program) for m, program in programs.items()}
    first = mesh.devices.flat[0]
    numbers: dict[str, dict[str, Any]] = {
        m: {"state_bytes": bytes_on(first, state)} for m, (_, state) in carried.items()
    }
    losses: dict[str, list[float]] = {m: [] for m in programs}
    turns: dict[str, list[float]] = {m: [] for m in programs}
    calls: dict[str, list[float]] = {m: [] for m in programs}
    for turn in range(rounds + 1):  # the first warms up
        for m, program in programs.items():
            params, state = carried[m]
            spent: list[float] = []
            began = time.perf_counter()
            for _ in range(steps):
                before = time.perf_counter()
                params, state, loss = program.step(params, state, batch)
                spent.append(time.perf_counter() - before)
                losses[m].append(loss)
                jax.block_until_ready((params, state, loss))
            if turn:
                turns[m].append((time.perf_counter() - began) / steps)
                calls[m].append(min(spent))  # the host's own work: the machine's noise only adds
            carried[m] = params, state
    base = turns.get("jzero", next(iter(turns.values())))
    for m, seconds in turns.items():
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        numbers[m] |= {
            "step_s": statistics.median(seconds),
            "step_s_turns": seconds,
            "step_ratio": statistics.median(ratios),
            "call_s": statistics.median(calls[m]),
            "losses": [float(loss) for loss in losses[m]],
        }
    return numbers


def bytes_on(device: Any, tree: Any) -> int:
    """Bytes that the arrays of ``tree`` occupy on one device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def agreement(result: dict[str, Any]) -> dict[str, Any]:
    """Whether all methods saw the same losses, and by how much they differ."""
    losses = np.array([numbers["losses"] for numbers in result["methods"].values()])
    spread = float(np.max(np.ptp(losses, axis=0) / np.abs(losses).mean(axis=0)))
    fell = bool(np.all(losses[:, -1] < losses[:, 0]))
    limit = AGREE[result["size"]["dtype"]]
    ok = bool(np.isfinite(losses).all()) and fell and spread <= limit
    return {"ok": ok, "relative_difference": spread, "limit": limit}


# ---------------------------------------------------------------- showing


def print_table(model: str, result: dict[str, Any]) -> None:
    size, methods = result["size"], result["methods"]
    print(f"\n{model}: {size['parameters'] / 1e6:.2f} M parameters, {size['dtype']}")
    ran = all("step_s" in numbers for numbers in methods.values())
    head = f"{'':20}" + (f"{'step ms':>9}{'/ jzero':>9}{'call us':>9}" if ran else "")
    print(
        head
        + f"{'trace s':>9}{'compile s':>10}{'peak':>11}{'temp':>11}{'state':>11}{'traffic':>11}"
    )
    for name, x in methods.items():
        line = f"{name:20}"
        if ran:
            line += f"{x['step_s'] * 1e3:9.2f}{x['step_ratio']:9.2f}{x['call_s'] * 1e6:9.0f}"
        line += f"{x['trace_s']:9.2f}{x['compile_s']:10.2f}"
        for key in ("peak_bytes", "temporary_bytes", "state_bytes", "bytes_accessed"):
            line += f"{human(x.get(key)):>11}"
        print(line)
    for name, x in methods.items():
        parts = [
            f"{c['count']} {c['kind']} {c['dtype']} {human(c['bytes'])}" for c in x["collectives"]
        ]
        print(f"  {name}: {', '.join(parts)}")
    if "losses_agree" in result:
        agree = result["losses_agree"]
        word = "agree" if agree["ok"] else "DO NOT AGREE"
        print(f"  losses {word}: they differ by at most {agree['relative_difference']:.1e}")


def human(count: float | None) -> str:
    if count is None:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


if __name__ == "__main__":
    report = main()
    ok = all(r.get("losses_agree", {"ok": True})["ok"] for r in report["models"].values())
    sys.exit(0 if ok else "the methods' losses differ: the timings compare different programs")
