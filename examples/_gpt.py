"""A byte-level GPT in flax nnx."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

BYTES = 256
Initializer = jax.nn.initializers.Initializer


@dataclasses.dataclass(frozen=True)
class Size:
    """A preset: the model, what suits it, and how large a bucket of jzero is."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    steps: int
    learning_rate: float
    bucket_mb: float


SIZES = {
    "tiny": Size(2, 32, 2, 32, 16, 100, 4e-3, 0.05),
    "small": Size(3, 128, 4, 32, 64, 200, 2e-3, 1.0),
    "medium": Size(6, 384, 6, 256, 64, 2000, 1e-3, 8.0),
    "large": Size(12, 768, 12, 1024, 64, 5000, 6e-4, 50.0),
}


class Block(nnx.Module):
    """Causal attention, then an MLP; each reads a norm of the stream and adds to it."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        # The stream is a sum of 2 x layers outputs: make each smaller, so that it starts at one.
        small = jax.nn.initializers.normal(0.02 * (2 * size.layers) ** -0.5)
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        norm = functools.partial(nnx.LayerNorm, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.heads = size.heads
        self.norm1, self.norm2 = norm(size.width), norm(size.width)
        self.qkv = linear(size.width, 3 * size.width)
        self.out = linear(size.width, size.width, kernel_init=small)
        self.up = linear(size.width, 4 * size.width)
        self.down = linear(4 * size.width, size.width, kernel_init=small)

    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes (batch, length) to float32 logits of each next byte (batch, length, 256)."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        normal = jax.nn.initializers.normal(0.02)
        embed = functools.partial(
            nnx.Embed, features=size.width, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.bytes = embed(BYTES, embedding_init=normal)
        self.places = embed(size.length, embedding_init=normal)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            size.width,
            BYTES,
            use_bias=False,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=normal,
            rngs=rngs,
        )

    def __call__(self, text: Array) -> Array:
        x = self.bytes(text) + self.places(jnp.arange(text.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(graph: nnx.GraphDef[GPT], params: Any, windows: Array) -> Array:
    """Mean cross-entropy, in nats a byte, over (batch, length + 1) windows of text."""
    text = windows.astype(jnp.int32)
    logits = nnx.merge(graph, params)(text[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]))


@functools.partial(jax.jit, static_argnames=("graph", "count", "length"))
def _generate(graph: Any, params: Any, prompt: Array, count: int, length: int, key: Array) -> Array:
    model = nnx.merge(graph, params)

    def next_byte(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        window, filled = carry
        logits = model(window[None])[0, filled - 1]
        byte = jax.random.categorical(key, logits / 0.7)  # a little bolder than the model
        full = filled == length
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, length - 1, filled)].set(byte)
        return (window, jnp.minimum(filled + 1, length)), byte

    window = jnp.zeros(length, jnp.int32).at[: prompt.size].set(prompt)
    start = (window, jnp.asarray(prompt.size, jnp.int32))
    return jax.lax.scan(next_byte, start, jax.random.split(key, count))[1]


def generate(graph: Any, params: Any, prompt: str, count: int, length: int, seed: int) -> str:
    """``count`` bytes of text that continue the prompt, on the device of ``params``."""
    start = np.frombuffer(prompt.encode()[-length:], np.uint8).astype(np.int32)
    made = _generate(graph, params, start, count, length, jax.random.key(seed))
    text = prompt + bytes(np.asarray(made, np.uint8)).decode(errors="replace")
    # An untrained model also makes control characters, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
