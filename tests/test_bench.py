"""Benchmarks in their tiniest setting: they run, their methods agree, their JSON is whole."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODEL = "noop"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "step.json"
    command = ["--models", MODEL, "--devices", "2", "--rounds", "2", "--steps", "2"]
    load("step").main([*command, "--out", str(out)])
    return json.loads(out.read_text())


def test_says_how_it_was_made(report: dict[str, Any]) -> None:
    assert report["command"].startswith("python benchmarks/step.py --models noop --devices 2")
    assert report["versions"]["jax"] == jax.__version__
    assert report["devices"].startswith("2 x ")
    assert {"date", "host", "models"} <= report.keys()


def test_measures_every_method(report: dict[str, Any]) -> None:
    methods = report["models"][MODEL]["methods"]
    assert set(methods) == {"jzero", "jzero in shard_map", "jzero lazy", "replicated", "annotated"}
    for numbers in methods.values():
        for name in ("step_s", "call_s", "trace_s", "compile_s", "state_bytes", "argument_bytes"):
            assert numbers[name] > 0, name
        assert {"peak_bytes", "temporary_bytes", "bytes_accessed"} <= numbers.keys()
        assert len(numbers["step_s_turns"]) == 2
        assert len(numbers["losses"]) == 6  # a turn to warm up, and two
    assert methods["jzero"]["step_ratio"] == 1


def test_losses_agree(report: dict[str, Any]) -> None:
    assert report["models"][MODEL]["losses_agree"]["ok"]
    reference, *others = (m["losses"] for m in report["models"][MODEL]["methods"].values())
    for losses in others:
        assert losses == pytest.approx(reference, rel=1e-4)


def test_donates_parameters_and_state(report: dict[str, Any]) -> None:
    for numbers in report["models"][MODEL]["methods"].values():
        # All that comes out but the loss lies where it went in.
        assert 0 <= numbers["output_bytes"] - numbers["donated_bytes"] < 256


def test_ddp_against_pmean_by_hand(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    command = ["--models", "tiny", "--devices", "2", "--rounds", "2", "--compiles", "1"]
    load("ddp").main([*command, "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["devices"].startswith("2 x ")
    assert report["models"].keys() == {"tiny, jax.jit", "tiny, nnx.jit"}
    for found in report["models"].values():
        assert found["loss_difference"] == 0
        for way in ("by hand", "jzero", "by hand again"):
            assert [c["kind"] for c in found[way]["collectives"]] == ["all-reduce"]
            assert len(found[way]["step_s"]) == 2
            assert len(found[way]["compile_s"]) == 1
        assert found["step_ratio"]["median"] > 0
        assert found["compile_resolution"]["fastest quarter"] > 0


def test_one_bucket_is_the_program_by_hand(make_mesh: Any) -> None:
    """The wrapper itself costs nothing: the same operations on the same types in the same order."""
    ddp = load("ddp")

    def operations(way: str) -> list[tuple[str, str]]:
        mesh = make_mesh(2, types="auto")
        compiled = ddp.Training(way, "jax.jit", "tiny", mesh).compile()[0]
        found = re.findall(
            r"^ +(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", compiled.as_text(), re.MULTILINE
        )
        assert len(found) > 20
        return found

    assert operations("jzero") == operations("by hand")


def test_counts_collectives_in_loops(make_mesh: Any) -> None:
    def local(x: jax.Array) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(total * 0.5, "data"), None

        total, _ = jax.lax.scan(body, x, None, length=3)
        return jax.lax.psum_scatter(total, "data", tiled=True)

    mesh = make_mesh(4)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    text = jax.jit(mapped).lower(jnp.ones((8, 16))).compile().as_text()
    found = {(c.kind, c.dtype): (c.count, c.bytes) for c in load("_hlo").collectives(text, 4)}
    assert found == {("all-reduce", "f32"): (3, 3 * 512), ("reduce-scatter", "f32"): (1, 512)}
