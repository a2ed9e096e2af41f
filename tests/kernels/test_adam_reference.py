import jax.numpy as jnp
import numpy as np
import optax

from jzero_kernels import adam


def test_smoke():
    def scalars(t):
        f = lambda x: jnp.asarray(x, jnp.float32)
        return adam.AdamScalars(
            f(0.1),
            f(0.9),
            f(1 - 0.9),
            f(0.999),
            f(1 - 0.999),
            f(1e-8),
            f(0.0),
            f(0.01),
            1 - 0.9 ** jnp.int32(t),
            1 - 0.999 ** jnp.int32(t),
            1 - 0.9 ** jnp.int32(t + 1),
            f(1.0),
            jnp.asarray(True),
        )

    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=1000), jnp.float32)
    m = v = jnp.zeros_like(p)
    tx = optax.adamw(0.1, weight_decay=0.01)
    st = tx.init(p)
    q = p
    for t in range(1, 5):
        g = jnp.asarray(rng.normal(size=1000), jnp.float32)
        p, m, v, out = adam.adam_update(p, m, v, g, scalars(t), out_dtype=jnp.bfloat16)
        u, st = tx.update(g, st, q)
        q = optax.apply_updates(q, u)
        np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-7)
    s = adam.grad_stats(g)
    np.testing.assert_allclose(
        adam.norm_from_stats(s), np.linalg.norm(np.asarray(g, np.float64)), rtol=1e-6
    )
    big = adam.norm_from_stats(adam.grad_stats(g.at[3].set(2e19)))
    np.testing.assert_allclose(big, 2e19, rtol=1e-6)
    np.testing.assert_allclose(
        adam.norm_from_stats(adam.grad_stats(jnp.full(5000, 1e-25))), 1e-25 * 5000**0.5, rtol=1e-6
    )
