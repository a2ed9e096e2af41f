"""All devices start from the first one's bits; where they differ is found and named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import by_op

import jzero

# The payload of this NaN, and the sign of this zero, must arrive.
NAN16 = np.array([0x7D01, 0xFFFF], np.uint16).view(np.float16)
NAN32 = np.array([0x7F800001, 0x80000000], np.uint32).view(np.float32)


def leaf(value: float, dtype: Any, *shape: int) -> np.ndarray:
    return np.full(shape, value).astype(dtype)


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "trained": leaf(rank, np.float32, 3, 5),
        "frozen": leaf(rank + 0.5, jnp.bfloat16, 7),
        "step": leaf(rank, np.int32),
        "mask": np.array([rank % 2 == 0, rank % 2 == 1]),
        "fp8": leaf(rank, jnp.float8_e4m3fn, 3),
        "int4": leaf(rank % 8 - 4, jnp.int4, 5),
        "complex": leaf(rank - 1j, np.complex64, 2),
        "empty": leaf(rank, np.float32, 0, 3),
        "nan16": NAN16 if rank == 0 else leaf(rank, np.float16, 2),
        "nan32": NAN32 if rank == 0 else leaf(rank, np.float32, 2),
        "keys": np.array([rank, rank + 1, rank, 7], np.uint32).reshape(2, 2),
    }


def diverged(mesh: Any, ranks: list[int] | None = None) -> dict[str, Any]:
    """Arrays that claim to be replicated, with another value on each device."""
    devices = list(mesh.devices.flat)
    trees = [tree_of(r) for r in (range(len(devices)) if ranks is None else ranks)]

    def one(*copies: np.ndarray) -> jax.Array:
        placed = [jax.device_put(x, d) for x, d in zip(copies, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(
            copies[0].shape, NamedSharding(mesh, P()), placed
        )

    tree = jax.tree.map(one, *trees)
    tree["keys"] = jax.random.wrap_key_data(tree["keys"])
    return {**tree, "none": None, "python": 3, "local": np.arange(4.0, dtype=np.float32)}


def bits(x: Any) -> tuple[Any, Any, bytes]:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return x.dtype, x.shape, np.asarray(x).tobytes()


def copies(x: jax.Array) -> list[bytes]:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize("shape", [8, (2, 4)], ids=str)
def test_every_device_gets_the_first_ones_bits(make_mesh, shape, types):
    mesh = make_mesh(shape, types=types)
    replica = "replica" if len(mesh.axis_names) == 2 else None
    config = jzero.ZeroConfig(mesh=mesh, replica_axis=replica, bucket_mb=2**-15)
    tree = diverged(mesh)
    assert jzero.first_difference(tree, zero=config) == "complex"  # the first in tree order
    out = jzero.broadcast(tree, zero=config)
    assert jzero.first_difference(out, zero=config) is None
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    want = {**tree_of(0), "local": tree["local"]}
    for path, x in want.items():
        assert bits(out[path]) == bits(jnp.asarray(x)), path
        assert copies(out[path]) == [np.asarray(x).tobytes()] * 8, path
    assert jnp.issubdtype(out["keys"].dtype, jax.dtypes.prng_key)
    assert jax.random.key_impl(out["keys"]) == jax.random.key_impl(tree["keys"])
    assert out["none"] is None
    assert out["python"] == 3


def test_one_all_reduce_of_integers_a_bucket(make_mesh):
    mesh = make_mesh(8)
    tree = {f"leaf{i}": jnp.ones(100, jnp.float32) for i in range(4)}
    tree |= {f"small{i}": jnp.ones(100, jnp.bfloat16) for i in range(2)}
    config = jzero.ZeroConfig(mesh=mesh, bucket_mb=800 / 2**20)
    compiled = jax.jit(lambda t: jzero.broadcast(t, zero=config)).lower(tree).compile()
    found = by_op(compiled)
    assert found.keys() == {"all-reduce"}
    assert sorted((c.dtypes, c.sizes) for c in found["all-reduce"]) == [
        (("u32",), (100,)),  # two of 16 bits
        (("u32",), (200,)),
        (("u32",), (200,)),
    ]


@pytest.mark.parametrize("path", ["keys", "mask", "nan16", "step"])
def test_one_bit_on_one_device_is_found_and_named(make_mesh, path):
    mesh = make_mesh(8)
    config = jzero.ZeroConfig(mesh=mesh)
    tree = diverged(mesh, [3] * 8)
    assert jzero.first_difference(tree, zero=config) is None
    odd = diverged(mesh, [3] * 6 + [4, 3])
    assert jzero.first_difference({**tree, path: odd[path]}, zero=config) == path


def test_equal_words_in_other_places_are_different(make_mesh):
    mesh = make_mesh(2)
    config = jzero.ZeroConfig(mesh=mesh)
    rows = [jax.device_put(x, d) for x, d in zip(jnp.eye(2), mesh.devices.flat, strict=True)]
    x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), rows)
    assert jzero.first_difference([x], zero=config) == "0"


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_broadcast_inside_shard_map(make_mesh, check):
    mesh = make_mesh(8)

    def body(x: Any) -> Any:
        return jzero.broadcast({"a": x, "b": x.astype(jnp.bfloat16)})

    out = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check)
    )(5.0 + jnp.arange(8.0))
    assert float(out["a"][0]) == 5
    assert out["b"].dtype == jnp.bfloat16
    assert copies(out["a"]) == [np.float32(5).tobytes()] * 8


def test_nothing_to_send_and_no_host_under_a_trace(make_mesh):
    config = jzero.ZeroConfig(mesh=make_mesh(8))
    assert jzero.broadcast({"a": None}, zero=config) == {"a": None}
    assert jzero.first_difference({}, zero=config) is None
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: jzero.first_difference(x, zero=config))(jnp.ones(2))
