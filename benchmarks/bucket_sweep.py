"""What the bucket size changes, by `jzero.report`: memory, number of collectives, exposed time.

    python benchmarks/bucket_sweep.py --topology gpu:h200:8 --mb 8 25 50 100 200
    python benchmarks/bucket_sweep.py --topology tpu:v5e:4x4 --model gpt-534m --sync eager

Nothing runs: figures are the compiler's, and times a roofline over its schedule (docs/report.md),
with `jzero.compiler_options`. The roofline knows no latency, which is what speaks against small
buckets: `collectives` says how many there are. Writes JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # only compiles

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import _models

import jzero

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--topology", default="tpu:v5e:4x4")
    p.add_argument("--model", choices=_models.SIZES, default="gpt-534m")
    p.add_argument("--sync", choices=("lazy", "eager"), default="lazy")
    p.add_argument("--mb", type=float, nargs="+", default=[8, 25, 50, 100, 200])
    p.add_argument("--out", type=Path, help="the JSON file (results/bucket-sweep-*.json)")
    args = p.parse_args(argv)
    size, lazy = _models.SIZES[args.model], args.sync == "lazy"
    devices = _devices(args.topology)

    def loss(params: Any, tokens: Any) -> Any:
        gather = jzero.gather_params if lazy else lambda x: x
        return _models.loss_fn(size, params, tokens, gather)

    rows: list[dict[str, Any]] = []
    print(f"{'MiB':>6}{'collectives':>13}{'peak GiB':>10}{'exposed ms':>12}{'step ms':>9}")
    for mb in args.mb:
        narrow = jzero.Precision(grad_sync=jnp.dtype(size.dtype)) if lazy else jzero.Precision()
        zero = jzero.ZeroConfig(bucket_mb=mb, param_sync=args.sync, precision=narrow)
        report = jzero.report(
            jzero.adamw(1e-3, zero=zero),
            _models.shapes(size),
            args.topology,
            loss=loss,
            batch=jax.ShapeDtypeStruct(_models.batch_shape(size, devices), jnp.int32),
            stacked="layers" if lazy and size.scanned else None,
            compiler_options=jzero.compiler_options(zero, args.topology),
        )
        method = report.methods[0]
        assert method.timeline is not None
        row = {
            "bucket_mb": mb,
            "collectives": sum(w.count for w in method.wire),
            "peak_bytes": method.memory.peak,
            "exposed_seconds": method.timeline.exposed_seconds,
            "step_seconds": method.timeline.seconds,
            "compile_seconds": method.compile_seconds,
        }
        rows.append(row)
        print(
            f"{mb:6g}{row['collectives']:13}{row['peak_bytes'] / 2**30:10.3f}"
            f"{row['exposed_seconds'] * 1e3:12.2f}{row['step_seconds'] * 1e3:9.2f}",
            flush=True,
        )
    result = {
        "topology": args.topology,
        "model": vars(size),
        "sync": args.sync,
        "jax": jax.__version__,
        "rows": rows,
    }
    name = f"bucket-sweep-{args.topology.replace(':', '-')}-{args.model}-{args.sync}.json"
    path = args.out or RESULTS / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return result


def _devices(topology: str) -> int:
    from jzero._targets import target_of

    return len(target_of(topology).devices)


if __name__ == "__main__":
    main()
