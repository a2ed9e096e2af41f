"""Way 1 of 3: plain `jit`. No shard_map in your code.

    python examples/plain_jit.py

`jzero.value_and_grad` runs the loss on each device's part of the batch and reduce-scatters the
gradient once a bucket; `tx.step` updates each device's shard and gathers the new parameters.
"""

import functools
from typing import Any

import jax
import optax
from _devices import bytes_on, devices
from _mlp import Batch, Params, batches, init_params, largest_difference, loss_fn, one_device
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero


def main(steps: int = 50) -> tuple[float, float]:
    """Train; returns the final loss and the largest difference to optax on one device."""
    mesh = jax.make_mesh((len(devices()),), ("data",), devices=devices())
    zero = jzero.ZeroConfig(axis="data", mesh=mesh)
    tx = jzero.adamw(3e-3, eps=1e-6, weight_decay=0.01, zero=zero)
    value_and_grad = jzero.value_and_grad(loss_fn, zero=zero)

    # Donated: parameters and state are updated in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Params, state: jzero.ZeroState, batch: Batch) -> Any:
        loss, grads = value_and_grad(params, batch)  # the mean over all devices
        params, state = tx.step(grads, state, params)
        return params, state, loss

    params = jax.device_put(init_params(), NamedSharding(mesh, P()))
    state = tx.init(params)
    loss = float("inf")
    for batch in batches(steps):
        params, state, loss = train_step(params, state, batch)

    expected, expected_loss = one_device(optax.adamw(3e-3, eps=1e-6, weight_decay=0.01), steps)
    loss, difference = float(loss), largest_difference(params, expected)
    print(
        f"{mesh.size} devices, {steps} steps: loss {loss:.6f}; optax, 1 device: {expected_loss:.6f}"
    )
    print(f"largest relative difference of a parameter: {difference:.1e}")
    print(f"optimizer state on each device: {bytes_on(mesh.devices.flat[0], state):,} bytes")
    return loss, difference


if __name__ == "__main__":
    main()
