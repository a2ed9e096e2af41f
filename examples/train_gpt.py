"""Train a byte-level GPT on several devices with jzero, and on one with optax, and compare.

    make demo
    python examples/train_gpt.py --size small --steps 200 --devices 8
    python examples/train_gpt.py --data ~/notes --precision bfloat16
    jzero launch -n 2 --devices-per-process 4 -- python examples/train_gpt.py
    python examples/train_gpt.py --checkpoint out/run --stop-at 90 --devices 8
    python examples/train_gpt.py --checkpoint out/run --devices 4

Without accelerators the devices are simulated on the CPU. Of several processes, each loads its own
part of every batch, and the first runs optax and writes. Writes loss.png, sample.txt and
summary.json to --out.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _devices import bytes_on, devices
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jzero

try:
    from _gpt import GPT, SIZES, Size, generate, loss_fn
    from _report import Curve, Progress, print_summary, summarize, write_plot, write_summary
    from _resume import Resume
    from _text import Text
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}; install what the examples need: pip install '.[examples]'") from (
        error
    )

# params, state, batch -> params, state, loss, norm of the gradient before clipping
Step = Callable[[Any, Any, Array], tuple[Any, Any, Array, Array]]

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
EVALUATIONS = 5
SAMPLE_BYTES = 400
CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves: the summary's numbers, and what they were taken from."""

    summary: dict[str, Any]
    ours: Curve
    theirs: Curve | None
    params: Any
    state: jzero.ZeroState


def optimizer_arguments(size: Size, steps: int) -> dict[str, Any]:
    """Arguments that optax.adamw and jzero.adamw share."""
    warmup = max(1, min(20, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        size.learning_rate / 10,
        size.learning_rate,
        warmup,
        max(steps, warmup + 1),
        size.learning_rate / 10,
    )
    return {"learning_rate": schedule, "b2": 0.95, "weight_decay": 0.1}


def sharded(
    loss_of: Callable[..., Array], arguments: dict[str, Any], bucket_mb: float, mesh: Mesh
) -> tuple[jzero.ZeroTransformation, Step]:
    """The optimizer and the compiled step on all devices of the mesh, with jzero."""
    zero = jzero.ZeroConfig(axis="data", mesh=mesh, bucket_mb=bucket_mb)
    tx = jzero.adamw(**arguments, clip_norm=CLIP_NORM, zero=zero)
    value_and_grad = jzero.value_and_grad(loss_of, zero=zero)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: jzero.ZeroState, batch: Array) -> Any:
        loss, grads = value_and_grad(params, batch)
        params, state = tx.step(grads, state, params)
        return params, state, loss, state.grad_norm

    return tx, step


