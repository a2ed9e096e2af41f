"""Properties of the plan: for any leaves, where does each element live?"""

import importlib.util
import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero._layout import ALIGNMENT, NARROW_TILE, TILE, Layout, Leaf, path_string, plan_layout

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MIB = 2**20

dims = st.one_of(st.integers(0, 9), st.sampled_from([13, 97, 127, 128, 129, 1021]))
shapes = st.lists(dims, max_size=3).map(tuple)
keys = st.one_of(st.sampled_from(["a", "b", "kernel", "é", "10", "9"]), st.integers(0, 12))


@st.composite
def leaf_lists(draw: st.DrawFn) -> list[Leaf]:
    paths = draw(
        st.lists(
            st.lists(keys, min_size=1, max_size=3).map(tuple),
            max_size=12,
            unique_by=path_string,
        )
    )
    leaves: list[Leaf] = []
    for path in paths:
        dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"]))
        group = draw(st.sampled_from(["", "", "no decay"]))
        leaves.append(Leaf(path, draw(shapes), dtype, ITEMSIZE[dtype], group))
    return leaves


shard_counts = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 100, 512, 1000, 4096])
caps = st.one_of(st.sampled_from([1, 3, 16, 512, 4096, 100 * MIB]), st.integers(1, 2000))
alignments = st.sampled_from([None, 1, 2, 3, 32, 128])


def f32(path: str | int | tuple, *shape: int, dtype: str = "float32", group: str = "") -> Leaf:
    path = path if isinstance(path, tuple) else (path,)
    return Leaf(path, shape, dtype, ITEMSIZE[dtype], group)


def contents(layout: Layout) -> list[list[str]]:
    return [[slot.path for slot in bucket.slots] for bucket in layout.buckets]


# ---------------------------------------------------------------- for any leaves


@given(leaf_lists(), shard_counts, caps, alignments)
def test_every_element_of_every_leaf_has_one_place(leaves, shards, cap, alignment):
    layout = plan_layout(leaves, shards=shards, cap_bytes=cap, alignment=alignment)
    assert sorted(slot.path for slot in layout.slots) == sorted(path_string(x.path) for x in leaves)
    for leaf in leaves:
        slot = layout.by_path[path_string(leaf.path)]
        assert (slot.shape, slot.dtype, slot.group) == (leaf.shape, leaf.dtype, leaf.group)
        assert slot.size == math.prod(leaf.shape)
        assert slot in layout.buckets[slot.bucket].slots
    for number, bucket in enumerate(layout.buckets):
        assert bucket.number == number
        # Slots stand end to end from 0 and stop where padding starts: disjoint, no gap, inside.
        end = 0
        for slot in bucket.slots:
            assert (slot.bucket, slot.offset) == (number, end)
            end += slot.size
        assert end == bucket.size <= bucket.padded
    assert layout.size == sum(math.prod(x.shape) for x in leaves)
    assert layout.shards == shards


@given(leaf_lists(), shard_counts, caps, alignments)
def test_each_bucket_is_padded_by_itself_and_no_further_than_it_must(
    leaves, shards, cap, alignment
):
    layout = plan_layout(leaves, shards=shards, cap_bytes=cap, alignment=alignment)
    for bucket in layout.buckets:
        assert bucket.padded == bucket.shard * shards
        assert bucket.shard > 0
        fits = [unit for unit in (NARROW_TILE, TILE) if bucket.size >= 16 * unit * shards]
        unit = alignment or max(fits, default=ALIGNMENT)
        assert bucket.shard % unit == 0
        # One unit a shard less would not hold it.
        assert (bucket.shard - unit) * shards < max(bucket.size, 1)
    assert layout.padded == sum(bucket.padded for bucket in layout.buckets)
    assert 0 <= layout.utilisation <= 1


@given(leaf_lists(), shard_counts, caps)
def test_a_bucket_has_one_dtype_and_one_group_and_keeps_to_the_cap(leaves, shards, cap):
    layout = plan_layout(leaves, shards=shards, cap_bytes=cap)
    by_path = {path_string(leaf.path): leaf for leaf in leaves}
    for bucket in layout.buckets:
        members = [by_path[slot.path] for slot in bucket.slots]
        assert {(x.dtype, x.group, x.itemsize) for x in members} == {
            (bucket.dtype, bucket.group, bucket.itemsize)
        }
        nbytes = bucket.size * bucket.itemsize
        assert nbytes <= cap or len(members) == 1
        if any(slot.size * bucket.itemsize >= cap for slot in bucket.slots):
            assert len(members) == 1, "a leaf of at least the cap stands alone"


