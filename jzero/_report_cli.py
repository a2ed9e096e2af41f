"""``jzero report``: a ready model on a machine that one does not have."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Generator
from typing import Any

from jzero._config import ZeroConfig
from jzero._ready_models import MODELS

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2", metavar="MODEL", help=", ".join(MODELS))
    add(
        "--topology",
        default="tpu:v5e:4x4",
        help="such as tpu:v5e:16x16, tpu:v5e:16x16:2 (two slices), gpu:h200:8, cpu:8 "
        "(default: %(default)s)",
    )
    add("--lazy", action="store_true", help="parameters as shards, gathered inside the loss")
    add("--batch", type=int, metavar="N", help="sequences a device (default: the model's)")
    add("--length", type=int, metavar="TOKENS", help="of a sequence (default: the model's)")
    mb = ZeroConfig.bucket_mb
    add("--bucket-mb", type=float, default=mb, metavar="MIB", help="default: %(default)g")
    add("--options", action="store_true", help="compile with jzero.compiler_options")
    add("--compare", action="store_true", help="replicated and annotated optax too")
    add(
        "--largest-batch",
        type=int,
        default=0,
        metavar="COMPILATIONS",
        help="find the largest batch that fits, by at most so many more compilations",
    )
    add(
        "--largest-depth",
        type=int,
        default=0,
        metavar="COMPILATIONS",
        help="find how many layers of the model's shape fit, likewise",
    )
    add("--json", action="store_true", help="print JSON")
    add("--picture", metavar="FILE", help="draw the schedule into this file (PNG, SVG)")


def run(options: argparse.Namespace) -> int:
    """Compile and print; returns the exit status: 1 where the step does not fit."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs, so no device is needed
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # libtpu warns if it finds none
    import jax
    import jax.numpy as jnp

    from jzero._lazy import gather_params
    from jzero._options import compiler_options
    from jzero._precision import Precision
    from jzero._transform import adamw
    from jzero.report import report

    kind, _, count = options.topology.partition(":")
    if kind == "cpu" and count.isdigit():
        with contextlib.suppress(RuntimeError):  # JAX runs already, with what it has
            jax.config.update("jax_num_cpu_devices", int(count))
    model = MODELS[options.model]
    if options.length is not None:
        model = dataclasses.replace(model, length=options.length)
    narrow = None if model.dtype == "float32" else jnp.dtype(model.dtype)
    zero = ZeroConfig(
        bucket_mb=options.bucket_mb,
        param_sync="lazy" if options.lazy else "eager",
        stacked=model.stacked,
        precision=Precision(grad_sync=narrow if options.lazy else None),
    )
    each = model.batch if options.batch is None else options.batch
    try:
        tx = adamw(1e-4, zero=zero)

        def loss(params: Any, tokens: Any) -> Any:
            return model.loss(params, tokens, gather_params)

        with _progress():
            found = report(
                tx,
                model.shapes(),
                options.topology,
                loss=loss if options.lazy else model.loss,
                batch=model.batch_shape(each * _devices(options.topology)),
                compare=model.loss if options.compare else False,
                compiler_options=compiler_options(zero, options.topology)
                if options.options
                else None,
                largest_batch=options.largest_batch,
                largest_depth=options.largest_depth,
            )
    except (ValueError, ModuleNotFoundError, RuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        print(f"jzero report: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(found.to_json())
    else:
        size = f"{model.parameters / 1e6:,.0f} M parameters, {model.dtype}"
        print(f"{options.model}: {size}, {each} x {model.length} tokens a device")
        _show(found)
    if options.picture:
        found.picture(options.picture)
    return 1 if found.methods[0].fits is False else 0


@contextlib.contextmanager
def _progress() -> Generator[None]:
    """Tell on the standard error what is being compiled: it may take minutes."""
    log, handler = logging.getLogger("jzero.report"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jzero report: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _devices(topology: str) -> int:
    from jzero._targets import target_of

    return len(target_of(topology).devices)


def _show(found: Any) -> None:
    if importlib.util.find_spec("rich") is not None and sys.stdout.isatty():
        import rich

        rich.print(found)
    else:
        print(found)
