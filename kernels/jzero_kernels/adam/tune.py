"""The autotuner of block sizes: measures on the device at hand and stores what it found.

``python -m jzero_kernels.adam.tune --backend tpu`` on the machine to tune for, then
``export JZERO_ADAM_BLOCKS=~/.cache/jzero/adam_blocks.json``. Nothing reads the file otherwise.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero_kernels.adam.api import Backend, adam_update
from jzero_kernels.adam.blocks import ENV, RULES, default_path, key
from jzero_kernels.adam.math import AdamScalars
from jzero_kernels.adam.shapes import BENCHMARK_BYTES, POLICIES, Policy


def example_scalars() -> AdamScalars:
    """The scalars of an ordinary third step."""
    values = (1e-3, 0.9, 0.1, 0.999, 0.001, 1e-8, 0.0, 0.01, 0.271, 0.002997, 0.3439, 1.0)
    return AdamScalars(*(jnp.float32(x) for x in values), finite=jnp.asarray(True))


def seconds_per_call(step: Callable[..., Any], state: Any, *rest: Any, repeats: int = 20) -> float:
    """Median seconds of ``state = step(*state, *rest)[:len(state)]``, its first calls left out.

    Args:
      step: a compiled function that donates its state.
      state: tuple of arrays, the leading results of ``step`` as well as its leading arguments.
      rest: further arguments.
      repeats: calls that are timed, each on its own.
    """
    times: list[float] = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        results = jax.block_until_ready(step(*state, *rest))
        times.append(time.perf_counter() - start)
        state = tuple(results)[: len(state)]
    return statistics.median(times[2:])


def tune(
    backend: Backend,
    n: int,
    policy: Policy = POLICIES["mixed"],
    *,
    candidates: Sequence[int] | None = None,
    path: pathlib.Path | None = None,
    measure: Callable[[int], float] | None = None,
) -> dict[int, float]:
    """Times each candidate block on the default device and stores the fastest.

    Args:
      backend: "tpu", "mosaic_gpu" or "triton".
      n: length of the shard.
      policy: its dtypes.
      candidates: block sizes; None: those of the built-in table.
      path: JSON file to add to; None: :func:`jzero_kernels.adam.blocks.default_path`.
      measure: block to seconds; None: run it.

    Returns:
      Seconds of each candidate.

    Raises:
      ValueError: if the backend has no blocks, or does not run on this machine's device.
    """
    if backend not in RULES:
        raise ValueError(
            f"tune: `backend` is {backend!r}; accepted: {', '.join(RULES)}. Name a kernel."
        )

    def run(block: int) -> float:
        step = jax.jit(
            functools.partial(adam_update, out_dtype=policy.out, backend=backend, block=block),
            donate_argnums=(0, 1, 2),
        )
        state = tuple(jnp.zeros((n,), t) for t in policy[:3])
        return seconds_per_call(step, state, jnp.zeros((n,), policy.g), example_scalars())

    seconds = {block: (measure or run)(block) for block in candidates or RULES[backend].candidates}
    best = min(seconds, key=lambda block: seconds[block])
    path = default_path() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text()) if path.exists() else {}
    table.setdefault(jax.devices()[0].device_kind, {})[key(backend, tuple(policy), n)] = best
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    return seconds


def main() -> None:
    """Tunes one backend for the benchmark's sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=list(RULES))
    parser.add_argument("--sizes", nargs="+", default=["16MB", "100MB", "1GB"])
    parser.add_argument("--path", type=pathlib.Path, default=default_path())
    arguments = parser.parse_args()
    for size in arguments.sizes:
        found = tune(arguments.backend, BENCHMARK_BYTES[size] // 4, path=arguments.path)
        print(size, {block: f"{1e6 * seconds:.1f} us" for block, seconds in found.items()})
    print(f"export {ENV}={arguments.path}")


if __name__ == "__main__":
    main()
