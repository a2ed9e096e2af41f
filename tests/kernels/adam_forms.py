"""Operands in every form that a kernel reads, and those forms in numpy."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jzero_kernels import adam
from jzero_kernels.adam import forms
from kernels import adam_oracle as oracle


class Case(NamedTuple):
    """p, m, v in their forms, and the dtypes of the wires."""

    parameter: str
    moments: str
    grad: str = "bfloat16"
    out: str = "bfloat16"
    stochastic: bool = False


CASES: dict[str, Case] = {
    "master": Case("master", "float32"),
    "remainder": Case("remainder", "float32"),
    "remainder_bf16_moments": Case("remainder", "bfloat16", stochastic=True),
    "remainder_e4m3": Case("remainder", "scaled float8_e4m3fn", stochastic=True),
    "remainder_e5m2": Case("remainder", "scaled float8_e5m2"),
    "float32_scaled_bf16": Case("float32", "scaled bfloat16", out="float32"),
    "float16": Case("scaled float16", "scaled float16", stochastic=True),
}
# Mosaic has no float16.
ON_TPU = [name for name, case in CASES.items() if "float16" not in case.moments.split()]


def moment(kind: str, x: Any, root: bool = False) -> Any:
    """An array, or what a kernel writes of it in a scaled form."""
    x = jnp.asarray(x, jnp.float32)
    if not kind.startswith("scaled "):
        return x.astype(kind)
    dtype = kind.removeprefix("scaled ")
    like = adam.Scaled(jnp.zeros(x.size, dtype), jnp.zeros(x.size // 128))
    return forms.write_moment(like, x, forms.flat_blocks(x.size), root=root)


def operands(case: Case, n: int, seed: int = 0) -> tuple[Any, ...]:
    """p, m, v, g with blocks of very different sizes, a block of zeros, and an edited parameter."""
    rng = np.random.default_rng(seed)
    p = rng.normal(size=n).astype(np.float32)
    size = np.exp2(rng.integers(-30, 10, -(-n // 128))).repeat(128)[:n]
    size[:128] = 0
    m = rng.normal(size=n) * size
    v = (rng.normal(size=n) * size) ** 2
    g = jnp.asarray(rng.normal(size=n) * size, case.grad)
    moments = (moment(case.moments, m), moment(case.moments, v, root=True))
    if case.parameter == "float32":
        return jnp.asarray(p), *moments, g
    if case.parameter == "remainder":
        high, low = forms.split(jnp.asarray(p))
        return adam.Remainder(high.at[min(7, n - 1)].set(3.5), low), *moments, g
    kind = "float32" if case.parameter == "master" else case.parameter
    stored = moment(kind, p)
    visible = decoded(stored).astype(ml_dtypes.bfloat16)
    visible[min(7, n - 1)] = 3.5
    return adam.Master(stored, jnp.asarray(visible)), *moments, g


def random_of(case: Case) -> tuple[adam.Random, ...]:
    return (adam.Random(jnp.int32(-123456789), jnp.int32(77)),) if case.stochastic else ()


def options_of(case: Case, **changes: Any) -> dict[str, Any]:
    plain = {"nesterov": False, "weight_decay_mode": "decoupled", "emit": "param"}
    return plain | {"out_dtype": jnp.dtype(case.out)} | changes


# ---------------------------------------------------------------- the forms again, in numpy


def decoded(form: Any, root: bool = False) -> np.ndarray:
    """The float32 that a moment's form stands for."""
    if not isinstance(form, adam.Scaled):
        return np.asarray(form).astype(np.float32)
    scales = np.asarray(form.scales).repeat(128)
    with np.errstate(over="ignore"):
        value = np.asarray(form.values).astype(np.float32) * scales
        return value * value if root else value


def parameter(p: Any) -> np.ndarray:
    """The float32 that a parameter's form stands for."""
    if isinstance(p, adam.Remainder):
        return join(np.asarray(p.visible), np.asarray(p.low))
    if not isinstance(p, adam.Master):
        return np.asarray(p)
    stored, visible = decoded(p.stored), np.asarray(p.visible)
    return np.where(stored.astype(visible.dtype) == visible, stored, visible.astype(np.float32))


def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """As NVIDIA Apex does: the upper half, less one where the lower is negative, beside it."""
    upper = high.view(np.uint16).astype(np.int64) - (low < 0)
    bits = ((upper & 0xFFFF) << 16) | low.view(np.uint16)
    return bits.astype(np.uint32).view(np.float32)


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As NVIDIA Apex does: the upper half, plus one where the lower is negative as an int16."""
    bits = x.view(np.uint32).astype(np.int64)
    low = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
    high = ((bits >> 16) + (low < 0)).astype(np.uint16)
    return high.view(ml_dtypes.bfloat16), low


@functools.cache
def eighths(dtype: str) -> np.ndarray:
    """Every finite value of an 8-bit float, ascending."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.finfo(dtype).dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


assert_same_bits = oracle.assert_same_bits
