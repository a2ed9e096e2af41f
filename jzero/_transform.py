"""The optax face: ``jzero.adamw`` and ``jzero.zero``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jzero._codec import codec_of
from jzero._config import ZeroConfig
from jzero._groups import FROZEN, Groups
from jzero._layout import Layout
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import Plan, differing_slot, plan_tree
from jzero._state import GradShards, ZeroState, partition_specs
from jzero._step import (
    Operands,
    Run,
    init_state,
    reduced,
    state_specs,
    zero_shards,
    zero_step,
)
from jzero._update import AdamW, Emit, OptaxRule, Rule

__all__ = ["ZeroTransformation", "adamw", "zero"]


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose state is sharded, with a direct path beside ``update``.

    Made by :func:`adamw` and :func:`zero`. ``init(params)`` and ``update(grads, state, params,
    grad_scale=None, **extra)`` follow optax's protocol. All run inside the user's ``shard_map``
    over the axis, on local arrays, as well as outside of it, on global ones; outside, under
    ``jit`` or not.
    """

    _machine: _Machine

    def __new__(cls, machine: _Machine) -> ZeroTransformation:
        self = super().__new__(cls, machine.init, cast("Any", machine.update))
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

    def layout(self, params: Any) -> Layout:
        """The buckets for a parameter tree (arrays or ``ShapeDtypeStruct``) on the mesh in use."""
        return self._machine.plan(params, resolve_axes(self._machine.config)).layout


@dataclasses.dataclass(frozen=True, eq=False)
class _Machine:
    config: ZeroConfig
    rule: Rule
    clip_norm: Any
    skip_nonfinite: bool
    compiled: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def plan(self, params: Any, axes: Axes) -> Plan:
        groups = self.rule.groups
        return plan_tree(params, shards=axes.shards, cap_bytes=self.config.cap_bytes, groups=groups)

    def _run(self, layout: Layout, axes: Axes, rule: Rule) -> Run:
        codecs = tuple(codec_of(bucket, self.config.precision) for bucket in layout.buckets)
        return Run(
            layout=layout,
            axes=axes,
            rule=rule,
            codecs=codecs,
            emit=("param",) * len(codecs),
            divisor=1,
            skip_nonfinite=self.skip_nonfinite,
        )

    def init(self, params: Any) -> ZeroState:
        if params is None:
            raise ValueError("jzero: init needs params, got None")
        axes = resolve_axes(self.config)
        plan = self.plan(params, axes)
        run = self._run(plan.layout, axes, self.rule)
        trainable = _trainable(plan, params)
        return on_mesh(
            axes,
            lambda p: init_state(p, run),
            (P(),),
            state_specs(run),
            trainable,
            cache=self.compiled,
            key=("init", plan.layout, axes),
        )

    def reduce(self, grads: Any, params: Any) -> GradShards:
        axes = resolve_axes(self.config)
        plan = self.plan(params, axes)
        run = self._run(plan.layout, axes, self.rule)
        incoming, specs = _incoming(grads, plan, axes)
        divisor = self._divisor(incoming, axes)

        def body(incoming: dict[str, Array] | GradShards) -> GradShards:
            shards = tuple(
                s.astype(codec.state) / jnp.asarray(divisor, codec.state)
                for s, codec in zip(reduced(incoming, run), run.codecs, strict=True)
            )
            return GradShards(shards, plan.layout, axes.shard)

        return on_mesh(
            axes,
            body,
            (specs,),
            _shard_specs(plan.layout, axes),
            incoming,
            cache=self.compiled,
            key=("reduce", plan.layout, axes, divisor),
        )

    def zero_gradients(self, params: Any) -> GradShards:
        axes = resolve_axes(self.config)
        layout = self.plan(params, axes).layout
        run = self._run(layout, axes, self.rule)
        return on_mesh(
            axes,
            lambda: GradShards(zero_shards(run), layout, axes.shard),
            (),
            _shard_specs(layout, axes),
            cache=self.compiled,
            key=("zeros", layout, axes),
        )

    def _divisor(self, incoming: dict[str, Array] | GradShards, axes: Axes) -> int:
        """Devices to average over: those whose partial sums are still apart, or were summed by
        autodiff inside the user's shard_map."""
        final = isinstance(incoming, GradShards) or not axes.manual
        return 1 if final or not self.config.average else axes.size

    def update(
        self,
        updates: Any,
        state: ZeroState,
        params: Any = None,
        *,
        grad_scale: Any = None,
        **extra: Any,
    ) -> tuple[Any, ZeroState]:
        """Optax's protocol: what ``optax.apply_updates`` must add to ``params``."""
        return self.run("update", updates, state, params, grad_scale, extra)

    def run(
        self,
        face: Literal["step", "update"],
        grads: Any,
        state: ZeroState,
        params: Any,
        grad_scale: Any,
        extra: Mapping[str, Any],
    ) -> tuple[Any, ZeroState]:
        if params is None:
            raise ValueError(
                f"jzero: {face} needs params, got None; call tx.{face}(grads, state, params)"
            )
        axes = resolve_axes(self.config)
        plan = self.plan(params, axes)
        _check_state(state, plan, axes)
        incoming, grad_specs = _incoming(grads, plan, axes)
        rule = self.rule
        if isinstance(rule, OptaxRule) and extra:
            rule = dataclasses.replace(rule, extra=extra)
        run = self._run(plan.layout, axes, rule)
        emit: tuple[Emit, ...] = tuple(
            "update" if face == "update" and codec.master is None else "param"
            for codec in run.codecs
        )
        divisor = self._divisor(incoming, axes)
        run = dataclasses.replace(run, emit=emit, divisor=divisor)
        operands = Operands(
            rule.operands(state.step, plan.layout),
            _scalar("clip_norm", self.clip_norm),
            _scalar("grad_scale", grad_scale),
        )
        state_specs = partition_specs(state)
        old = _trainable(plan, params)
        new, new_state = on_mesh(
            axes,
            functools.partial(zero_step, run=run),
            (grad_specs, state_specs, P(), P()),
            (P(), state_specs),
            incoming,
            state,
            old,
            operands,
            cache=self.compiled if rule is self.rule else None,
            key=("step", plan.layout, axes, emit, divisor, jax.tree.structure(state)),
        )
        if face == "update":
            sent = {
                slot.path: how
                for bucket, how in zip(plan.layout.buckets, emit, strict=True)
                for slot in bucket.slots
            }
            new = {p: x if sent[p] == "update" else _difference(x, old[p]) for p, x in new.items()}
        leaves = plan.leaves(params)
        others = {
            path: leaf if face == "step" else _no_change(path, leaf)
            for path, leaf in leaves.items()
            if path not in new
        }
        return plan.rebuild({**new, **others}), new_state


