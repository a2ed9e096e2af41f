"""Masters, 16-bit remainders, scaled moments and stochastic rounding in the kernels."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernels.adam_forms import CASES, ON_TPU, decoded, operands, options_of, random_of
from kernels.adam_oracle import Hyper, assert_same_bits

from jzero_kernels import adam
from jzero_kernels.adam import forms, reference, tpu, triton
from kernels import adam_forms as oracle_forms
from kernels import adam_oracle as oracle

pytestmark = pytest.mark.usefixtures("strict")


def run(kernel, case, n, hyper, **options):
    args = (*operands(case, n), hyper.scalars(), *random_of(case))
    return jax.jit(functools.partial(kernel, **options_of(case, **options)))(*args)


def assert_same(got, want):
    for a, b in zip(forms.parts(got), forms.parts(want), strict=True):
        assert_same_bits(a, b)


# ---------------------------------------------------------------- one specification


@pytest.mark.parametrize(
    ("name", "finite"),
    [(name, True) for name in ON_TPU] + [("master", False), ("remainder_e4m3", False)],
)
def test_tpu_kernel_is_the_reference(name, finite):
    case, n = CASES[name], 2**17 + 12288  # a partial last block
    kernel = functools.partial(tpu.adam_update, interpret=True)
    hyper = Hyper(finite=finite, multiplier=0.3)
    assert_same(run(kernel, case, n, hyper), run(reference.adam_update, case, n, hyper))


def test_tpu_kernel_in_simulated_memory():
    case, n = CASES["remainder_e4m3"], 2**17 + 4096
    params = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    kernel = functools.partial(tpu.adam_update, interpret=params)
    assert_same(run(kernel, case, n, Hyper()), run(reference.adam_update, case, n, Hyper()))


@pytest.mark.parametrize("n", [1, 1000])
@pytest.mark.parametrize("name", ["master", "remainder", "remainder_bf16_moments"])
def test_any_length_without_scales(name, n):
    want = run(reference.adam_update, CASES[name], n, Hyper())
    for kernel in (tpu, triton):
        got = run(functools.partial(kernel.adam_update, interpret=True), CASES[name], n, Hyper())
        assert_same(got, want)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_triton_kernel_is_the_reference(name, finite):
    kernel = functools.partial(triton.adam_update, interpret=True)
    hyper = Hyper(finite=finite, multiplier=0.3)
    n = 2048 + 384  # a partial last block
    assert_same(
        run(kernel, CASES[name], n, hyper), run(reference.adam_update, CASES[name], n, hyper)
    )


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    """The step is that of the decoded values; storing them costs what their dtype costs."""
    case, n = CASES[name], 4096
    p, m, v, g = operands(case, n)
    hyper = Hyper(eps=1e-3)
    got = run(reference.adam_update, case, n, hyper)
    p64, m64, _, u64 = oracle.step(
        oracle_forms.parameter(p), decoded(m), decoded(v, root=True), g, hyper.scalars()
    )
    kind = case.moments.removeprefix("scaled ")
    info = ml_dtypes.finfo(kind)
    ulps = 1.01 if case.stochastic else 0.505
    block = np.abs(m64).reshape(-1, 128).max(1).repeat(128)
    floor = (
        block * float(info.smallest_subnormal) / float(info.max) * 8
        if "scaled" in case.moments
        else 0
    )
    unit = np.exp2(np.floor(np.log2(np.abs(m64) + 1e-300))) * float(info.eps)
    error = np.abs(decoded(got.m) - m64)
    rounding = 2.4e-7 * (np.abs(decoded(m)) + np.abs(oracle.f64(g))) + 1e-45
    assert (error <= np.maximum(unit * ulps + rounding, floor)).all()
    new = got.p
    if case.parameter == "remainder":
        assert_same_bits(
            got.out, oracle_forms.split(oracle_forms.join(np.asarray(got.out), np.asarray(new)))[0]
        )
        assert (
            oracle.ulp_error(oracle_forms.join(np.asarray(got.out), np.asarray(new)), p64, u64) < 8
        )
    elif case.parameter in ("master", "float32"):
        assert oracle.ulp_error(np.asarray(new), p64, u64) < 8
        assert_same_bits(got.out, np.asarray(new).astype(case.out))
    else:  # float16 with a scale per block: 11 bits of the largest
        largest = np.abs(p64).reshape(-1, 128).max(1).repeat(128)
        assert (np.abs(decoded(new) - p64) <= largest * 2.0**-10).all()
        assert_same_bits(got.out, decoded(new).astype(case.out))


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_changes_no_bit(name):
    case, n = CASES[name], 2048
    p, m, v, g = operands(case, n)
    poisoned = jnp.full_like(g, jnp.nan)
    got = reference.adam_update(
        p, m, v, poisoned, Hyper(finite=False).scalars(), *random_of(case), **options_of(case)
    )
    assert_same((got.m, got.v), (m, v))
    assert_same_bits(got.out, p if case.parameter == "float32" else p.visible)
    if case.parameter == "remainder":
        assert_same_bits(got.p, p.low)


# ---------------------------------------------------------------- 16-bit remainders


def classes() -> np.ndarray:
    """A float32 of every class: each upper half with lower halves on both sides of the tie."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    return np.concatenate([upper | np.uint32(x) for x in lower]).view(np.float32)


