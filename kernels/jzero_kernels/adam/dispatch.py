"""Choosing a backend by the platform that is lowered for, and naming the wrong one.

The platform is known only when a program is lowered: a TPU program may be compiled ahead of time
on a CPU host, so ``jax.default_backend()`` says nothing. ``lax.platform_dependent`` traces every
branch and lowers one; :func:`refuse_platform` is the branch that raises when it is that one.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax
import jax.custom_batching
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_Tree = TypeVar("_Tree")

# Platforms (as lax.platform_dependent names them) on which each explicit backend runs.
PLATFORMS: dict[str, tuple[str, ...]] = {
    "tpu": ("tpu",),
    "mosaic_gpu": ("cuda",),
    "triton": ("cuda", "rocm"),
}

# What "auto" means. CUDA and ROCm: the Pallas kernels compile but have not been timed on a GPU, so
# the plain-XLA reference, one fusion that moves the same bytes, is the choice until they have been
# (docs/kernels.md).
AUTO: dict[str, str] = {
    "cpu": "reference",
    "tpu": "tpu",
    "cuda": "reference",
    "rocm": "reference",
}

# With Scaled forms XLA makes two passes and keeps the moments in float32 in between (compiled for
# H200: four bytes a parameter of temporary memory), so the kernel is the choice there.
AUTO_SCALED: dict[str, str] = {**AUTO, "cuda": "triton", "rocm": "triton"}


_refuse_p = Primitive("jzero_refuse_platform")
_refuse_p.def_abstract_eval(lambda x, *, message: x)


def _refuse_lowering(ctx: Any, x: Any, *, message: str) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise ValueError(message.replace("{platform}", ", ".join(platforms)))


def _refuse_batching(args: Any, dims: Any, *, message: str) -> Any:
    return _refuse_p.bind(args[0], message=message), dims[0]


mlir.register_lowering(_refuse_p, _refuse_lowering)
batching.primitive_batchers[_refuse_p] = _refuse_batching


_no_vmap_p = Primitive("jzero_no_vmap")
_no_vmap_p.def_abstract_eval(lambda x, *, message: x)


def _no_vmap_lowering(_ctx: Any, x: Any, *, message: str) -> Any:
    return [x]


def _no_vmap_batching(_args: Any, _dims: Any, *, message: str) -> Any:
    raise ValueError(message)


mlir.register_lowering(_no_vmap_p, _no_vmap_lowering)
batching.primitive_batchers[_no_vmap_p] = _no_vmap_batching


def _each(fn: Callable[[Any], Any], value: Any) -> Any:
    """``fn`` of an array, or of each array in a tuple or NamedTuple, which is rebuilt."""
    if not isinstance(value, tuple):
        return fn(value)
    parts: list[Any] = [_each(fn, x) for x in cast("tuple[Any, ...]", value)]
    make: Any = type(value)
    return make(*parts) if hasattr(value, "_fields") else tuple(parts)


def _or_reference_under_vmap(
    kernel: Callable[..., _Tree], reference: Callable[..., _Tree]
) -> Callable[..., _Tree]:
    """The kernel; under ``vmap`` the reference, which XLA fuses into one pass like any other.

    Pallas has no form to lower for batched scalars or batched one-dimensional blocks.
    """
    call: Any = jax.custom_batching.custom_vmap(kernel)

    def rule(axis_size: int, in_batched: Any, *args: Any) -> Any:
        axes = _each(lambda batched: 0 if batched else None, tuple(in_batched))
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*args)
        return out, _each(lambda _: True, out)

    call.def_vmap(rule)
    return call


def by_platform(
    function: str, backend: str, kernel: Callable[..., _Tree], fallback: Callable[..., _Tree]
) -> Callable[..., _Tree]:
    """A function that runs ``kernel`` where ``backend`` exists and raises elsewhere on lowering.

    Args:
      function: public name, for the message.
      backend: a key of :data:`PLATFORMS`.
      kernel: the backend's own function; positional array arguments only.
      fallback: any function of the same signature and result types. It gives the refusing branch
        its types and is never lowered.
    """
    accepted = PLATFORMS[backend]
    message = (
        f"{function}: `backend` is {backend!r}, but the program is being lowered for "
        f"{{platform}}; {backend!r} runs on {' and '.join(accepted)}. Pass backend='auto' or "
        "'reference', or lower for a device of that kind."
    )

    def refuse(*args: Any) -> _Tree:
        first, *rest = args
        refused = _each(lambda x: _refuse_p.bind(x, message=message), first)
        return fallback(refused, *rest)

    no_vmap = (
        f"{function}: `backend` is {backend!r} under vmap; accepted there: 'auto', 'reference'. "
        "Pass one of these, or give the kernel one flat array."
    )

    def run(*args: Any) -> _Tree:
        # Any operand may be the batched one.
        return kernel(*_each(lambda x: _no_vmap_p.bind(x, message=no_vmap), args))

    def call(*args: Any) -> _Tree:
        return lax.platform_dependent(*args, default=refuse, **dict.fromkeys(accepted, run))

    return call


def auto(
    kernels: dict[str, Callable[..., _Tree]],
    reference: Callable[..., _Tree],
    table: dict[str, str],
) -> Any:
    """A function that runs, on each platform, what a table says; the reference elsewhere.

    Args:
      kernels: backend name to function, for those usable with the operands at hand.
      reference: the plain-XLA function.
      table: :data:`AUTO` or :data:`AUTO_SCALED`.
    """
    branches = {
        platform: _or_reference_under_vmap(kernels[name], reference)
        for platform, name in table.items()
        if name in kernels
    }
    if not branches:
        return reference
    return lambda *args: lax.platform_dependent(*args, default=reference, **branches)


def vary_together(function: str, arrays: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays, each cast to vary over every manual mesh axis that any of them varies over.

    Inside ``shard_map(check_vma=True)`` the branches of the dispatcher must agree on the type of
    their results, and ``pallas_call`` takes operands of one varying type only. Elsewhere (no
    ``shard_map``, or the check off) this does nothing.

    Raises:
      ValueError: if an operand is still ``unreduced`` over an axis: it owes a reduction.
    """
    arrays = tuple(arrays)
    types = [jax.typeof(x).manual_axis_type for x in arrays]
    unreduced = frozenset().union(*(t.unreduced for t in types))
    if unreduced:
        raise ValueError(
            f"{function}: an operand is of type unreduced over {sorted(map(str, unreduced))}; "
            "expected values that owe no reduction. Reduce it first, with lax.psum_scatter."
        )
    union = frozenset().union(*(t.varying for t in types))
    if not union:
        return arrays
    return tuple(
        lax.pcast(x, tuple(sorted(union - t.varying, key=str)), to="varying")
        if union - t.varying
        else x
        for x, t in zip(arrays, types, strict=True)
    )


def is_typed_sharded(x: jax.Array) -> bool:
    """Whether x is split over an Explicit mesh axis, outside ``shard_map``.

    XLA partitions the reference; a kernel would have to be wrapped in ``shard_map`` first.
    """
    spec = jax.typeof(x).sharding.spec
    return any(part is not None for part in spec)
