"""Validation, documentation and the one dispatcher of the Adam kernels."""

import functools
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jzero_kernels.adam import (
    dispatch,
    forms,
    mosaic_gpu,
    reference,
    stats,
    tpu,
    tpu_stats,
    triton,
)
from jzero_kernels.adam.forms import Master, Random, Remainder, Scaled
from jzero_kernels.adam.math import AdamResult, AdamScalars, Emit, WeightDecayMode

Backend = Literal["auto", "reference", "tpu", "mosaic_gpu", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def adam_update(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    scalars: AdamScalars,
    random: Random | None = None,
    *,
    nesterov: bool = False,
    weight_decay_mode: WeightDecayMode = "decoupled",
    out_dtype: DTypeLike,
    emit: Emit = "param",
    backend: Backend = "auto",
    block: int | None = None,
) -> AdamResult:
    """One AdamW step on one flat shard: reads p, m, v, g once, writes p, m, v, out once.

    With ``g' = multiplier * g`` (``+ weight_decay * p`` for "l2")::

        m' = (1 - b1) g' + b1 m              v' = (1 - b2) g'^2 + b2 v
        u  = (m' / bias_correction1) / (sqrt(v' / bias_correction2 + eps_root) + eps)
        u  = -learning_rate (u + weight_decay p)          # "l2": -learning_rate u
        p' = p + u

    in float32 (float64 when a moment is float64), in the order of ``optax.adamw``; the unrounded
    m', v' enter u, each result is rounded once (to nearest, ties to even) when stored. With
    ``nesterov`` the first moment in u is ``b1 m' / bias_correction1_next + (1 - b1) g' /
    bias_correction1``, as ``optax.scale_by_adam(nesterov=True)``.

    Works under ``jit``, under ``vmap`` (as plain XLA; a kernel by name is refused) and inside
    ``shard_map`` with ``check_vma`` on or off: results vary over the union of the axes that the
    operands vary over. On several TPUs call it inside ``shard_map``: XLA does not partition a
    kernel. It adds no collective, and is in place when the enclosing ``jit`` donates p, m and v.
    Only the reference is differentiable.

    Args:
      p: float[n], the parameter: float32 as a rule; float64, bfloat16, float16 too. Or a
        ``Master`` (of a float[n], or of a ``Scaled``), or a ``Remainder``: see ``forms``.
      m: float[n], first moment; or a ``Scaled`` of n elements, n a multiple of 128.
      v: float[n], second moment; or a ``Scaled``, which holds its root.
      g: float[n], gradient, any float dtype.
      scalars: :class:`AdamScalars`, 0-d device values.
      random: where given, moments and masters in 8 or 16 bits are rounded stochastically with
        these bits instead of to nearest.
      nesterov: see above.
      weight_decay_mode: "decoupled" (AdamW, Loshchilov & Hutter) or "l2" (added to the gradient).
      out_dtype: dtype of ``out``.
      emit: "param": ``out`` is the stored p' cast to ``out_dtype``. "update": ``out`` is u, with
        ``p + out == p'`` exactly for float32 p and ``out_dtype``.
      backend: "auto" (the default for the platform that is lowered for: see
        :func:`default_backend`), or one by name, which raises where it cannot run.
      block: elements that a kernel named by ``backend`` handles at a time; None: the tuned or
        built-in size.

    Returns:
      :class:`AdamResult`. With ``scalars.finite`` False: p, m, v bit-identical to the arguments,
      and ``out`` the cast of the unchanged p (or an update of -0.0, which changes no bit of any p),
      whatever g holds.

    Raises:
      ValueError: naming the argument, what it got, what is accepted and the fix.
    """
    name = "adam_update"
    _check_choice(name, "weight_decay_mode", weight_decay_mode, get_args(WeightDecayMode))
    _check_choice(name, "emit", emit, get_args(Emit))
    _check_choice(name, "backend", backend, BACKENDS)
    # The length that the others are compared with: p's, where that is an array.
    first = {"g": g} if isinstance(p, tuple) else {"p": p}
    for argument, form in (("p", p), ("m", m), ("v", v), ("g", g)):
        _check_form(name, argument, form, first)
    _check_dtype(name, "out_dtype", jnp.dtype(out_dtype))
    _check_emit(name, p, jnp.dtype(out_dtype), emit)
    scalars = _check_scalars(scalars)
    if block is not None and backend in ("auto", "reference"):
        raise ValueError(
            f"{name}: `block` is {block}; accepted: None with backend {backend!r}, which may have "
            "no blocks. Pass None, or a kernel's backend by name."
        )
    operands: Any = (p, m, v, g, scalars, *(() if random is None else (random,)))
    together = dispatch.vary_together(name, forms.parts(operands))
    return _adam_update(
        *forms.rebuilt(operands, iter(together)),
        nesterov=nesterov,
        weight_decay_mode=weight_decay_mode,
        out_dtype=jnp.dtype(out_dtype),
        emit=emit,
        backend=backend,
        block=block,
    )


# Jitted so that an eager call is one program, and buckets of one shape are traced once.
@functools.partial(
    jax.jit,
    static_argnames=("nesterov", "weight_decay_mode", "out_dtype", "emit", "backend", "block"),
)
def _adam_update(
    p: Any,
    m: Any,
    v: Any,
    g: jax.Array,
    scalars: AdamScalars,
    random: Random | None = None,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
    block: int | None,
    **options: Any,
) -> AdamResult:
    name = "adam_update"
    plain = functools.partial(reference.adam_update, out_dtype=out_dtype, **options)
    modules = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}
    kernels = {
        key: functools.partial(module.adam_update, out_dtype=out_dtype, **options)
        for key, module in modules.items()
    }
    reasons = {key: x.unsupported(p, m, v, g, out_dtype) for key, x in modules.items()}
    operands: Any = (p, m, v, g, scalars, *(() if random is None else (random,)))
    if g.size == 0 or backend == "reference":
        return plain(*operands)
    if backend == "auto":
        # Lengths without the free two-dimensional view: XLA updates them in place just as well.
        taken = {
            key: kernel
            for key, kernel in kernels.items()
            if reasons[key] is None
            and not any(map(dispatch.is_typed_sharded, forms.parts((p, m, v, g))))
            and (key != "tpu" or tpu.is_aligned(g.size, p, m, v, g, out_dtype))
        }
        table = dispatch.AUTO_SCALED if forms.has_scales((p, m, v)) else dispatch.AUTO
        return dispatch.auto(taken, plain, table)(*operands)
    _check_supported(name, backend, reasons[backend])
    kernel = functools.partial(kernels[backend], block=block)
    return dispatch.by_platform(name, backend, kernel, plain)(*operands)


