"""Wrong arguments and wrong gradients raise, and say what to do."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from test_ddp import wrap
from test_ddp_rules import Scalars, f32, linear

import jzero


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"axis": "model"}, ValueError, r"DistributedDataParallel\(axis='model'\) is not an axis"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb.*got 0, expected a positive number"),
        ({"first_bucket_mb": "1"}, ValueError, "first_bucket_mb.*positive number of MiB"),
        ({"static_graph": 1}, ValueError, "static_graph.*expected True or False"),
        ({"init_sync": None}, ValueError, "init_sync.*expected True or False"),
        ({"buffers": "sum"}, ValueError, "buffers.*'mean' or 'first'"),
        ({"grad_reduce_dtype": jnp.int32}, ValueError, "grad_reduce_dtype.*a float of 16 to 64"),
        ({"grad_reduce_dtype": "nonsense"}, ValueError, "grad_reduce_dtype.*a float of 16 to 64"),
        ({"variables": {}}, ValueError, "variables.*an nnx module holds its own"),
        ({"model": 3}, TypeError, "model.*got int, expected an nnx or a linen Module"),
        ({"model": linen.Dense(2)}, ValueError, "variables.*what model.init"),
        ({"mesh": None}, ValueError, "no mesh"),
    ],
    ids=str,
)
def test_arguments_are_refused_by_name(make_mesh, options, error, match):
    arguments = {"model": Scalars(w=f32(1)), "mesh": make_mesh(2), **options}
    with pytest.raises(error, match=match):
        jzero.DistributedDataParallel(**arguments)


def test_mistakes_with_gradients_raise_by_name(make_mesh):
    mesh = make_mesh(2, types="auto")
    ddp, other = wrap(mesh, Scalars(w=f32(1))), wrap(mesh, Scalars(v=f32(1)))
    x = f32(1, 3)
    fn = ddp.value_and_grad(linear)
    _, grads = fn(ddp, x)
    with ddp.no_sync():
        _, local = fn(ddp, x)
    # Reduced twice.
    with pytest.raises(TypeError, match="reduced already"):
        ddp.reduce(grads)
    with pytest.raises(TypeError, match="reduced already"):
        fn(ddp, x, accumulated=grads)
    with pytest.raises(TypeError, match="not reduced yet"):
        _ = local + grads
    # Not reduced at all.
    optimizer = nnx.Optimizer(ddp, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"(?i)mismatch|different|same"):
        optimizer.update(ddp, local)
    tx = jzero.adamw(1e-3, zero=jzero.ZeroConfig(mesh=mesh))
    params = nnx.as_pure(nnx.state(ddp, nnx.Param))
    with pytest.raises(ValueError, match="structure of params"):
        tx.step(local, tx.init(params), params)
    # Of another model.
    with pytest.raises(ValueError, match=r"another model.*\['v', 'w'\]"):
        other.reduce(local)
    with pytest.raises(TypeError, match="got None"):
        ddp.reduce(None)
    # Losses and batches.
    with pytest.raises(ValueError, match=r"argument 1\['x'\] has 3 elements in dim 0"):
        ddp.value_and_grad(lambda m, b: linear(m, b["x"]))(ddp, {"x": f32(1, 2, 3)})
    with pytest.raises(ValueError, match="floating scalar"):
        ddp.value_and_grad(lambda m, x: x)(ddp, x)
    with pytest.raises(ValueError, match="scalar of dtype bool"):
        ddp.value_and_grad(lambda m, x: (linear(m, x), jnp.bool_(True)), has_aux=True)(ddp, x)
    counted = wrap(mesh, Scalars(w=f32(1)))
    counted.module.count = nnx.Variable(jnp.int32(0))

    def forgets(model: Any, x: jax.Array) -> jax.Array:
        del model.module.count
        return linear(model, x)

    with pytest.raises(ValueError, match="removed 'count'"):
        counted.value_and_grad(forgets)(counted, x)
    # Sharded optimizers.
    config = jzero.ZeroConfig(mesh=make_mesh(4))
    with pytest.raises(ValueError, match="same mesh, axis and replica_axis"):
        ddp.value_and_grad(linear, zero=config)(ddp, x)
    with pytest.raises(ValueError, match=r"must be made by jzero\.adamw"):
        ddp.value_and_grad(linear, zero=optax.adam(1e-3))(ddp, x)
    half = wrap(mesh, Scalars(w=f32(1)), grad_reduce_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="grad_sync"):
        half.value_and_grad(linear, zero=tx)(half, x)
    config = jzero.ZeroConfig(mesh=mesh)
    frozen = jzero.adamw(1e-3, param_labels=lambda path: "frozen", zero=config)
    with pytest.raises(ValueError, match=r"train different parameters: \['w'\]"):
        ddp.value_and_grad(linear, zero=frozen)(ddp, x)
    with pytest.raises(AttributeError, match=r"nnx\.state\(ddp\)"):
        _ = ddp.variables


def test_without_flax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r"pip install 'jzero\[flax\]'"):
        jzero.DistributedDataParallel(Scalars(w=f32(1)))
