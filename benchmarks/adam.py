"""How close does the Adam update come to the memory's speed?

python benchmarks/adam.py [--sizes 1MB 16MB ...] [--backends auto reference ...] [--json FILE]

Each line is one way to update a shard whose float32 parameters take SIZE: GB/s of the bytes that
must move (p, m, v read and written, g read, out written), per cent of what a copy of the same
bytes reached in this run, and beside it the time that those bytes take at the copy's speed (the
roofline; also at the data sheet's speed where that is known). The ways:

  copy                x + 1 over float32, read and written: what "100 %" means
  <backend>           jzero_kernels.adam.adam_update on one flat shard, state donated
  optax               jitted optax.adamw over a pytree of GPT leaves, float32 gradients, donated
  torch               torch.optim.AdamW(fused=True) over one flat tensor, where torch is importable
  stats               adam.grad_stats (reads g once)

Times are medians of calls timed one by one, from the host: on an accelerator, small sizes show
the cost of a launch.
"""

import argparse
import functools
import json
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero_kernels import adam
from jzero_kernels.adam.shapes import BENCHMARK_BYTES, POLICIES, gpt_leaves
from jzero_kernels.adam.tpu import bytes_moved
from jzero_kernels.adam.tune import example_scalars, seconds_per_call

# Bytes a second of device memory, from data sheets; others show the measured copy alone.
DATA_SHEET = {
    "NVIDIA H200": 4.8e12,
    "TPU v5 lite": 8.19e11,
    "TPU v5": 2.765e12,
    "TPU v6 lite": 1.64e12,
}


def time_copy(n: int, repeats: int) -> tuple[float, int]:
    """Seconds and bytes of a pass that reads and writes n float32."""
    step = jax.jit(lambda x: (x + 1,), donate_argnums=0)
    return seconds_per_call(step, (jnp.zeros((n,)),), repeats=repeats), 8 * n


def time_kernel(n: int, policy: Any, backend: Any, repeats: int) -> tuple[float, int]:
    step = jax.jit(
        functools.partial(adam.adam_update, out_dtype=policy.out, backend=backend),
        donate_argnums=(0, 1, 2),
    )
    state = tuple(jnp.zeros((n,), t) for t in policy[:3])
    seconds = seconds_per_call(
        step, state, jnp.ones((n,), policy.g), example_scalars(), repeats=repeats
    )
    return seconds, bytes_moved(n, *policy)


def time_stats(n: int, policy: Any, repeats: int) -> tuple[float, int]:
    g = jnp.ones((n,), policy.g)
    step = jax.jit(adam.grad_stats)
    seconds = seconds_per_call(lambda x: (x, step(x)), (g,), repeats=repeats)
    return seconds, n * g.dtype.itemsize


def time_optax(n: int, repeats: int) -> tuple[float, int]:
    params = {name: jnp.zeros(shape) for name, shape in gpt_leaves(n).items()}
    grads = jax.tree.map(jnp.ones_like, params)
    tx = optax.adamw(1e-3, weight_decay=0.01)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    count = sum(x.size for x in jax.tree.leaves(params))
    seconds = seconds_per_call(step, (params, tx.init(params)), grads, repeats=repeats)
    return seconds, 28 * count  # float32 gradient in, no second copy out: the same 28


def time_torch(n: int, repeats: int) -> tuple[float, int]:
    import torch  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    param = torch.nn.Parameter(torch.zeros(n, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), 28 * n


def memory_limit(device: Any) -> float:
    """Bytes that a benchmark may use: most of the device's, a third of a CPU's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return 0.9 * stats["bytes_limit"]
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024 / 3
    return 2.0**32


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = jax.devices()[0]
    policy = POLICIES[arguments.policy]
    sheet = DATA_SHEET.get(device.device_kind)
    rows: list[dict[str, Any]] = []
    print(f"{'size':>6} {'way':>12} {'ms':>10} {'GB/s':>8} {'% of copy':>9}  roofline ms")
    for size in arguments.sizes:
        n = BENCHMARK_BYTES[size] // 4
        if 12 * BENCHMARK_BYTES[size] > memory_limit(device):
            print(f"{size:>6} left out: needs more memory than this device has to spare")
            continue
        ways: dict[str, Any] = {"copy": lambda n=n: time_copy(n, arguments.repeats)}
        for backend in arguments.backends:
            ways[backend] = functools.partial(time_kernel, n, policy, backend, arguments.repeats)
        ways["stats"] = functools.partial(time_stats, n, policy, arguments.repeats)
        ways["optax"] = functools.partial(time_optax, n, arguments.repeats)
        if not arguments.no_torch:
            ways["torch"] = functools.partial(time_torch, n, arguments.repeats)
        copy = 0.0
        for way, run in ways.items():
            try:
                seconds, moved = run()
            except ModuleNotFoundError as error:
                print(f"{size:>6} {way:>12} left out: {error}")
                continue
            rate = moved / seconds
            copy = copy or rate
            roofline = f"{1e3 * moved / copy:.3f} (copy)"
            if sheet:
                roofline += f", {1e3 * moved / sheet:.3f} (data sheet)"
            row = {"size": size, "n": n, "way": way, "seconds": seconds, "bytes": moved}
            rows.append(row | {"gb_per_s": rate / 1e9, "per_cent_of_copy": 100 * rate / copy})
            print(
                f"{size:>6} {way:>12} {1e3 * seconds:10.3f} {rate / 1e9:8.2f} "
                f"{100 * rate / copy:9.1f}  {roofline}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["1MB", "16MB"], choices=list(BENCHMARK_BYTES)
    )
    parser.add_argument("--backends", nargs="+", default=["auto"], choices=list(adam.BACKENDS))
    parser.add_argument("--policy", default="mixed", choices=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, dtypes {POLICIES[arguments.policy]}")
    rows = measure(arguments)
    if arguments.json:
        record = {
            "command": "python benchmarks/adam.py " + " ".join(sys.argv[1:]),
            "device": device.device_kind,
            "host": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "policy": POLICIES[arguments.policy]._asdict(),
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