def test_split_and_join_lose_nothing():
    x = classes()
    high, low = map(np.asarray, jax.jit(forms.split)(x))
    back = np.asarray(jax.jit(forms.join)(high, low))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(back[number].view(np.uint32), x[number].view(np.uint32))
    want = oracle_forms.split(x[number])
    assert_same_bits(high[number], want[0])
    assert_same_bits(low[number], want[1])
    # A NaN stays one, in the model and in the master: Apex' rule alone makes zeros of some.
    assert np.isnan(high[~number].astype(np.float32)).all()
    assert np.isnan(back[~number]).all()


@pytest.mark.parametrize(
    ("bits", "high", "low"),
    [
        (0x3F808000, 0x3F81, -32768),  # a tie, away from zero: to nearest even it were 3F80
        (0x3F818000, 0x3F82, -32768),
        (0xBF808000, 0xBF81, -32768),
        (0x7F7F8000, 0x7F80, -32768),  # infinity in the model, finite in the master
        (0x7F7FFFFF, 0x7F80, -1),
        (0x7F7F7FFF, 0x7F7F, 0x7FFF),
        (0x80000000, 0x8000, 0),
        (0x00008000, 0x0001, -32768),
        (0x7FFFFFFF, 0x7FC0, 0),
        (0xFFFFFFFF, 0x7FC0, 0),
    ],
)
def test_split_of_golden_patterns(bits, high, low):
    """parity.md, section 2."""
    x = np.array([bits], np.uint32).view(np.float32)
    got = jax.jit(forms.split)(x)
    assert (int(oracle.bits(got[0])[0]), int(got[1][0])) == (high, low)


def test_a_parameter_set_to_zero_is_zero_whatever_its_remainder():
    zeros = np.array([0.0, -0.0], ml_dtypes.bfloat16)
    for low in (-1, -32768):
        back = np.asarray(forms.join(jnp.asarray(zeros), jnp.full(2, low, jnp.int16)))
        np.testing.assert_array_equal(back.view(np.uint32), [0, 0x80000000])


