"""From global arrays, or a shard_map's local ones, to a step: plan, check, map over the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jzero._codec import codec_of
from jzero._collectives import divide
from jzero._config import ZeroConfig
from jzero._homes import Home, home_of
from jzero._layout import Layout
from jzero._mesh import Axes, on_mesh, resolve_axes
from jzero._pack import Plan, differing_slot
from jzero._plans import checked_plan, gradient_shards, plan_params
from jzero._processes import agree_on_layout
from jzero._shards import ParamShards
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
from jzero._update import Emit, OptaxRule, Rule
from jzero_kernels.adam import BLOCK

__all__ = ["Machine"]


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
    """A transformation without a face: its rule, its options, and where its steps run.

    Attributes:
      config: axes, buckets, precision.
      rule: the update rule.
      clip_norm: number, scalar array or None.
      skip_nonfinite: whether a non-finite gradient skips the step.
      compiled: programs for calls outside of ``jit``, by what they depend on.
    """

    config: ZeroConfig
    rule: Rule
    clip_norm: Any
    skip_nonfinite: bool
    compiled: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def plan(self, params: Any, axes: Axes) -> Plan:
        if isinstance(params, ParamShards):
            return checked_plan(params, axes, self.config, self.rule.groups)
        return plan_params(params, axes, self.config, self.rule.groups)

    def _run(self, layout: Layout, home: Home, axes: Axes, rule: Rule) -> Run:
        codecs = tuple(codec_of(bucket, self.config.precision) for bucket in layout.buckets)
        return Run(
            layout=layout,
            home=home,
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
        home = home_of(params, plan)
        run = self._run(plan.layout, home, axes, self.rule)
        trainable = home.entries(params)
        _refuse_tied(trainable)
        _agree(plan.layout, axes, trainable)
        return on_mesh(
            axes,
            lambda p: init_state(p, run),
            (home.specs(params),),
            state_specs(run),
            trainable,
            cache=self.compiled,
            key=("init", plan.layout, type(home), axes),
        )

    def reduce(self, grads: Any, params: Any) -> GradShards:
        axes = resolve_axes(self.config)
        plan = self.plan(params, axes)
        run = self._run(plan.layout, home_of(params, plan), axes, self.rule)
        incoming, specs = _incoming(grads, plan, axes)
        divisor = self._divisor(incoming, axes)

        def body(incoming: dict[str, Array] | GradShards) -> GradShards:
            shards = tuple(
                divide(s.astype(codec.state), divisor)
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
            key=("reduce", plan.layout, axes, divisor, _kind(incoming, specs)),
        )

    def zero_gradients(self, params: Any) -> GradShards:
        axes = resolve_axes(self.config)
        plan = self.plan(params, axes)
        layout = plan.layout
        run = self._run(layout, home_of(params, plan), axes, self.rule)
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
        home = home_of(params, plan)
        run = self._run(plan.layout, home, axes, rule)
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
        old, param_specs = home.entries(params), home.specs(params)
        new, new_state = on_mesh(
            axes,
            functools.partial(zero_step, run=run),
            (grad_specs, state_specs, param_specs, P()),
            (param_specs, state_specs),
            incoming,
            state,
            old,
            operands,
            cache=self.compiled if rule is self.rule else None,
            key=(
                "step",
                plan.layout,
                type(home),
                axes,
                emit,
                divisor,
                _kind(incoming, grad_specs),
                jax.tree.structure(state),
            ),
        )
        others = home.others(params)
        if face == "update":
            sent = {
                key: how
                for bucket, how in zip(plan.layout.buckets, emit, strict=True)
                for key in home.keys(bucket)
            }
            new = {p: x if sent[p] == "update" else _difference(x, old[p]) for p, x in new.items()}
            others = {path: _no_change(path, leaf) for path, leaf in others.items()}
        return home.rebuild(params, new, others), new_state


def _difference(new: Array, old: Array) -> Array:
    """The float32 change from one low-precision parameter to the next; adding it gives back
    ``new`` exactly (unless it is over 2**15 times smaller than ``old``)."""
    change = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.where(new == old, jnp.full_like(change, -0.0), change)  # -0.0 + 0.0 is not -0.0


def _no_change(path: str, leaf: Any) -> Any:
    """What ``optax.apply_updates`` can add to a leaf that does not train."""
    if leaf is None:
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"params[{path!r}] is a PRNG key, to which optax.apply_updates cannot add; use "
            "tx.step, which leaves it as it is, or keep keys out of params"
        )
    return jnp.full_like(leaf, -0.0 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0)


def _agree(layout: Layout, axes: Axes, leaves: dict[Any, Any]) -> None:
    """Processes with different models would wait for each other in collectives of other sizes.

    Only where the call is one that all processes of the mesh must make anyway: on global arrays,
    outside of a trace (which a process that has a compiled program does not repeat)."""
    # Under a trace the mesh may be of a topology that is only compiled for.
    if not any(isinstance(x, Tracer) for x in leaves.values()):
        agree_on_layout(f"the parameters of {axes.shards} shards", layout, axes.mesh)


def _refuse_tied(leaves: dict[Any, Any]) -> None:
    """One array in two places would be counted, clipped and decayed twice, then drift apart.
    Seen where arrays are concrete; a trace does not show that two of its inputs are one."""
    seen: dict[int, str] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.size:
            first = seen.setdefault(id(leaf), path)
            if first != path:
                raise ValueError(
                    f"params[{first!r}] and params[{path!r}] are one array; keep a tied "
                    "parameter once in params and use it twice in the loss, or copy it"
                )


def _incoming(grads: Any, plan: Plan, axes: Axes) -> tuple[dict[str, Array] | GradShards, Any]:
    """Gradients as the step takes them, and their specs."""
    if isinstance(grads, ParamShards):
        grads = gradient_shards(grads, axes)
    grads = _unboxed(grads)
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


def _unboxed(grads: Any) -> Any:
    """``grads``, or the one :class:`GradShards` that is all that the tree ``grads`` holds: how
    ``jzero.DistributedDataParallel`` gets shards through ``nnx.Optimizer``."""
    found = jax.tree.leaves(grads, is_leaf=lambda x: x is None or isinstance(x, GradShards))
    return found[0] if len(found) == 1 and isinstance(found[0], GradShards) else grads


def _kind(incoming: Any, specs: Any) -> Any:
    """What a compiled program depends on in the form of its gradients."""
    return jax.tree.structure(incoming), tuple(jax.tree.leaves(specs))


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
    arrays += jax.tree.leaves(state.master)
    sizes = {b.shard if axes.manual else b.padded for b in plan.layout.buckets}
    sizes |= {size // BLOCK for size in sizes}  # their scales
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
