"""Models to report on: GPT-2 and Llama shapes in plain JAX, layers scanned, bfloat16 arithmetic.

They are here for their shapes: nobody need train them. Attention runs over blocks of queries and
the loss over blocks of tokens, each recomputed in the backward pass, so that neither scores nor
logits of a whole sequence are ever held.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["MODELS", "Model"]

COMPUTE = jnp.bfloat16
QUERIES = 512  # of attention at a time
TOKENS = 1024  # of the loss at a time, of a device's batch
ROPE_BASE = 500_000.0


def whole(part: Any) -> Any:
    """Parameters that need no gathering."""
    return part


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Attributes:
      layers, width, heads, kv_heads, hidden, vocab: its shape; ``hidden`` is the MLP's width.
      length: tokens of a sequence.
      batch: sequences a device, where none are asked for.
      llama: rotary positions, RMS norm and a gated MLP; else learned positions, layer norm with
        biases and GELU, as in GPT-2.
      tied: the embedding is the output matrix too.
      dtype: of the parameters.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    batch: int = 1
    llama: bool = True
    tied: bool = False
    dtype: str = "bfloat16"

    stacked = "layers"
    """The subtree of stacked layers, for ``jzero.shard_params(stacked=...)``."""

    @property
    def parameters(self) -> int:
        """How many."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes()))

    def shapes(self) -> dict[str, Any]:
        """Parameters as ShapeDtypeStructs."""
        d, kv = self.width, self.width // self.heads * self.kv_heads

        def stacked(*shape: int) -> Any:
            return leaf(self.layers, *shape)

        def leaf(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

        def norm(make: Callable[..., Any]) -> dict[str, Any]:
            return {"scale": make(d)} | ({} if self.llama else {"bias": make(d)})

        def matrix(rows: int, columns: int) -> dict[str, Any]:
            bias = {} if self.llama else {"bias": stacked(columns)}
            return {"kernel": stacked(rows, columns)} | bias

        layers = {
            "attention_norm": norm(stacked),
            "query": matrix(d, d),
            "key": matrix(d, kv),
            "value": matrix(d, kv),
            "out": matrix(d, d),
            "mlp_norm": norm(stacked),
            "up": matrix(d, self.hidden),
            "down": matrix(self.hidden, d),
        }
        if self.llama:
            layers["gate"] = matrix(d, self.hidden)
        params = {"embed": leaf(self.vocab, d), "layers": layers, "norm": norm(leaf)}
        if not self.llama:
            params["positions"] = leaf(self.length, d)
        if not self.tied:
            params["head"] = leaf(d, self.vocab)
        return params

    def batch_shape(self, sequences: int) -> Any:
        """The tokens that ``loss`` takes: (sequences, length + 1) int32."""
        return jax.ShapeDtypeStruct((sequences, self.length + 1), jnp.int32)

    def loss(self, params: Any, tokens: Array, gather: Callable[[Any], Any] = whole) -> Array:
        """Mean cross-entropy of the next token.

        Args:
          params: as ``shapes`` says, or shards of them.
          tokens: (sequences, length + 1) int32.
          gather: from a part of ``params``, where it is used, to arrays.
        """
        embed = gather(params["embed"])
        x = jnp.take(embed, tokens[:, :-1], axis=0).astype(COMPUTE)
        if not self.llama:
            x = x + gather(params["positions"]).astype(COMPUTE)[None]

        @jax.checkpoint
        def block(x: Array, layer: Any) -> tuple[Array, None]:
            return self._block(x, gather(layer)), None

        x, _ = lax.scan(block, x, params["layers"])
        x = self._norm(x, gather(params["norm"]))
        head = embed.T if self.tied else gather(params["head"])
        return _cross_entropy(x, head.astype(COMPUTE), tokens[:, 1:], max(1, TOKENS // self.batch))

    def _block(self, x: Array, layer: dict[str, Any]) -> Array:
        h = self._norm(x, layer["attention_norm"])
        q, k, v = (
            _linear(h, layer[name]).reshape(*h.shape[:2], heads, -1)
            for name, heads in (
                ("query", self.heads),
                ("key", self.kv_heads),
                ("value", self.kv_heads),
            )
        )
        if self.llama:
            q, k = _rotated(q), _rotated(k)
        x = x + _linear(_attention(q, k, v).reshape(x.shape), layer["out"])
        h = self._norm(x, layer["mlp_norm"])
        up = _linear(h, layer["up"])
        wide = jax.nn.silu(_linear(h, layer["gate"])) * up if self.llama else jax.nn.gelu(up)
        return x + _linear(wide, layer["down"])

    def _norm(self, x: Array, p: dict[str, Any]) -> Array:
        wide = x.astype(jnp.float32)
        if not self.llama:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
        scaled = wide.astype(x.dtype) * p["scale"].astype(x.dtype)[None, None]
        return scaled if self.llama else scaled + p["bias"].astype(x.dtype)[None, None]


def _linear(x: Array, p: dict[str, Any]) -> Array:
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype)[None, None] if "bias" in p else y


def _rotated(x: Array) -> Array:
    """Rotary positions of (batch, length, heads, dim)."""
    half = x.shape[-1] // 2
    rates = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates[None]
    cos, sin = (f(angles).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of (batch, length, heads, dim) over fewer or as many heads of k and v."""
    batch, length, heads, dim = q.shape
    size = _block_size(length, QUERIES)
    grouped = q.reshape(batch, length // size, size, k.shape[2], heads // k.shape[2], dim)

    @jax.checkpoint
    def one(block: tuple[Array, Array]) -> Array:
        queries, start = block
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, k).astype(jnp.float32) * dim**-0.5
        seen = jnp.arange(length)[None] <= start + jnp.arange(size)[:, None]
        scores = jnp.where(seen[None, None, None], scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)

    blocks = lax.map(one, (jnp.moveaxis(grouped, 1, 0), jnp.arange(0, length, size)))
    return jnp.moveaxis(blocks, 0, 1).reshape(q.shape)


def _cross_entropy(x: Array, head: Array, targets: Array, tokens: int) -> Array:
    """Over blocks of at most so many tokens of every sequence: the batch, which may be sharded by
    annotation, stays whole in each."""
    length = targets.shape[1]
    size = _block_size(length, tokens)

    @jax.checkpoint
    def one(block: tuple[Array, Array]) -> Array:
        h, target = block
        logits = (h @ head).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def blocks(x: Array) -> Array:
        split = x.reshape(x.shape[0], length // size, size, *x.shape[2:])
        return jnp.moveaxis(split, 1, 0)

    return jnp.sum(lax.map(one, (blocks(x), blocks(targets)))) / targets.size


def _block_size(length: int, largest: int) -> int:
    return next(n for n in range(min(length, largest), 0, -1) if length % n == 0)


_LLAMA = functools.partial(Model, kv_heads=8, vocab=128_256, length=4096)

# Shapes: GPT-2 (Radford et al., 2019); Llama 3.2 1B, Llama 3 8B and 70B (Grattafiori et al., 2024).
MODELS: dict[str, Model] = {
    "tiny": Model(2, 64, 4, 2, 128, vocab=256, length=32, dtype="float32"),
    "gpt2": Model(12, 768, 12, 12, 3072, 50_257, 1024, 4, False, True, "float32"),
    "llama-1b": _LLAMA(layers=16, width=2048, heads=32, hidden=8192, tied=True),
    "llama-8b": _LLAMA(layers=32, width=4096, heads=32, hidden=14_336),
    "llama-70b": _LLAMA(layers=80, width=8192, heads=64, hidden=28_672),
}
"""By the names that ``jzero report --model`` takes."""