def grad_stats(g: jax.Array, *, backend: Backend = "auto") -> jax.Array:
    """Sums of squares of one flat shard, safe from overflow and underflow, in one pass.

    Magnitudes are kept apart as in Blue's algorithm (LAPACK ``nrm2``), so that gradients of 1e-25
    or of 2e19 have a norm:

    ====  =========================================================================
    0     sum of ``(g * 2^63)^2`` over ``|g| < 2^-50``
    1     sum of ``g^2`` over ``2^-50 <= |g| <= 2^40`` (and NaN)
    2     sum of ``(g * 2^-64)^2`` over ``|g| > 2^40`` (and infinities)
    3     number of elements that are inf or NaN
    ====  =========================================================================

    Summed in levels, so the error does not grow with n as a running float32 sum's does (that
    stops at 2^24 equal terms). Sum the four over devices with one ``lax.psum``, then take
    :func:`norm_from_stats`. ``stats[3] == 0`` says that all is finite.

    Args:
      g: float[n], n >= 0. float64 is rounded to float32 first: over 3.4e38 counts as inf.
      backend: as for :func:`adam_update`.

    Returns:
      float32[4].

    Raises:
      ValueError: naming the argument, what it got, what is accepted and the fix.
    """
    _check_choice("grad_stats", "backend", backend, BACKENDS)
    _check_vectors("grad_stats", {"g": g})
    return _grad_stats(g, backend=backend)


@functools.partial(jax.jit, static_argnames=("backend",))
def _grad_stats(g: jax.Array, *, backend: Backend) -> jax.Array:
    if g.size == 0:
        return jnp.zeros((4,), jnp.float32)
    if backend in ("auto", "reference"):
        return stats.grad_stats(g)
    kernels = {"tpu": tpu_stats.grad_stats}
    _check_choice("grad_stats", "backend", backend, ("auto", "reference", *kernels))
    _check_supported("grad_stats", backend, tpu_stats.unsupported(g))
    return dispatch.by_platform("grad_stats", backend, kernels[backend], stats.grad_stats)(g)


def default_backend(platform: str) -> str:
    """The backend that "auto" takes when lowering for a platform ("cpu", "tpu", "cuda", "rocm").

    Scaled forms go to "triton" on GPU. Operands that its kernel does not take (:func:`adam_update`
    with float64, say) go to "reference" instead.
    """
    return dispatch.AUTO.get(platform, "reference")


