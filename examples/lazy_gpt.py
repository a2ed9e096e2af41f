"""Lazy parameter sync: each device keeps a share of the parameters and gathers one layer at a time.

    python examples/lazy_gpt.py            # a byte-level GPT on the standard library's sources
    python examples/lazy_gpt.py --steps 200 --data FOLDER

The layers are one stack, run by a scan. `shard_params` cuts each layer by itself, the loss gathers
it where it is used, and autodiff reduce-scatters its gradient where the backward pass leaves it.
Beside it trains optax on one device, with the same batches.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _devices import bytes_on, devices
from _gpt import BYTES, SIZES, Block
from _text import Text
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

SIZE = SIZES["tiny"]


def init_params(seed: int = 0) -> tuple[Any, Any]:
    """The graph of one layer, and parameters: those of all layers stacked."""
    keys = jax.random.split(jax.random.key(seed), SIZE.layers + 3)

    @jax.vmap
    def layers(key: Array) -> Any:
        return nnx.state(Block(SIZE, jnp.float32, nnx.Rngs(key)), nnx.Param)

    graph = nnx.graphdef(Block(SIZE, jnp.float32, nnx.Rngs(0)))

    def normal(key: Array, *shape: int) -> Array:
        return 0.02 * jax.random.normal(key, shape)

    return graph, {
        "bytes": normal(keys[0], BYTES, SIZE.width),
        "places": normal(keys[1], SIZE.length, SIZE.width),
        "layers": layers(keys[3:]),
        "head": normal(keys[2], SIZE.width, BYTES),
    }


def loss_fn(graph: Any, params: Any, windows: Array, gather: Any = jzero.gather_params) -> Array:
    """Mean cross-entropy of the next byte. ``params`` are shards; ``gather`` gives arrays."""
    text = windows.astype(jnp.int32)
    x = gather(params["bytes"])[text[:, :-1]] + gather(params["places"])[None]

    @jax.checkpoint  # gathers again in the backward pass; policy=jzero.save_gathered would keep
    def layer(x: Array, part: Any) -> tuple[Array, None]:
        return nnx.merge(graph, gather(part))(x), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = x @ gather(params["head"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]))


def main(steps: int = 30, data: str | None = None) -> tuple[list[float], list[float]]:
    """Train; returns the losses of jzero and of optax on one device."""
    mesh = jax.make_mesh((len(devices()),), ("data",), devices=devices())
    zero = jzero.ZeroConfig(axis="data", mesh=mesh, param_sync="lazy")
    tx = jzero.adamw(SIZE.learning_rate, zero=zero)
    graph, params = init_params()

    shards = jzero.shard_params(params, zero=zero, stacked="layers")
    state = tx.init(shards)
    value_and_grad = jzero.value_and_grad(functools.partial(loss_fn, graph), zero=zero)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(shards: jzero.ParamShards, state: jzero.ZeroState, windows: Array) -> Any:
        loss, grads = value_and_grad(shards, windows)  # shards of the mean gradient
        shards, state = tx.step(grads, state, shards)  # no communication but the norm's
        return shards, state, loss

    single = optax.adamw(SIZE.learning_rate)

    @jax.jit
    def one_device(params: Any, opt: Any, windows: Array) -> Any:
        loss, grads = jax.value_and_grad(
            lambda p: loss_fn(graph, p, windows, gather=lambda part: part)
        )(params)
        updates, opt = single.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    whole, opt = params, single.init(params)
    losses: tuple[list[float], list[float]] = ([], [])
    for windows in Text(data, SIZE.length).batches(steps, SIZE.batch, SIZE.length, seed=0):
        split = jax.device_put(windows, NamedSharding(mesh, P("data")))
        shards, state, loss = train_step(shards, state, split)
        whole, opt, expected = one_device(whole, opt, windows)
        losses[0].append(float(loss))
        losses[1].append(float(expected))

    device = mesh.devices.flat[0]
    print(f"{mesh.size} devices, {steps} steps: loss {losses[0][0]:.4f} -> {losses[0][-1]:.4f}")
    print(f"optax, 1 device: {losses[1][-1]:.4f}")
    print(f"parameters on each device: {bytes_on(device, shards):,} bytes of shards")
    print(f"               all of them: {sum(x.nbytes for x in jax.tree.leaves(params)):,} bytes")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--data", help="a folder of text; the standard library's sources if none")
    main(**vars(parser.parse_args()))
