"""Options for XLA, so that it keeps buckets apart and runs them beside computation."""

from __future__ import annotations

from typing import Any

from jzero._config import ZeroConfig, config_and_groups

__all__ = ["compiler_options"]

# XLA merges collectives up to so many bytes: 1 merges none. All-reduces keep those of scalars
# together, which are as many as a step has norms and losses.
_NEVER, _SCALARS = 1, 65_536
_SPARSE_CORE = ("v5p", "v6e")
_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def compiler_options(
    zero: Any = None,
    platform: str = "gpu",
    *,
    merge_mb: float = 0.0,
    pipelined: bool = True,
    user_buffers: bool = False,
    command_buffers: bool | None = None,
    double_buffering: bool = False,
) -> dict[str, Any]:
    """Options for ``jax.jit(..., compiler_options=...)`` or ``lowered.compile(...)``.

    XLA merges the collectives of buckets into few large ones, which start when the last gradient is
    there; then no computation is left to run beside them. These options keep them apart. What each
    does to a compiled program is in docs/report.md.

    Args:
      zero: the :class:`ZeroConfig`, or the transformation made with it. None: ``ZeroConfig()``.
      platform: "gpu"; "tpu"; or a topology as ``jzero.report`` takes it, such as
        ``"tpu:v6e:16x16"``: chips differ, and "tpu" alone has what all of them take. "cpu": no
        options.
      merge_mb: collectives may be merged up to this size (MiB); 0: never. On GPU the size of a
        reduce-scatter is that of its result, a shard.
      pipelined: GPU: move the collectives at the ends of a loop's body beside the next turn's
        computation (for ``param_sync="lazy"`` with scanned layers).
      user_buffers: GPU: let NCCL read and write XLA's buffers, registered once. It saves a copy and
        needs memory of its own; off by default, as in XLA.
      command_buffers: GPU: True: record what can be into CUDA graphs (fusions, products, library
        calls; not collectives); False: record nothing; None: XLA's own choice.
      double_buffering: GPU: unroll loops by two, so that two turns overlap.

    Returns:
      Names and values. They differ between platforms: one set is an error on another platform.

    Raises:
      ValueError: an unknown platform, a negative ``merge_mb``, an option of another platform.
    """
    config = config_and_groups(zero, ZeroConfig())[0]
    kind, chip = _platform(platform)
    if isinstance(merge_mb, bool) or not isinstance(merge_mb, (int, float)) or merge_mb < 0:
        raise ValueError(f"merge_mb={merge_mb!r} must be a number of MiB, at least 0")
    asked = {"user_buffers": user_buffers, "double_buffering": double_buffering}
    asked["command_buffers"] = command_buffers is not None
    if kind != "gpu" and any(asked.values()):
        names = [name for name, value in asked.items() if value]
        raise ValueError(f"{names} are options of GPUs; platform={platform!r} has none of them")
    threshold = max(_NEVER, int(merge_mb * 2**20))
    reduced = max(_SCALARS, threshold)
    if kind == "cpu":
        return {}
    if kind == "tpu":
        # XLA writes many reduce-scatters as all-reduces there, which this threshold covers.
        options: dict[str, Any] = {"xla_jf_crs_combiner_threshold_in_bytes": reduced}
        if chip in _SPARSE_CORE:
            options |= dict.fromkeys(_SPARSE_CORE_OPTIONS, True)
        return options
    options = {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": threshold,
        "xla_gpu_all_gather_combine_threshold_bytes": threshold,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }
    if config.replica_axis is not None:  # a bucket's shard is all-reduced too
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = reduced
    if pipelined:
        options["xla_gpu_enable_pipelined_all_gather"] = True
        options["xla_gpu_enable_pipelined_reduce_scatter"] = True
    if user_buffers:
        options["xla_gpu_enable_nccl_user_buffers"] = True
    if command_buffers is not None:
        options["xla_gpu_enable_command_buffer"] = _RECORDED if command_buffers else ""
    if double_buffering:
        options["xla_gpu_enable_while_loop_double_buffering"] = True
    return options


_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"

# Collectives run on the sparse cores, as asynchronous calls. All-reduces too: XLA writes most
# reduce-scatters as all-reduces.
_SPARSE_CORE_OPTIONS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_all_gather_offload_tracing",
    "xla_tpu_enable_reduce_scatter_offload_tracing",
    "xla_tpu_enable_all_reduce_offload_tracing",
    "xla_tpu_use_tc_device_shape_on_sc",
    "xla_sc_disable_megacore_partitioning",
)


def _platform(platform: Any) -> tuple[str, str]:
    kind, _, rest = str(platform).partition(":")
    chip = rest.partition(":")[0]
    known = {"gpu": True, "cuda": True, "cpu": True, "tpu": not chip or chip in _TPUS}
    if not known.get(kind, False):
        raise ValueError(
            f"platform={platform!r}: use 'gpu', 'tpu', 'cpu', or a topology such as "
            f"'tpu:v6e:16x16' (chips {', '.join(_TPUS)})"
        )
    return ("gpu" if kind == "cuda" else kind), chip
