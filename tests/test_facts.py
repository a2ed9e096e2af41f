"""What a program says about its results before it runs: dependence, zeros, order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero._program import Fact, analyze

X = jnp.ones(3)


def facts(fn: Callable[..., Any], *args: Any, varying: tuple[int, ...] = ()) -> list[Fact]:
    return analyze(jax.jit(fn).trace(*args).jaxpr, varying, ("data",))


def depends(fact: Fact, count: int) -> list[int]:
    return [i for i in range(count) if fact.depends_on(i)]


def test_a_result_depends_on_what_it_is_computed_from():
    a, b, c = facts(lambda x, y, z: (x + y, jnp.sin(y), 2.0), X, X, X)
    assert [depends(f, 3) for f in (a, b, c)] == [[0, 1], [1], []]


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))], ids=["jit", "remat", "twice"]
)
def test_calls_are_looked_into(wrap: Any):
    inner = wrap(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    a, b = facts(lambda x, y: inner(x, y), X, X)
    assert [depends(f, 2) for f in (a, b)] == [[0], [1]]


def test_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def f(x: Any, y: Any) -> Any:
        return x * 2, y * 2

    f.defvjp(lambda x, y: (f(x, y), None), lambda _, g: (g[0], jnp.zeros_like(g[1])))
    a, b = facts(lambda x, y: f(x, y), X, X)
    assert [depends(f, 2) for f in (a, b)] == [[0], [1]]
    # The zero that its backward pass returns is seen.
    _, grad = facts(jax.grad(lambda x, y: jnp.sum(f(x, y)[0] + f(x, y)[1]), (0, 1)), X, X)
    assert grad.zero


def test_loops_pass_dependence_on_until_nothing_is_new():
    def rotate(carry: Any, _: Any) -> Any:
        a, b, c, d = carry
        return (b, c, a, d), d

    # a takes from b, which takes from c: after three rounds all three are mixed; d is not.
    outs = facts(lambda a, b, c, d: lax.scan(rotate, (a, b, c, d), None, 5), X, X, X, X)
    assert [depends(f, 4) for f in outs] == [[0, 1, 2]] * 3 + [[3], [3]]

    def body(state: Any) -> Any:
        i, x, y = state
        return i - 1, x * 2, y

    outs = facts(
        lambda i, x, y: lax.while_loop(lambda s: s[0] > 0, body, (i, x, y)), jnp.int32(3), X, X
    )
    assert [depends(f, 3) for f in outs][:2] == [[0], [0, 1]]  # by how often it ran


def test_a_branch_depends_on_the_choice():
    out, kept = facts(
        lambda p, x, y, z: lax.cond(p, lambda: (x, z + 1), lambda: (y, z + 2)),
        jnp.bool_(True),
        *(X, X, X),
    )
    assert depends(out, 4) == [0, 1, 2]
    assert depends(kept, 4) == [0, 3]


def test_zeros_are_known_only_where_they_are_certain():
    def f(x: Any) -> Any:
        zero = jnp.zeros((3, 1))
        return (
            zero.T.reshape(-1),
            zero[:, 0] * x,
            jnp.zeros(3) + x,
            jax.jit(lambda: zero - zero)(),
            0.0,
        )

    assert [f.zero for f in facts(f, X)] == [True, False, False, True, True]
    # Many functions of zero are one.
    assert not any(
        f.zero for f in facts(lambda x: (jnp.exp(jnp.zeros(3)), jnp.cos(jnp.zeros(3)), x), X)
    )
    grads = facts(jax.grad(lambda x, y, z: jnp.sum(x) + 0 * jnp.sum(z), (0, 1, 2)), X, X, X)
    assert [f.zero for f in grads] == [False, True, False]  # of z: only computing tells


def test_results_are_in_the_order_of_the_program():
    def f(x: Any) -> Any:
        first = jnp.sin(x)
        second = jax.jit(lambda y: (jnp.cos(y), jnp.tan(y)))(x)
        third, fourth = lax.scan(lambda c, _: (c * 2, c), x, None, 2)
        return fourth, third, second[1], second[0], first, x

    when = [f.when for f in facts(f, X)]
    assert when[0] == when[1]  # a loop's results are there at its end
    assert when[5] == ()
    assert when[5] < when[4] < when[3] < when[2] < when[1]


def test_which_results_may_differ_between_devices(make_mesh):
    found: list[list[bool]] = []

    def body(x: Any, y: Any) -> Any:
        def local(x: Any, y: Any) -> Any:
            index = lax.axis_index("data").astype(jnp.float32)
            return x + 1, y + 1, y + index, lax.psum(x + y, "data"), lax.all_gather(x, "data")

        traced = jax.jit(local).trace(x, y)
        out = analyze(traced.jaxpr, (0,), ("data",))
        found.append([f.varies for f in out])
        assert depends(out[3], 2) == [0, 1]  # the sum still depends on its terms
        found.append([f.varies for f in analyze(traced.jaxpr, (0,), ("data", "other"))])
        return x

    mesh = make_mesh(8)
    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")),
        jnp.ones(8),
        jnp.ones(1),
    )
    assert found == [[True, False, True, False, False], [True, False, True, True, True]]


def test_constants_differ_where_they_may():
    outer = jnp.arange(3.0)
    traced = jax.jit(lambda x: x + outer).trace(X)
    assert [f.varies for f in analyze(traced.jaxpr, (), ("data",))] == [False]
    if traced.jaxpr.jaxpr.constvars:
        assert [f.varies for f in analyze(traced.jaxpr, (), ("data",), True)] == [True]