@given(leaf_lists(), shard_counts, caps)
def test_no_two_buckets_of_a_kind_could_have_been_one(leaves, shards, cap):
    """Greedy filling: a bucket is closed only because the next leaf would not have fitted."""
    layout = plan_layout(leaves, shards=shards, cap_bytes=cap)
    shared: dict[tuple[str, str], list] = {}
    for bucket in layout.buckets:
        if bucket.size * bucket.itemsize < cap:
            shared.setdefault((bucket.dtype, bucket.group), []).append(bucket)
    for buckets in shared.values():
        for one, two in itertools.pairwise(buckets):
            first_nonempty = next(slot.size for slot in two.slots if slot.size)
            assert (one.size + first_nonempty) * one.itemsize > cap


@given(leaf_lists(), shard_counts, caps, st.randoms(use_true_random=False))
def test_insertion_order_does_not_matter(leaves, shards, cap, random):
    """Case 12: ranks that meet the parameters in another order must cut the same buckets."""
    shuffled = list(leaves)
    random.shuffle(shuffled)
    one = plan_layout(leaves, shards=shards, cap_bytes=cap)
    two = plan_layout(iter(shuffled), shards=shards, cap_bytes=cap)
    assert one == two
    assert hash(one) == hash(two)
    assert one.buckets == two.buckets
    assert one.fingerprint == two.fingerprint


@given(leaf_lists(), caps)
def test_the_number_of_shards_changes_padding_only(leaves, cap):
    """A checkpoint moves between world sizes bucket by bucket."""
    plans = [plan_layout(leaves, shards=w, cap_bytes=cap) for w in (1, 3, 8, 4096)]
    for plan in plans[1:]:
        assert plan.slots == plans[0].slots
        if leaves:
            assert plan != plans[0]


@given(leaf_lists(), st.randoms(use_true_random=False), caps)
def test_a_given_order_is_kept_within_each_kind(leaves, random, cap):
    order = [path_string(leaf.path) for leaf in leaves]
    random.shuffle(order)
    layout = plan_layout(leaves, shards=4, cap_bytes=cap, order=order)
    huge = {s.path for s in layout.slots if s.size * ITEMSIZE[s.dtype] >= cap}
    for kind in {(s.dtype, s.group) for s in layout.slots}:
        placed = [s.path for s in layout.slots if (s.dtype, s.group) == kind and s.path not in huge]
        assert placed == [path for path in order if path in placed]


@given(leaf_lists(), leaf_lists(), shard_counts)
def test_equal_layouts_are_equal_plans(one, two, shards):
    a, b = (plan_layout(x, shards=shards, cap_bytes=64) for x in (one, two))
    assert (a == b) == (a.buckets == b.buckets)
    assert (a.fingerprint == b.fingerprint) == (a == b)


# ---------------------------------------------------------------- the cap


@pytest.mark.parametrize(
    ("cap", "buckets"),
    [(1020, [["w"], ["b", "a"]]), (1024, [["w"], ["b", "a"]]), (1028, [["w", "b"], ["a"]])],
)
def test_a_leaf_around_the_cap_is_in_exactly_one_bucket(cap: int, buckets: list[list[str]]):
    """Case 8: 256 float32 elements are 1024 bytes; the cap is compared in bytes."""
    leaves = [f32("w", 16, 16), f32("b", 1), f32("a", 1)]
    assert contents(plan_layout(leaves, shards=4, cap_bytes=cap)) == buckets


def test_the_cap_counts_bytes_and_not_elements():
    leaves = [f32(i, 100, dtype="bfloat16") for i in range(4)]
    layout = plan_layout(leaves, shards=1, cap_bytes=401)
    assert contents(layout) == [["3", "2"], ["1", "0"]]
    leaves = [f32(i, 100, dtype="float32") for i in range(4)]
    assert len(plan_layout(leaves, shards=1, cap_bytes=401).buckets) == 4


