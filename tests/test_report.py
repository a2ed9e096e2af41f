"""jzero.report and jzero.compiler_options: what compiled programs hold, told from their text."""

import dataclasses
import functools
import importlib.resources
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jzero
from jzero import _report_search as search
from jzero import _targets, cli
from jzero._hlo import parse
from jzero._hlo_collectives import collectives
from jzero._hlo_cost import cost
from jzero._ready_models import MODELS
from jzero._report_programs import moved
from jzero._roofline import simulate

P = jax.P
report_module: Any = importlib.import_module("jzero.report")  # jzero.report is the function
LAYERS, WIDTH, ROWS = 3, 64, 16
SHAPES = {
    "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
SIZE = (LAYERS + 1) * WIDTH * WIDTH


def loss(params, batch, gather=lambda x: x):
    def layer(x, w):
        return jnp.tanh(x @ gather(w)), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params["layers"])
    return jnp.mean(jnp.square(x @ gather(params["head"])))


def adamw(**options: Any) -> jzero.ZeroTransformation:
    return jzero.adamw(1e-3, zero=jzero.ZeroConfig(**options))


@pytest.fixture(scope="module")
def eager() -> jzero.Report:
    return jzero.report(adamw(), SHAPES, "cpu:8", loss=loss, batch=BATCH, compare=True)


@pytest.fixture(scope="module")
def lazy() -> jzero.Report:
    return jzero.report(
        adamw(param_sync="lazy"),
        SHAPES,
        "cpu:8",
        loss=lambda p, b: loss(p, b, jzero.gather_params),
        batch=BATCH,
        stacked="layers",
    )


def by_kind(method: Any) -> dict[str, Any]:
    return {w.kind: w for w in method.wire}


# ---------------------------------------------------------------- a report


def test_wire_of_an_eager_step(eager):
    wire = by_kind(eager["jzero"])
    sent = SIZE * 4 * 7 // 8  # one bucket, which fills whole shards
    assert wire["reduce-scatter"].bytes == wire["all-gather"].bytes == sent
    assert wire["reduce-scatter"].count == wire["all-gather"].count == 1
    assert {w.axis for w in eager["jzero"].wire} == {"data"}
    assert {w.dtype for w in eager["jzero"].wire} == {"f32"}
    assert by_kind(eager["optax replicated"])["all-reduce"].bytes >= 2 * sent


def test_wire_of_a_lazy_step(lazy):
    wire = by_kind(lazy["jzero lazy"])
    layer = WIDTH * WIDTH * 4 * 7 // 8
    # Each layer is gathered in both passes (it is recomputed) and reduced inside the loop.
    assert wire["reduce-scatter"].bytes == (LAYERS + 1) * layer
    assert wire["reduce-scatter"].in_loops == pytest.approx(LAYERS / (LAYERS + 1))
    assert wire["all-gather"].bytes == (2 * LAYERS + 1) * layer


def test_arithmetic_is_that_of_the_products(eager, lazy):
    product = 2 * ROWS * WIDTH * WIDTH
    for method in (*eager.methods[:2], *lazy.methods):
        # forward, recomputed (tanh' needs the product), and two of the backward pass; the input
        # has no gradient, but the loop computes it.
        assert method.timeline.flops in (product * (4 * LAYERS + 3), product * (3 * LAYERS + 3))
        assert method.timeline.unknown_loops == 0


def test_memory_is_what_is_allocated(eager, lazy, make_mesh):
    mesh = make_mesh(8)
    for report, name, sync in ((eager, "jzero", "eager"), (lazy, "jzero lazy", "lazy")):
        zero = jzero.ZeroConfig(mesh=mesh, param_sync=sync)
        tx = jzero.adamw(1e-3, zero=zero)
        gather = jzero.gather_params if sync == "lazy" else lambda x: x
        grad = jzero.value_and_grad(lambda p, b, gather=gather: loss(p, b, gather), zero=tx)

        def train(params, state, batch, grad=grad, tx=tx):
            value, grads = grad(params, batch)
            params, state = tx.step(grads, state, params)
            return params, state, value

        params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), SHAPES)
        params = jax.device_put(params, NamedSharding(mesh, P()))
        if sync == "lazy":
            params = jzero.shard_params(params, zero=tx, stacked="layers")
        state = tx.init(params)
        batch = jax.device_put(jnp.ones(BATCH.shape), NamedSharding(mesh, P("data")))
        compiled = jax.jit(train, donate_argnums=(0, 1)).lower(params, state, batch).compile()
        params, state, _ = jax.block_until_ready(compiled(params, state, batch))
        memory = report[name].memory
        assert memory.parameters == allocated(params, mesh)
        assert memory.state == allocated(state, mesh)
        here = compiled.memory_analysis()
        total = allocated((params, state, batch), mesh) + here.temp_size_in_bytes
        assert memory.peak == pytest.approx(total, rel=0.1)
        parts = memory.parameters + memory.state + memory.gradients + memory.temporaries
        assert parts == memory.peak


