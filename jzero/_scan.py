"""A scan over stacked layers that gathers a layer while the one before it computes.

[Note: prefetch]
``lax.scan`` over shards, with a gather in its body, puts the all-gather in front of the layer that
waits for it. Here the loop carries the gathered parameters of the layer that is due, and its body
gathers those of the next one, which nothing in that iteration waits for: a compiler that runs
collectives asynchronously can hide them behind the layer's arithmetic. Drawn for 3 layers, g for
a gather, r for a reduce-scatter, each column one iteration::

    forward    g0 |layer 0  |layer 1  |layer 2         backward  g2 |      |layer 1' |layer 0' |
                  |g1       |g2       |                  layer 2' g1|      |g0 r2    |r1       |r0

Autodiff of such a carry would keep every gathered layer. So the backward pass is written out: it
recomputes each layer from its input, as ``jax.checkpoint`` does, gathers the layer before, and
reduce-scatters the gradient of the layer after, both beside the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero._collectives import vary
from jzero._gather import backward
from jzero._mesh import Axes, resolve_axes
from jzero._shards import ParamShards, gather_local, how_to_gather

__all__ = ["scan_layers"]

Body = Callable[..., Any]


def scan_layers(body: Body, carry: Any, shards: ParamShards, *args: Any) -> Any:
    """``carry = body(carry, params, *args)`` for each layer of a stack in turn, where ``params``
    are that layer's, gathered one layer ahead; see [Note: prefetch].

    Differentiable by ``carry``, ``shards`` and ``args``. It keeps the input of every layer and
    recomputes the layer in the backward pass, as a scan over ``jax.checkpoint(body)`` does, and
    holds two layers' gathered parameters where that holds one, and, in the backward pass, two
    layers' gradients. Collectives: those of that scan, and one gather more in the backward pass.

    Args:
      body: a pure function that returns something like ``carry`` (same structure, shapes and
        dtypes). Arrays that it needs beside the parameters come as ``args``: under autodiff it
        must not close over arrays that depend on what is differentiated.
      carry: floating arrays (a pytree).
      shards: the stacked part of what ``shard_params(..., stacked=...)`` returned, unsliced.
      args: given whole to every layer (a pytree each).

    Returns:
      The last carry.

    Raises:
      ValueError: shards that are not one stack; a call outside of ``shard_map`` and
        ``jzero.value_and_grad``.
    """
    counts = {s.layers for s in shards.plan.layout.slots + shards.plan.frozen.slots}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "scan_layers needs shards of stacked layers alone, such as shards['layers'] of "
            f"shard_params(params, stacked='layers'); these have {sorted(counts)} layers"
        )
    axes = resolve_axes(shards.config)
    if not axes.manual:
        raise ValueError(
            "scan_layers runs inside the loss of jzero.value_and_grad, or inside a shard_map over "
            f"{axes.names}"
        )
    rest = dataclasses.replace(shards, buckets=(), probes=None)
    how = _How(body, axes, counts.pop())
    return _scan(how, vary(carry, axes), shards.buckets, shards.probes, rest, args)


@dataclasses.dataclass(frozen=True)
class _How:
    """What does not change from layer to layer, and is no array."""

    body: Body
    axes: Axes
    layers: int

    def call(self, x: Any, params: Any, args: Any) -> Any:
        return vary(self.body(x, params, *args), self.axes)

    def layer(self, tree: Any, i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)

    def gathered(self, rest: ParamShards, buckets: Any, i: Any) -> Any:
        part = dataclasses.replace(self.layer(rest, i), buckets=self.layer(buckets, i))
        return gather_local(part, self.axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(how: _How, carry: Any, buckets: Any, probes: Any, rest: Any, args: Any) -> Any:
    return _forward(how, carry, buckets, probes, rest, args)[0]


def _forward(how: _How, carry: Any, buckets: Any, probes: Any, rest: Any, args: Any) -> Any:
    def step(state: Any, i: Any) -> Any:
        x, params = state
        ahead = how.gathered(rest, buckets, i + 1)
        return (how.call(x, params, args), ahead), x

    last = how.layers - 1
    (x, params), inputs = lax.scan(step, (carry, how.gathered(rest, buckets, 0)), jnp.arange(last))
    return how.call(x, params, args), (inputs, x, buckets, probes, rest, args)


def _backward(how: _How, residuals: Any, cotangent: Any) -> Any:
    inputs, x, buckets, probes, rest, args = residuals
    last, axes, layout = how.layers - 1, how.axes, rest.plan.layout
    trained = _Part(rest.plan.trains)
    floating = _Part(tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jax.tree.leaves(args)))

    def one(x: Any, params: Any, cotangent: Any) -> Any:
        """Cotangents of a layer's input, of its trained parameters and of floating args."""

        def call(x: Any, own: Any, more: Any) -> Any:
            return how.call(x, trained.join(params, own), floating.join(args, more))

        _, pull = jax.vjp(call, x, trained.take(params), floating.take(args))
        return pull(cotangent)

    def reduced(totals: Any, grads: list[Any], i: Any) -> Any:
        """``totals`` with the gradient of layer ``i``, scattered, in its place."""
        paths = [p for p, t in zip(rest.plan.paths, rest.plan.trains, strict=True) if t]
        by_path = dict(zip(paths, grads, strict=True))
        new: list[Any] = []
        for number, (total, bucket) in enumerate(zip(totals, layout.buckets, strict=True)):
            weight = probes[number].reshape(-1)[0] if probes and rest.weighted else None
            to = how_to_gather(rest, bucket, axes)
            shard = backward(to, by_path, weight, probed=probes is not None)
            new.append(lax.dynamic_update_index_in_dim(total, shard, i, 0))
        return tuple(new)

    def step(state: Any, at: Any) -> Any:
        cotangent, params, grads, totals, dargs = state
        i, x = at
        ahead = how.gathered(rest, buckets, jnp.maximum(i - 1, 0))
        totals = reduced(totals, grads, i + 1)
        cotangent, grads, more = one(x, params, cotangent)
        return (cotangent, ahead, grads, totals, jax.tree.map(jnp.add, dargs, more)), None

    ahead = how.gathered(rest, buckets, max(last - 1, 0))
    cotangent, grads, dargs = one(x, how.gathered(rest, buckets, last), cotangent)
    zeros = [jnp.zeros_like(x) for x in (buckets if probes is None else probes)]
    state = (cotangent, ahead, grads, tuple(vary(zeros, axes, (axes.shard,))), dargs)
    (cotangent, _, grads, totals, dargs), _ = lax.scan(
        step, state, (jnp.arange(last), inputs), reverse=True
    )
    totals = reduced(totals, grads, 0)
    dbuckets, dprobes = (totals, None) if probes is None else (None, totals)
    return cotangent, dbuckets, dprobes, None, floating.join(args, dargs, others=None)


class _Part:
    """Some leaves of a tree: those that ``flags`` says, in leaf order, ``None`` leaves counted
    where the tree is one of parameters."""

    def __init__(self, flags: tuple[bool, ...]) -> None:
        self.flags = flags

    def take(self, tree: Any) -> list[Any]:
        leaves = self._leaves(tree)[0]
        return [leaf for leaf, flag in zip(leaves, self.flags, strict=True) if flag]

    def join(self, tree: Any, part: list[Any], **others: None) -> Any:
        """``tree`` with these leaves, and with None for the others if so told."""
        leaves, treedef = self._leaves(tree)
        new = iter(part)
        return treedef.unflatten(
            [
                next(new) if flag else others.get("others", leaf)
                for leaf, flag in zip(leaves, self.flags, strict=True)
            ]
        )

    def _leaves(self, tree: Any) -> Any:
        return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


_scan.defvjp(_forward, _backward)