def test_a_bucket_may_be_filled_to_the_last_byte():
    leaves = [f32(i, 64) for i in range(4)]
    assert contents(plan_layout(leaves, shards=2, cap_bytes=512)) == [["3", "2"], ["1", "0"]]
    assert len(plan_layout(leaves, shards=2, cap_bytes=511).buckets) == 4


@pytest.mark.parametrize("size", [250, 10**6])  # exactly the cap, and far over it
def test_a_huge_leaf_leaves_the_open_bucket_open(size: int):
    leaves = [f32("c", 1), f32("b", size), f32("a", 1)]
    assert contents(plan_layout(leaves, shards=2, cap_bytes=1000)) == [["c", "a"], ["b"]]


@pytest.mark.parametrize(
    ("sizes", "first", "want"),
    [
        ([40, 40, 80, 80, 200], 100, [["4"], ["3", "2"], ["1", "0"]]),  # 4 is above the cap
        ([40, 40, 80, 80], 100, [["3"], ["2", "1", "0"]]),
        ([80, 80, 20, 20], 50, [["3", "2"], ["1", "0"]]),
        ([80, 80, 20, 120], 100, [["3"], ["2", "1"], ["0"]]),  # 3 fills the first bucket alone
        ([120, 30, 0, 20], 49, [["3", "2"], ["1", "0"]]),
        ([40, 40, 40, 40], 1000, [["3", "2", "1", "0"]]),  # no larger than the others
    ],
)
def test_the_first_bucket_of_a_kind_has_its_own_cap(sizes, first, want):
    leaves = [Leaf((i,), (n,), "float8_e4m3fn", 1) for i, n in enumerate(sizes)]
    layout = plan_layout(leaves, shards=1, cap_bytes=160, first_cap_bytes=first)
    assert contents(layout) == want


def test_each_kind_has_a_first_bucket():
    leaves = [f32(i, 8, dtype=d) for i, d in enumerate(["float32", "bfloat16"] * 4)]
    layout = plan_layout(leaves, shards=1, cap_bytes=64, first_cap_bytes=32)
    assert contents(layout) == [["7", "5"], ["6"], ["4", "2"], ["3", "1"], ["0"]]


def test_buckets_in_the_order_of_their_last_leaf():
    leaves = [f32(i, n) for i, n in enumerate([0, 8, 1, 0, 8, 1])]
    first = plan_layout(leaves, shards=1, cap_bytes=32)
    last = plan_layout(leaves, shards=1, cap_bytes=32, by_last=True)
    assert contents(first) == [["5", "3", "2", "0"], ["4"], ["1"]]
    assert contents(last) == [["4"], ["5", "3", "2", "0"], ["1"]]  # an empty leaf is never late
    assert [slot.bucket for slot in last.slots] == [0, 1, 1, 1, 1, 2]
    empty = plan_layout([f32(0, 0), f32(1, 0)], shards=1, cap_bytes=32, by_last=True)
    assert contents(empty) == [["1", "0"]]


def test_zero_size_leaves_change_no_neighbour():
    """Case 1: shapes [1], [1], [0], [1], [0], and 36 leaves of which the last is empty."""
    for count, empty in ((5, {2, 4}), (36, {35}), (56, {35}), (3, {0, 1, 2})):
        leaves = [f32(i, 0 if i in empty else 1) for i in range(count)]
        (bucket,) = plan_layout(leaves, shards=8, cap_bytes=MIB).buckets
        assert bucket.size == count - len(empty)
        places = {slot.path: slot.offset for slot in bucket.slots if slot.size}
        assert sorted(places.values()) == list(range(bucket.size))
        # Reverse order: the last full leaf is first.
        assert places == {
            str(i): sum(j not in empty for j in range(i + 1, count))
            for i in range(count)
            if i not in empty
        }


@pytest.mark.parametrize("count", [1, 3])
def test_only_zero_size_leaves(count: int):
    leaves = [f32(i, 0, 8) for i in range(count)]
    (bucket,) = plan_layout(leaves, shards=4, cap_bytes=1).buckets
    assert bucket.size == 0
    assert bucket.shard == ALIGNMENT
    assert all(slot.shape == (0, 8) for slot in bucket.slots)


def test_no_leaves():
    layout = plan_layout([], shards=8, cap_bytes=1)
    assert (layout.buckets, layout.size, layout.padded, layout.utilisation) == ((), 0, 0, 1.0)
    assert "0 leaves" in repr(layout)


# ---------------------------------------------------------------- padding


