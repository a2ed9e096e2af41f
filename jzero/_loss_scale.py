"""The loss scale of low-precision training, as a state machine without side effects."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["DynamicLossScale"]

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, init=False)
class DynamicLossScale:
    """Multiply the loss by as much as the gradient's dtype can take.

    A pytree to carry beside the optimizer state; every method is pure::

        loss, grads = jzero.value_and_grad(lambda p, b: scale.scale(loss_fn(p, b)))(params, batch)
        params, state = tx.step(grads, state, params, grad_scale=scale.value)
        scale = scale.update(state.finite)

    A non-finite gradient multiplies the scale by ``backoff_factor`` (the ``hysteresis``-th since
    the scale last grew, and each after it); ``growth_interval`` finite ones in a row multiply
    it by ``growth_factor``. As torch.amp.GradScaler, and with hysteresis as Megatron-LM's.

    Attributes:
      value: float32 scalar, the scale.
      finite_steps: int32 scalar, finite gradients since the last change or overflow.
      tolerance: int32 scalar, overflows until the scale backs off.
    """

    value: Array
    finite_steps: Array
    tolerance: Array
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    minimum: float
    hysteresis: int

    def __init__(
        self,
        initial: Any = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        minimum: float = _TINY,
        hysteresis: int = 1,
    ) -> None:
        """Args:
          initial: first scale.
          growth_factor: above 1.
          backoff_factor: between 0 and 1.
          growth_interval: finite gradients in a row before the scale grows.
          minimum: the scale never backs off below it; the smallest normal float32 if not given.
          hysteresis: overflows that it takes to back off.

        Raises:
          ValueError: a value out of range, by name.
        """
        checks = {
            "growth_factor": growth_factor > 1,
            "backoff_factor": 0 < backoff_factor < 1,
            "growth_interval": growth_interval >= 1,
            "minimum": minimum > 0,
            "hysteresis": hysteresis >= 1,
        }
        if isinstance(initial, (int, float)):
            checks["initial"] = math.isfinite(initial) and initial >= minimum
        got = locals()
        for name, right in checks.items():
            if not right:
                raise ValueError(
                    f"DynamicLossScale({name}={got[name]!r}): growth_factor must be above 1, "
                    "backoff_factor between 0 and 1, growth_interval and hysteresis at least 1, "
                    "minimum positive, initial finite and at least minimum"
                )
        self._set(
            value=jnp.asarray(initial, jnp.float32),
            finite_steps=jnp.int32(0),
            tolerance=jnp.int32(hysteresis),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            minimum=minimum,
            hysteresis=hysteresis,
        )

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def scale(self, loss: Array) -> Array:
        """``loss`` times the scale, in at least float32."""
        wide = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        return wide * self.value.astype(wide.dtype)

    def unscale(self, tree: Any) -> Any:
        """Divide a loss, or any pytree, by the scale."""
        return jax.tree.map(lambda x: (x / self.value.astype(x.dtype)).astype(x.dtype), tree)

    def update(self, finite: Array) -> DynamicLossScale:
        """The next state.

        Args:
          finite: bool scalar, the same on all devices: ``state.finite``.
        """
        grown = self.value * jnp.float32(self.growth_factor)
        backed_off = jnp.maximum(
            self.value * jnp.float32(self.backoff_factor), jnp.float32(self.minimum)
        )
        steps = self.finite_steps + 1
        due = steps >= self.growth_interval
        left = self.tolerance - 1
        up = jnp.where(due & jnp.isfinite(grown), grown, self.value)
        down = jnp.where(left <= 0, backed_off, self.value)
        return self._replace(
            value=jnp.where(finite, up, down),
            finite_steps=jnp.where(finite & ~due, steps, jnp.zeros_like(steps)),
            tolerance=jnp.where(
                finite,
                jnp.where(due, jnp.int32(self.hysteresis), self.tolerance),
                jnp.maximum(left, 0),
            ),
        )

    def _replace(self, **changes: Any) -> DynamicLossScale:
        new = object.__new__(DynamicLossScale)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        new._set(**{**fields, **changes})
        return new

    @classmethod
    def from_flax(cls, scale: Any) -> DynamicLossScale:
        """The state of a ``flax.training.dynamic_scale.DynamicScale``, whose own
        ``value_and_grad`` would all-reduce full gradients."""
        new = cls(
            scale.scale,
            scale.growth_factor,
            scale.backoff_factor,
            scale.growth_interval,
            minimum=_TINY if scale.minimum_scale is None else scale.minimum_scale,
        )
        return new._replace(finite_steps=jnp.asarray(scale.fin_steps, jnp.int32))

    def to_flax(self) -> Any:
        """A flax DynamicScale in the same state. Needs flax (``pip install jzero[flax]``).

        Raises:
          ValueError: ``hysteresis`` above 1, which flax does not have.
        """
        if self.hysteresis > 1:
            raise ValueError("flax's DynamicScale has no hysteresis; use hysteresis=1")
        try:
            from flax.training.dynamic_scale import DynamicScale
        except ImportError as error:
            raise ImportError("to_flax needs flax; pip install 'jzero[flax]'") from error
        return DynamicScale(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            minimum_scale=self.minimum,
            fin_steps=cast("Any", self.finite_steps),
            scale=cast("Any", self.value),
        )


_DYNAMIC = ("value", "finite_steps", "tolerance")
_STATIC = ("growth_factor", "backoff_factor", "growth_interval", "minimum", "hysteresis")


def _flatten_with_keys(scale: DynamicLossScale) -> Any:
    children = [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in _DYNAMIC]
    return children, tuple(getattr(scale, name) for name in _STATIC)


def _unflatten(static: Any, children: Any) -> DynamicLossScale:
    # Not by the constructor, whose arguments are checked and are not the fields.
    new = object.__new__(DynamicLossScale)
    new._set(**dict(zip((*_DYNAMIC, *_STATIC), (*children, *static), strict=True)))
    return new


jax.tree_util.register_pytree_with_keys(DynamicLossScale, _flatten_with_keys, _unflatten)
