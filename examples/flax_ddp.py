"""jzero.DistributedDataParallel of a flax nnx model: a ResNet with BatchNorm on images of digits.

    python examples/flax_ddp.py
    python examples/flax_ddp.py --epochs 20 --zero      # optimizer state sharded by jzero.adamw

Compared with the same training on one device, three lines change: the model is wrapped, gradients
come from `ddp.value_and_grad`, and with --zero the optimizer is `jzero.adamw`. Without
accelerators the devices are simulated on the CPU. Writes accuracy.png to --out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _devices import bytes_on, devices
from jax import Array
from jax.sharding import AxisType

import jzero

try:
    from _digits import Batch, Digits, Run
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}; install what the examples need: pip install '.[examples]'") from (
        error
    )


class Block(nnx.Module):
    """Two 3 x 3 convolutions beside the identity, or a 1 x 1 convolution to another shape."""

    def __init__(self, width_in: int, width: int, stride: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(width_in, width, (3, 3), stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        if stride != 1 or width_in != width:
            self.skip = nnx.Conv(width_in, width, (1, 1), stride, use_bias=False, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = self.norm2(self.conv2(y), use_running_average=not train)
        return nnx.relu(y + (self.skip(x) if hasattr(self, "skip") else x))


class ResNet(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(width, width, 1, rngs), Block(width, 2 * width, 2, rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * width, 10, rngs=rngs)

    def __call__(self, x: Array, train: bool = True) -> Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, train)
        return self.head(self.dropout(x.mean((1, 2)), deterministic=not train))


def loss_fn(model: Any, batch: Batch) -> Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def main(argv: Sequence[str] | None = None) -> Run:
    """Train, print and plot; returns the run."""
    args = _arguments(argv)
    mesh = jax.make_mesh(
        (args.devices,), ("data",), (AxisType.Auto,), devices=devices(args.devices)
    )
    digits, run = Digits(), Run(f"ResNet, {args.devices} devices", args.epochs)

    # The first device's parameters and statistics, on all of them.
    ddp = jzero.DistributedDataParallel(ResNet(args.width, nnx.Rngs(0)), mesh, static_graph=True)
    steps = args.epochs * (len(digits.train[1]) // args.batch)
    schedule = optax.cosine_decay_schedule(args.learning_rate, steps)
    if args.zero:
        tx = jzero.adamw(schedule, weight_decay=1e-2, zero=jzero.ZeroConfig(mesh=mesh))
    else:
        tx = optax.adamw(schedule, weight_decay=1e-2)
    optimizer = nnx.Optimizer(ddp, tx, wrt=nnx.Param)
    value_and_grad = ddp.value_and_grad(loss_fn, zero=tx if args.zero else None)

    @nnx.jit
    def train_step(ddp: Any, optimizer: nnx.Optimizer[Any], batch: Batch) -> Array:
        loss, grads = value_and_grad(ddp, batch)  # the batch is split over the devices
        optimizer.update(ddp, grads)
        return loss

    @nnx.jit
    def accuracy(ddp: Any, batch: Batch) -> Array:
        return jnp.mean(ddp(batch[0], train=False).argmax(-1) == batch[1])

    with run.bar:
        for epoch in range(args.epochs):
            losses = [train_step(ddp, optimizer, b) for b in digits.batches(args.batch, epoch)]
            run.epoch([float(x) for x in losses], float(accuracy(ddp, digits.held_out)))

    differs = ddp.first_difference()
    params = nnx.state(ddp, nnx.Param)
    count = sum(x.size for x in jax.tree.leaves(params))
    state = bytes_on(mesh.devices.flat[0], optimizer.opt_state)
    run.console.print(
        f"{count:,} parameters in {len(ddp.buckets)} buckets; optimizer state on each device: "
        f"{state:,} bytes\n"
        f"devices after {len(run.losses)} steps: "
        + ("bit-identical" if differs is None else f"{differs} DIFFERS")
    )
    run.console.print(f"held-out accuracy: {run.accuracies[-1]:.1%}")
    run.plot(args.out / "accuracy.png")
    run.console.print(f"Written to {args.out}: accuracy.png")
    return run


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images")
    parser.add_argument("--batch", type=int, default=128, help="images in a step, on all devices")
    parser.add_argument("--devices", type=int, default=8, help="devices to split a batch over")
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--zero", action="store_true", help="shard the optimizer: jzero.adamw")
    parser.add_argument("--out", type=Path, default=Path("out/flax_ddp"), help="folder to write to")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.devices < 1 or args.batch < 1:
        parser.error("--epochs, --devices and --batch must be at least 1")
    if args.batch % args.devices:
        parser.error(f"--batch {args.batch} is not a multiple of {args.devices} devices")
    return args


if __name__ == "__main__":
    main()
