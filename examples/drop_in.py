"""Way 3 of 3: a program that you have already, with one line changed.

    python examples/drop_in.py

The program is data parallel by annotation: the batch is split by a NamedSharding, and XLA reduces
the gradients of the replicated parameters. With `jzero.adamw` in place of `optax.adamw` each
device keeps and updates only its shard of the optimizer state. (XLA has then summed the gradient
in full; ways 1 and 2 reduce-scatter it instead, and hold only shards of it.)
"""

from typing import Any

import jax
import optax
from _devices import bytes_on, devices
from _mlp import Batch, Params, batches, init_params, largest_difference, loss_fn, one_device
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero


def train(tx: optax.GradientTransformation, mesh: Mesh, steps: int) -> tuple[Params, Any, float]:
    """The program that you have already: nothing in it knows of jzero."""
    params = jax.device_put(init_params(), NamedSharding(mesh, P()))
    state = tx.init(params)

    @jax.jit
    def train_step(params: Params, state: Any, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    loss = float("inf")
    for batch in batches(steps):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state, loss = train_step(params, state, batch)
    return params, state, float(loss)


def main(steps: int = 50) -> tuple[float, float]:
    """Train; returns the final loss and the largest difference to optax on one device."""
    mesh = jax.make_mesh((len(devices()),), ("data",), (AxisType.Auto,), devices=devices())

    tx = optax.adamw(3e-3, eps=1e-6, weight_decay=0.01)
    _, replicated, _ = train(tx, mesh, steps)

    tx = jzero.adamw(
        3e-3, eps=1e-6, weight_decay=0.01, zero=jzero.ZeroConfig(mesh=mesh)
    )  # the line
    params, sharded, loss = train(tx, mesh, steps)

    expected, expected_loss = one_device(optax.adamw(3e-3, eps=1e-6, weight_decay=0.01), steps)
    difference = largest_difference(params, expected)
    print(
        f"{mesh.size} devices, {steps} steps: loss {loss:.6f}; optax, 1 device: {expected_loss:.6f}"
    )
    print(f"largest relative difference of a parameter: {difference:.1e}")
    for name, state in {"optax": replicated, "jzero": sharded}.items():
        print(f"{name} state on each device: {bytes_on(mesh.devices.flat[0], state):,} bytes")
    return loss, difference


if __name__ == "__main__":
    main()
