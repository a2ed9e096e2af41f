"""What each precision policy costs in quality: the demo's GPT, trained with each, from the same
seeds, on the same text.

    python benchmarks/precision.py --steps 200 --seeds 3 --out benchmarks/results/precision-cpu.json

Prints held-out loss (mean over seeds, with the spread), its difference from float32 seed by seed,
and bytes of state a parameter. ``b2`` is 0.999, where narrow second moments suffer most.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
from _devices import devices
from _gpt import GPT, SIZES, loss_fn
from _text import Text
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from train_gpt import CLIP_NORM, optimizer_arguments

import jzero

F8 = "float8_e4m3fn"
REMAINDER = {"master": "remainder"}
EIGHT = {**REMAINDER, "state": F8, "scaled": True}
SIXTEEN = {**REMAINDER, "state": "bfloat16"}
STOCHASTIC = {"rounding": "stochastic"}

# name: dtype of the model, arguments of Precision
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "bf16, float32 master": ("bfloat16", {}),
    "bf16, remainder": ("bfloat16", REMAINDER),
    "bf16, remainder, bf16 moments": ("bfloat16", SIXTEEN),
    "bf16, remainder, bf16 moments, stochastic": ("bfloat16", SIXTEEN | STOCHASTIC),
    "bf16, remainder, fp16 scaled moments": (
        "bfloat16",
        {**REMAINDER, "state": "float16", "scaled": True},
    ),
    "bf16, remainder, fp8 moments": ("bfloat16", EIGHT),
    "bf16, remainder, fp8 moments, stochastic": ("bfloat16", EIGHT | STOCHASTIC),
    "bf16, remainder, fp8 moments, stochastic, fp8 gradients": (
        "bfloat16",
        EIGHT | STOCHASTIC | {"grad_sync": F8},
    ),
    "bf16, fp16 scaled state": ("bfloat16", {"state": "float16", "scaled": True}),
    "bf16, no master": ("bfloat16", {"master": "none"}),
    "float32, fp8 parameters on the wire": ("float32", {"param_sync": F8}),
}


def train(name: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Held-out loss for each seed, and bytes of state a parameter."""
    dtype, chosen = POLICIES[name]
    size = SIZES[options.size]
    used = devices(options.devices)
    mesh = jax.make_mesh(
        (len(used),), ("data",), devices=used, axis_types=(jax.sharding.AxisType.Auto,)
    )
    text = Text(options.data, size.length)
    held_out = text.held_out_batch(128, size.length)
    graph, _ = nnx.split(GPT(size, jnp.dtype(dtype), nnx.Rngs(0)), nnx.Param)
    loss_of = functools.partial(loss_fn, graph)
    evaluate = jax.jit(loss_of)
    arguments = optimizer_arguments(size, options.steps) | {"b2": options.b2}
    zero = jzero.ZeroConfig(
        mesh=mesh, bucket_mb=size.bucket_mb, precision=jzero.Precision(**chosen)
    )
    tx = jzero.adamw(**arguments, clip_norm=CLIP_NORM, zero=zero)
    value_and_grad = jzero.value_and_grad(loss_of, zero=zero)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = value_and_grad(params, batch)
        return tx.step(grads, state, params)

    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    init, losses, bytes_each = jax.jit(tx.init), [], 0.0
    for seed in range(options.seeds):
        _, initial = nnx.split(GPT(size, jnp.dtype(dtype), nnx.Rngs(seed)), nnx.Param)
        params = jax.device_put(initial, whole)
        state = init(params)
        bytes_each = tx.memory(params).state_bytes_per_parameter
        for batch in text.batches(options.steps, size.batch, size.length, seed):
            params, state = step(params, state, jax.device_put(batch, rows))
            # Steps in flight at once can starve each other's collectives of the CPU's threads.
            jax.block_until_ready(state.step)
        losses.append(float(evaluate(params, windows=held_out)))
    return losses, bytes_each


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--b2", type=float, default=0.999)
    parser.add_argument("--data", type=pathlib.Path, default=None)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--out", type=pathlib.Path, default=None)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in options.policies:
        start = time.perf_counter()
        losses, each = train(name, options)
        rows[name] = {"held_out": losses, "state_bytes_per_parameter": each}
        base = rows.get("float32", rows[name])["held_out"]
        difference = np.subtract(losses, base)
        rows[name]["minus_float32"] = difference.tolist()
        print(
            f"{name:>58} {each:>7.4g} bytes  {np.mean(losses):.4f} "
            f"± {np.std(losses):.4f}  float32 {np.mean(difference):+.4f} "
            f"({difference.min():+.4f} … {difference.max():+.4f})  "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
    if options.out is not None:
        facts = {
            "what": (__doc__ or "").split("\n\n")[0],
            "size": options.size,
            "steps": options.steps,
            "b2": options.b2,
            "devices": options.devices,
            "jax": jax.__version__,
            "backend": jax.default_backend(),
        }
        options.out.write_text(json.dumps({**facts, "policies": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
