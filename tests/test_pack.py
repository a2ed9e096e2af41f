"""A tree goes into buckets and comes back as it was, bit for bit."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from support import assert_bits

from jzero._pack import leaf_paths, pack, plan_tree, unpack

# Packing is slicing and joining: it does not depend on the values, so arange says where each went.
FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
OTHERS = ["int32", "uint8", "bool"]


class Pair(NamedTuple):
    left: object
    right: object


def array(shape: tuple[int, ...], dtype: str, start: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=int))
    # Any bits, NaNs and -0.0 among them: packing does not look at them.
    itemsize = jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(start).integers(0, 256, size * itemsize, np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(jnp.dtype(dtype)).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> object:
    kind = draw(st.sampled_from(["array"] * 8 + ["none", "key"]))
    if kind == "none":
        return None
    seed = draw(st.integers(0, 1000))
    if kind == "key":
        return jax.random.key(seed)
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=3)))
    return array(shape, draw(st.sampled_from(FLOATS + OTHERS)), seed)


names = st.sampled_from(["w", "b", "z", "a", "kernel"])
trees = st.recursive(
    arrays(),
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.lists(st.tuples(names, inner), max_size=4, unique_by=lambda x: x[0]).map(
            collections.OrderedDict
        ),
    ),
    max_leaves=8,
)


def round_trip(tree: object, shards: int, cap: int) -> object:
    """Through host arrays: nothing is compiled for each example's shapes."""
    plan = plan_tree(tree, shards=shards, cap_bytes=cap)
    leaves = plan.leaves(tree)
    for bucket in plan.layout.buckets:
        flat = np.zeros(bucket.padded, jnp.dtype(bucket.dtype))
        for slot in bucket.slots:
            # Each element is written once: no slot lies over another.
            piece = flat[slot.offset : slot.offset + slot.size]
            assert piece.size == slot.size
            piece[:] = np.asarray(leaves[slot.path]).reshape(-1)
        for slot in bucket.slots:
            end = slot.offset + slot.size
            leaves[slot.path] = flat[slot.offset : end].reshape(slot.shape)
    return plan.rebuild(leaves)


@given(trees, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 8, 64, 10**6]))
def test_any_tree_comes_back_with_its_structure_and_bits(tree, shards, cap):
    back = round_trip(tree, shards, cap)
    assert_bits(back, tree)
    assert [path for path, _ in leaf_paths(back)] == [path for path, _ in leaf_paths(tree)]


@given(trees)
def test_floats_have_a_slot_and_nothing_else_has(tree):
    plan = plan_tree(tree, shards=2, cap_bytes=100)
    for (_, leaf), path, trains in zip(leaf_paths(tree), plan.paths, plan.trains, strict=True):
        floating = leaf is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        assert trains == floating == (path in plan.layout.by_path)


def samples() -> dict[str, object]:
    ordered = collections.OrderedDict(z=array((5, 3), "float32", 1), a=array((7,), "float32", 2))
    model = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    return {
        "dict": {"b": array((2, 3), "float32", 1), "a": [array((), "float32", 2), None]},
        "ordered": ordered,
        "namedtuple": Pair(array((4,), "bfloat16", 1), array((0, 8), "bfloat16", 2)),
        "nnx": nnx.state(model),
        "others": {
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(3), 4),
            "flag": jnp.array([True, False]),
            "count": jnp.array(2**31 + 1, jnp.uint32),
            "w": array((300,), "float16", 5),
            "none": None,
        },
        "root": array((3, 3), "float32", 1),
    }


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("shards", [1, 3])
def test_unpack_undoes_pack(name: str, shards: int):
    tree = samples()[name]
    plan = plan_tree(tree, shards=shards, cap_bytes=64)
    leaves = dict(plan.leaves(tree))
    for bucket in plan.layout.buckets:
        parts = {s.path: jnp.asarray(leaves[s.path]) for s in bucket.slots}
        flat = pack(parts, bucket, bucket.dtype)
        assert flat.shape == (bucket.padded,)
        assert flat.dtype == bucket.dtype
        assert not np.asarray(flat[bucket.size :]).view(np.uint8).any(), "padding is +0"
        leaves |= unpack(flat, bucket)
    assert_bits(plan.rebuild(leaves), tree)


def test_packing_casts_to_the_dtype_of_the_wire():
    tree = {"w": jnp.array([1 + 2.0**-10, 3.0])}
    (bucket,) = plan_tree(tree, shards=2, cap_bytes=64).layout.buckets
    flat = pack(tree, bucket, jnp.bfloat16)
    assert flat.dtype == jnp.bfloat16
    assert flat[:2].tolist() == [1.0, 3.0]


def test_a_plan_reads_shapes_only():
    tree = {"w": jax.ShapeDtypeStruct((2**31, 3), jnp.bfloat16), "n": None}
    plan = plan_tree(tree, shards=8, cap_bytes=2**20)
    assert plan.layout.size == 3 * 2**31
    traced = jax.eval_shape(lambda x: x, {"w": jnp.ones(3)})
    assert plan_tree(traced, shards=8, cap_bytes=9).layout.size == 3


def test_insertion_order_of_a_dict_is_not_in_the_plan():
    one = {"b": jnp.ones(3), "a": jnp.ones(2)}
    two = {"a": jnp.ones(2), "b": jnp.ones(3)}
    ordered = collections.OrderedDict(b=jnp.ones(3), a=jnp.ones(2))
    layouts = [plan_tree(t, shards=2, cap_bytes=64).layout for t in (one, two, ordered)]
    assert layouts[0] == layouts[1] == layouts[2]


def test_paths_as_people_write_them():
    tree = {"layers": [{"kernel": jnp.ones(1)}], "pair": Pair(jnp.ones(1), None)}
    assert plan_tree(tree, shards=1, cap_bytes=4).paths == (
        "layers/0/kernel",
        "pair/left",
        "pair/right",
    )
