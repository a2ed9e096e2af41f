"""jzero.DistributedDataParallel of a flax linen model: a small CNN with BatchNorm on digits.

    python examples/linen_ddp.py

A linen wrapper is a pytree of the model's variables: pass it through `jax.jit` and return it. The
statistics that a call changes are kept in it, as an nnx module keeps its own. Without accelerators
the devices are simulated on the CPU. Writes accuracy.png to --out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _devices import devices
from jax import Array
from jax.sharding import AxisType

import jzero

try:
    import flax.linen as nn
    from _digits import Batch, Digits, Run
except ImportError as error:
    raise SystemExit(f"{error}; install what the examples need: pip install '.[examples]'") from (
        error
    )


class CNN(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        for i, width in enumerate((self.width, 2 * self.width)):
            x = nn.Conv(width, (3, 3), use_bias=False, name=f"conv{i}")(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm{i}")(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10, name="head")(x)


def loss_fn(model: Any, batch: Batch, key: Array) -> Array:
    images, labels = batch
    logits = model(images, rngs={"dropout": key})  # the key is this device's own
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def accuracy(ddp: Any, batch: Batch) -> Array:
    return jnp.mean(ddp(batch[0], train=False).argmax(-1) == batch[1])


def main(argv: Sequence[str] | None = None) -> Run:
    """Train, print and plot; returns the run."""
    args = _arguments(argv)
    mesh = jax.make_mesh(
        (args.devices,), ("data",), (AxisType.Auto,), devices=devices(args.devices)
    )
    digits, run = Digits(), Run(f"linen CNN, {args.devices} devices", args.epochs)

    module = CNN()
    variables = module.init(jax.random.key(0), digits.held_out[0][:1], train=False)
    ddp = jzero.DistributedDataParallel(module, mesh, variables=variables)
    tx = optax.adamw(3e-3)
    state = tx.init(ddp.params)

    @jax.jit
    def train_step(ddp: Any, state: Any, batch: Batch, key: Array) -> tuple[Any, Any, Array]:
        loss, grads = ddp.value_and_grad(loss_fn)(ddp, batch, key)
        updates, state = tx.update(grads, state, ddp.params)
        return ddp.replace(params=optax.apply_updates(ddp.params, updates)), state, loss

    with run.bar:
        for epoch in range(args.epochs):
            losses: list[Array] = []
            for step, batch in enumerate(digits.batches(args.batch, epoch)):
                key = jax.random.fold_in(jax.random.key(epoch), step)
                ddp, state, loss = train_step(ddp, state, batch, key)
                losses.append(loss)
            run.epoch([float(x) for x in losses], float(accuracy(ddp, digits.held_out)))

    differs = ddp.first_difference()
    run.console.print(
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
    parser.add_argument(
        "--out", type=Path, default=Path("out/linen_ddp"), help="folder to write to"
    )
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.devices < 1 or args.batch < 1:
        parser.error("--epochs, --devices and --batch must be at least 1")
    if args.batch % args.devices:
        parser.error(f"--batch {args.batch} is not a multiple of {args.devices} devices")
    return args


if __name__ == "__main__":
    main()