def _difference(new: Array, old: Array) -> Array:
    """The float32 change from one low-precision parameter to the next; adding it gives back
    ``new`` exactly (unless it is over 2**15 times smaller than ``old``)."""
    return new.astype(jnp.float32) - old.astype(jnp.float32)


def _no_change(path: str, leaf: Any) -> Any:
    """What ``optax.apply_updates`` can add to a leaf that does not train."""
    if leaf is None:
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"params[{path!r}] is a PRNG key, to which optax.apply_updates cannot add; use "
            "tx.step, which leaves it as it is, or keep keys out of params"
        )
    return jnp.zeros_like(leaf)


def _trainable(plan: Plan, params: Any) -> dict[str, Array]:
    leaves = plan.leaves(params)
    return {
        path: jnp.asarray(leaves[path]) if isinstance(leaves[path], np.ndarray) else leaves[path]
        for path, trains in zip(plan.paths, plan.trains, strict=True)
        if trains
    }


def _incoming(grads: Any, plan: Plan, axes: Axes) -> tuple[dict[str, Array] | GradShards, Any]:
    """Gradients as the step takes them, and their specs."""
    if isinstance(grads, GradShards):
        missing = plan.layout.by_path.keys() - grads.layout.by_path.keys()
        if missing or grads.layout.shards != axes.shards:
            raise ValueError(
                "grads were reduced for other parameters or another mesh: "
                + differing_slot(grads.layout, plan.layout)
            )
        return grads, partition_specs(grads)
    leaves = plan.gradients(grads)
    if axes.manual:
        return leaves, P()

    def spec(x: Array) -> P:
        unreduced = jax.typeof(x).sharding.spec.unreduced & set(axes.names)
        return P(*[None] * x.ndim, unreduced=unreduced) if unreduced else P()

    return leaves, {path: spec(grad) for path, grad in leaves.items()}


def _shard_specs(layout: Layout, axes: Axes) -> GradShards:
    return GradShards(cast("Any", (P(axes.shard),) * len(layout.buckets)), layout, axes.shard)


def _check_state(state: Any, plan: Plan, axes: Axes) -> None:
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"state must be what this transformation's init returned, got {type(state).__name__}"
        )
    if state.axis != axes.shard:
        raise ValueError(f"state is sharded over {state.axis!r}, this optimizer {axes.shard!r}")
    if state.layout != plan.layout:
        raise ValueError(
            "state does not belong to these params and options: "
            f"{differing_slot(state.layout, plan.layout)}; init a new state, or restore a "
            "checkpoint onto this layout"
        )
    leaves = jax.tree.leaves(state.inner)
    arrays = [x for x, s in zip(leaves, state.sharded, strict=True) if s]
    arrays += [x for x in state.master if x is not None]
    sizes = {b.shard if axes.manual else b.padded for b in plan.layout.buckets}
    for array in arrays:
        if array.shape[0] not in sizes:
            raise ValueError(
                f"a state array has {array.shape[0]} elements here, expected one of "
                f"{sorted(sizes)[:5]}; give shard_map in_specs=jzero.partition_specs(state)"
            )


def _scalar(name: str, value: Any) -> Array | None:
    if value is None:
        return None
    array = jnp.asarray(value, jnp.float32)
    if array.ndim:
        raise ValueError(f"{name} must be a scalar, got an array of shape {array.shape}")
    return array


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
        if callable(value) or isinstance(value, (jax.Array, np.ndarray)):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise ValueError(
                f"{where}: {name} must be a number, a scalar array or a schedule, got {value!r}"
            )
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
    if isinstance(clip_norm, (int, float)) and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r} must be positive, or None for no clipping")
    if not isinstance(skip_nonfinite, bool):
        raise ValueError(f"skip_nonfinite={skip_nonfinite!r} must be True or False")
    return ZeroTransformation(_Machine(config, rule, clip_norm, skip_nonfinite))
