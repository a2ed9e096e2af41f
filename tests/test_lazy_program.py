"""Lazy sync in compiled programs: which collectives, where they stand, and what is kept."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import batch, batch_axes, by_op, counting, split
from test_lazy import LAYERS, deep, lazy_config, lazy_loss, rematted, shard

import jzero

P = jax.P


def structs(tree, mesh, specs):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        tree,
        specs,
    )


def lowered_step(mesh, loss, stacked: bool = True, dtype=jnp.float32, donate=False, **options):
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh, **options))
    shards = jax.eval_shape(
        lambda p: jzero.shard_params(p, zero=tx, stacked="layers" if stacked else None),
        deep(stacked, dtype),
    )
    state = jax.eval_shape(tx.init, shards)
    data = structs(batch(), mesh, (batch_axes(mesh),) * 2)

    def step(shards, state, data):
        _, grads = jzero.value_and_grad(loss, zero=tx)(shards, data)
        return tx.step(grads, state, shards)

    args = (structs(x, mesh, jzero.partition_specs(x)) for x in (shards, state))
    step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    return step.lower(*args, data), shards


def compiled_step(*args, **options):
    lowered, shards = lowered_step(*args, **options)
    return lowered.compile(), shards


def placed(compiled, op: str) -> list[str]:
    """Of each collective of a kind: "entry", "forward loop" or "backward loop"."""
    found, computation = [], ""
    for line in compiled.as_text().splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if re.search(rf" {op}(-start)?\(", line):
            backward = "transpose(" in line
            found.append(
                "entry"
                if computation == "ENTRY"
                else "backward loop"
                if backward
                else "forward loop"
            )
    return sorted(found)


def test_each_bucket_is_reduced_where_the_backward_pass_ends_with_it(make_mesh):
    """Scanned: in the loop of the backward pass, a layer at a time."""
    mesh = make_mesh((2, 4))
    compiled, shards = compiled_step(mesh, rematted, bucket_mb=1.0)
    buckets, found = shards.layout.buckets, by_op(compiled)
    assert [b.layers for b in buckets] == [LAYERS, 0, 0]
    assert placed(compiled, "reduce-scatter") == ["backward loop", "entry", "entry"]
    assert placed(compiled, "all-gather") == ["backward loop", "entry", "entry", "forward loop"]
    assert sorted(c.sizes[0] for c in found["reduce-scatter"]) == sorted(
        b.row_shard for b in buckets
    )
    gathered = sorted(c.sizes[0] for c in found["all-gather"])
    assert gathered == sorted([b.row for b in buckets] + [buckets[0].row])
    # The shard over the replica axis, then scalars: the loss, and four sums for the norm.
    large = sorted(n for c in found["all-reduce"] for n in c.sizes if n > 5)
    assert large == sorted(b.row_shard for b in buckets)


POLICIES = {
    "none": (lambda f: f, 1),
    "remat": (jax.checkpoint, 2),
    "keep": (functools.partial(jax.checkpoint, policy=jzero.save_gathered), 1),
    "regather": (functools.partial(jax.checkpoint, policy=jzero.save_except_gathered), 2),
}


@pytest.mark.parametrize("stacked", [True, False], ids=["scanned", "unrolled"])
def test_what_is_kept_for_the_backward_pass(make_mesh, stacked: bool):
    """How often a layer is gathered says whether the gathered parameters were kept."""
    mesh = make_mesh(2)
    layers = 1 if stacked else LAYERS  # a loop's body counts once
    for name, (checkpoint, times) in POLICIES.items():
        loss = functools.partial(lazy_loss, checkpoint=checkpoint)
        text = lowered_step(mesh, loss, stacked, bucket_mb=1.0)[0].as_text()
        assert text.count('"stablehlo.all_gather"(') == 2 + times * layers, name
        assert text.count('"stablehlo.reduce_scatter"(') == 2 + layers, name
        # tanh of a layer is recomputed unless activations are kept.
        recomputed = name in ("remat", "keep")
        tanh = text.count("stablehlo.tanh")
        assert tanh == 1 + layers * (2 if recomputed else 1), name


def test_a_compiler_for_tpu_gathers_unrolled_layers_again(tpu_topology):
    """It may not see that the layer was gathered before (XLA for CPU does, and keeps it)."""
    mesh = jax.sharding.Mesh(np.array(tpu_topology("v5e:2x2").devices).reshape(-1), ("data",))
    for name, times in {"regather": 2, "keep": 1}.items():
        loss = functools.partial(lazy_loss, checkpoint=POLICIES[name][0])
        compiled, _ = compiled_step(mesh, loss, False, bucket_mb=1.0)
        arrays = sum(len(dims) for _, dims in typed(compiled, "all-gather"))
        assert arrays == 2 + times * LAYERS, name


def typed(compiled, op: str) -> list[tuple[str, list[int]]]:
    """Of each collective of a kind: dtype, and elements of each array that it gives."""
    found = []
    for line in compiled.as_text().splitlines():
        if m := re.search(rf"= (.*) {op}(-start)?\(", line):
            arrays = re.findall(r"\b(f32|bf16|f16|s32|u32)\[([\d,]*)\]", m[1])
            sizes = [math.prod(int(d) for d in dims.split(",") if d) for _, dims in arrays]
            found.append((arrays[0][0], sizes))
    return found


def test_one_device_does_not_communicate(make_mesh):
    compiled, _ = compiled_step(make_mesh(1), rematted)
    assert by_op(compiled) == {}


def test_shards_are_updated_in_place(make_mesh):
    mesh = make_mesh(4)
    compiled, shards = compiled_step(mesh, rematted, donate=True)
    held = sum(3 * 4 * b.shard for b in shards.layout.buckets)
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_ten_steps_compile_once(make_mesh):
    mesh = make_mesh(2)
    tx = jzero.adamw(1e-2, zero=lazy_config(mesh))
    shards = shard(deep(), tx, mesh, True)
    state = tx.init(shards)

    @jax.jit
    def step(shards, state, data):
        _, grads = jzero.value_and_grad(lazy_loss, zero=tx)(shards, data)
        return tx.step(grads, state, shards)

    data = split(batch(), mesh)
    before = jax.tree.map(jnp.shape, jax.tree.leaves((shards, state)))
    with counting() as names:
        for _ in range(10):
            shards, state = step(shards, state, data)
    assert len(names) == 1, names
    assert jax.tree.map(jnp.shape, jax.tree.leaves((shards, state))) == before


@pytest.mark.parametrize("wires", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_wire_for_each_direction(tpu_topology, wires: tuple[str, str]):
    """Compiled for TPU: the CPU backend widens 16-bit collectives."""
    mesh = jax.sharding.Mesh(np.array(tpu_topology("v5e:2x2").devices).reshape(-1), ("data",))
    gradient, parameter = wires
    precision = jzero.Precision(grad_sync=gradient, param_sync=parameter)
    compiled, shards = compiled_step(mesh, rematted, precision=precision, bucket_mb=1.0)
    short = {"float32": "f32", "bfloat16": "bf16"}
    rows = sorted(b.row for b in shards.layout.buckets)
    # A small reduce-scatter is an all-reduce and a slice.
    reduced = [(d, n) for d, sizes in typed(compiled, "all-reduce") for n in sizes if n > 5]
    assert sorted(reduced) == [(short[gradient], row) for row in rows]
    assert {d for d, _ in typed(compiled, "all-gather")} == {short[parameter]}


# ---------------------------------------------------------------- one layer ahead


def ahead(shards, data):
    def layer(x, p):
        return jnp.tanh(x @ p["kernel"] + p["bias"][None]) * p["gain"] + x

    x, y = data
    x = jnp.tanh(x @ jzero.gather_params(shards["first"])["kernel"])
    x = jzero.scan_layers(layer, x, shards["layers"])
    return jnp.mean((x @ jzero.gather_params(shards["last"]) - y) ** 2)


def bodies(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Computation → instruction → opcode and the rest of its line."""
    found, current = {}, {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            current = found[line.removeprefix("ENTRY ").split()[0].lstrip("%")] = {}
        elif m := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\((.*)$", line):
            current[m[1]] = m[2], m[3]
    return found


def opcodes(computations, name: str) -> set[str]:
    """All opcodes of a computation and of those that it calls."""
    found: set[str] = set()
    for op, rest in computations[name].values():
        found.add(op)
        for called in re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", rest):
            found |= opcodes(computations, called)
    return found


def waiting(computations, body: str, start: str, backwards: bool) -> set[str]:
    """Opcodes in a loop's body that depend on an instruction, or that it depends on."""
    lines = computations[body]
    uses = {
        n: set(re.findall(r"%([\w.\-]+)", rest)) & lines.keys() for n, (_, rest) in lines.items()
    }
    seen, pending = set(), [start]
    while pending:
        name = pending.pop()
        near = uses[name] if backwards else {n for n, used in uses.items() if name in used}
        pending += near - seen
        seen |= near
    found: set[str] = set()
    for name in seen:
        op, rest = lines[name]
        found.add(op)
        for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", rest):
            found |= opcodes(computations, called)
    return found


@pytest.mark.parametrize("loss", [ahead, rematted], ids=["ahead", "in the body"])
def test_no_layer_waits_for_a_gather_of_its_own_iteration(make_mesh, loss):
    """Nor does a reduce-scatter wait for it: both stand beside the arithmetic."""
    compiled, _ = compiled_step(make_mesh(4), loss, bucket_mb=1.0)
    computations = bodies(compiled.as_text())
    entry = [line for line in compiled.as_text().splitlines() if line.startswith("ENTRY")]
    skip = entry[0].split()[1].lstrip("%")
    found = {"all-gather": [], "reduce-scatter": []}
    for body, lines in computations.items():
        for name, (op, _) in lines.items():
            if op in found and body != skip:
                beside = waiting(computations, body, name, backwards=op == "reduce-scatter")
                found[op].append("dot" in beside)
    waits = loss is rematted
    assert found == {"all-gather": [waits, waits], "reduce-scatter": [waits]}