def _check_choice(function: str, name: str, got: Any, accepted: tuple[str, ...]) -> None:
    if got not in accepted:
        raise ValueError(
            f"{function}: `{name}` is {got!r}; accepted: {', '.join(map(repr, accepted))}. "
            "Pass one of these."
        )


def _check_supported(function: str, backend: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(
            f"{function}: `backend` is {backend!r}, and {reason} by that backend. "
            "Pass backend='auto' or 'reference', which take every float dtype."
        )


def _check_dtype(function: str, name: str, dtype: jnp.dtype) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{function}: `{name}` is {dtype}; accepted: real floating dtypes. "
            "Integer and complex leaves take no Adam step: leave them out of the bucket."
        )


def _check_vectors(function: str, arrays: dict[str, jax.Array]) -> None:
    first_name, first = next(iter(arrays.items()))
    for name, x in arrays.items():
        if jnp.ndim(x) != 1:
            raise ValueError(
                f"{function}: `{name}` has shape {jnp.shape(x)}; accepted: one dimension. "
                "Pass the flat shard (x.reshape(-1))."
            )
        if jnp.shape(x) != jnp.shape(first):
            raise ValueError(
                f"{function}: `{name}` has shape {jnp.shape(x)}; accepted: that of "
                f"`{first_name}`, {jnp.shape(first)}. Pass shards of one bucket."
            )
        _check_dtype(function, name, jnp.dtype(x.dtype))


def _check_form(function: str, name: str, form: Any, first: dict[str, jax.Array]) -> None:
    """A parameter or a moment: an array, or a form for which its arrays fit; as long as ``first``,
    which is one array by its name."""
    (shape,) = map(jnp.shape, first.values())
    if isinstance(form, (Master, Remainder)) and name == "p":
        _check_vectors(function, {**first, "p.visible": form.visible})
        if isinstance(form, Master):
            _check_form(function, "p.stored", form.stored, first)
            return
        halves = (jnp.dtype(form.visible.dtype).name, jnp.dtype(form.low.dtype).name)
        if halves != ("bfloat16", "int16") or form.low.shape != shape:
            raise ValueError(
                f"{function}: `p` is a Remainder of {halves} and shape {form.low.shape}; "
                f"accepted: ('bfloat16', 'int16') and {shape}. Split a float32 with forms.split."
            )
    elif isinstance(form, Scaled):
        dtype = jnp.dtype(form.values.dtype).name
        _check_vectors(function, {**first, f"{name}.values": form.values})
        n = form.values.size
        if n % forms.BLOCK or form.scales.shape != (n // forms.BLOCK,):
            raise ValueError(
                f"{function}: `{name}` is Scaled with {n} values and scales of shape "
                f"{form.scales.shape}; accepted: a multiple of {forms.BLOCK} values, and one scale "
                f"for {forms.BLOCK} of them. Pad the shard to whole blocks."
            )
        if dtype not in forms.SCALABLE:
            raise ValueError(
                f"{function}: `{name}` is Scaled {dtype}; accepted: {', '.join(forms.SCALABLE)}. "
                "Pass a wider moment as a plain array."
            )
    else:
        _check_vectors(function, {**first, name: cast("jax.Array", form)})


def _check_emit(function: str, p: Any, out_dtype: jnp.dtype, emit: Emit) -> None:
    if isinstance(p, (Master, Remainder)) and emit == "update":
        raise ValueError(
            f"{function}: `emit` is 'update' with a {type(p).__name__} as `p`; accepted: 'param'. "
            "Subtract the old parameter from `out` where a change is wanted."
        )
    if isinstance(p, Remainder) and out_dtype != jnp.bfloat16:
        raise ValueError(
            f"{function}: `out_dtype` is {out_dtype} with a Remainder as `p`; accepted: bfloat16, "
            "the upper half. Cast `out`, or use a Master."
        )


def _check_scalars(scalars: AdamScalars) -> AdamScalars:
    scalars = AdamScalars(*map(jnp.asarray, scalars))
    for name, x in zip(AdamScalars._fields, scalars, strict=True):
        kind = jnp.bool_ if name == "finite" else jnp.floating
        if x.shape != () or not jnp.issubdtype(x.dtype, kind):
            expected = "a 0-d bool" if name == "finite" else "a 0-d float32"
            raise ValueError(
                f"adam_update: `scalars.{name}` is {x.dtype}{list(x.shape)}; accepted: {expected} "
                "array. Pass jnp.asarray(value, dtype)."
            )
    return scalars
