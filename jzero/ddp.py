"""The flax face: a model whose gradients are averaged over devices, in buckets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

import jax
from jax.core import Tracer

from jzero._broadcast import broadcast, first_difference
from jzero._ddp_step import Job, LocalGrads, checked_grads, reduce_local, run_job, sharding_of
from jzero._flax import Parts, flax_modules, linen_parts, nnx_parts, register_wrapper
from jzero._layout import Bucket, Layout
from jzero._mesh import resolve_axes
from jzero._replicate import Record, Static, argument_error, bucket_layout, make_options
from jzero._state import GradShards

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel:
    """Data-parallel training of a flax model, with the promises of PyTorch's wrapper of this name.

    The model is replicated; ``ddp.value_and_grad`` runs the loss on each device's part of the batch
    and averages gradients by one all-reduce a bucket (see [Note: what is communicated] in
    ``_ddp_step``), so that all devices keep the same parameters, bit by bit::

        ddp = jzero.DistributedDataParallel(model, mesh)
        optimizer = nnx.Optimizer(ddp, optax.adamw(1e-3), wrt=nnx.Param)

        @nnx.jit
        def train_step(ddp, optimizer, batch):
            loss, grads = ddp.value_and_grad(loss_fn)(ddp, batch)  # loss_fn(ddp, batch) -> scalar
            optimizer.update(ddp, grads)
            return loss

    With an nnx module, the wrapper is an nnx graph node with the paths of the module itself: states
    and optimizers of ``ddp`` and ``ddp.module`` are interchangeable. With a linen module, it is a
    pytree of its variables, to be passed through ``jax.jit`` and returned; see ``replace``.

    Args:
      model: an ``nnx.Module``, or a ``linen.Module`` together with ``variables``.
      mesh: a ``jax.sharding.Mesh``; None: the ambient mesh.
      axis: mesh axis that batches are split over.
      init_sync: give all devices and processes the first device's parameters and buffers, of
        every dtype; False: leave them as they are.
      bucket_cap_mb: most MiB of gradients in a bucket; a larger leaf has a bucket of its own.
      find_unused_parameters: parameters that the loss does not use are not communicated; their
        gradient is zero. Read from the program, not from a run. False: their zeros are reduced
        like any gradient, and nothing hangs or diverges.
      average_in_collective: sum, then divide by the number of devices; False: divide each
        device's gradient, then sum. Where float16 is sent, a sum may overflow or a quotient
        vanish; float32 and bfloat16 have the range for either, and are divided after the sum.
      static_graph: fill buckets in the order in which this program's backward pass produces
        gradients, instead of reverse order of the parameters. See ``ddp.buckets``.
      grad_reduce_dtype: dtype of the all-reduce; None: each parameter's. Gradients come back in
        the parameters' dtypes.
      variables: for linen, what ``model.init`` returned.
      replica_axis: a second mesh axis that batches are split over.
      average: False: gradients are summed over devices, not averaged.
      buffers: how buffers that a device's batch changed (BatchNorm statistics) become equal
        again: "mean" over the devices for floats (others: the first device's), or "first".
      first_bucket_mb: most MiB in the first bucket of each dtype, so that it leaves early.
      wrt: what is trained. nnx: a filter (None: ``nnx.Param``); linen: a function from a path such
        as ``"Dense_0/kernel"`` to a bool (None: all of "params"). Other parameters are frozen.

    Raises:
      ImportError: flax is not installed.
      TypeError: ``model`` is no flax module.
      ValueError: an argument that does not fit, by name; no mesh.
    """

    _module: Any  # nnx: the module; linen: its variables
    _static: Static

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        axis: str = "data",
        init_sync: bool = True,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        average_in_collective: bool = False,
        static_graph: bool = False,
        grad_reduce_dtype: Any = None,
        *,
        variables: Mapping[str, Any] | None = None,
        replica_axis: str | None = None,
        average: bool = True,
        buffers: Literal["mean", "first"] = "mean",
        first_bucket_mb: float = 1.0,
        wrt: Any = None,
    ) -> None:
        nnx, linen = flax_modules()
        if isinstance(model, nnx.Module):
            if variables is not None:
                text = "an nnx module holds its own; leave it out"
                raise ValueError(argument_error("variables", text))
            self._module = model
            register_wrapper(
                DistributedDataParallel,
                lambda ddp: ddp._module,
                lambda ddp: ddp._static,
                DistributedDataParallel._make,
            )
        elif isinstance(model, linen.Module):
            if not isinstance(variables, Mapping):
                text = "a linen module needs what model.init(key, x) returned"
                raise ValueError(argument_error("variables", text))
            self._module = variables
        else:
            text = f"got {type(model).__name__}, expected an nnx or a linen Module"
            raise TypeError(argument_error("model", text))
        if not isinstance(init_sync, bool):
            text = f"got {init_sync!r}, expected True or False"
            raise ValueError(argument_error("init_sync", text))
        options = make_options(
            mesh=mesh,
            axis=axis,
            replica_axis=replica_axis,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            find_unused_parameters=find_unused_parameters,
            average_in_collective=average_in_collective,
            static_graph=static_graph,
            average=average,
            grad_reduce_dtype=grad_reduce_dtype,
            buffers=buffers,
        )
        linen_module = None if isinstance(model, nnx.Module) else model
        if linen_module is None and wrt is None:
            wrt = nnx.Param
        self._static = Static(options, wrt, linen_module, no_sync=False, record=Record())
        if init_sync:
            self.broadcast()

    @staticmethod
    def _make(module: Any, static: Static) -> DistributedDataParallel:
        self = object.__new__(DistributedDataParallel)
        self._module, self._static = module, static
        return self

    # ---------------------------------------------------------------- the model

    @property
    def module(self) -> Any:
        """The model that was wrapped."""
        return self._module if self._static.linen is None else self._static.linen

    @property
    def variables(self) -> Any:
        """The collections of a linen model.

        Raises:
          AttributeError: the model is an nnx module; its state is ``nnx.state(ddp)``.
        """
        if self._static.linen is None:
            raise AttributeError("an nnx model has no variables; take nnx.state(ddp)")
        return self._module

    @property
    def params(self) -> Any:
        """What an optimizer is given: ``variables["params"]``, or for nnx the state that ``wrt``
        selects, as plain arrays."""
        return self._parts(self).params

    def replace(self, *, params: Any = None, variables: Any = None) -> DistributedDataParallel:
        """For linen: a copy with other parameters, or other variables altogether."""
        new = dict(self.variables if variables is None else variables)
        if params is not None:
            new["params"] = params
        return self._make(new, self._static)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Forward: what the model returns, any pytree.

        A linen model is applied to its variables. Collections other than "params" that the call
        writes are kept, as an nnx module keeps its own; with linen's ``mutable=``, it returns them
        instead, as ``apply`` does.
        """
        linen = self._static.linen
        if linen is None:
            return self._module(*inputs, **kwargs)
        if "mutable" in kwargs:
            return linen.apply(self._module, *inputs, **kwargs)
        collections = [name for name in self._module if name != "params"]
        out, new = linen.apply(self._module, *inputs, mutable=collections, **kwargs)
        self._keep({**self._module, **new})
        return out

    def _keep(self, variables: Any) -> None:
        """Take over a linen model's variables, unless a trace would leak out."""
        old, new = (jax.tree.leaves(v) for v in (self._module, variables))
        if any(a is not b and isinstance(b, Tracer) for a, b in zip(old, new, strict=False)) and (
            not any(isinstance(a, Tracer) for a in old)
        ):
            raise ValueError(
                "the model's variables would change under jit, where this wrapper is not an "
                "argument; pass ddp to the jitted function and return it"
            )
        self._module = variables

    # ---------------------------------------------------------------- gradients

    def value_and_grad(
        self, loss_fn: Callable[..., Any], has_aux: bool = False, *, zero: Any = None
    ) -> Callable[..., Any]:
        """Like ``nnx.value_and_grad`` of a loss that is a mean over a batch split over the mesh.

        ``loss_fn(ddp, *args)`` runs on each device with its part of ``args``: arrays are split
        along dim 0, scalars are given to all, and a scalar PRNG key (``jax.random.key``) is made
        each device's own, as are the keys of the model's random streams. The ``ddp`` that it gets
        is a copy on this device; ``ddp.module`` may be passed in its place.

        Buffers that the loss changes are made equal over the devices by the rule ``buffers`` and
        stored in the model. Variables that the loss creates (sown intermediates) are dropped.

        Under ``no_sync`` nothing is communicated: gradients come back as :class:`LocalGrads`, the
        loss and scalars of ``aux`` as (devices,) arrays, and buffers that depend on the batch
        stay as they were.

        Args:
          loss_fn: returns a scalar mean over its part of the batch, or ``(loss, aux)``.
          has_aux: whether it returns ``(loss, aux)``.
          zero: a ``jzero.adamw`` or ``jzero.zero`` transformation (or a ``ZeroConfig``): gradients
            are reduce-scattered, once a bucket of *its* layout and in its ``grad_sync`` dtype, and
            handed over as shards, which its ``step`` and ``nnx.Optimizer.update`` take.

        Returns:
          ``f(ddp, *args, accumulated=None) -> (loss, grads)`` or ``((loss, aux), grads)``. ``loss``
          is the mean over all devices; floating scalars of ``aux`` are averaged, integer ones
          summed, arrays concatenated along dim 0. ``grads`` has the structure of
          ``nnx.state(ddp, wrt)`` (linen: of ``variables["params"]``). ``accumulated``: the sum of
          :class:`LocalGrads` to add before the reduction.

        Raises:
          ValueError: a batch dim that the devices do not divide, by path; a loss that is not a
            scalar; ``zero`` with other axes, or together with ``grad_reduce_dtype``.
        """

        def call(node: Any, *args: Any, accumulated: LocalGrads | None = None) -> Any:
            job, parts = self._job(node, loss_fn, has_aux, zero)
            record = self._static.record
            held = checked_grads(accumulated, parts.trained)
            out = run_job(job, parts.trained, parts.others, args, held, record.programs)
            if out.layout is not None:
                record.layout = out.layout
            parts.write(out.buffers)
            grads = out.grads
            if isinstance(grads, GradShards):
                grads = parts.as_box(grads)
            elif not isinstance(grads, LocalGrads):
                grads = parts.as_grads(grads)
            return ((out.loss, out.aux), grads) if has_aux else (out.loss, grads)

        return call

    def reduce(self, grads: LocalGrads, *, zero: Any = None) -> Any:
        """Gradients that were accumulated under ``no_sync``, reduced as ``value_and_grad`` does.

        One all-reduce a bucket, in the buckets that ``ddp.buckets`` shows (or one reduce-scatter a
        bucket of ``zero``).

        Raises:
          TypeError: gradients that are reduced already.
        """
        job, parts = self._job(self, lambda *_: None, False, zero)
        held = checked_grads(grads, parts.trained)
        if held is None:
            raise TypeError("ddp.reduce needs the LocalGrads of a call under no_sync, got None")
        reduced = reduce_local(job, parts.trained, held, self._layout(parts))
        return parts.as_box(reduced) if isinstance(reduced, GradShards) else parts.as_grads(reduced)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Calls of ``value_and_grad`` inside communicate nothing. May be nested."""
        before = self._static
        self._static = dataclasses.replace(before, no_sync=True)
        try:
            yield
        finally:
            self._static = dataclasses.replace(self._static, no_sync=before.no_sync)

    def unused_parameters(self, loss_fn: Callable[..., Any], *args: Any) -> tuple[str, ...]:
        """Paths of the trained parameters that ``loss_fn(ddp, *args)`` does not use: the loss does
        not depend on them, or their gradient is zero whatever the values. Runs nothing."""
        job, parts = self._job(self, loss_fn, False, None)
        found: list[tuple[str, ...]] = []

        def trace(trained: Any, others: Any, args: Any) -> None:
            found.append(run_job(job._replace(look=True), trained, others, args, None, {}).unused)

        jax.eval_shape(trace, parts.trained, parts.others, args)
        return found[0]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the last synchronised call, in order; before one, those of reverse
        order."""
        layout = self._static.record.layout
        if layout is None:
            layout = self._layout(self._parts(self))
        return layout.buckets

    # ---------------------------------------------------------------- equal devices

    def broadcast(self) -> None:
        """Give all devices and processes the first device's parameters and buffers, in place:
        every array of the model, with its dtype and bits. See ``jzero.broadcast``."""
        if self._static.linen is not None:
            self._module = broadcast(self._module, zero=self._static.options.config)
            return
        nnx, _ = flax_modules()
        state = nnx.as_pure(nnx.state(self._module, graph=True))
        nnx.update(self._module, broadcast(state, zero=self._static.options.config))

    def first_difference(self) -> str | None:
        """The path of the first array that differs between devices or processes, or None; see
        ``jzero.first_difference``."""
        tree = self._module
        if self._static.linen is None:
            nnx, _ = flax_modules()
            tree = nnx.as_pure(nnx.state(self._module, graph=True))
        return first_difference(tree, zero=self._static.options.config)

    def __repr__(self) -> str:
        name = type(self.module).__name__
        return f"DistributedDataParallel({name}, {self._static.options.config})"

    # ---------------------------------------------------------------- inside

    def _parts(self, node: Any) -> Parts:
        static = self._static
        if static.linen is None:
            return nnx_parts(node, static.wrt)

        def replace(variables: Any) -> None:
            node._keep(variables)

        return linen_parts(
            node.variables,
            static.wrt,
            lambda variables: self._make(variables, static),
            lambda ddp: ddp.variables,
            replace,
        )

    def _job(self, node: Any, loss_fn: Any, has_aux: bool, zero: Any) -> tuple[Job, Parts]:
        nnx, _ = flax_modules()
        wrapped = isinstance(node, DistributedDataParallel)
        if not wrapped and (self._static.linen is not None or not isinstance(node, nnx.Module)):
            raise TypeError(
                f"the first argument must be the wrapper (or its nnx module), got "
                f"{type(node).__name__}; the loss function gets it back as its first argument"
            )
        # Under nnx.jit the wrapper in hand is a copy; its no_sync is what holds now.
        static = node._static if wrapped else self._static
        axes = resolve_axes(static.options.config)
        parts = self._parts(node)
        job = Job(
            loss_fn=loss_fn,
            has_aux=has_aux,
            options=static.options,
            axes=axes,
            sync=not static.no_sync,
            look=False,
            shards=sharding_of(zero, axes, static.options, parts.params, parts.trained),
            merge=parts.merge,
            changed=parts.changed,
            static=(loss_fn, has_aux, wrapped, parts.static),
        )
        return job, parts

    def _layout(self, parts: Parts) -> Layout:
        """The buckets in use, where they hold every parameter."""
        layout = self._static.record.layout
        if layout is not None and layout.by_path.keys() == parts.trained.keys():
            return layout
        return bucket_layout(parts.trained, self._static.options)


def _flatten(ddp: DistributedDataParallel) -> Any:
    return ((jax.tree_util.GetAttrKey("module"), ddp._module),), ddp._static


jax.tree_util.register_pytree_with_keys(
    DistributedDataParallel,
    _flatten,
    lambda static, children: DistributedDataParallel._make(next(iter(children)), static),
)
