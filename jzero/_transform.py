"""The optax face: ``jzero.adamw`` and ``jzero.zero``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import numpy as np
import optax

from jzero._codec import codec_of
from jzero._config import ZeroConfig
from jzero._groups import FROZEN, Groups
from jzero._layout import Layout
from jzero._machine import Machine
from jzero._memory import Memory, memory_of
from jzero._mesh import resolve_axes
from jzero._state import GradShards, ZeroState
from jzero._update import AdamW, OptaxRule, Rule

__all__ = ["ZeroTransformation", "adamw", "zero"]


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose state is sharded, with a direct path beside ``update``.

    Made by :func:`adamw` and :func:`zero`. ``init(params)`` and ``update(grads, state, params,
    grad_scale=None, **extra)`` follow optax's protocol. All run inside the user's ``shard_map``
    over the axis, on local arrays, as well as outside of it, on global ones; outside, under
    ``jit`` or not.
    """

    _machine: Machine

    def __new__(cls, machine: Machine) -> ZeroTransformation:
        self = super().__new__(cls, cast("Any", machine.init), cast("Any", machine.update))
        self._machine = machine
        return self

    def step(
        self,
        grads: Any,
        state: ZeroState,
        params: Any,
        *,
        grad_scale: Any = None,
        **extra: Any,
    ) -> tuple[Any, ZeroState]:
        """The direct path: new parameters instead of updates, gathered in the wire dtype.

        Args:
          grads: a pytree like params (see [Note: reduced exactly once] in ``_collectives``), or
            the :class:`GradShards` of ``jzero.value_and_grad``.
          state: of ``init`` or of the last step.
          params: the parameters; they are the truth, whatever the state remembers.
          grad_scale: scalar that the loss was multiplied by; gradients are divided by it.
          extra: passed to the inner transformation's ``update``.

        Returns:
          New parameters (same dtypes and structure) and new state.

        Raises:
          ValueError: gradients, state or parameters that do not fit each other, naming the path.
        """
        return self._machine.run("step", grads, state, params, grad_scale, extra)

    def reduce(self, grads: Any, params: Any) -> GradShards:
        """The reduction alone: a gradient (as ``step`` takes it) as float32 shards of its mean.

        One reduce-scatter a bucket (none for gradients that are shards already).
        """
        return self._machine.reduce(grads, params)

    def zero_gradients(self, params: Any) -> GradShards:
        """Shards of zeros, as :meth:`reduce` would return them: an accumulator to start from."""
        return self._machine.zero_gradients(params)

    @property
    def config(self) -> ZeroConfig:
        """The configuration that the transformation was made with."""
        return self._machine.config

    @property
    def groups(self) -> Groups:
        """How parameters are grouped: labels, overrides and mask."""
        return self._machine.rule.groups

    def memory(self, params: Any) -> Memory:
        """Bytes of state per parameter and per device of AdamW under this precision policy, for a
        parameter tree (arrays or ``ShapeDtypeStruct``) on the mesh in use; print it for a table.
        (Other transformations keep what their own state holds in place of two moments.)"""
        layout = self.layout(params)
        precision = self.config.precision
        return memory_of(layout, tuple(codec_of(b, precision) for b in layout.buckets))

    def layout(self, params: Any) -> Layout:
        """The buckets for a parameter tree (arrays or ``ShapeDtypeStruct``) on the mesh in use."""
        return self._machine.plan(params, resolve_axes(self._machine.config)).layout