def allocated(tree: Any, mesh: jax.sharding.Mesh) -> int:
    first = mesh.devices.flat[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def test_sharding_shows_in_memory(eager):
    whole = SIZE * 4
    assert eager["optax replicated"].memory.state >= 2 * whole
    for name in ("jzero", "optax annotated"):
        assert eager[name].memory.state == pytest.approx(2 * whole / 8, rel=0.01)
        assert eager[name].memory.parameters == whole


def test_shown_as_text_table_json_and_picture(eager, tmp_path):
    text = str(eager)
    assert "cpu:8: 8 devices, data=8" in text
    assert "optax annotated" in text
    assert all(note in text for note in eager.assumptions)
    value = json.loads(eager.to_json())
    assert [m["name"] for m in value["methods"]] == [m.name for m in eager.methods]
    assert value["methods"][0]["memory"]["peak"] == eager["jzero"].memory.peak
    assert value["methods"][0]["step_seconds"] == eager["jzero"].seconds
    with pytest.raises(KeyError, match="optax annotated"):
        eager["nothing"]
    pytest.importorskip("rich")
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(eager)
    assert "optax annotated" in console.export_text()
    pytest.importorskip("matplotlib")
    eager.picture(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_every_turn_of_nested_loops():
    def nested(x):
        def inner(x, _):
            return jnp.tanh(x @ x), None

        def outer(x, _):
            return jax.lax.scan(inner, x + 1, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    compiled = jax.jit(nested).lower(jnp.ones((64, 64))).compile()
    timeline = simulate(parse(compiled.as_text()), _targets.target_of("cpu:8"))
    shown = {e.name: e.seconds * len(e.starts(100)) for e in timeline.events}
    assert sum(shown.values()) == pytest.approx(timeline.seconds)
    assert max(len(e.starts(100)) for e in timeline.events) == 15
    last = max(e.starts(100)[-1] + e.seconds for e in timeline.events)
    assert last == pytest.approx(timeline.seconds)
    assert max(len(e.starts(14)) for e in timeline.events) == 5  # the inner loop once a turn


def test_update_alone_on_two_axes():
    tx = adamw(replica_axis="replica")
    report = jzero.report(tx, SHAPES, "cpu:8", mesh_shape={"replica": 2, "data": 4})
    found = {(w.kind, w.axis): w.bytes for w in report.methods[0].wire}
    assert found["reduce-scatter", "data"] == SIZE * 4 * 3 // 4
    assert found["all-reduce", "replica"] == SIZE * 4 // 4  # of a shard, between two
    assert report.mesh == {"replica": 2, "data": 4}


def test_the_users_step(eager):
    tx = adamw()
    grad = jzero.value_and_grad(loss, zero=tx)

    def step(params, state, batch):
        value, grads = grad(params, batch)
        return *tx.step(grads, state, params), value

    def args(mesh):
        return jax.eval_shape(moved(tx, mesh).init, SHAPES), BATCH

    in_specs = (P(), None, P("data"))
    specs = jzero.partition_specs(args(jax.make_mesh((8,), ("data",))))[0]
    in_specs = (P(), specs, P("data"))
    report = jzero.report(step, SHAPES, "cpu:8", args=args, in_specs=in_specs)
    mine, ours = report.methods[0], eager["jzero"]
    assert by_kind(mine)["reduce-scatter"].bytes == by_kind(ours)["reduce-scatter"].bytes
    assert mine.memory.state == ours.memory.state
    assert mine.timeline.flops == ours.timeline.flops


@pytest.mark.parametrize("largest", [1, 7, 100])
@pytest.mark.parametrize("bend", [0, 30])
def test_finds_the_largest_batch(largest, bend):
    """Peaks of 10 a row, on a line or (bend) above it from 50 rows on."""

    def method(rows: int) -> Any:
        peak = 1000 + 10 * rows + (bend if rows > 50 else 0)
        memory = report_module.Memory(peak, 0, 0, 0, 0, 0)
        return report_module.Method("", memory, peak <= capacity, None, (), 0.0)

    capacity = 1000 + 10 * largest + 5 + (bend if largest > 50 else 0)
    found = search.largest(method, 4, method(4), capacity, compilations=8)
    assert found["fits"] == largest
    assert found["smallest_that_does_not_fit"] == largest + 1
    with pytest.raises(ValueError, match="is not known"):
        jzero.report(adamw(), SHAPES, "cpu:8", loss=loss, batch=BATCH, largest_batch=3)


def test_finds_the_deepest_model(monkeypatch):
    capacity = 400_000
    chip = dataclasses.replace(_targets.CHIPS["cpu"], memory=capacity)
    monkeypatch.setitem(_targets.CHIPS, "cpu", chip)
    report = jzero.report(
        adamw(), SHAPES, "cpu:8", loss=loss, batch=BATCH, stacked="layers", largest_depth=6
    )
    found = report.largest_depth
    fits, limit = found["fits"], found["smallest_that_does_not_fit"]
    assert limit == fits + 1
    assert found["peaks"][fits] <= capacity < found["peaks"][limit]
    # Of a layer: weights, a float32 gradient, moments on an eighth, activations of its rows.
    assert found["peaks"][limit] - found["peaks"][fits] >= WIDTH * WIDTH * (4 + 4 + 1)
    assert f"Deepest model found to fit: {fits} stacked layers ({limit} does not)" in str(report)
    with pytest.raises(ValueError, match=r"stacked=\(\) must name stacks"):
        jzero.report(adamw(), SHAPES, "cpu:8", loss=loss, batch=BATCH, largest_depth=3)


# ---------------------------------------------------------------- reading schedules

GPU = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%body (p: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %p = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64,64] get-tuple-element(%p), index=1
  %rs = ((f32[64,64]), f32[16,64]) reduce-scatter-start(%x), replica_groups=[2,4]<=[4,2]T(1,0)
  %dot = f32[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[16,64] reduce-scatter-done(%rs)
  ROOT %t = (s32[], f32[64,64]) tuple(%i, %dot)
}

%condition (p: (s32[], f32[64,64])) -> pred[] {
  %q = (s32[], f32[64,64]) parameter(0)
  %n = s32[] constant(5)
  %i2 = s32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%i2, %n), direction=LT
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x0 = f32[64,64] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,64]) tuple(%zero, %x0)
  %loop = (s32[], f32[64,64]) while(%start), condition=%condition, body=%body
  %out = f32[64,64] get-tuple-element(%loop), index=1
  ROOT %ar = f32[64,64] all-reduce(%out), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""

TPU = """HloModule step, is_scheduled=true

%start.1 (a: bf16[8,512]) -> (bf16[8,512], bf16[64,512]) {
  %a = bf16[8,512]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %ag = bf16[64,512]{1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%host (a: bf16[8,512], b: bf16[64,512], s: u32[]) -> (bf16[64,64], bf16[8,512], /*index=2*/) {
  %a2 = bf16[8,512]{1,0} parameter(0)
  %b2 = bf16[64,512]{1,0} parameter(1)
  %s2 = u32[]{:S(2)} parameter(2)
  %part = bf16[64,512]{1,0} all-gather(%a2), replica_groups={{0,1,2,3,4,5,6,7}}, \
frontend_attributes={chain_id="0"}
  %conv = bf16[64,64]{1,0} convolution(%b2, %b2), dim_labels=bf_oi->bf
  ROOT %t = (bf16[64,64]{1,0}, bf16[8,512]{1,0}, bf16[64,512]{1,0}, u32[]{:S(2)}) \
tuple(%conv, %a2, %part, %s2)
}

%all-reduce-scatter.1 (c: bf16[64,64]) -> bf16[8,64] {
  %c = bf16[64,64]{1,0} parameter(0)
  %ar = bf16[64,64]{1,0} all-reduce(%c), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %slice = bf16[8,64]{1,0} dynamic-slice(%ar), dynamic_slice_sizes={8,64}
}

ENTRY %main (x: bf16[8,512], y: bf16[64,512]) -> bf16[8,64] {
  %x = bf16[8,512]{1,0} parameter(0)
  %y = bf16[64,512]{1,0:T(8,128)S(1)} parameter(1)
  %async-collective-start.3 = (bf16[8,512]{1,0}, bf16[64,512]{1,0}) fusion(%x), kind=kCustom, \
calls=%start.1
  %s = u32[]{:S(2)} constant(0)
  %h = (bf16[64,64]{1,0}, bf16[8,512]{1,0}, bf16[64,512]{1,0}, u32[]{:S(2)}) fusion(%x, %y, %s), \
kind=kOutput, calls=%host
  %f = bf16[64,64]{1,0} get-tuple-element(%h), index=0
  %async-collective-done.3 = bf16[64,512]{1,0} fusion(%h), kind=kCustom, calls=%start.1
  ROOT %rs = bf16[8,64]{1,0} fusion(%f), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_reads_loops_groups_and_pairs():
    hlo = parse(GPU)
    scatter, total = collectives(hlo, 8)
    assert (scatter.kind, scatter.times, scatter.bytes) == ("reduce-scatter", 5, 64 * 64 * 4)
    assert scatter.group == (0, 2, 4, 6)
    assert scatter.groups == 2
    assert scatter.asynchronous
    assert scatter.wire_bytes == 64 * 64 * 4 * 3 // 4
    assert (total.kind, total.times, total.asynchronous) == ("all-reduce", 1, False)
    assert total.wire_bytes == 2 * 64 * 64 * 4 * 7 // 8


def test_reads_groups_by_axis_name():
    text = GPU.replace("[2,4]<=[4,2]T(1,0)", "mesh['replica'=2,'data'=4] {'replica'}")
    scatter, _ = collectives(parse(text), 8)
    assert (scatter.group, scatter.groups) == ((0, 4), 4)
    text = text.replace("{'replica'}", "{'data'}")
    scatter, _ = collectives(parse(text), 8)
    assert (scatter.group, scatter.groups) == ((0, 1, 2, 3), 2)


def test_runs_through_a_schedule():
    chip = _targets.Chip(1 << 30, flops=2 * 64**3, bandwidth=1e30, link=64 * 64 * 4 * 3 // 4)
    target = _targets.Target("gpu:x:8", "gpu", chip, tuple(range(8)))
    timeline = simulate(parse(GPU), target)
    # A turn: a second of dot beside a second of wire. Then an all-reduce, with nothing beside.
    after = 2 * 7 / 8 / (3 / 4)
    assert timeline.seconds == pytest.approx(5 + after)
    assert timeline.flops == 5 * 2 * 64**3
    assert [x.between for x in timeline.exchanges] == [1, 0]
    assert timeline.exposed_seconds == pytest.approx(after)


def test_reads_what_tpu_hides_in_fusions():
    hlo = parse(TPU)
    gather, scatter = collectives(hlo, 8)
    assert (gather.kind, gather.bytes, gather.asynchronous) == ("all-gather", 64 * 512 * 2, True)
    assert (scatter.kind, scatter.bytes, scatter.asynchronous) == (
        "reduce-scatter",
        64 * 64 * 2,
        False,
    )
    host = hlo.tables["main"]["h"]
    # The operand in on-chip memory (S(1)) moves nothing; nor does it what the gather works on.
    assert cost(hlo, "main", host) == (2 * 64 * 64 * 512, 64 * 64 * 2)
    device = type("Device", (), {"coords": (0, 0, 0)})
    target = _targets.Target("tpu:v5e:2x4", "tpu", _targets.CHIPS["v5e"], (device,) * 8)
    assert [x.between for x in simulate(hlo, target).exchanges] == [1, 0]


# ---------------------------------------------------------------- targets and errors


def test_wire_seconds_know_the_torus():
    def devices(rows: int, columns: int) -> tuple[Any, ...]:
        return tuple(
            type("Device", (), {"coords": (r, c, 0)}) for r in range(rows) for c in range(columns)
        )

    v5e = dataclasses.replace(_targets.CHIPS["v5e"], hop=0.0)
    ring = _targets.Target("", "tpu", v5e, devices(16, 16))
    line = _targets.Target("", "tpu", v5e, devices(4, 4))
    assert ring.seconds(180 * 10**9, range(256)) == pytest.approx(1)  # four links of 45 GB/s
    assert line.seconds(90 * 10**9, range(16)) == pytest.approx(1)
    assert line.seconds(45 * 10**9, range(4)) == pytest.approx(1)  # one row
    h200 = dataclasses.replace(_targets.CHIPS["h200"], hop=0.0)
    h200 = _targets.Target("", "gpu", h200, tuple(range(16)))
    assert h200.seconds(450 * 10**9, range(8)) == pytest.approx(1)
    assert h200.seconds(0, range(8)) == 0


def test_small_collectives_cost_their_steps():
    """A way of 3 + 3 chips, or 2 + 2 half ways around rings; NCCL's two ways to send little."""
    device = type("Device", (), {})

    def torus(side: int) -> _targets.Target:
        devices = tuple(device() for _ in range(side * side))
        for i, d in enumerate(devices):
            d.coords = (i // side, i % side, 0)
        return _targets.Target("", "tpu", _targets.CHIPS["v5e"], devices)

    bits = 128 / 45e9
    assert torus(4).seconds(128, range(16)) == pytest.approx(6e-6 + bits / 2)
    assert torus(4).seconds(128, range(16), rounds=2) == pytest.approx(12e-6 + bits / 2)
    assert torus(4).seconds(128, range(4)) == pytest.approx(3e-6 + bits)
    assert torus(16).seconds(128, range(256)) == pytest.approx(16e-6 + bits / 4)
    h200 = _targets.Target("", "gpu", _targets.CHIPS["h200"], tuple(range(16)))
    large = 450 * 10**6
    assert h200.seconds(large, range(8)) == pytest.approx(1e-3 + 8.4e-6 + 7 * 3.4e-6)
    assert h200.seconds(450, range(8)) == pytest.approx(4e-9 + 3.6e-6 + 7 * 0.47e-6)
    between = 8.4e-6 + 2 * (14 * 3.4e-6 + 9.6e-6)
    assert h200.seconds(large, range(16), rounds=2) == pytest.approx(1e-3 + between)
    assert _targets.Target("", "cpu", _targets.CHIPS["cpu"], (0, 1)).seconds(10, (0, 1)) == 1e-9


@pytest.mark.parametrize(
    "topology",
    [
        "",
        "tpu",
        "tpu:v5e",
        "tpu:v3:2x2",
        "tpu:v5e:2x2:0",
        "tpu:v5e:2x2:",
        "gpu:h200:8:2",
        "gpu:h200",
        "gpu:a100:8",
        "cpu",
        "cpu:0",
    ],
)
def test_unknown_topologies_are_refused(topology):
    with pytest.raises(ValueError, match="use 'tpu:CHIP:SHAPE'"):
        jzero.report(adamw(), SHAPES, topology)


def test_slices_that_tpus_do_not_have_are_refused(tpu_topology):
    with pytest.raises(ValueError, match="at most 16x16"):
        jzero.report(adamw(), SHAPES, "tpu:v5e:16x32")
    with pytest.raises(ValueError, match=r"does not know the slice 'v5p:7x7'"):
        jzero.report(adamw(), SHAPES, "tpu:v5p:7x7")


def test_several_slices(tpu_topology):
    """XLA makes of a collective one within each slice, and sends between their hosts."""
    target = _targets.target_of("tpu:v5e:2x2:2")
    assert [d.slice_index for d in target.devices] == [0] * 4 + [1] * 4
    report = jzero.report(adamw(), SHAPES, "tpu:v5e:2x2:2")
    sent = {w.kind: w.bytes for w in report.methods[0].wire if w.bytes > 1000}
    assert sent["all-gather"] == SIZE * 4 * 3 // 4
    assert report.methods[0].memory.parameters == SIZE * 4
    assert "neither its bytes nor its time" in str(report)


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"libtpu.*pip install 'jzero\[tpu\]'"):
        jzero.report(adamw(), SHAPES, "tpu:v5e:2x2")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jzero\[cuda\]'"):
        jzero.report(adamw(), SHAPES, "gpu:h200:8")
    assert cli.main(["report", "--model", "tiny", "--topology", "gpu:h200:8"]) == 2


def test_gpu_targets_are_there():
    for chip in _targets.GPUS:
        text = importlib.resources.files("jzero").joinpath("targets", f"{chip}.txtpb")
        assert f"device_memory_size: {_targets.CHIPS[chip].memory}\n" in text.read_text()


def test_arguments_that_do_not_fit():
    tx = adamw()
    with pytest.raises(ValueError, match="batch is None"):
        jzero.report(tx, SHAPES, "cpu:8", loss=loss)
    with pytest.raises(ValueError, match="needs a transformation"):
        jzero.report(3, SHAPES, "cpu:8")
    with pytest.raises(ValueError, match="compare=True needs loss"):
        jzero.report(tx, SHAPES, "cpu:8", compare=True)
    with pytest.raises(ValueError, match="a step function holds its own"):
        jzero.report(lambda p: p, SHAPES, "cpu:8", loss=loss, batch=BATCH)
    with pytest.raises(ValueError, match="has 4 devices and cpu:8 8"):
        jzero.report(tx, SHAPES, "cpu:8", mesh_shape={"data": 4})
    with pytest.raises(ValueError, match="give mesh_shape"):
        jzero.report(adamw(replica_axis="replica"), SHAPES, "cpu:8")
    with pytest.raises(RuntimeError, match="jax_num_cpu_devices"):
        jzero.report(tx, SHAPES, "cpu:512")


# ---------------------------------------------------------------- models and the command


def test_ready_models_have_their_names_sizes():
    sizes = {name: round(model.parameters / 1e6) for name, model in MODELS.items()}
    assert sizes == {
        "tiny": 0,
        "gpt2": 124,
        "llama-1b": 1236,
        "llama-8b": 8030,
        "llama-70b": 70554,
    }


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_ready_models_predict(name):
    tiny = MODELS["tiny"]
    model = tiny if name == "tiny" else type(tiny)(2, 64, 4, 4, 128, 256, 32, 1, False, True)
    params = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), model.shapes())
    tokens = np.zeros((2, 33), np.int32)
    value = jax.jit(model.loss)(params, tokens)
    # All rows of the output matrix are equal: every token is as likely.
    assert float(value) == pytest.approx(np.log(256), rel=1e-3)


