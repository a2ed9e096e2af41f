"""What the bucket size changes: by `jzero.report` for a machine that is not there, or measured.

    python benchmarks/bucket_sweep.py --topology gpu:h200:8 --mb 8 25 50 100 200
    python benchmarks/bucket_sweep.py --topology tpu:v5e:4x4 --model gpt-534m --sync eager
    python benchmarks/bucket_sweep.py --run 8 --model medium-unrolled --sync eager

By report: memory, number of collectives, exposed time and step by a roofline over the compiled
schedule, latencies assumed (docs/report.md), with `jzero.compiler_options`. `--run N`: seconds of a
step on N devices of this machine; sizes take turns (benchmarks/step.py), and the ratio is to the
first of them in the same turn. Writes JSON.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # --topology only compiles

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import _methods
import _models
import step

import jzero
from jzero._ready_models import MODELS, Model

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--topology", default="tpu:v5e:4x4")
    p.add_argument(
        "--model", choices=(*_models.SIZES, *MODELS), default="gpt-534m", metavar="MODEL"
    )
    p.add_argument("--layers", type=int, help="in place of the model's own")
    p.add_argument("--sync", choices=("lazy", "eager"), default="lazy")
    p.add_argument("--mb", type=float, nargs="+", default=[8, 25, 50, 100, 200])
    p.add_argument(
        "--run", type=int, metavar="N", help="measure on N devices, in place of compiling"
    )
    p.add_argument("--rounds", type=int, default=10, help="with --run: turns (%(default)s)")
    p.add_argument("--steps", type=int, default=3, help="with --run: steps in a turn (%(default)s)")
    p.add_argument("--out", type=Path, help="the JSON file (results/bucket-sweep-*.json)")
    args = p.parse_args(argv)
    model: Any = (_models.SIZES | MODELS)[args.model]
    if args.layers:
        model = dataclasses.replace(model, layers=args.layers)
    if args.run:
        where, rows = f"{jax.default_backend()}-{args.run}", measured(args, model)
    else:
        where, rows = args.topology.replace(":", "-"), compiled(args, model)
    result = {
        "topology": where if args.run else args.topology,
        "model": vars(model),
        "sync": args.sync,
        "jax": jax.__version__,
        "rows": rows,
    }
    path = args.out or RESULTS / f"bucket-sweep-{where}-{args.model}-{args.sync}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return result


def compiled(args: argparse.Namespace, model: Any) -> list[dict[str, Any]]:
    lazy, devices = args.sync == "lazy", _devices(args.topology)
    gather = jzero.gather_params if lazy else lambda x: x
    if isinstance(model, Model):
        shapes, scanned = model.shapes(), True
        batch = model.batch_shape(model.batch * devices)
    else:
        shapes, scanned = _models.shapes(model), model.scanned
        batch = jax.ShapeDtypeStruct(_models.batch_shape(model, devices), jnp.int32)

    def loss(params: Any, tokens: Any) -> Any:
        if isinstance(model, Model):
            return model.loss(params, tokens, gather)
        return _models.loss_fn(model, params, tokens, gather)

    rows: list[dict[str, Any]] = []
    head = ("MiB", "collectives", "peak GiB", "exposed ms", "step ms", "overlapped")
    print("".join(f"{name:>12}" for name in head))
    for mb in args.mb:
        narrow = jzero.Precision(grad_sync=jnp.dtype(model.dtype))
        zero = jzero.ZeroConfig(
            bucket_mb=mb,
            param_sync=args.sync,
            precision=narrow,
            stacked="layers" if scanned else (),
        )
        report = jzero.report(
            jzero.adamw(1e-3, zero=zero),
            shapes,
            args.topology,
            loss=loss,
            batch=batch,
            compiler_options=jzero.compiler_options(zero, args.topology),
        )
        method = report.methods[0]
        assert method.timeline is not None
        sent = sum(w.bytes for w in method.wire)
        row = {
            "bucket_mb": mb,
            "collectives": sum(w.count for w in method.wire),
            "peak_bytes": method.memory.peak,
            "exposed_seconds": method.timeline.exposed_seconds,
            "step_seconds": method.timeline.seconds,
            "overlapped": sum(w.bytes * w.overlapped for w in method.wire) / max(sent, 1),
            "compile_seconds": method.compile_seconds,
        }
        rows.append(row)
        print(
            f"{mb:12g}{row['collectives']:12}{row['peak_bytes'] / 2**30:12.3f}"
            f"{row['exposed_seconds'] * 1e3:12.2f}{row['step_seconds'] * 1e3:12.2f}"
            f"{row['overlapped']:12.0%}",
            flush=True,
        )
    return rows


def measured(args: argparse.Namespace, size: Any) -> list[dict[str, Any]]:
    mesh = step.local_mesh(args.run)
    method = _methods.lazy if args.sync == "lazy" else _methods.jzero_jit
    programs = {f"{mb:g}": method(dataclasses.replace(size, bucket_mb=mb), mesh) for mb in args.mb}
    found = step.run(programs, size, mesh, args.rounds, args.steps)
    rows: list[dict[str, Any]] = []
    print(f"{'MiB':>6}{'step ms':>9}{'ratio':>7}")
    for mb, numbers in zip(args.mb, found.values(), strict=True):
        names = ("step_s", "step_ratio", "step_s_turns")
        rows.append({"bucket_mb": mb} | {name: numbers[name] for name in names})
        print(f"{mb:6g}{numbers['step_s'] * 1e3:9.1f}{numbers['step_ratio']:7.3f}")
    return rows


def _devices(topology: str) -> int:
    from jzero._targets import target_of

    return len(target_of(topology).devices)


if __name__ == "__main__":
    main()