def zero(
    inner: optax.GradientTransformation,
    *,
    clip_norm: Any = None,
    skip_nonfinite: bool = True,
    param_labels: Any = None,
    overrides: Mapping[str, optax.GradientTransformation] | None = None,
    zero: ZeroConfig | None = None,
) -> ZeroTransformation:
    """Shard any elementwise optax transformation.

    Its state lives in flat shards, and it is given the reduced, averaged, unscaled and clipped
    gradient. A schedule inside it advances with completed steps only.

    Args:
      inner: e.g. ``optax.lion(1e-4)`` or an ``optax.chain`` of elementwise parts.
      clip_norm, skip_nonfinite, param_labels, zero: as for :func:`adamw`.
      overrides: by label, the transformation to use instead of ``inner``
        (``optax.multi_transform`` on shards).

    Raises:
      ValueError: an argument that does not fit, by name; at ``init``, an ``inner`` that is not
        elementwise.
    """
    for name, tx in {"inner": inner, **(overrides or {})}.items():
        if not isinstance(tx, optax.GradientTransformation):
            raise ValueError(f"jzero.zero({name}={tx!r}) must be an optax.GradientTransformation")
        if isinstance(tx, ZeroTransformation):
            raise ValueError(f"jzero.zero({name}=...) is sharded already; use it as it is")
    groups = _groups(param_labels, overrides, None)
    return _transformation(OptaxRule(inner, groups), clip_norm, skip_nonfinite, zero)


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    bias_correction: bool = True,
    weight_decay_mode: Literal["decoupled", "l2"] = "decoupled",
    clip_norm: Any = None,
    skip_nonfinite: bool = True,
    param_labels: Any = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    zero: ZeroConfig | None = None,
) -> ZeroTransformation:
    """AdamW with gradients, update and state sharded; the parameters of ``optax.adamw``.

    Hyperparameters may be numbers, scalar arrays (traced too; a new value recompiles nothing) or
    schedules of the number of completed steps.

    Args:
      learning_rate, b1, b2, eps, eps_root, weight_decay: as for ``optax.adamw``.
      mask: where weight decay applies: a pytree prefix of bools, or a function of params.
      nesterov: as for ``optax.adamw``.
      bias_correction: False drops the division of the moments by ``1 - b**step``.
      weight_decay_mode: "decoupled", or "l2" (``weight_decay * params`` joins the gradient).
      clip_norm: scale the gradient down to this global 2-norm where it exceeds it.
      skip_nonfinite: leave everything bit-identical, on all devices, where any element of the
        gradient on any device is inf or nan. False, without ``clip_norm``: no update waits for
        the whole gradient.
      param_labels: a label per leaf (a pytree prefix), or a function from a path such as
        ``"layers/0/kernel"`` to one. "frozen": no state, never moves.
      overrides: hyperparameters by label.
      zero: a :class:`ZeroConfig`; None: ``ZeroConfig()``, axis "data" of the ambient mesh.

    Returns:
      A :class:`ZeroTransformation`.

    Raises:
      ValueError: an argument that does not fit, by name.
    """
    hyperparameters = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
    }
    if weight_decay_mode not in ("decoupled", "l2"):
        raise ValueError(
            f"jzero.adamw(weight_decay_mode={weight_decay_mode!r}): use 'decoupled' or 'l2'"
        )
    _check_hyperparameters("jzero.adamw", hyperparameters)
    for label, values in (overrides or {}).items():
        unknown = set(values) - set(hyperparameters)
        if unknown:
            raise ValueError(
                f"overrides[{label!r}] sets {sorted(unknown)}; a label may set "
                f"{sorted(hyperparameters)}"
            )
        _check_hyperparameters(f"overrides[{label!r}]", values)
    rule = AdamW(
        hyperparameters,
        _groups(param_labels, overrides, mask),
        nesterov=nesterov,
        bias_correction=bias_correction,
        weight_decay_mode=weight_decay_mode,
    )
    return _transformation(rule, clip_norm, skip_nonfinite, zero)


def _check_hyperparameters(where: str, values: Mapping[str, Any]) -> None:
    """Ranges of what is a number already; schedules and arrays are taken as they are."""
    for name, value in values.items():
        if callable(value) or (isinstance(value, (jax.Array, np.ndarray)) and not value.ndim):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise ValueError(
                f"{where}: {name} must be a number, a scalar array or a schedule, got {value!r}"
            )
        if not np.isfinite(value):
            raise ValueError(f"{where}: {name} must be finite, got {value}")
        if name in ("b1", "b2") and not 0 <= value < 1:
            raise ValueError(f"{where}: {name} must be at least 0 and below 1, got {value}")
        if name in ("eps", "eps_root") and value < 0:
            raise ValueError(f"{where}: {name} must not be negative, got {value}")


def _groups(param_labels: Any, overrides: Mapping[str, Any] | None, mask: Any) -> Groups:
    if overrides and param_labels is None:
        raise ValueError(
            f"overrides for {sorted(overrides)} need param_labels, which is None: say which "
            "parameters have these labels"
        )
    if overrides and FROZEN in overrides:
        raise ValueError(f"overrides[{FROZEN!r}]: frozen parameters have no hyperparameters")
    return Groups(param_labels, overrides, mask)


def _transformation(
    rule: Rule, clip_norm: Any, skip_nonfinite: bool, config: ZeroConfig | None
) -> ZeroTransformation:
    config = ZeroConfig() if config is None else config
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"zero={config!r} must be a jzero.ZeroConfig")
    if not (clip_norm is None or isinstance(clip_norm, (jax.Array, np.ndarray))) and (
        isinstance(clip_norm, bool)
        or not isinstance(clip_norm, (int, float, np.number))
        or not clip_norm > 0
    ):
        raise ValueError(f"clip_norm={clip_norm!r} must be positive, or None for no clipping")
    if not isinstance(skip_nonfinite, bool):
        raise ValueError(f"skip_nonfinite={skip_nonfinite!r} must be True or False")
    return ZeroTransformation(Machine(config, rule, clip_norm, skip_nonfinite))
