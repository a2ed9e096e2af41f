"""The dispatcher: by the platform that is lowered for, inside shard_map, under vmap, by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels.adam_oracle import Hyper, assert_same_bits

from jzero_kernels import adam
from jzero_kernels.adam import blocks, tune
from jzero_kernels.adam.shapes import POLICIES
from kernels import adam_oracle as oracle

pytestmark = pytest.mark.usefixtures("strict")

N = 8 * 1024
update = functools.partial(adam.adam_update, out_dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def operands():
    return (*oracle.shard(POLICIES["mixed"], N), Hyper().scalars())


@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(operands, make_mesh, types, check_vma):
    mesh = make_mesh(8, types=types)

    def step(*args):
        stats = jax.lax.psum(adam.grad_stats(args[3]), "data")
        return update(*args), adam.norm_from_stats(stats)

    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*(P("data"),) * 4, P()),
            out_specs=(P("data"), P()),
            check_vma=check_vma,
        )
    )
    put = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in operands[:4]]
    lowered = sharded.lower(*put, operands[4])
    text: Any = lowered.compile().as_text()
    got, norm = sharded(*put, operands[4])
    for value, to in zip(got, update(*operands), strict=True):
        assert_same_bits(value, to)
    np.testing.assert_allclose(norm, np.linalg.norm(np.asarray(operands[3], np.float64)), rtol=1e-6)
    assert "conditional" not in text
    assert text.count("all-reduce(") == 1  # the one asked for
    assert "all-gather" not in text


def test_results_vary_over_the_union(operands, make_mesh):
    mesh = make_mesh((2, 4))

    def step(p, m, v, g, scalars):
        got = update(p, m, v, g, scalars)
        types = [jax.typeof(x).manual_axis_type.varying for x in got]
        assert types == [frozenset({"data", "replica"})] * 4
        return got

    specs = (P("data"), P("data"), P("data"), P(("replica", "data")), P())
    shapes = [
        jax.ShapeDtypeStruct((n,), x.dtype)
        for n, x in zip((N, N, N, 2 * N), operands[:4], strict=True)
    ]
    jax.eval_shape(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(("replica", "data"))),
        *shapes,
        operands[4],
    )


def test_global_arrays_on_an_explicit_mesh(operands, make_mesh):
    mesh = make_mesh(8, types="explicit")
    with jax.set_mesh(mesh):
        put = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in operands[:4]]
        got = jax.jit(update)(*put, operands[4])
    assert got.p.sharding.spec == P("data")
    for value, to in zip(got, update(*operands), strict=True):
        assert_same_bits(value, to)


def test_vmap(operands):
    batch = [x.reshape(8, -1) for x in operands[:4]]
    got = jax.vmap(update, in_axes=(0, 0, 0, 0, None))(*batch, operands[4])
    for value, to in zip(got, update(*operands), strict=True):
        assert_same_bits(value.reshape(-1), to)
    stats = jax.vmap(adam.grad_stats)(batch[3])
    np.testing.assert_allclose(stats[5], adam.grad_stats(batch[3][5]), rtol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 1000])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_short(n, backend):
    p, m, v, g = oracle.shard(POLICIES["mixed"], n)
    got = update(p, m, v, g, Hyper().scalars(), backend=backend)
    exact_p, *_ = oracle.step(p, m, v, g, Hyper().scalars())
    assert [x.shape for x in got] == [(n,)] * 4
    np.testing.assert_allclose(got.p, exact_p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["tpu", "triton", "mosaic_gpu"])
def test_wrong_platform_raises_on_lowering(operands, backend):
    if backend == "mosaic_gpu":
        pytest.importorskip("absl", reason="JAX's Mosaic GPU needs absl-py")
    lowered_for = r"`backend` is .*lowered for cpu; .* runs on .*Pass backend='auto'"
    with pytest.raises(ValueError, match=lowered_for):
        update(*operands, backend=backend)


def test_wrong_platform_names_stats_too():
    with pytest.raises(ValueError, match=r"grad_stats: `backend` is 'tpu'.*lowered for cpu"):
        adam.grad_stats(jnp.ones(8192), backend="tpu")
    with pytest.raises(ValueError, match="grad_stats: `backend` is 'triton'; accepted: 'auto'"):
        adam.grad_stats(jnp.ones(8192), backend="triton")


def test_defaults():
    assert adam.default_backend("tpu") == "tpu"
    assert [adam.default_backend(x) for x in ("cpu", "cuda", "rocm", "other")] == ["reference"] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "gpu"}, r"`backend` is 'gpu'; accepted: 'auto', 'reference', 'tpu'"),
        ({"emit": "delta"}, r"`emit` is 'delta'; accepted: 'param', 'update'"),
        ({"weight_decay_mode": "L2"}, r"`weight_decay_mode` is 'L2'; accepted: 'decoupled', 'l2'"),
        ({"out_dtype": jnp.int32}, r"`out_dtype` is int32; accepted: real floating"),
        ({"m": jnp.zeros(7)}, r"`m` has shape \(7,\); accepted: that of `p`, \(8,\)"),
        ({"g": jnp.zeros((2, 4))}, r"`g` has shape \(2, 4\); accepted: one dimension"),
        ({"g": jnp.zeros(8, jnp.int32)}, r"`g` is int32; accepted: real floating"),
        ({"p": jnp.zeros(8, jnp.complex64)}, r"`p` is complex64; accepted: real floating"),
        (
            {"backend": "tpu", "v": jnp.zeros(8, jnp.float16)},
            r"`backend` is 'tpu', and `v` is float16",
        ),
        (
            {"scalars": Hyper().scalars()._replace(eps=jnp.zeros(3))},
            r"`scalars.eps` is float32\[3\]; accepted: a 0-d float32",
        ),
        (
            {"scalars": Hyper().scalars()._replace(finite=jnp.ones(()))},
            r"`scalars.finite` is float32\[\]; accepted: a 0-d bool",
        ),
        ({"backend": "reference", "block": 128}, r"`block` is 128; accepted: None"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else None,
)
def test_errors_name_argument_got_accepted(change, message):
    zeros = jnp.zeros(8)
    arguments = {
        "p": zeros,
        "m": zeros,
        "v": zeros,
        "g": zeros,
        "scalars": Hyper().scalars(),
        "out_dtype": jnp.float32,
    } | change
    with pytest.raises(ValueError, match="adam_update: " + message):
        adam.adam_update(**arguments)


def test_block_rules(tmp_path, monkeypatch):
    names = ("float32",) * 5
    assert blocks.block_for("tpu", 2**24, names, None) == 2**17
    assert blocks.block_for("tpu", 2**18, names, None) == 2**14
    assert blocks.block_for("tpu", 100, names, None) == 100
    with pytest.raises(ValueError, match="`block` is 100; accepted for backend 'tpu': positive"):
        blocks.block_for("tpu", 2**24, names, 100)
    path = tmp_path / "blocks.json"
    kind = jax.devices()[0].device_kind
    path.write_text(f'{{"{kind}": {{"{blocks.key("tpu", names, 2**24)}": 65536}}}}')
    assert blocks.block_for("tpu", 2**24, names, None) == 2**17  # read only when asked for
    monkeypatch.setenv(blocks.ENV, str(path))
    assert blocks.block_for("tpu", 2**24, names, None) == 65536
    assert blocks.block_for("tpu", 2**25, names, None) == 2**17
    monkeypatch.setenv(blocks.ENV, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=f"environment variable {blocks.ENV}"):
        blocks.block_for("tpu", 2**24, names, None)


def test_autotuner_stores_what_it_found(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "blocks.json"
    seconds = {2**15: 3.0, 2**16: 1.0, 2**17: 2.0, 2**18: 5.0}
    found = tune.tune("tpu", 2**24, path=path, measure=seconds.__getitem__)
    assert found == seconds
    tune.tune("tpu", 2**20, candidates=[4096], path=path, measure=lambda _: 1.0)
    monkeypatch.setenv(blocks.ENV, str(path))
    blocks._load.cache_clear()
    dtypes = tuple(POLICIES["mixed"])
    assert blocks.block_for("tpu", 2**24, dtypes, None) == 2**16
    assert blocks.block_for("tpu", 2**20, dtypes, None) == 4096
    with pytest.raises(ValueError, match="tune: `backend` is 'auto'; accepted: tpu, mosaic_gpu"):
        tune.tune("auto", 2**20)