def replicated(
    loss_of: Callable[..., Array], arguments: dict[str, Any], dtype: Any
) -> tuple[optax.GradientTransformation, Step]:
    """The same with optax on one device. ``params`` are float32; for a model in another dtype
    they are the master copy, as jzero keeps one, and the loss sees their rounding."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(**arguments))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(cast(params, dtype), batch)
        grads = cast(grads, jnp.float32)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    return tx, step


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def train(
    name: str,
    step: Step,
    evaluate: Callable[[Any], Array],
    params: Any,
    state: Any,
    batches: np.ndarray,
    sharding: Sharding,
    progress: Progress,
    resume: Resume | None = None,
    stop_at: int | None = None,
) -> tuple[Any, Any, Curve]:
    """Run all steps, or go on from a checkpoint; the curve says what each cost."""
    steps, batch, window = batches.shape
    device = min(sharding.addressable_devices, key=lambda d: d.id)
    curve = Curve(name, bytes_on(device, params), bytes_on(device, state))
    every = max(1, -(-steps // EVALUATIONS))
    if resume is not None:
        params, state = resume.load(params, state, curve)
        if curve.losses:
            progress.print(f"{name} goes on after step {len(curve.losses)}")
    steps = min(steps, stop_at or steps)
    with progress.of(curve, steps) as advance:
        for i in range(len(curve.losses), steps):
            start = time.perf_counter()
            placed = own_part(batches[i], sharding)
            params, state, loss, norm = step(params, state, placed)
            # Waiting for each step keeps the figures honest; a long run would look less often.
            curve.losses.append(float(loss))
            curve.norms.append(float(norm))
            curve.seconds.append(time.perf_counter() - start)
            if (i + 1) % every == 0 or i + 1 == steps:
                curve.held_out[i + 1] = float(evaluate(params))
            if resume is not None:
                resume.save(params, state, curve, last=i + 1 == steps)
            advance(batch * (window - 1))
    return params, state, curve


def own_part(batch: np.ndarray, sharding: Sharding) -> Array:
    """The batch on the devices of all processes, of which this one gives its own rows."""
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(batch, sharding)
    assert isinstance(sharding.mesh, Mesh)
    rows = jzero.distributed.local_rows(sharding.mesh, len(batch))
    return jzero.distributed.global_batch(batch[rows], sharding.mesh)


def run(options: argparse.Namespace) -> Result:
    """Train with jzero, then with optax, and write the comparison to ``options.out``.

    Raises:
      ValueError: options that do not fit each other, the machine or the text.
    """
    size, dtype = SIZES[options.size], DTYPES[options.precision]
    steps, batch = options.steps or size.steps, options.batch or size.batch
    jzero.distributed.initialize()  # nothing, in a lone process
    used = devices(options.devices)
    first = jax.process_index() == 0
    if batch % len(used):
        raise ValueError(
            f"--batch {batch} is not a multiple of {len(used)} devices, which each take an equal "
            f"part; use {max(1, batch // len(used)) * len(used)}, or other --devices"
        )
    text = Text(options.data, size.length)
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made a folder: {error}") from error

    graph, initial = nnx.split(GPT(size, dtype, nnx.Rngs(options.seed)), nnx.Param)
    batches = text.batches(steps, batch, size.length, options.seed)
    held_out = text.held_out_batch(16 * len(used), size.length)
    loss_of = functools.partial(loss_fn, graph)
    arguments = optimizer_arguments(size, steps)
    progress = Progress(quiet=not first)
    progress.print(
        f"{options.size} GPT, {sum(x.size for x in jax.tree.leaves(initial)):,} parameters in "
        f"{options.precision}, on {len(used)} devices ({used[0].device_kind}); "
        f"{text.train.size / 1e6:.1f} MB of text from {text.source}"
    )

    def start(sharding: Sharding, dtype: Any) -> Any:
        # A copy: the steps update it in place, and both runs start from the same values.
        return jax.device_put(jax.tree.map(lambda x: jnp.array(x, dtype), initial), sharding)

    # Auto axes: the evaluation below is split over the devices by XLA.
    mesh = jzero.distributed.make_mesh(devices=used, axis_types=AxisType.Auto)
    tx, step = sharded(loss_of, arguments, size.bucket_mb, mesh)
    params = start(NamedSharding(mesh, P()), dtype)
    rows = NamedSharding(mesh, P("data"))
    evaluate = functools.partial(jax.jit(loss_of), windows=jax.device_put(held_out, rows))
    params, state, ours = train(
        f"jzero, {len(used)} devices",
        step,
        evaluate,
        params,
        tx.init(params),
        batches,
        rows,
        progress,
        Resume(options.checkpoint, max(1, -(-steps // (2 * EVALUATIONS)))),
        options.stop_at,
    )

    theirs = None
    if options.reference and first:
        alone = SingleDeviceSharding(jax.local_devices()[0])
        tx, step = replicated(loss_of, arguments, dtype)
        master = start(alone, jnp.float32)
        rounded = jax.jit(lambda p, windows: loss_of(cast(p, dtype), windows))
        evaluate = functools.partial(rounded, windows=jax.device_put(held_out, alone))
        # Compiled, and placed: else its scalars have no device, and later steps compile anew.
        start_state = jax.jit(tx.init, out_shardings=alone)(master)
        _, _, theirs = train(
            "optax, 1 device",
            step,
            evaluate,
            master,
            start_state,
            batches[: len(ours.losses)],
            alone,
            progress,
        )
        if dtype != jnp.float32:  # the master copy is optimizer state; the model has its own
            theirs.state_bytes += theirs.param_bytes
            theirs.param_bytes = ours.param_bytes

    if not first:
        return Result({}, ours, None, params, state)
    prompt = bytes(text.held_out[: min(24, size.length)]).decode(errors="replace")
    sample = generate(
        graph,
        jax.tree.map(lambda x: x.addressable_data(0), params),
        prompt,
        SAMPLE_BYTES,
        size.length,
        options.seed,
    )
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    write_plot(out / "loss.png", ours, theirs)
    summary = summarize(ours, theirs, int(state.skipped), used, len(state.layout.buckets))
    write_summary(out / "summary.json", summary)
    progress.print(f"\nA sample, continuing {prompt!r} from the held-out text:\n\n{sample}\n")
    print_summary(progress.console, summary, out)
    return Result(summary, ours, theirs, params, state)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> Result:
    doc = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=sorted(SIZES), default="small", help="preset of model and training")
    add("--steps", type=positive, help="training steps; None: the preset's")
    add("--batch", type=positive, help="windows of text a step, all devices; None: the preset's")
    add("--devices", type=positive, help="None: all accelerators, or 8 simulated CPU devices")
    add("--precision", choices=sorted(DTYPES), default="float32", help="dtype of the parameters")
    add("--seed", type=int, default=0, help="of initialisation, batches and sample")
    add("--data", help="folder whose text files to train on; None: Python's standard library")
    add("--checkpoint", metavar="DIR", help="save there, and go on from what is there")
    add("--stop-at", type=positive, metavar="STEP", help="end after so many of the steps")
    add("--out", default="out/train_gpt", help="folder for what is written")
    add(
        "--reference",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train with optax on one device, which must have room for all of the state",
    )
    options = parser.parse_args(argv)
    try:
        return run(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