def test_remainders_are_a_full_master():
    """1,000 steps, bit for bit those of a float32 master."""
    n = 256
    rng = np.random.default_rng(1)
    p = jnp.asarray(rng.normal(size=n), jnp.float32)
    high, low = forms.split(p)
    zeros = jnp.zeros(n)
    step = functools.partial(
        reference.adam_update,
        nesterov=False,
        weight_decay_mode="decoupled",
        out_dtype=jnp.bfloat16,
        emit="param",
    )
    grads = jnp.asarray(rng.normal(size=(1000, n)), jnp.float32)
    scalars = Hyper(learning_rate=1e-2).scalars()

    def both(carry, g):
        full, halves = carry
        a = step(full[0], *full[1:], g, scalars)
        b = step(adam.Remainder(*halves[0]), *halves[1:], g, scalars)
        return ((a.p, a.m, a.v), ((b.out, b.p), b.m, b.v)), None

    carry = ((p, zeros, zeros), ((high, low), zeros, zeros))
    full, halves = jax.jit(lambda c: jax.lax.scan(both, c, grads)[0])(carry)
    assert_same_bits(forms.join(*halves[0]), full[0])
    assert_same((halves[1], halves[2]), (full[1], full[2]))
    assert np.abs(np.asarray(full[0]) - np.asarray(p)).max() > 0.1


# ---------------------------------------------------------------- scaled moments


SCALED = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]


