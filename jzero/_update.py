"""The update rules that run on shards: fused AdamW, or any elementwise optax transformation.

A rule sees tuples of flat shards, one per bucket, and never a mesh or a pytree of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jzero._codec import Codec
from jzero._collectives import divide
from jzero._elementwise import sharded_leaves
from jzero._groups import Groups
from jzero._layout import Layout
from jzero_kernels import adam
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
    """Result of a rule: new parameters, what to send (the parameter, or the change to it, in the
    dtype to send), and the new state."""

    params: tuple[Array, ...]
    out: tuple[Array, ...]
    inner: Any


class Moments(NamedTuple):
    """State of AdamW: a (shard,) per bucket of first (mu) and second (nu) moments."""

    mu: tuple[Array, ...]
    nu: tuple[Array, ...]


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
        params: tuple[Array, ...],
        grads: tuple[Array, ...],
        inner: Any,
        operands: Any,
        scaling: Scaling,
        layout: Layout,
        codecs: Sequence[Codec],
        emit: Sequence[Emit],
    ) -> Updated:
        """One step on shards. No communication."""
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
        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros_like(p, c.state) for p, c in zip(params, codecs, strict=True))

        return Moments(zeros(), zeros())

    def sharded(self, layout: Layout, codecs: Sequence[Codec]) -> Any:
        every: Any = (True,) * len(layout.buckets)
        return Moments(every, every)

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
        params: tuple[Array, ...],
        grads: tuple[Array, ...],
        inner: Moments,
        operands: dict[str, adam.AdamScalars],
        scaling: Scaling,
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
                nesterov=self.nesterov,
                weight_decay_mode=self.weight_decay_mode,
                out_dtype=codec.sync if how == "param" else codec.state,
                emit=how,
            )
            for p, m, v, g, bucket, codec, how in zip(
                params, *inner, grads, layout.buckets, codecs, emit, strict=True
            )
        ]
        p, m, v, out = (
            tuple(getattr(result, name) for result in results) for name in ("p", "m", "v", "out")
        )
        return Updated(p, out, Moments(m, v))


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

    def _by_group(self, layout: Layout) -> dict[str, list[int]]:
        members: dict[str, list[int]] = {}
        for bucket in layout.buckets:
            members.setdefault(bucket.group, []).append(bucket.number)
        return dict(sorted(members.items()))

    def init(
        self, params: tuple[Array, ...], layout: Layout, codecs: Sequence[Codec]
    ) -> dict[str, Any]:
        return {
            group: self._of(group).init(tuple(params[i] for i in members))
            for group, members in self._by_group(layout).items()
        }

    def sharded(self, layout: Layout, codecs: Sequence[Codec]) -> dict[str, Any]:
        return {
            group: sharded_leaves(self._of(group), [codecs[i].compute for i in members], self.extra)
            for group, members in self._by_group(layout).items()
        }

    def operands(self, step: Array, layout: Layout) -> Mapping[str, Any]:
        return self.extra

    def apply(
        self,
        params: tuple[Array, ...],
        grads: tuple[Array, ...],
        inner: dict[str, Any],
        operands: Mapping[str, Any],
        scaling: Scaling,
        layout: Layout,
        codecs: Sequence[Codec],
        emit: Sequence[Emit],
    ) -> Updated:
        new_params, out, new_inner = list(params), list(params), {}
        for group, members in self._by_group(layout).items():
            shards = tuple(params[i] for i in members)
            scaled = tuple(_scaled(grads[i], scaling, codecs[i]) for i in members)
            updates, state = self._of(group).update(scaled, inner[group], shards, **operands)
            new_inner[group] = jax.tree.map(
                lambda new, old: jnp.where(scaling.finite, new, old), state, inner[group]
            )
            for i, p, u in zip(members, shards, cast("tuple[Array, ...]", updates), strict=True):
                u = jnp.where(scaling.finite, u, jnp.full_like(u, -0.0)).astype(codecs[i].state)
                # Rounded before it is added, so that sending u or p + u gives the same parameters.
                u = opaque(u, runtime_zero(u))
                new_params[i] = jnp.where(scaling.finite, p + u.astype(p.dtype), p)
                out[i] = u if emit[i] == "update" else new_params[i].astype(codecs[i].sync)
        return Updated(tuple(new_params), tuple(out), new_inner)


def _scaled(grad: Array, scaling: Scaling, codec: Codec) -> Array:
    grad = grad.astype(codec.state)
    if scaling.divisor > 1:
        grad = divide(grad, scaling.divisor)
    return grad if scaling.factor is None else grad * scaling.factor.astype(grad.dtype)
