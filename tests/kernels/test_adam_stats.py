"""Sums of squares that neither overflow nor underflow, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero_kernels import adam

pytestmark = pytest.mark.usefixtures("strict")


def norm(g):
    return float(adam.norm_from_stats(adam.grad_stats(jnp.asarray(g))))


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000, 65536, 65537, 100_003])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ordinary(n, dtype):
    g = jnp.asarray(np.random.default_rng(n).normal(size=n), dtype)
    stats = adam.grad_stats(g)
    exact = np.asarray(g).astype(np.float64)
    assert stats.shape == (4,)
    assert stats.dtype == jnp.float32
    np.testing.assert_allclose(stats, [0, (exact**2).sum(), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(norm(g), np.linalg.norm(exact), rtol=1e-6)


@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e-16, 1e-12, 1.0, 1e12, 2e17, 2e19, 1e30])
def test_whole_range(size):
    g = np.full(5000, size, np.float32)
    # Equal terms round the same way in every partial sum: the worst case.
    assert norm(g) == pytest.approx(float(g[0]) * 5000**0.5, rel=3e-6, abs=0)


def test_mixed_ranges():
    rng = np.random.default_rng(0)
    g = (rng.normal(size=10_000) * np.exp2(rng.integers(-110, 100, 10_000))).astype(np.float32)
    assert norm(g) == pytest.approx(np.linalg.norm(g.astype(np.float64)), rel=1e-6, abs=0)
    # The large and the middle class meet at 2^40: neither may hide the other.
    g = np.concatenate([np.full(4096, 2.0**40, np.float32), np.float32([2.0**40 * 1.01])])
    assert norm(g) == pytest.approx(np.linalg.norm(g.astype(np.float64)), rel=1e-6, abs=0)


def test_one_large_element_is_finite():
    g = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    g[17] = 2e19  # its square is over the largest float32
    stats = adam.grad_stats(jnp.asarray(g))
    assert stats[3] == 0
    assert norm(g) == pytest.approx(2e19, rel=1e-6, abs=0)


@pytest.mark.parametrize(("bad", "total"), [(np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.inf)])
def test_nonfinite(bad, total):
    g = np.ones(3000, np.float32)
    g[[5, 2999]] = bad
    assert adam.grad_stats(jnp.asarray(g))[3] == 2
    np.testing.assert_equal(norm(g), total)


def test_empty_and_zero():
    assert norm(np.zeros(0, np.float32)) == 0
    assert norm(np.zeros(1000, np.float32)) == 0
    np.testing.assert_array_equal(adam.grad_stats(jnp.zeros(0)), np.zeros(4))


def test_long_sum_does_not_saturate():
    """2^25 ones: a running float32 sum stops at 2^24."""
    assert adam.grad_stats(jnp.ones(2**25, jnp.bfloat16))[1] == 2**25


def test_sums_over_devices():
    parts = [np.float32([3e-20, 4.0]), np.float32([1e25, 1e-3])]
    total = sum(adam.grad_stats(jnp.asarray(x)) for x in parts)
    exact = np.linalg.norm(np.concatenate(parts).astype(np.float64))
    assert float(adam.norm_from_stats(total)) == pytest.approx(exact, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_no_copy_of_the_gradient_on_cpu(dtype):
    n = 2**22
    step: Any = jax.jit(adam.grad_stats).lower(jax.ShapeDtypeStruct((n,), dtype)).compile()
    assert step.memory_analysis().temp_size_in_bytes < n * dtype.dtype.itemsize // 16
    if dtype == jnp.bfloat16:
        assert step.cost_analysis()["bytes accessed"] < 2 * n * 1.1


def test_norm_refuses_other_arrays():
    with pytest.raises(ValueError, match=r"`stats` is float32\[3\]; expected float32\[4\]"):
        adam.norm_from_stats(jnp.zeros(3))
