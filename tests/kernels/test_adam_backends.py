"""Every kernel, interpreted on CPU, against the reference: the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernels.adam_oracle import Hyper, assert_same_bits

from jzero_kernels import adam
from jzero_kernels.adam import reference, tpu, tpu_stats, triton
from jzero_kernels.adam.shapes import LENGTHS, POLICIES
from kernels import adam_oracle as oracle

pytestmark = pytest.mark.usefixtures("strict")

# Both simulators fill what is outside a block, or not yet written, with NaN; the second also
# raises on a read out of bounds.
KERNELS = {
    "tpu": functools.partial(tpu.adam_update, interpret=True),
    "tpu_simulated": functools.partial(
        tpu.adam_update,
        interpret=pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise"),
    ),
    "triton": functools.partial(triton.adam_update, interpret=True),
}
PLAIN = {"nesterov": False, "weight_decay_mode": "decoupled", "emit": "param"}


def check(kernel, policy, n, hyper, **options):
    operands = (*oracle.shard(policy, n), hyper.scalars())
    options = PLAIN | {"out_dtype": jnp.dtype(policy.out)} | options
    block = options.pop("block", None)
    got = jax.jit(functools.partial(kernel, block=block, **options))(*operands)
    expected = jax.jit(functools.partial(reference.adam_update, **options))(*operands)
    for value, to in zip(got, expected, strict=True):
        assert_same_bits(value, to)
    assert np.isfinite(np.asarray(got.out, np.float32)).all()


@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
@pytest.mark.parametrize("name", KERNELS)
def test_any_length(name, n):
    if name == "triton" and n > 2**17:
        pytest.skip("the interpreter runs Triton's many small programs one by one")
    block = 2**16 if name == "tpu_simulated" and n > 2**16 else None
    check(KERNELS[name], POLICIES["mixed"], n, Hyper(), block=block)


@pytest.mark.parametrize("n", [1000, 5 * 1024])
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "bf16_moments", "no_master"])
@pytest.mark.parametrize("name", ["tpu", "triton"])
def test_any_dtype(name, policy, n):
    if name == "triton" and n > 1000:
        pytest.skip("Triton's kernel has one form for every length")
    check(KERNELS[name], POLICIES[policy], n, Hyper(multiplier=0.3))


def test_float8_wire():
    check(KERNELS["tpu"], POLICIES["float8_wire"], 8192, Hyper())


@pytest.mark.parametrize(
    ("nesterov", "mode", "emit", "finite"),
    [
        (False, "l2", "param", True),
        (True, "decoupled", "update", True),
        (True, "l2", "update", True),
        (False, "decoupled", "update", False),
    ],
)
@pytest.mark.parametrize("name", ["tpu", "triton"])
def test_any_option(name, nesterov, mode, emit, finite):
    check(
        KERNELS[name],
        POLICIES["float32"],
        3000,
        Hyper(finite=finite, eps_root=1e-7, multiplier=0.7),
        nesterov=nesterov,
        weight_decay_mode=mode,
        emit=emit,
    )


@pytest.mark.parametrize("name", KERNELS)
def test_skipped_step_is_bit_identical_under_poison(name):
    p, m, v, g = oracle.shard(POLICIES["mixed"], 2048)
    p = p.at[:4].set(jnp.array([jnp.nan, -0.0, 1e-44, jnp.inf]))
    g = jnp.full_like(g, jnp.nan)
    got = KERNELS[name](p, m, v, g, Hyper(finite=False).scalars(), out_dtype=jnp.bfloat16, **PLAIN)
    for value, before in zip(got, (p, m, v, p.astype(jnp.bfloat16)), strict=True):
        assert_same_bits(value, before)


def test_block_size_changes_nothing():
    for block in (4096, 2 * 4096):
        check(KERNELS["tpu"], POLICIES["mixed"], 5 * 4096 + 1024, Hyper(), block=block)


@pytest.mark.parametrize("interpret", [True, pltpu.InterpretParams()], ids=["hlo", "simulated"])
@pytest.mark.parametrize("n", [1, 4096, 4096 * 65, 4096 * 193 + 17])
def test_stats_kernel(n, interpret):
    """Odd numbers of blocks (a step too many in the second half), partial blocks, tails."""
    rng = np.random.default_rng(n)
    g = jnp.asarray(rng.normal(size=n) * np.exp2(rng.integers(-90, 90, n)), jnp.float32)
    got = tpu_stats.grad_stats(g, interpret=interpret)
    np.testing.assert_allclose(got, adam.grad_stats(g), rtol=2e-6)
    np.testing.assert_allclose(
        adam.norm_from_stats(got), np.linalg.norm(np.asarray(g, np.float64)), rtol=2e-6
    )