class Small:
    """Stands for a ready model: those take a minute to compile for CPU."""

    parameters, dtype, length, batch, stacked = SIZE, "float32", WIDTH, ROWS, "layers"

    def shapes(self):
        return SHAPES

    def batch_shape(self, sequences):
        return jax.ShapeDtypeStruct((sequences, WIDTH), jnp.float32)

    loss = staticmethod(loss)


def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "tiny", Small())
    picture = tmp_path / "schedule.svg"
    command = ["report", "--model", "tiny", "--topology", "cpu:8", "--lazy", "--json"]
    assert cli.main([*command, "--options", "--picture", str(picture)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(
        "jzero report: compiling jzero lazy for cpu:8\njzero report: compiled"
    )
    value = json.loads(said.out)
    (method,) = value["methods"]
    assert method["name"] == "jzero lazy"
    kinds = {w["kind"]: w for w in method["wire"]}
    assert kinds["reduce-scatter"]["in_loops"] > 0
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_the_command_with_a_ready_model(capsys):
    assert cli.main(["report", "--model", "tiny", "--topology", "cpu:8", "--lazy"]) == 0
    text = capsys.readouterr().out
    assert "tiny: 0 M parameters, float32, 1 x 32 tokens a device" in text
    assert "reduce-scatter" in text


# ---------------------------------------------------------------- options


def test_options_of_each_platform():
    zero = jzero.ZeroConfig()
    gpu = jzero.compiler_options(zero, platform="gpu")
    assert gpu["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 1
    assert gpu["xla_gpu_all_gather_combine_threshold_bytes"] == 1
    assert gpu["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert "xla_gpu_enable_nccl_user_buffers" not in gpu
    assert "xla_gpu_enable_command_buffer" not in gpu
    more = jzero.compiler_options(
        adamw(replica_axis="replica"),
        "gpu:h200:8",
        merge_mb=1,
        pipelined=False,
        user_buffers=True,
        command_buffers=False,
        double_buffering=True,
    )
    assert more == {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**20,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**20,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_nccl_user_buffers": True,
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_enable_while_loop_double_buffering": True,
    }
    assert jzero.compiler_options(zero, "cpu") == {}
    assert jzero.compiler_options(zero, "tpu:v6e:4x4") != jzero.compiler_options(zero, "tpu")
    for bad in ("rocm", "tpu:v3"):
        with pytest.raises(ValueError, match="use 'gpu', 'tpu'"):
            jzero.compiler_options(zero, bad)
    with pytest.raises(ValueError, match="options of GPUs"):
        jzero.compiler_options(zero, "tpu", user_buffers=True)
    with pytest.raises(ValueError, match="merge_mb"):
        jzero.compiler_options(zero, merge_mb=-1)
    with pytest.raises(ValueError, match="ZeroConfig"):
        jzero.compiler_options(optax.sgd(1.0))


def buckets_apart(target: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Instructions that reduce and that gather, in a step of four layers, each a bucket."""
    mesh, width = target.mesh({"data": len(target.devices)}), 256

    def local(layers, x):
        def loss(layers):
            h = x
            for w in layers:
                h = jnp.tanh(h @ w)
            return jnp.sum(h.astype(jnp.float32))

        grads = [g.astype(jnp.float32).reshape(-1) for g in reversed(jax.grad(loss)(layers))]
        shards = [jax.lax.psum_scatter(g, "data", tiled=True) for g in grads]
        return [jax.lax.all_gather(s.astype(x.dtype), "data", tiled=True) for s in shards]

    def shape(rows, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=sharding)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    arguments = [shape(width, P())] * 4, shape(512 * mesh.size, P("data"))
    compiled = jax.jit(mapped).lower(*arguments).compile(compiler_options=options or None)
    found = list(collectives(parse(compiled.as_text()), mesh.size))
    gathers = sum(c.kind == "all-gather" for c in found)
    return len(found) - gathers, gathers


def test_tpu_keeps_buckets_apart(tpu_topology):
    target = _targets.target_of("tpu:v5e:2x4")
    assert buckets_apart(target, {})[0] == 1
    assert buckets_apart(target, jzero.compiler_options(None, target.name)) == (4, 4)


@pytest.mark.parametrize(
    "topology",
    [
        "tpu:v5p:2x2x1",
        pytest.param("tpu:v5p:2x2x2", marks=pytest.mark.slow),
        "tpu:v6e:2x4",
        pytest.param("tpu:v6e:4x4", marks=pytest.mark.slow),
    ],
)
def test_tpu_overlaps_what_it_sends(tpu_topology, topology):
    """Without the options none of it. The gather of the first layer has nothing before it."""
    zero = jzero.ZeroConfig(param_sync="lazy", precision=jzero.Precision(grad_sync="bfloat16"))
    target = _targets.target_of(topology)
    mesh = target.mesh({"data": len(target.devices)})
    layers, width, hidden = 4, 256, 1024

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    params = {"layers": {"up": shape(layers, width, hidden), "down": shape(layers, hidden, width)}}

    def loss(shards, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["up"]) @ p["down"]

        return jnp.mean(jzero.scan_layers(layer, x, shards["layers"]).astype(jnp.float32))

    with jax.set_mesh(mesh):
        held = jax.eval_shape(lambda p: jzero.shard_params(p, zero=zero, stacked="layers"), params)
    report = jzero.report(
        jzero.value_and_grad(loss, zero=zero),
        held,
        topology,
        args=(shape(512 * mesh.size, width),),
        in_specs=(jzero.partition_specs(held), P("data")),
        compiler_options=jzero.compiler_options(zero, topology),
    )
    size = 2 * layers * width * hidden * 2 * (mesh.size - 1) // mesh.size
    sent = {w.kind: w for w in report.methods[0].wire if w.bytes > 10_000}
    assert sent["all-gather"].bytes == size * 9 // 4  # once in each pass, and one layer more
    assert sent["all-gather"].overlapped >= 0.99 * 8 / 9
    # Of more than eight chips, and in three dims, XLA makes reduce-scatters all-reduces.
    kind, twice = ("reduce-scatter", 1) if mesh.size <= 8 else ("all-reduce", 2)
    if topology == "tpu:v5p:2x2x2":
        kind, twice = "all-reduce", 2
    assert sent[kind].bytes == twice * size
    assert sent[kind].overlapped == 1


def test_a_flat_bucket_is_scattered_not_summed(tpu_topology):
    """TPU makes an all-reduce and a slice, of twice the bytes, of a flat reduce-scatter."""
    mesh = _targets.target_of("tpu:v5e:2x4").mesh({"data": 8})
    zero = jzero.ZeroConfig(mesh=mesh)
    params = {name: jax.ShapeDtypeStruct((512, 600), jnp.float32) for name in "ab"}
    grad = jzero.value_and_grad(lambda p, x: jnp.sum(p["a"] * p["b"] * x), zero=zero)
    named = [NamedSharding(mesh, spec) for spec in (P(), P("data"))]
    arguments = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=named[0]), params
    )
    x = jax.ShapeDtypeStruct((8 * 512, 1), jnp.float32, sharding=named[1])
    compiled = jax.jit(grad).lower(arguments, x).compile()
    found = [c for c in collectives(parse(compiled.as_text()), 8) if c.bytes > 100]
    assert [c.kind for c in found] == ["reduce-scatter"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sync"), [("gpt-534m", "eager"), ("gpt-534m", "lazy"), ("llama-1b", "lazy")]
)
def test_gpu_overlaps_what_it_sends(name, sync, monkeypatch):
    """Of the bytes at least 90 % have computation between start and end, most of them in loops:
    of the benchmarks' GPT, and of eight layers of a Llama."""
    pytest.importorskip("jax_cuda13_plugin", reason="compiling for GPU needs jzero[cuda]")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    models = importlib.import_module("_models")
    gather = jzero.gather_params if sync == "lazy" else lambda x: x
    if name == "llama-1b":
        model = dataclasses.replace(MODELS[name], layers=8)
        shapes, tokens = model.shapes(), model.batch_shape(8)
        loss = functools.partial(model.loss, gather=gather)
    else:
        size = models.SIZES[name]
        shapes = models.shapes(size)
        tokens = jax.ShapeDtypeStruct(models.batch_shape(size, 8), jnp.int32)
        loss = functools.partial(models.loss_fn, size, gather=gather)
    narrow = jzero.Precision(grad_sync=jnp.bfloat16)
    zero = jzero.ZeroConfig(param_sync=sync, stacked="layers", precision=narrow)
    report = jzero.report(
        jzero.adamw(1e-3, zero=zero),
        shapes,
        "gpu:h200:8",
        loss=loss,
        batch=tokens,
        compiler_options=jzero.compiler_options(zero, "gpu"),
    )
    wire = by_kind(report.methods[0])
    assert wire["reduce-scatter"].overlapped >= 0.9
    assert wire["all-gather"].overlapped >= 0.9
    assert wire["reduce-scatter"].in_loops > 0.5


@pytest.mark.slow
def test_gpu_keeps_buckets_apart():
    pytest.importorskip("jax_cuda13_plugin", reason="compiling for GPU needs jzero[cuda]")
    target = _targets.target_of("gpu:h200:8")
    assert buckets_apart(target, {}) == (1, 1)
    options = jzero.compiler_options(None, "gpu", user_buffers=True, double_buffering=True)
    for record in (None, True, False):
        more = jzero.compiler_options(None, "gpu", command_buffers=record)
        assert buckets_apart(target, {**options, **more}) == (4, 4)


def test_what_does_not_fit_is_said_so(tpu_topology):
    """The compiler gives up; its message says how much it would have needed."""
    rows = jax.ShapeDtypeStruct((5 * 2**30,), jnp.float32)
    report = jzero.report(lambda x: x * 2, rows, "tpu:v5e:2x2")
    (method,) = report.methods
    assert method.fits is False
    assert method.timeline is None
    assert method.memory.peak >= 20 * 2**30  # the input alone
    assert "out of memory" in str(report)
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm"
    assert report_module._used(message) == int(18.5 * 2**30)
    assert report_module._used("INTERNAL: Used 3G") is None
