"""Way 2 of 3: inside your own `jax.shard_map`, with its type check on or off.

    python examples/in_shard_map.py
    python examples/in_shard_map.py --no-check-vma

Everything of jzero runs on local arrays there; only the state's specs come from jzero.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from _devices import devices
from _mlp import Batch, Params, batches, init_params, largest_difference, loss_fn, one_device
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

TrainStep = Callable[[Params, jzero.ZeroState, Batch], tuple[Params, jzero.ZeroState, jax.Array]]


def build(mesh: Mesh, check_vma: bool) -> tuple[TrainStep, Params, jzero.ZeroState]:
    """The compiled step and what it starts from."""
    zero = jzero.ZeroConfig(axis="data", mesh=mesh)
    tx = jzero.adamw(3e-3, eps=1e-6, weight_decay=0.01, zero=zero)

    params = jax.device_put(init_params(), NamedSharding(mesh, P()))
    state: Any = tx.init(params)  # global arrays, made outside of the shard_map
    specs = jzero.partition_specs(state)  # P("data") for the shards, P() for the scalars

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs, P()),
        check_vma=check_vma,
    )
    def train_step(params: Params, state: jzero.ZeroState, batch: Batch) -> Any:
        # With check_vma on, jax.grad of replicated parameters all-reduces the whole gradient to
        # every device before you see it; jzero.value_and_grad keeps it a local partial sum, so
        # that one reduce-scatter a bucket is all that is sent. With check_vma off the two are
        # alike: jax.grad gives local partial sums, which tx.step also takes.
        loss, grads = jzero.value_and_grad(loss_fn, zero=zero)(params, batch)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    return train_step, params, state


def main(steps: int = 50, check_vma: bool = True) -> tuple[float, float]:
    """Train; returns the final loss and the largest difference to optax on one device."""
    mesh = jax.make_mesh((len(devices()),), ("data",), devices=devices())
    train_step, params, state = build(mesh, check_vma)
    loss = float("inf")
    for batch in batches(steps):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state, loss = train_step(params, state, batch)

    expected, expected_loss = one_device(optax.adamw(3e-3, eps=1e-6, weight_decay=0.01), steps)
    loss, difference = float(loss), largest_difference(params, expected)
    print(
        f"check_vma={check_vma}, {mesh.size} devices, {steps} steps: loss {loss:.6f}; "
        f"optax, 1 device: {expected_loss:.6f}"
    )
    print(f"largest relative difference of a parameter: {difference:.1e}")
    return loss, difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check-vma", action=argparse.BooleanOptionalAction, default=True)
    main(check_vma=parser.parse_args().check_vma)
