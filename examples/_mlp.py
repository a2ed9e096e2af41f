"""What the three short examples train: a small model, its data, and optax's result."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

Params = dict[str, Array]
Batch = dict[str, np.ndarray]

WIDTHS = (16, 64, 64, 1)


def init_params(seed: int = 0) -> Params:
    """Weights and biases of an MLP, float32."""
    rng = np.random.default_rng(seed)
    params: Params = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(WIDTHS)):
        kernel = rng.normal(0, fan_in**-0.5, (fan_in, fan_out))
        params[f"kernel{i}"] = jnp.asarray(kernel, jnp.float32)
        params[f"bias{i}"] = jnp.zeros(fan_out, jnp.float32)
    return params


def loss_fn(params: Params, batch: Any) -> Array:
    """Mean squared error over whatever part of the batch it is given."""
    h = batch["x"]
    for i in range(len(WIDTHS) - 1):
        h = h @ params[f"kernel{i}"] + params[f"bias{i}"][None]
        h = jnp.tanh(h) if i < len(WIDTHS) - 2 else h
    return jnp.mean(jnp.square(h[:, 0] - batch["y"]))


def batches(steps: int, size: int = 128, seed: int = 1) -> list[Batch]:
    """The same batches in every run: y is a smooth function of x."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=WIDTHS[0])
    x = rng.normal(size=(steps, size, WIDTHS[0])).astype(np.float32)
    y = np.sin(x @ direction).astype(np.float32)
    return [{"x": x[i], "y": y[i]} for i in range(steps)]


def one_device(tx: optax.GradientTransformation, steps: int) -> tuple[Params, float]:
    """Train on one device with optax; what every other run must equal.

    Up to rounding: the sum over devices adds in another order. Adam divides by the gradient's
    own size, so where a gradient is all rounding error, any optimizer's step is too; the examples'
    eps=1e-6 lies above that and below the gradients.
    """
    params = init_params()
    state = tx.init(params)

    @jax.jit
    def train_step(params: Params, state: Any, batch: Batch) -> tuple[Params, Any, Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]

    loss = jnp.inf
    for batch in batches(steps):
        params, state, loss = train_step(params, state, batch)
    return params, float(loss)


def largest_difference(params: Params, expected: Params) -> float:
    """Over all leaves, the largest difference relative to the leaf's largest element."""

    def difference(a: Array, b: Array) -> float:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(x - y)) / np.max(np.abs(y)))

    return max(jax.tree.leaves(jax.tree.map(difference, params, expected)))
