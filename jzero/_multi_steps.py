"""Gradient accumulation for a loop written in Python: one call per micro-batch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jzero._state import GradShards, ZeroState

__all__ = ["MultiSteps", "MultiStepsState"]


class MultiStepsState(NamedTuple):
    """A pytree of arrays; ``jzero.partition_specs`` and checkpoints take it as it is.

    Attributes:
      micro_step: int32 scalar, replicated: micro-batches accumulated so far, below ``steps``.
      grads: their float32 sum, sharded.
      inner: state of the optimizer.
    """

    micro_step: Array
    grads: GradShards
    inner: ZeroState


class MultiSteps(optax.GradientTransformationExtraArgs):
    """Apply a sharded optimizer to the mean gradient of every ``steps`` calls.

    What ``optax.MultiSteps`` does, made for a transformation that communicates: each call
    reduce-scatters its micro-batch into a float32 accumulator of a shard, and only the last one
    measures, updates and gathers (a ``lax.cond`` on a replicated counter, so all devices agree).
    A micro-batch with a non-finite gradient makes its whole window be skipped.

    Args:
      tx: from ``jzero.adamw`` or ``jzero.zero``.
      steps: calls per update.

    Raises:
      ValueError: ``steps`` below 1, or another kind of ``tx``.
    """

    _tx: Any
    _steps: int

    def __new__(cls, tx: Any, steps: int) -> MultiSteps:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"MultiSteps(steps={steps!r}) must be an integer of at least 1")
        if not hasattr(tx, "reduce"):
            raise ValueError(
                f"MultiSteps(tx={type(tx).__name__}) must be made by jzero.adamw or jzero.zero; "
                "for others there is optax.MultiSteps"
            )
        machine: Any = _Accumulator(tx, steps)
        self = super().__new__(cls, machine.init, machine.update)
        self._tx = tx
        self._steps = steps
        return self

    def step(
        self,
        grads: Any,
        state: MultiStepsState,
        params: Any,
        *,
        grad_scale: Any = None,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        """New parameters (unchanged but for every ``steps``-th call) and state."""
        return _Accumulator(self._tx, self._steps).run(
            "step", grads, state, params, grad_scale, extra
        )


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    tx: Any
    steps: int

    def init(self, params: Any) -> MultiStepsState:
        return MultiStepsState(jnp.int32(0), self.tx.zero_gradients(params), self.tx.init(params))

    def update(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        grad_scale: Any = None,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        return self.run("update", updates, state, params, grad_scale, extra)

    def run(
        self, face: str, grads: Any, state: Any, params: Any, grad_scale: Any, extra: Any
    ) -> tuple[Any, MultiStepsState]:
        shards = self.tx.reduce(grads, params)
        if grad_scale is not None:  # now, since the next micro-batch may have another scale
            shards = jax.tree.map(lambda s: s / jnp.asarray(grad_scale, s.dtype), shards)
        total = jax.tree.map(jnp.add, state.grads, shards)

        def last(total: GradShards, inner: ZeroState, params: Any) -> Any:
            mean = jax.tree.map(lambda s: s / jnp.asarray(self.steps, s.dtype), total)
            result, inner = getattr(self.tx, face)(mean, inner, params, **extra)
            return result, jax.tree.map(jnp.zeros_like, total), inner

        def wait(total: GradShards, inner: ZeroState, params: Any) -> Any:
            shape = jax.eval_shape(last, total, inner, params)[0]
            result = params
            if face == "update":
                result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
            return result, total, inner

        done = state.micro_step + 1 == self.steps
        result, total, inner = lax.cond(done, last, wait, total, state.inner, params)
        count = jnp.where(done, 0, state.micro_step + 1).astype(jnp.int32)
        return result, MultiStepsState(count, total, inner)