def test_a_large_cap_costs_a_small_model_nothing():
    """Case 11: ten scalars under a cap of 100 MiB on 8 devices."""
    layout = plan_layout([f32(i) for i in range(10)], shards=8, cap_bytes=100 * MIB)
    assert (layout.size, layout.padded) == (10, 8 * ALIGNMENT)


def test_real_elements_of_each_shard():
    """Case 9: 100 elements on 8 devices at an alignment of 32."""
    layout = plan_layout([f32("w", 100)], shards=8, cap_bytes=MIB, alignment=32)
    (bucket,) = layout.buckets
    assert bucket.shard == 32
    real = [min(bucket.shard, max(0, bucket.size - r * bucket.shard)) for r in range(8)]
    assert real == [32, 32, 32, 4, 0, 0, 0, 0]


def test_the_last_shard_of_a_large_bucket_ends_past_the_real_end():
    """Case 9: 566,195,520 elements on a world whose shards do not divide them."""
    layout = plan_layout([f32("w", 566_195_520)], shards=4096, cap_bytes=MIB)
    (bucket,) = layout.buckets
    assert bucket.size == 566_195_520 <= bucket.padded
    assert bucket.shard % TILE == 0
    assert bucket.padded - bucket.size < NARROW_TILE * 4096


@pytest.mark.parametrize("shards", [1, 3, 8, 4096])
def test_large_shards_are_whole_tiles_and_pad_little(shards: int):
    edge = 16 * TILE * shards
    narrow = 16 * NARROW_TILE * shards
    cases = ((edge - 1, ALIGNMENT), (edge, TILE), (edge + 1, TILE))
    for size, unit in (*cases, (narrow - 1, TILE), (narrow, NARROW_TILE)):
        (bucket,) = plan_layout([f32("w", size)], shards=shards, cap_bytes=1).buckets
        assert bucket.shard == -(-size // (shards * unit)) * unit
        if unit != ALIGNMENT:
            assert (bucket.padded - size) / bucket.padded < 1 / 16


# ---------------------------------------------------------------- sizes past 32 bits


def test_offsets_past_two_to_the_31():
    """Case 66: (19345706, 128) has 2,476,250,368 elements; int32 makes that -1,818,716,928."""
    leaves = [f32("c", 19345706, 128), f32("b", 3), f32("a", 19345706, 128)]
    layout = plan_layout(leaves, shards=8, cap_bytes=2**40)
    places = {slot.path: (slot.offset, slot.size) for slot in layout.slots}
    assert places == {
        "c": (0, 2_476_250_368),
        "b": (2_476_250_368, 3),
        "a": (2_476_250_371, 2_476_250_368),
    }
    assert layout.size == 4_952_500_739
    assert layout.padded == layout.buckets[0].shard * 8 >= 4_952_500_739


def test_offsets_past_two_to_the_33():
    leaves = [f32(i, 2**31 - 1, 3, dtype="bfloat16") for i in range(5)]
    layout = plan_layout(leaves, shards=4096, cap_bytes=2**50)
    offsets = {slot.path: slot.offset for slot in layout.slots}
    assert offsets["0"] == 4 * 3 * (2**31 - 1) == 25_769_803_764
    assert layout.size == 32_212_254_705
    # The cap is compared in bytes that do not fit 32 bits either.
    close = plan_layout(leaves, shards=4096, cap_bytes=2 * 2 * 3 * (2**31 - 1))
    assert [len(b.slots) for b in close.buckets] == [2, 2, 1]


# ---------------------------------------------------------------- order and identity


def test_the_last_leaf_is_placed_first_and_numbers_sort_as_numbers():
    leaves = [f32(("layers", i, name), 2) for i in range(12) for name in ("bias", "kernel")]
    layout = plan_layout(leaves, shards=2, cap_bytes=MIB)
    assert contents(layout) == [
        [f"layers/{i}/{name}" for i in reversed(range(12)) for name in ("kernel", "bias")]
    ]


def test_string_and_integer_keys_may_meet():
    layout = plan_layout(
        [f32(("a", 1), 1), f32(("a", "b"), 2), f32(("a",), 3)], shards=1, cap_bytes=MIB
    )
    assert contents(layout) == [["a/b", "a/1", "a"]]


GOLDEN = "1993139f66e8c09f0e29000f3e5fdc7ff738028983e3e4a7933348403fe0a16f"


def golden_leaves() -> list[Leaf]:
    return [
        f32(("layers", 0, "kernel"), 17, 5),
        f32(("layers", 10, "bias"), 3, dtype="bfloat16", group="no decay"),
        f32(("scale",)),
        f32(("empty",), 0, 8),
    ]


def test_the_fingerprint_is_the_same_in_every_version_and_process():
    """Checkpoints and processes of a job compare it: a new value is a decision."""
    assert plan_layout(golden_leaves(), shards=8, cap_bytes=256).fingerprint == GOLDEN


def test_hash_seeds_and_ranks_do_not_enter():
    code = (
        "import sys, importlib.util as u\n"
        "s = u.spec_from_file_location('layout', sys.argv[1]); m = u.module_from_spec(s)\n"
        "sys.modules['layout'] = m; s.loader.exec_module(m)\n"
        # A set of strings: its order differs with the seed.
        "leaves = {m.Leaf((n,), (i,), 'float32', 4, '') for i, n in enumerate('abcdefgh')}\n"
        "print(m.plan_layout(leaves, shards=3, cap_bytes=64).fingerprint)"
    )
    spec = importlib.util.find_spec("jzero._layout")
    assert spec is not None
    assert spec.origin is not None
    prints = {
        subprocess.run(
            [sys.executable, "-S", "-c", code, spec.origin],
            env={"PYTHONHASHSEED": seed, "JAX_PROCESS_ID": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(prints) == 1


@pytest.mark.parametrize("change", ["shape", "dtype", "group", "path", "shards", "cap"])
def test_the_fingerprint_tells_layouts_apart(change: str):
    leaves = golden_leaves()
    other = {
        "shape": lambda x: x._replace(shape=(5, 17)),
        "dtype": lambda x: x._replace(dtype="float64", itemsize=8),
        "group": lambda x: x._replace(group="other"),
        "path": lambda x: x._replace(path=("layers", 1, "kernel")),
    }.get(change, lambda x: x)
    changed = [other(leaves[0]), *leaves[1:]]
    a = plan_layout(leaves, shards=8, cap_bytes=10_000)
    b = plan_layout(
        changed, shards=4 if change == "shards" else 8, cap_bytes=64 if change == "cap" else 10_000
    )
    assert a != b
    assert a.fingerprint != b.fingerprint


def test_a_layout_does_not_change_and_hides_nothing():
    layout = plan_layout(golden_leaves(), shards=8, cap_bytes=256)
    with pytest.raises(AttributeError, match="immutable"):
        layout.shards = 3
    assert layout != "layout"
    table = layout.summary()
    for bucket in layout.buckets:
        assert f"{bucket.size:,}" in table
    assert repr(layout) in table
    assert "4 leaves" in repr(layout)
    assert layout.utilisation == layout.size / layout.padded


def test_planning_is_linear_in_the_number_of_leaves():
    """Each leaf's shape is looked at a fixed number of times, however many leaves there are."""

    def looks(count: int) -> int:
        seen = [0]

        class Counted(tuple):
            def __iter__(self):
                seen[0] += 1
                return super().__iter__()

        leaves = [f32(i)._replace(shape=Counted((3, 4))) for i in range(count)]
        plan_layout(leaves, shards=8, cap_bytes=4096)
        return seen[0]

    assert looks(2000) == 2 * looks(1000)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["shards", "cap_bytes", "alignment", "first_cap_bytes"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused(name: str, value: int):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        plan_layout([f32("a", 1)], **{"shards": 1, "cap_bytes": 1, name: value})


def test_two_leaves_on_one_path_are_refused():
    leaves = [f32(("a", "b"), 1), f32(("c",), 1), f32(("a/b",), 2)]
    with pytest.raises(ValueError, match="share the path 'a/b'"):
        plan_layout(leaves, shards=1, cap_bytes=1)


@pytest.mark.parametrize(
    ("order", "odd"), [(["a"], "b"), (["a", "b", "c"], "c"), (["a", "a", "b"], "a"), ([], "a")]
)
def test_an_order_that_is_no_permutation_is_refused(order: list[str], odd: str):
    with pytest.raises(ValueError, match=f"exactly once.*'{odd}'"):
        plan_layout([f32("a", 1), f32("b", 1)], shards=1, cap_bytes=1, order=order)