def scaled(x, dtype, root=False):
    like = adam.Scaled(jnp.zeros(x.size, dtype), jnp.zeros(x.size // 128))
    write = functools.partial(forms.write_moment, like, root=root)
    return jax.jit(lambda x: write(x, forms.flat_blocks(x.size)))(x)


@pytest.mark.parametrize("dtype", SCALED)
def test_scales_are_powers_of_two_and_storing_again_changes_nothing(dtype):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 128)) * np.exp2(rng.integers(-120, 120, (40, 1)).astype(float))
    x[3] = 0
    x = jnp.asarray(x.reshape(-1), jnp.float32)
    once = scaled(x, dtype)
    exponents = np.log2(
        np.asarray(once.scales), where=np.asarray(once.scales) > 0, out=np.zeros(40)
    )
    assert (exponents == np.round(exponents)).all()
    assert float(once.scales[3]) == 0
    assert not np.asarray(once.values)[3 * 128 : 4 * 128].astype(np.float32).any()
    assert_same(scaled(jnp.asarray(decoded(once)), dtype), once)
    largest = np.abs(np.asarray(x)).reshape(40, 128).max(1)
    got = np.abs(decoded(once)).reshape(40, 128).max(1)
    np.testing.assert_allclose(got, largest, rtol=float(ml_dtypes.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_each_value_is_the_nearest_one(dtype):
    rng = np.random.default_rng(3)
    x = rng.normal(size=128).astype(np.float32)
    got = scaled(jnp.asarray(x), dtype)
    grid = oracle_forms.eighths(dtype) * float(got.scales[0])
    nearest = np.abs(grid[None] - x[:, None]).min(1)
    np.testing.assert_array_equal(np.abs(decoded(got) - x), nearest)


@pytest.mark.parametrize("dtype", SCALED)
def test_an_outlier_costs_its_block_range_and_no_other_block(dtype):
    x = np.full(256, 1e-3, np.float32)
    x[5] = 1e30
    got = decoded(scaled(jnp.asarray(x), dtype))
    assert got[5] == pytest.approx(1e30, rel=float(ml_dtypes.finfo(dtype).eps))
    assert (np.delete(got[:128], 5) == (got[6] if dtype == "bfloat16" else 0)).all()
    np.testing.assert_allclose(got[128:], 1e-3, rtol=float(ml_dtypes.finfo(dtype).eps))
    # As a second moment no element becomes zero: its step would be divided by eps alone.
    root = scaled(jnp.asarray(x), dtype, root=True)
    assert (decoded(root, root=True) > 0).all()


@pytest.mark.parametrize("dtype", SCALED)
def test_overflow_is_held_at_the_end_of_the_range(dtype):
    x = np.ones(384, np.float32)
    x[0], x[128], x[256] = np.inf, np.nan, np.finfo(np.float32).max
    got = decoded(scaled(jnp.asarray(x), dtype))
    assert got[0] > 3e38
    assert np.isnan(got[128])
    assert got[256] > 3e38
    assert not np.isnan(got[np.arange(384) != 128]).any()


# ---------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_stochastic_rounding_is_right_in_the_mean(dtype):
    """Each result is a neighbour, the mean of 2**16 is the value, exact values never move."""
    n = 2**16
    bits = forms.random_bits(jnp.arange(n, dtype=jnp.int32), jnp.int32(42))
    round_all = jax.jit(lambda x: forms.rounded(jnp.full(n, x), dtype, bits))
    info = ml_dtypes.finfo(dtype)
    tiny = float(info.smallest_subnormal)
    values = [1.0, 1.1, -3.3, 200.7, 2.0 - 1e-6]
    if dtype != "bfloat16":  # float32's own subnormals are flushed
        values += [0.3 * tiny, -2.6 * tiny]
    for value in values:
        got = np.asarray(round_all(jnp.float32(value))).astype(np.float64)
        exact = float(np.float32(value))
        near = np.float32(value).astype(dtype).astype(np.float64)
        unit = max(np.exp2(np.floor(np.log2(abs(exact)))) * float(info.eps), tiny)
        assert np.abs(got - exact).max() < unit
        assert len(np.unique(got)) <= 2
        # Five standard deviations of the mean.
        assert abs(got.mean() - exact) <= 5 * unit / 2 / n**0.5
        if value == near:
            assert (got == exact).all()
    got = np.asarray(round_all(jnp.float32(np.inf))).astype(np.float32)
    assert (np.isnan(got) if dtype == "float8_e4m3fn" else np.isposinf(got)).all()


def test_a_moment_in_bfloat16_stands_still_unless_rounded_stochastically():
    """v decays by 0.999 a step, a quarter of bfloat16's unit: 1 -> exp(-1) in 1,000 steps."""
    n = 1024
    v, m = jnp.ones(n, jnp.bfloat16), jnp.zeros(n)
    scalars = Hyper(learning_rate=0.0).scalars()
    options = options_of(CASES["float32_scaled_bf16"])

    def decayed(stochastic):
        def step(v, key):
            random = (adam.Random(key, jnp.int32(0)),) if stochastic else ()
            p = jnp.zeros(n)
            return reference.adam_update(p, m, v, p, scalars, *random, **options).v, None

        keys = jax.random.bits(jax.random.key(0), 1000).astype(jnp.int32)
        return np.asarray(jax.jit(lambda v: jax.lax.scan(step, v, keys)[0])(v), np.float32)

    assert (decayed(False) == 1).all()
    assert decayed(True).mean() == pytest.approx(np.exp(-1), rel=0.01)


def test_random_bits_are_lowbias32():
    def mixed(x, key):
        x = np.uint32(x)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = x ^ np.uint32(key)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    index = np.arange(1000)
    with np.errstate(over="ignore"):
        want = mixed(index, 0xDEADBEEF)
    got = forms.random_bits(jnp.asarray(index, jnp.int32), jnp.int32(0xDEADBEEF - 2**32))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": adam.Scaled(jnp.zeros(100), jnp.zeros(1))}, "a multiple of 128"),
        ({"m": adam.Scaled(jnp.zeros(256), jnp.zeros(2))}, "Scaled float32; accepted: float16"),
        ({"v": adam.Scaled(jnp.zeros(256, jnp.float16), jnp.zeros(3))}, "scales of shape"),
        ({"p": adam.Remainder(jnp.zeros(256, jnp.float16), jnp.zeros(256, jnp.int16))}, "int16"),
        (
            {"p": adam.Remainder(jnp.zeros(256, jnp.bfloat16), jnp.zeros(256, jnp.int16))},
            "float32 with",
        ),
        ({"p": adam.Master(jnp.zeros(256), jnp.zeros(256)), "emit": "update"}, "`emit` is"),
        ({"p": adam.Master(jnp.zeros(128), jnp.zeros(256))}, r"shape \(128,\)"),
    ],
)
def test_errors_name_the_argument(change, message):
    n = 100 if "m" in change and change["m"].values.size == 100 else 256
    operands = {name: jnp.zeros(n) for name in "pmvg"} | change
    with pytest.raises(ValueError, match=message):
        adam.adam_update(scalars=Hyper().scalars(), out_dtype=jnp.float32, **operands)
