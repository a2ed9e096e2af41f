"""The gradient statistics on TPU: one Mosaic kernel that reads the shard once.

The grid has an outer, parallel axis of two halves (one for each core of a chip that has two in one
device) and an inner axis of blocks. A block is summed chunk by chunk into one (8, 128) register a
statistic, and the blocks' sums are added up in the output, which stays in VMEM: two levels, so no
float32 sum is longer than the blocks of a half. XLA adds the 2 x 1,024 partial sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jzero_kernels.adam import stats
from jzero_kernels.adam.tpu import CHUNK, LANES, WIRE_DTYPES

_HALVES = 2
_SUBLANES = 8
_BLOCK = 2**18  # elements: 1 MiB of float32, double-buffered 2 MiB
_ROWS = CHUNK // LANES


def unsupported(g: Any) -> str | None:
    """Why the kernel does not take this operand, or None if it does."""
    if jnp.dtype(g.dtype).name not in WIRE_DTYPES:
        return f"`g` is {jnp.dtype(g.dtype).name}; accepted: {', '.join(WIRE_DTYPES)}"
    return None


def _kernel(g_ref: Any, out_ref: Any, *, rows: int, blocks: int, half: int) -> None:
    step = pl.program_id(1)
    block = pl.program_id(0) * half + step
    block_rows = g_ref.shape[0]

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    # The second half may have a step too many; its block index is clamped, its sums left out.
    @pl.when(block < blocks)
    def _() -> None:
        def add_chunk(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            g = g_ref[pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS)].astype(jnp.float32)
            # Rows past the end of the last block hold whatever was in memory.
            row = block * block_rows + i * _ROWS + jax.lax.broadcasted_iota(jnp.int32, g.shape, 0)
            g = jnp.where(row < rows, g, jnp.zeros_like(g))
            terms = (x.reshape(-1, _SUBLANES, LANES).sum(axis=0) for x in stats.stat_terms(g))
            return tuple(a + b for a, b in zip(sums, terms, strict=True))

        zero = jnp.zeros((_SUBLANES, LANES), jnp.float32)
        sums = jax.lax.fori_loop(0, block_rows // _ROWS, add_chunk, (zero,) * 4)
        for i, x in enumerate(sums):
            out_ref[pl.ds(i * _SUBLANES, _SUBLANES)] += x


def grad_stats(g: jax.Array, *, interpret: Any = False) -> jax.Array:
    """:func:`jzero_kernels.adam.grad_stats` of a shard of n >= 1 elements.

    A tail of less than 4,096 elements is summed by XLA. A shard that has one is also copied once,
    without it: a slice cannot be an operand in place.
    """
    (n,) = g.shape
    head = n - n % CHUNK
    if head == 0:
        return stats.grad_stats(g)
    rows, block_rows = head // LANES, min(_BLOCK, head) // LANES
    blocks = pl.cdiv(rows, block_rows)
    half = pl.cdiv(blocks, _HALVES)
    partials = pl.pallas_call(
        lambda *refs: _kernel(*refs, rows=rows, blocks=blocks, half=half),
        grid=(_HALVES, half),
        in_specs=[
            pl.BlockSpec(
                (block_rows, LANES), lambda i, j: (jnp.minimum(i * half + j, blocks - 1), 0)
            )
        ],
        out_specs=pl.BlockSpec((4 * _SUBLANES, LANES), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (_HALVES * 4 * _SUBLANES, LANES),
            jnp.float32,
            manual_axis_type=jax.typeof(g).manual_axis_type,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=16 * head, transcendentals=0, bytes_accessed=head * g.dtype.itemsize
        ),
        interpret=interpret,
        name="jzero_grad_stats",
    )(g[:head].reshape(rows, LANES))
    total = partials.reshape(_HALVES, 4, -1).sum(axis=(0, 2))
    return total + stats.grad_stats(g[head:]) if head < n else total
