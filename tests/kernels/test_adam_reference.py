"""The reference against float64, against optax, against the ancestors' numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernels.adam_oracle import Hyper, assert_same_bits, f64, ulp_error

from jzero_kernels import adam
from jzero_kernels.adam.shapes import POLICIES
from kernels import adam_oracle as oracle

pytestmark = pytest.mark.usefixtures("strict")

N = 4097
MODES = [(n, w) for n in (False, True) for w in ("decoupled", "l2")]


def update(p, m, v, g, hyper=None, **options):
    hyper = Hyper() if hyper is None else hyper
    options = {"out_dtype": jnp.float32} | options
    return adam.adam_update(p, m, v, g, hyper.scalars(), **options)


@pytest.mark.parametrize(
    ("name", "nesterov", "mode"),
    [(name, *mode) for name in POLICIES for mode in (MODES if name == "float32" else MODES[::3])],
)
def test_error_against_float64(name, nesterov, mode):
    policy = POLICIES[name]
    p, m, v, g = oracle.shard(policy, N)
    hyper = Hyper(multiplier=0.37, eps_root=1e-6)
    got = update(p, m, v, g, hyper, nesterov=nesterov, weight_decay_mode=mode, out_dtype=policy.out)
    exact = oracle.step(p, m, v, g, hyper.scalars(), nesterov=nesterov, weight_decay_mode=mode)
    # A result of float32 is off by the few roundings of its formula, in units of its largest term
    # (with nesterov the two terms of the look-ahead may cancel in the update: more of them); a
    # narrower one by its one rounding and no more.
    wide = {"p": 12.0 if nesterov else 3.0, "m": 3.0, "v": 2.0}
    terms = {"p": exact[3], "m": 0.1 * hyper.multiplier * f64(g) + hyper.weight_decay, "v": 0.0}
    for field, before, value, to in zip("pmv", (p, m, v), got, exact, strict=False):
        bound = wide[field] if value.dtype == jnp.float32 else 0.51
        assert value.dtype == before.dtype
        scale = np.maximum(np.abs(f64(before)), np.abs(terms[field]))
        assert ulp_error(value, to, scale=scale) <= bound, field
    assert got.out.dtype == policy.out
    assert_same_bits(got.out, got.p.astype(policy.out))


@pytest.mark.parametrize(("nesterov", "mode"), MODES)
def test_update_against_float64(nesterov, mode):
    p, m, v, g = oracle.shard(POLICIES["float32"], N)
    hyper = Hyper(weight_decay=0.0, multiplier=0.37)
    m = jnp.abs(m) * jnp.sign(g)  # no cancellation between m and g: the error is relative
    got = update(p, m, v, g, hyper, nesterov=nesterov, weight_decay_mode=mode, emit="update")
    *_, exact = oracle.step(p, m, v, g, hyper.scalars(), nesterov=nesterov, weight_decay_mode=mode)
    assert ulp_error(got.out, exact) <= 4.0


@pytest.mark.parametrize("mode", ["decoupled", "l2"])
def test_emitted_update_adds_up_exactly(mode):
    p, m, v, g = oracle.shard(POLICIES["float32"], N)
    for hyper in (Hyper(), Hyper(step=1, learning_rate=1e-3), Hyper(finite=False)):
        got = update(p, m, v, g, hyper, weight_decay_mode=mode, emit="update")
        assert_same_bits(np.asarray(p) + np.asarray(got.out), got.p)
        assert_same_bits(optax.apply_updates(p, got.out), got.p)
        direct = update(p, m, v, g, hyper, weight_decay_mode=mode, emit="param")
        assert_same_bits(direct.p, got.p)
        assert_same_bits(direct.out, got.p)


def test_bfloat16_param_is_apply_updates():
    p, m, v, g = oracle.shard(POLICIES["no_master"], N)
    got = update(p, m, v, g, emit="update")
    with jax.numpy_dtype_promotion("standard"):
        assert_same_bits(optax.apply_updates(p, got.out), got.p)


def test_float64_param_keeps_its_width():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p = jnp.asarray(rng.normal(size=N), jnp.float64)
        m, v, g = (jnp.asarray(x, jnp.float32) for x in np.abs(rng.normal(size=(3, N))))
        hyper = Hyper(weight_decay=0.0)
        got = update(p, m, v, g, hyper, emit="update", out_dtype=jnp.float64)
        exact_p, _, _, exact_u = oracle.step(p, m, v, g, hyper.scalars())
        assert got.p.dtype == jnp.float64
        assert_same_bits(np.asarray(p) + np.asarray(got.out), got.p)
        np.testing.assert_allclose(got.p - p, exact_u, rtol=1e-6)
        np.testing.assert_allclose(got.p, exact_p, atol=1e-6 * np.abs(exact_u).max())
        # Moments in float64: all of the arithmetic is.
        wide = update(p, *(x.astype(jnp.float64) for x in (m, v, g)), hyper, out_dtype=jnp.float64)
        for value, exact in zip(wide[:3], oracle.step(p, m, v, g, hyper.scalars()), strict=False):
            np.testing.assert_allclose(
                value, exact if value is not wide.out else exact_p, rtol=4e-15, atol=1e-15
            )


@pytest.mark.parametrize("emit", ["param", "update"])
@pytest.mark.parametrize("name", POLICIES)
def test_skipped_step_changes_no_bit(name, emit):
    policy = POLICIES[name]
    p, m, v, g = oracle.shard(policy, 1027)
    poison = np.resize(np.array([np.nan, np.inf, -np.inf, 1.0, 6e4]), g.shape)
    odd = np.resize(np.array([-0.0, 0.0, np.nan, np.inf, 1e-44, -1e-41, 1.0]), p.shape)
    p = jnp.asarray(odd, policy.p)
    m, v = p.astype(policy.m)[::-1], p.astype(policy.v)
    for poisoned in (Hyper(finite=False), Hyper(finite=False, multiplier=np.nan)):
        got = update(
            p, m, v, jnp.asarray(poison, policy.g), poisoned, emit=emit, out_dtype=policy.out
        )
        for value, before in zip(got, (p, m, v), strict=False):
            assert_same_bits(value, before)
        expected = jnp.full(p.shape, -0.0, policy.out) if emit == "update" else p.astype(policy.out)
        assert_same_bits(got.out, expected)


def test_nonfinite_gradient_shows_when_the_step_counts():
    p, m, v, g = oracle.shard(POLICIES["float32"], 8)
    got = update(p, m, v, g.at[3].set(jnp.nan))
    assert np.isnan(got.p[3])
    assert np.isfinite(np.delete(np.asarray(got.p), 3)).all()


@functools.partial(jax.jit, static_argnames=("step",))
def optax_corrections(hyper_b1, hyper_b2, step):
    """Bias corrections as optax has them: a float32 power, with its rounding."""
    count = jnp.int32(step)
    with jax.numpy_dtype_promotion("standard"):
        return 1 - hyper_b1**count, 1 - hyper_b2**count, 1 - hyper_b1 ** (count + 1)


@pytest.mark.parametrize(
    ("nesterov", "mode", "hyper"),
    [
        (False, "decoupled", Hyper(learning_rate=1e-3)),
        (True, "decoupled", Hyper(learning_rate=1e-3)),
        (False, "l2", Hyper(learning_rate=1e-3)),
        (False, "decoupled", Hyper(learning_rate=1e-2, eps_root=1e-8, b1=0.5, weight_decay=0.1)),
    ],
)
def test_optax_over_1000_steps(nesterov, mode, hyper):
    """float32: parameters within 24 ulp of optax over 1,000 steps, at the size they had."""
    n, steps = 512, 1000
    rng = np.random.default_rng(1)
    p0 = jnp.asarray(rng.normal(size=n), jnp.float32)
    grads = jnp.asarray(rng.normal(size=(steps, n)), jnp.float32)
    keys = {"b1": hyper.b1, "b2": hyper.b2, "eps": hyper.eps, "eps_root": hyper.eps_root}
    if mode == "l2":
        tx = optax.chain(
            optax.add_decayed_weights(hyper.weight_decay),
            optax.adam(hyper.learning_rate, nesterov=nesterov, **keys),
        )
    else:
        tx = optax.adamw(
            hyper.learning_rate, weight_decay=hyper.weight_decay, nesterov=nesterov, **keys
        )

    def theirs(carry, g):
        p, state = carry
        u, state = tx.update(g, state, p)
        p = optax.apply_updates(p, u)
        return (p, state), p

    def ours(carry, g):
        p, m, v, count = carry
        with jax.numpy_dtype_promotion("standard"):
            scalars = hyper.scalars()._replace(
                bias_correction1=1 - hyper.b1**count,
                bias_correction2=1 - hyper.b2**count,
                bias_correction1_next=1 - hyper.b1 ** (count + 1),
            )
        got = adam.adam_update(
            p,
            m,
            v,
            g,
            scalars,
            nesterov=nesterov,
            weight_decay_mode=mode,
            out_dtype=jnp.float32,
        )
        return (*got[:3], count + 1), got.p

    with jax.numpy_dtype_promotion("standard"):
        _, expected = jax.jit(lambda: jax.lax.scan(theirs, (p0, tx.init(p0)), grads))()
    zero = jnp.zeros_like(p0)
    _, got = jax.jit(lambda: jax.lax.scan(ours, (p0, zero, zero, jnp.int32(1)), grads))()
    largest = np.maximum.accumulate(np.abs(expected), axis=0)
    assert ulp_error(got[0], f64(expected[0]), scale=f64(largest[0])) <= 2
    assert ulp_error(got, f64(expected), scale=f64(largest)) <= 24


# --- golden numbers of Apex's tests (float64 there; learning rate 0.1, p0 = 1.5) ---

APEX = Hyper(learning_rate=0.1, b1=0.1, b2=0.2, eps=0.25, weight_decay=0.1)
X = (3.0, 1.0, 4.0, 1.0, 5.0, 9.0)


def run_apex(grads, multipliers, finite):
    p, m, v = jnp.full((1,), 1.5), jnp.zeros(1), jnp.zeros(1)
    step, history = 0, []
    for g, multiplier, ok in zip(grads, multipliers, finite, strict=True):
        step += ok
        hyper = Hyper(
            **{**vars(APEX), "step": max(step, 1), "multiplier": multiplier, "finite": ok}
        )
        p, m, v, _ = update(p, m, v, jnp.full((1,), g), hyper)
        history.append(float(p[0]))
    return history


def test_golden_clip_grad_norm():
    grads = [x * dy for x, dy in zip(X, (1, -1, 1, -1, 1, -1), strict=True)]
    coefficients = [min(1.0, 3.5 / (abs(g) + 1e-6)) for g in grads]
    expected = [1.392692308, 1.414565925, 1.311217836, 1.328597088, 1.226255449, 1.290858021]
    got = run_apex(grads, coefficients, [True] * 6)
    np.testing.assert_allclose(got, expected, rtol=3e-7)


def test_golden_grad_scaler():
    scales = (3.21, 3.9483, 3.4587108, 4.2542143, 5.2326836, 4.5838308)
    dys = (1.0, np.inf, 1.0, 1.0, np.nan, -1.0)
    grads = [x * dy * scale for x, dy, scale in zip(X, dys, scales, strict=True)]
    got = run_apex(grads, [1 / s for s in scales], list(np.isfinite(grads)))
    expected = [1.392692308, 1.392692308, 1.283454404, 1.211187644, 1.211187644, 1.294532617]
    np.testing.assert_allclose(got, expected, rtol=5e-7)


def test_no_bias_correction():
    p, m, v, g = oracle.shard(POLICIES["float32"], 64)
    hyper = Hyper(bias_correction=False)
    got = update(p, m, v, g, hyper)
    exact_p, *_ = oracle.step(p, m, v, g, hyper.scalars())
    assert ulp_error(got.p, exact_p, scale=f64(p)) <= 2.5
    assert ulp_error(update(p, m, v, g).p, exact_p, scale=f64(p)) > 1000  # it does matter


def test_in_place_on_cpu():
    """p, m, v aliased, no temporary. XLA's CPU backend makes one fusion a result: 42 bytes."""
    n = 2**16
    policy = POLICIES["mixed"]
    shapes = [jax.ShapeDtypeStruct((n,), t) for t in policy[:4]]
    step = jax.jit(
        functools.partial(adam.adam_update, out_dtype=policy.out), donate_argnums=(0, 1, 2)
    )
    compiled: Any = step.lower(*shapes, Hyper().scalars()).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 3 * 4 * n
    assert memory.temp_size_in_bytes < 4096
    assert compiled.cost_analysis()["bytes accessed"] <= 42 * n * 1.05


def test_new_scalars_compile_nothing():
    p, m, v, g = oracle.shard(POLICIES["float32"], 64)
    traces = []

    @jax.jit
    def step(*args):
        traces.append(1)
        return adam.adam_update(*args, out_dtype=jnp.float32)

    outs = [
        step(p, m, v, g, Hyper(learning_rate=lr, step=t).scalars()).p for lr, t in ((1, 2), (3, 4))
    ]
    assert len(traces) == 1
    assert np.abs(outs[0] - outs[1]).max() > 0.1
