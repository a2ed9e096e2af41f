"""One of the processes of test_ddp_processes."""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

RANK = int(sys.argv[1])


class Start(nnx.Module):
    def __init__(self, value: int):
        self.count = nnx.Variable(jnp.full(1, value, jnp.int32))
        self.frozen = nnx.Variable(jnp.full(1, value, jnp.bfloat16))
        self.trained = nnx.Param(jnp.full(1, value, jnp.float32))
        self.flag = nnx.Variable(jnp.full(1, bool(value)))
        self.rngs = nnx.Rngs(value)


class Net(nnx.Module):
    """Runs first, middle, last; by name their reverse is middle, last, first."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)

        def draw() -> nnx.Dict:
            return nnx.Dict(kernel=nnx.Param(jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)))

        self.first, self.middle, self.last = draw(), draw(), draw()

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.middle):
            x = jnp.tanh(x @ layer["kernel"][...])
        return x @ self.last["kernel"][...]


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def values(node: Any) -> list[Any]:
    return [np.asarray(x[...]).item() for x in (node.count, node.frozen, node.trained, node.flag)]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)


def main() -> None:
    report: dict[str, Any] = {}
    jax.distributed.initialize(f"127.0.0.1:{os.environ['JZERO_TEST_PORT']}", 2, RANK)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ddp = jzero.DistributedDataParallel(Start(RANK), mesh, init_sync=False)
    report["values before"] = values(ddp.module)
    report["difference before"] = ddp.first_difference()
    ddp.broadcast()
    report["values after"] = values(ddp.module)
    names = ("count", "frozen", "trained", "flag")
    report["dtypes after"] = [str(getattr(ddp.module, name)[...].dtype) for name in names]
    report["difference after"] = ddp.first_difference()
    report["key after"] = np.asarray(jax.random.key_data(ddp.module.rngs.default.key[...])).tolist()

    model = Net(0)
    if RANK == 1:
        kernel = model.middle["kernel"]
        kernel[...] = kernel[...].at[2, 2].add(1e-6)
    wrapped = jzero.DistributedDataParallel(model, mesh, init_sync=False)
    report["one difference"] = wrapped.first_difference()
    try:
        jzero.broadcast({"x": jnp.zeros(3 + RANK)}, zero=jzero.ZeroConfig(mesh=mesh))
    except ValueError as error:
        report["other shapes"] = str(error)

    ddp = jzero.DistributedDataParallel(Net(RANK), mesh, bucket_cap_mb=2**-15, static_graph=True)
    optimizer = nnx.Optimizer(ddp, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(ddp: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = ddp.value_and_grad(loss_fn)(ddp, batch)
        optimizer.update(ddp, grads)
        return loss

    sharding = NamedSharding(mesh, P("data"))
    losses = []
    for i in range(3):
        mine = [x[4 * RANK : 4 * RANK + 4] for x in batch(i)]
        part = tuple(jax.make_array_from_process_local_data(sharding, x) for x in mine)
        losses.append(float(step(ddp, optimizer, part)))
    report["losses"] = losses
    report["order"] = [slot.path for bucket in ddp.buckets for slot in bucket.slots]
    report["still equal"] = ddp.first_difference()
    report["params"] = flat(ddp)

    alone = Net(0)
    reference = nnx.Optimizer(alone, optax.sgd(0.1), wrt=nnx.Param)
    report["alone losses"] = []
    for i in range(3):
        loss, grads = nnx.value_and_grad(loss_fn)(alone, batch(i))
        reference.update(alone, grads)
        report["alone losses"].append(float(loss))
    report["alone params"] = flat(alone)
    print(json.dumps(report))


def flat(node: Any) -> list[float]:
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(node, nnx.Param)))
    return np.concatenate([np.asarray(x).ravel() for x in leaves]).tolist()


if __name__ == "__main__":
    main()
