"""Models to measure: a GPT in plain JAX, its sizes as data, its layers scanned or unrolled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch. ``batch`` and ``length``: sequences, and tokens in each, a device.

    ``scanned``: layers are stacked into one leaf a kernel and run by ``lax.scan``, else each has
    leaves of its own. ``remat``: the backward pass recomputes each layer. ``bucket_mb``: for jzero.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    batch: int
    dtype: str = "float32"
    scanned: bool = True
    remat: bool = False
    bucket_mb: float = 100.0

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(shapes(self)))


_TINY = Size(layers=2, width=32, heads=2, vocab=64, length=16, batch=1, bucket_mb=0.05)
_SMALL = Size(layers=4, width=128, heads=4, vocab=512, length=32, batch=1, bucket_mb=1.0)
_GPT = Size(8, 2048, 16, 32_000, length=1024, batch=4, dtype="bfloat16", remat=True, bucket_mb=48.0)

SIZES: dict[str, Size] = {
    # Next to no work: what is left is what a call costs the host.
    "noop": Size(layers=1, width=8, heads=1, vocab=8, length=2, batch=1),
    "noop-unrolled": Size(4, 8, 1, 8, length=2, batch=1, scanned=False),
    "tiny": _TINY,
    "tiny-unrolled": dataclasses.replace(_TINY, scanned=False),
    "small": _SMALL,
    "small-unrolled": dataclasses.replace(_SMALL, scanned=False),
    # 13.8 M parameters, 55 MB of gradient: buckets of 1 to 32 MiB differ, and a laptop runs it.
    "medium-unrolled": Size(6, 384, 6, 4096, length=32, batch=1, scanned=False),
    # 534 M parameters: to compile for a pod, not to run on a laptop.
    "gpt-534m": _GPT,
    "gpt-534m-unrolled": dataclasses.replace(_GPT, scanned=False),
}


def init(size: Size, seed: int = 0) -> Params:
    """Parameters; traceable."""
    d, dtype = size.width, jnp.dtype(size.dtype)
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int, scale: float = 0.02) -> Array:
        return (jax.random.normal(next(keys), shape) * scale).astype(dtype)

    n, small = size.layers, 0.02 * (2 * size.layers) ** -0.5
    stacked = {
        "norm1": jnp.ones((n, d), dtype),
        "qkv": normal(n, d, 3 * d),
        "out": normal(n, d, d, scale=small),
        "norm2": jnp.ones((n, d), dtype),
        "up": normal(n, d, 4 * d),
        "down": normal(n, 4 * d, d, scale=small),
    }
    layers = stacked if size.scanned else [{k: v[i] for k, v in stacked.items()} for i in range(n)]
    return {
        "embed": normal(size.vocab, d),
        "layers": layers,
        "norm": jnp.ones(d, dtype),
        "head": normal(d, size.vocab),
    }


def shapes(size: Size) -> Params:
    """``init`` as ShapeDtypeStructs."""
    return jax.eval_shape(functools.partial(init, size))


def batch_shape(size: Size, devices: int) -> tuple[int, int]:
    """Of the tokens (int32) that ``loss_fn`` takes, on all devices together."""
    return size.batch * devices, size.length + 1


def loss_fn(
    size: Size, params: Any, tokens: Array, gather: Callable[[Any], Any] = lambda x: x
) -> Array:
    """Mean cross-entropy of the next token, over (batch, length + 1) tokens.

    ``gather``: from a part of ``params``, where it is used, to arrays.
    """
    x = jnp.take(gather(params["embed"]), tokens[:, :-1], axis=0)

    def block(x: Array, layer: Any) -> Array:
        return _block(size, x, gather(layer))

    if size.remat:
        block = jax.checkpoint(block)
    if size.scanned:
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    norm, head = gather(params["norm"]), gather(params["head"])
    logits = (_norm(x, norm) @ head).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _block(size: Size, x: Array, layer: Params) -> Array:
    """Causal attention, then an MLP; each reads a norm of the stream and adds to it."""
    batch, length, d = x.shape
    qkv = (_norm(x, layer["norm1"]) @ layer["qkv"]).reshape(batch, length, 3, size.heads, -1)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    x = x + mixed.reshape(batch, length, d) @ layer["out"]
    return x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale[None, None]
