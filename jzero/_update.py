"""The update rules that run on shards: fused AdamW, or any elementwise optax transformation.

A rule sees tuples of flat shards, one per bucket, and never a mesh or a pytree of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jzero._codec import Codec, Noise, Storage
from jzero._collectives import divide
from jzero._elementwise import sharded_leaves
from jzero._groups import Groups
from jzero._layout import Layout
from jzero_kernels import adam
from jzero_kernels.adam import BLOCK
from jzero_kernels.adam.math import opaque, runtime_zero

__all__ = ["AdamW", "Emit", "Moments", "OptaxRule", "Rule", "Scaling", "Updated"]

Emit = Literal["param", "update"]


class Scaling(NamedTuple):
    """How a reduced gradient becomes the one that the rule applies: ``g / divisor * factor``.

    Attributes:
      divisor: devices to average over; 1 for a sum.
      factor: float32 scalar, unscaling and clipping in one; None: neither is asked for.
      finite: bool scalar; False: the step must change nothing.
    """

    divisor: int
    factor: Array | None
    finite: Array


class Updated(NamedTuple):
    """Result of a rule: new masters in their stored form, what to send (the parameter, or the
    change to it, in the dtype to send), and the new state."""

    master: tuple[Any, ...]
    out: tuple[Array, ...]
    inner: Any


class Moments(NamedTuple):
    """State of AdamW: a (shard,) per bucket of first (mu) and second (nu) moments, in the form
    that the precision policy gives them."""

    mu: tuple[Any, ...]
    nu: tuple[Any, ...]


class Rule(Protocol):
    """What a step needs of an update rule."""

    @property
    def groups(self) -> Groups: ...

    def init(self, params: tuple[Array, ...], layout: Layout, codecs: Sequence[Codec]) -> Any:
        """State for (shard,) parameters, which are in full precision."""
        ...

    def operands(self, step: Array, layout: Layout) -> Any:
        """Replicated scalars of this step: learning rates and the like. Runs on every device."""
        ...

    def sharded(self, layout: Layout, codecs: Sequence[Codec]) -> Any:
        """A tree like the state with True where a leaf is a (shard,) and False where replicated."""
        ...

    def apply(
        self,
        params: tuple[Any, ...],
        grads: tuple[Array, ...],
        inner: Any,
        operands: Any,
        scaling: Scaling,
        noises: Sequence[Noise],
        layout: Layout,
        codecs: Sequence[Codec],
        emit: Sequence[Emit],
    ) -> Updated:
        """One step on shards; ``params`` are operands of the codecs. No communication."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW:
    """Adam with decoupled or L2 weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019), in
    optax's order of operations, by the fused kernel.

    Attributes:
      hyperparameters: ``learning_rate, b1, b2, eps, eps_root, weight_decay``: numbers, scalar
        arrays, or schedules of the number of completed steps.
      groups: overrides by label.
    """

    hyperparameters: Mapping[str, Any]
    groups: Groups
    nesterov: bool = False
    bias_correction: bool = True
    weight_decay_mode: Literal["decoupled", "l2"] = "decoupled"

    def init(self, params: tuple[Array, ...], layout: Layout, codecs: Sequence[Codec]) -> Moments:
        zeros = [jnp.zeros_like(p, c.state) for p, c in zip(params, codecs, strict=True)]
        return Moments(
            tuple(c.mu.encode(z) for c, z in zip(codecs, zeros, strict=True)),
            tuple(c.nu.encode(z) for c, z in zip(codecs, zeros, strict=True)),
        )

    def sharded(self, layout: Layout, codecs: Sequence[Codec]) -> Any:
        return Moments(
            tuple(c.mu.like(True) for c in codecs), tuple(c.nu.like(True) for c in codecs)
        )

    def operands(self, step: Array, layout: Layout) -> dict[str, adam.AdamScalars]:
        groups = {bucket.group for bucket in layout.buckets}
        return {group: self._scalars(group, step) for group in sorted(groups)}

    def _scalars(self, group: str, step: Array) -> adam.AdamScalars:
        chosen = self.groups.hyperparameters(group, self.hyperparameters)
        h: dict[str, Any] = {
            name: value(step) if callable(value) else value for name, value in chosen.items()
        }
        count = step + 1

        def correction(decay: Any, count: Array) -> Any:
            # Not `decay**count`: outside of jit that compiles a power for every count.
            return 1 - lax.pow(jnp.asarray(decay), count) if self.bias_correction else 1.0

        def scalar(value: Any) -> Array:
            return jnp.asarray(value, jnp.float32)

        # Always 1, but only at run time: the kernel's guard against contracting products into
        # sums hangs on the learning rate, and with a constant one a compiler removes it.
        one = 1 + jnp.minimum(step.astype(jnp.float32), 0)

        return adam.AdamScalars(
            learning_rate=scalar(h["learning_rate"]) * one,
            b1=scalar(h["b1"]),
            one_minus_b1=scalar(1 - h["b1"]),  # in double for a Python float, as optax does
            b2=scalar(h["b2"]),
            one_minus_b2=scalar(1 - h["b2"]),
            eps=scalar(h["eps"]),
            eps_root=scalar(h["eps_root"]),
            weight_decay=scalar(h["weight_decay"]),
            bias_correction1=scalar(correction(h["b1"], count)),
            bias_correction2=scalar(correction(h["b2"], count)),
            bias_correction1_next=scalar(correction(h["b1"], count + 1)),
            multiplier=scalar(1),
            finite=jnp.asarray(True),
        )

    def apply(
        self,
        params: tuple[Any, ...],
        grads: tuple[Array, ...],
        inner: Moments,
        operands: dict[str, adam.AdamScalars],
        scaling: Scaling,
        noises: Sequence[Noise],
        layout: Layout,
        codecs: Sequence[Codec],
        emit: Sequence[Emit],
    ) -> Updated:
        factor = jnp.float32(1) if scaling.factor is None else scaling.factor
        multiplier = factor / jnp.float32(scaling.divisor)
        results = [
            adam.adam_update(
                p,
                m,
                v,
                g,
                operands[bucket.group]._replace(multiplier=multiplier, finite=scaling.finite),
                noise.random,
                nesterov=self.nesterov,
                weight_decay_mode=self.weight_decay_mode,
                out_dtype=codec.out if how == "param" else codec.state,
                emit=how,
            )
            for p, m, v, g, bucket, codec, noise, how in zip(
                params, *inner, grads, layout.buckets, codecs, noises, emit, strict=True
            )
        ]
        return Updated(
            tuple(c.stored(result.p) for c, result in zip(codecs, results, strict=True)),
            tuple(result.out for result in results),
            Moments(tuple(result.m for result in results), tuple(result.v for result in results)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class OptaxRule:
    """An elementwise optax transformation, run on flat shards; one per label where overridden.

    Attributes:
      inner: used for labels without an entry in ``groups.overrides``.
      groups: overrides are transformations by label.
      extra: extra arguments of this call, as optax passes them.
    """

    inner: optax.GradientTransformation
    groups: Groups
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def _of(self, group: str) -> optax.GradientTransformationExtraArgs:
        override = (self.groups.overrides or {}).get(group)
        return optax.with_extra_args_support(self.inner if override is None else override)

    def _members(self, layout: Layout) -> dict[str, list[int]]:
        """Buckets of one group and one precision policy, by a name for both."""
        members: dict[str, list[int]] = {}
        for bucket in layout.buckets:
            name = f"{bucket.group} {bucket.policy}" if bucket.policy else bucket.group
            members.setdefault(name, []).append(bucket.number)
        return dict(sorted(members.items()))

    def _each(self, layout: Layout) -> Iterator[tuple[str, list[int], Any]]:
        for name, members in self._members(layout).items():
            yield name, members, self._of(layout.buckets[members[0]].group)

    def init(
        self, params: tuple[Array, ...], layout: Layout, codecs: Sequence[Codec]
    ) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, members, tx in self._each(layout):
            state = tx.init(tuple(params[i] for i in members))
            flags = self._flags(tx, members, codecs)
            states[name] = _stored(state, flags, codecs[members[0]].mu, Noise(None))
        return states

    def _flags(self, tx: Any, members: list[int], codecs: Sequence[Codec]) -> Any:
        return sharded_leaves(tx, [codecs[i].compute for i in members], self.extra)

    def sharded(self, layout: Layout, codecs: Sequence[Codec]) -> dict[str, Any]:
        flags: dict[str, Any] = {}
        for name, members, tx in self._each(layout):
            dtypes = [codecs[i].compute for i in members]
            params = tuple(jax.ShapeDtypeStruct((BLOCK,), dtype) for dtype in dtypes)
            state = jax.eval_shape(tx.init, params)
            storage = codecs[members[0]].mu
            flags[name] = jax.tree.map(
                lambda x, s, storage=storage: storage.like(s) if _narrows(x, s, storage) else s,
                state,
                self._flags(tx, members, codecs),
            )
        return flags

    def operands(self, step: Array, layout: Layout) -> Mapping[str, Any]:
        return self.extra

    def apply(
        self,
        params: tuple[Any, ...],
        grads: tuple[Array, ...],
        inner: dict[str, Any],
        operands: Mapping[str, Any],
        scaling: Scaling,
        noises: Sequence[Noise],
        layout: Layout,
        codecs: Sequence[Codec],
        emit: Sequence[Emit],
    ) -> Updated:
        values = [codec.value(p) for codec, p in zip(codecs, params, strict=True)]
        master: list[Any] = [None] * len(values)
        out, new_inner = list(values), {}
        for name, members, tx in self._each(layout):
            shards = tuple(values[i] for i in members)
            scaled = tuple(_scaled(grads[i], scaling, codecs[i]) for i in members)
            storage, flags = codecs[members[0]].mu, self._flags(tx, members, codecs)
            state = _loaded(inner[name], jax.eval_shape(tx.init, shards), flags, storage)
            updates, state = tx.update(scaled, state, shards, **operands)
            new_inner[name] = jax.tree.map(
                lambda new, old: jnp.where(scaling.finite, new, old),
                _stored(state, flags, storage, noises[members[0]]),
                inner[name],
            )
            for i, p, u in zip(members, shards, cast("tuple[Array, ...]", updates), strict=True):
                u = jnp.where(scaling.finite, u, jnp.full_like(u, -0.0)).astype(codecs[i].state)
                # Rounded before it is added, so that sending u or p + u gives the same parameters.
                u = opaque(u, runtime_zero(u))
                new = jnp.where(scaling.finite, p + u.astype(p.dtype), p)
                master[i], shown = codecs[i].encode(new, noises[i])
                out[i] = u if emit[i] == "update" else shown
        return Updated(tuple(master), tuple(out), new_inner)


def _narrows(leaf: Any, sharded: bool, storage: Storage) -> bool:
    """Whether a leaf of an optax state is kept in fewer bits than optax has it in."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return sharded and floating and jnp.dtype(storage.dtype).itemsize < leaf.dtype.itemsize


def _stored(state: Any, flags: Any, storage: Storage, noise: Noise) -> Any:
    """An optax state with its sharded leaves in the precision policy's form."""
    leaves, treedef = jax.tree.flatten(state)
    flat = treedef.flatten_up_to(flags)
    return treedef.unflatten(
        storage.encode(x, noise.bits(x.size, 8 + i)) if _narrows(x, s, storage) else x
        for i, (x, s) in enumerate(zip(leaves, flat, strict=True))
    )


def _loaded(stored: Any, shapes: Any, flags: Any, storage: Storage) -> Any:
    """The optax state that :func:`_stored` was given; ``shapes`` says in which dtypes."""
    return jax.tree.map(
        lambda x, s, leaf: storage.decode(leaf, x.dtype) if _narrows(x, s, storage) else leaf,
        shapes,
        flags,
        stored,
    )


def _scaled(grad: Array, scaling: Scaling, codec: Codec) -> Array:
    grad = grad.astype(codec.state)
    if scaling.divisor > 1:
        grad = divide(grad, scaling.divisor)
    return grad if scaling.factor is None else grad * scaling.factor.astype(grad.dtype)
