"""What a training step will take on a machine that one does not have, from compiling alone."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jzero._hlo import parse
from jzero._report_programs import (
    Program,
    local_bytes,
    mesh_axes,
    optax_programs,
    user_program,
    zero_program,
)
from jzero._report_result import Memory, Method, Report, wires
from jzero._report_search import deeper, depth_of, largest, rows_of, wider
from jzero._roofline import simulate
from jzero._targets import Target, target_of
from jzero._transform import ZeroTransformation

__all__ = ["Memory", "Method", "Report", "report"]

_log = logging.getLogger("jzero.report")


def report(
    fn_or_tx: Any,
    params: Any,
    topology: str = "tpu:v5e:4x4",
    *,
    loss: Callable[..., Any] | None = None,
    batch: Any = None,
    args: Any = (),
    in_specs: Any = None,
    stacked: Any = None,
    mesh_shape: Mapping[str, int] | None = None,
    compare: bool | Callable[..., Any] = False,
    baseline: optax.GradientTransformation | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    largest_batch: int = 0,
    largest_depth: int = 0,
) -> Report:
    """Compile a training step for a machine and tell what it takes there: nothing runs.

    For each way to train: peak memory of a device and its parts, whether that fits, what goes over
    the wire by collective, axis and dtype, which collectives have computation beside them in the
    schedule, and how long a step takes by a roofline, whose assumptions the report prints.

    Args:
      fn_or_tx: a transformation of ``jzero.adamw`` or ``jzero.zero`` (its mesh, if it has one, is
        replaced by the topology's): its step is built here, with ``loss`` the whole of it, else
        reduction, update and gather alone. Or the user's own step ``fn(params, *args)``, jitted or
        not, traced with the topology's mesh as the ambient one (``jax.set_mesh``), so that
        ``ZeroConfig(mesh=None)`` finds it; not jitted, it may overwrite its first two arguments.
      params: arrays or ``ShapeDtypeStruct``; only shapes and dtypes are used.
      topology: ``"tpu:v5e:16x16"`` (chips v4, v5e, v5p, v6e, tpu7x; two slices of them:
        ``"tpu:v5e:16x16:2"``), ``"gpu:h200:8"`` (h100, h200, b200), or ``"cpu:8"``.
      loss: ``loss(params, batch)``, the mean over its part of the batch. With
        ``param_sync="lazy"`` it gets shards, which it gathers.
      batch: a pytree of arrays or ``ShapeDtypeStruct``, of all devices together: dim 0 is split.
      args: what a step ``fn`` takes after the parameters, or a function of the mesh that returns
        it (state whose shapes depend on the number of devices).
      in_specs: for ``fn``: a tuple of PartitionSpecs (or prefixes) of params and each of args.
        None: those of their shardings; jzero's own for its states and shards; replicated.
      stacked: for lazy sync and ``largest_depth``, as for ``jzero.shard_params``. None: what the
        transformation's ``ZeroConfig.stacked`` says.
      mesh_shape: sizes of the mesh axes by name, in order. None: all devices on the shard axis.
      compare: compile replicated optax and annotation-sharded optax too; a function: the loss on
        whole parameters to use there.
      baseline: the optax transformation that they use; None: ``optax.adamw(1e-4)``.
      compiler_options: for the compiler, such as ``jzero.compiler_options`` returns.
      largest_batch: find the largest batch that fits, by at most so many more compilations of the
        first method. The dim 0 of ``batch`` is scaled.
      largest_depth: find the deepest model that fits, likewise: the leading dim of the ``stacked``
        leaves is scaled, so the loss must take as many layers as it is given.

    Returns:
      A :class:`Report`: print it, ``to_json()``, ``picture(path)``.

    Raises:
      ValueError: an unknown topology, or arguments that do not fit each other, by name.
      ModuleNotFoundError: the machine's compiler is not installed; the message names the extra.
    """
    is_tx = isinstance(fn_or_tx, ZeroTransformation)
    if is_tx and stacked is None:
        stacked = fn_or_tx.config.stacked
    _check(fn_or_tx, is_tx, loss, batch, compare, largest_batch, largest_depth)
    target = target_of(topology)
    capacity = target.chip.memory
    depth = depth_of(params, stacked) if largest_depth else 0
    if (largest_batch or largest_depth) and not capacity:
        name, value = (
            ("largest_batch", largest_batch) if largest_batch else ("largest_depth", largest_depth)
        )
        raise ValueError(f"{name}={value}: what fits on {topology} is not known")
    config = fn_or_tx.config if is_tx else None
    mesh = target.mesh(mesh_axes(config, len(target.devices), mesh_shape))
    options = dict(compiler_options or {})

    def first(params: Any, batch: Any) -> Program:
        if is_tx:
            return zero_program(fn_or_tx, params, mesh, loss, batch, stacked)
        return user_program(fn_or_tx, params, args, mesh, in_specs)

    def measured(params: Any, batch: Any) -> Method:
        return _measure(first(params, batch), target, mesh, options)

    with jax.set_mesh(mesh):
        programs = [first(params, batch)]
        if compare and loss is not None:
            plain = compare if callable(compare) else loss
            inner = optax.adamw(1e-4) if baseline is None else baseline
            axis = config.axis if config is not None else mesh.axis_names[0]
            programs += optax_programs(inner, params, mesh, plain, batch, axis)
        methods = [_measure(program, target, mesh, options) for program in programs]
        widest = deepest = None
        if largest_batch:
            widest = largest(
                lambda rows: measured(params, wider(batch, mesh.size, rows)),
                rows_of(batch, mesh.size),
                methods[0],
                capacity,
                largest_batch,
            )
        if largest_depth:
            deepest = largest(
                lambda layers: measured(deeper(params, stacked, layers), batch),
                depth,
                methods[0],
                capacity,
                largest_depth,
            )
    return Report(
        topology=topology,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        chip=target.chip,
        methods=tuple(methods),
        largest_batch=widest,
        largest_depth=deepest,
    )


def _check(
    fn_or_tx: Any,
    is_tx: bool,
    loss: Any,
    batch: Any,
    compare: Any,
    largest_batch: int,
    largest_depth: int,
) -> None:
    if not is_tx and not callable(fn_or_tx):
        raise ValueError(
            f"jzero.report({fn_or_tx!r}) needs a transformation of jzero.adamw or jzero.zero, or a "
            "step function"
        )
    if not is_tx and loss is not None:
        raise ValueError("loss= is for a transformation; a step function holds its own")
    if (loss is None) != (batch is None):
        missing = "batch" if batch is None else "loss"
        raise ValueError(f"loss and batch go together: {missing} is None")
    if compare and loss is None:
        raise ValueError("compare=True needs loss and batch: optax's steps are built of them")
    for name, value in (("largest_batch", largest_batch), ("largest_depth", largest_depth)):
        if value and loss is None:
            raise ValueError(f"{name}={value} needs loss and batch")


def _measure(
    program: Program, target: Target, mesh: jax.sharding.Mesh, options: dict[str, Any]
) -> Method:
    if hasattr(program.step, "lower"):
        jitted: Any = program.step
    else:
        jitted = jax.jit(
            program.step, donate_argnums=program.donate, out_shardings=program.out_shardings
        )
    begin = time.perf_counter()
    _log.info("compiling %s for %s", program.name, target.name)
    params, state = program.args[0], program.args[1] if len(program.args) > 1 else ()
    held = {"parameters": _local(params), "state": _local(state)}
    try:
        compiled = jitted.lower(*program.args).compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        used = _used(str(error))
        if used is None:
            raise
        memory = _split(used, held, program, 0)
        return Method(program.name, memory, False, None, (), time.perf_counter() - begin)
    text = compiled.as_text()
    analysis = compiled.memory_analysis()
    seconds = time.perf_counter() - begin
    _log.info("compiled %s in %.0f s", program.name, seconds)
    arguments = int(analysis.argument_size_in_bytes)
    peak = int(getattr(analysis, "peak_memory_in_bytes", 0))
    alive = arguments + int(analysis.output_size_in_bytes) - int(analysis.alias_size_in_bytes)
    if target.kind != "tpu" or not peak:
        # These runtimes hold one buffer for all temporaries from the step's start to its end.
        peak = max(peak, alive + int(analysis.temp_size_in_bytes))
    memory = _split(peak, held, program, arguments)
    timeline = simulate(parse(text), target)
    capacity = target.chip.memory
    fits = None if not capacity else peak <= capacity
    return Method(
        program.name, memory, fits, timeline, wires(timeline, mesh), seconds, program.gradients
    )


def _local(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = leaf.sharding
        total += local_bytes([leaf], [sharding.spec], sharding.mesh)
    return total


def _split(peak: int, held: dict[str, int], program: Program, arguments: int) -> Memory:
    known = held["parameters"] + held["state"]
    rest = max(0, peak - known)
    gradients = min(program.gradients, rest)
    return Memory(peak, held["parameters"], held["state"], gradients, rest - gradients, arguments)


def _used(message: str) -> int | None:
    """What the compiler says that a program needs that does not fit."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    found = re.search(r"(?:[Uu]sed|usage >?=|temporaries \() ?([\d.]+)([KMGT])", message)
    if found is None:
        return None
    return int(float(found[1]) * 2 ** (10 * (1 + "KMGT".index(found[2]))))
