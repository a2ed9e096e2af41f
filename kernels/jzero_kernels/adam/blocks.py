"""Block sizes, as data: how many elements a kernel handles at a time.

The table is what the kernels use unless told otherwise. ``jzero_kernels.adam.tune`` measures on a
device and writes what it found to a JSON file; that file is read only when the environment
variable ``JZERO_ADAM_BLOCKS`` names it, so no result depends on a file nobody asked for.
"""

import dataclasses
import functools
import json
import os
import pathlib

import jax

ENV = "JZERO_ADAM_BLOCKS"


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """The block sizes that a backend takes.

    Attributes:
      default: elements of a block on a long shard.
      multiple: every block is a multiple of it.
      steps: a shorter shard gets smaller blocks, for at least this many pipeline steps.
      candidates: what the autotuner tries.
    """

    default: int
    multiple: int
    steps: int
    candidates: tuple[int, ...]


# tpu: 2^17 elements are 3.5 MiB of operands and results (float32 state, bfloat16 gradient and
# output), 7 MiB double-buffered: under half of the 16 MiB of VMEM that v5e gives a kernel, and a
# transfer of some microseconds, long beside the fixed cost of a grid step.
# mosaic_gpu: per warpgroup of 128 threads; triton: per program of 4 warps.
RULES: dict[str, BlockRule] = {
    "tpu": BlockRule(2**17, 2**12, 16, (2**15, 2**16, 2**17, 2**18)),
    "mosaic_gpu": BlockRule(2**12, 2**10, 1, (2**10, 2**11, 2**12, 2**13)),
    "triton": BlockRule(2**11, 2**7, 1, (2**9, 2**10, 2**11, 2**12)),
}


# With Scaled forms: a block's scales are a one-dimensional block too, which TPU takes in multiples
# of 1024.
SCALED_RULES: dict[str, BlockRule] = {
    **RULES,
    "tpu": BlockRule(2**17, 2**17, 1, (2**17, 2**18)),
}


def key(backend: str, dtypes: tuple[str, ...], n: int) -> str:
    """The name of an entry in the tuning file: sizes within a factor of two share one."""
    return f"{backend}/{'-'.join(dtypes)}/2^{max(n - 1, 0).bit_length()}"


def default_path() -> pathlib.Path:
    """Where the autotuner writes: ``$XDG_CACHE_HOME/jzero/adam_blocks.json``, or in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "jzero" / "adam_blocks.json"


@functools.lru_cache(maxsize=8)
def _load(path: str) -> dict[str, dict[str, int]]:
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"adam_update: the environment variable {ENV} names {path!r}, which does not read as "
            f"JSON ({error}); accepted: a file that jzero_kernels.adam.tune wrote. Unset it, or "
            "tune again."
        ) from error


def _tuned(backend: str, dtypes: tuple[str, ...], n: int) -> int | None:
    path = os.environ.get(ENV)
    if not path:
        return None
    return _load(path).get(jax.devices()[0].device_kind, {}).get(key(backend, dtypes, n))


def block_for(
    backend: str, n: int, dtypes: tuple[str, ...], block: int | None, *, scaled: bool = False
) -> int:
    """The block to use for a shard of n >= 1 elements.

    Args:
      backend: a key of :data:`RULES`.
      n: length of the shard.
      dtypes: names of the dtypes of p, m, v, g and out.
      block: the caller's wish; None for the tuned or built-in size.
      scaled: whether an operand is Scaled.

    Raises:
      ValueError: if ``block`` is not a positive multiple of what the backend takes.
    """
    rule = (SCALED_RULES if scaled else RULES)[backend]
    # No block is longer than the shard: a shard shorter than one multiple is a block by itself.
    # (Triton blocks are powers of two, with a mask: theirs may be longer.)
    whole = n // rule.multiple * rule.multiple or n
    if backend == "triton":
        whole = rule.default if block is None else block
    wish = block if block is not None else _tuned(backend, dtypes, n)
    if wish is None:
        share = -(-n // (rule.steps * rule.multiple)) * rule.multiple
        return rule.default if backend == "triton" else min(rule.default, share, whole)
    if wish <= 0 or wish % rule.multiple:
        raise ValueError(
            f"adam_update: `block` is {wish}; accepted for backend {backend!r}: positive "
            f"multiples of {rule.multiple}. Pass None for the built-in size."
        )
    return min(wish, whole)
