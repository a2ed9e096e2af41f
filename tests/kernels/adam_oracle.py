"""Adam in numpy float64, written from the papers and not from the code under test."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jzero_kernels import adam
from jzero_kernels.adam.shapes import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyper:
    learning_rate: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.01
    step: int = 3
    multiplier: float = 1.0
    finite: bool = True
    bias_correction: bool = True

    def scalars(self) -> adam.AdamScalars:
        def f32(x: float) -> jax.Array:
            return jnp.asarray(x, jnp.float32)

        def correction(decay: float, step: int) -> jax.Array:
            return f32(1 - decay**step if self.bias_correction else 1.0)

        return adam.AdamScalars(
            learning_rate=f32(self.learning_rate),
            b1=f32(self.b1),
            one_minus_b1=f32(1 - self.b1),
            b2=f32(self.b2),
            one_minus_b2=f32(1 - self.b2),
            eps=f32(self.eps),
            eps_root=f32(self.eps_root),
            weight_decay=f32(self.weight_decay),
            bias_correction1=correction(self.b1, self.step),
            bias_correction2=correction(self.b2, self.step),
            bias_correction1_next=correction(self.b1, self.step + 1),
            multiplier=f32(self.multiplier),
            finite=jnp.asarray(self.finite),
        )


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def step(p, m, v, g, scalars, *, nesterov=False, weight_decay_mode="decoupled"):
    """New p, m, v and the update, float64, from the scalars' exact values."""
    p, m, v, g = map(f64, (p, m, v, g))
    s = {name: float(value) for name, value in scalars._asdict().items()}
    g = g * s["multiplier"]
    if weight_decay_mode == "l2":
        g = g + s["weight_decay"] * p
    m = s["b1"] * m + s["one_minus_b1"] * g
    v = s["b2"] * v + s["one_minus_b2"] * g**2
    m_hat = m / s["bias_correction1"]
    if nesterov:
        m_hat = s["b1"] * m / s["bias_correction1_next"]
        m_hat = m_hat + s["one_minus_b1"] * g / s["bias_correction1"]
    direction = m_hat / (np.sqrt(v / s["bias_correction2"] + s["eps_root"]) + s["eps"])
    if weight_decay_mode == "decoupled":
        direction = direction + s["weight_decay"] * p
    u = -s["learning_rate"] * direction
    return p + u, m, v, u


def ulp_error(got: Any, exact: np.ndarray, scale: np.ndarray | None = None) -> float:
    """The largest error in units in the last place of got's dtype, at the size of ``scale``.

    Args:
      got: array of any float dtype.
      exact: float64.
      scale: magnitudes that set the unit, where ``exact`` is a difference of larger things.
    """
    info = ml_dtypes.finfo(np.asarray(got).dtype)
    size = np.maximum(np.abs(exact), float(info.smallest_normal))
    if scale is not None:
        size = np.maximum(size, np.abs(scale))
    unit = np.exp2(np.floor(np.log2(size))) * float(info.eps)
    error = np.abs(f64(got) - exact) / unit
    return float(error.max()) if error.size else 0.0


def shard(policy: Policy, n: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """p, m, v, g of one length, of ordinary sizes, in the policy's dtypes."""
    rng = np.random.default_rng(seed)
    p, m, g = rng.normal(size=(3, n))
    v = np.abs(rng.normal(size=n)) + 1e-3
    arrays = (p, 0.1 * m, 0.1 * v, g)
    return tuple(jnp.asarray(x, name) for x, name in zip(arrays, policy[:4], strict=True))


def bits(x: Any) -> np.ndarray:
    """The array as unsigned integers, to compare NaN and signed zero too."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(got: Any, expected: Any) -> None:
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(bits(got), bits(expected))
