"""The examples do what they say: each trains as optax does on one device."""

import contextlib
import importlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

EXAMPLES = Path(__file__).parents[1] / "examples"

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports an example by name, as Python does for a script beside it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


# float32 sums in another order, amplified by Adam over the steps.
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("plain_jit", {}, id="plain_jit"),
        pytest.param("in_shard_map", {"check_vma": True}, id="in_shard_map-checked"),
        pytest.param("in_shard_map", {"check_vma": False}, id="in_shard_map-unchecked"),
        pytest.param("drop_in", {}, id="drop_in"),
    ],
)
def test_short_examples_equal_optax_on_one_device(
    name: str, arguments: dict[str, Any], load: Load, capsys: pytest.CaptureFixture[str]
):
    loss, difference = load(name).main(steps=30, **arguments)
    assert np.isfinite(loss)
    assert difference < 2e-6
    assert f"loss {loss:.6f}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain_jit", "in_shard_map", "drop_in"])
def test_short_examples_are_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_one_reduce_scatter_a_bucket_inside_shard_map(check_vma: bool, load: Load):
    mesh = jax.make_mesh((8,), ("data",))
    step, params, state = load("in_shard_map").build(mesh, check_vma)
    batch = jax.device_put(load("_mlp").batches(1)[0], NamedSharding(mesh, P("data")))
    program = step.lower(params, state, batch).compile().as_text()
    operations = re.findall(r"= \S+ (reduce-scatter|all-gather|all-reduce)\(", program)
    buckets = len(state.layout.buckets)
    assert operations.count("reduce-scatter") == buckets
    assert operations.count("all-gather") == buckets
    # What is all-reduced are scalars: the loss, and what the step measures.
    reduced = re.findall(r"= (\S+) all-reduce\(", program)
    assert all(re.match(r"[a-z0-9]+\[4?\]", shape) for shape in reduced), reduced


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sleeps"]
    rng = np.random.default_rng(0)
    (folder / "words.txt").write_text(" ".join(rng.choice(words, 4000)), encoding="utf-8")
    (folder / "binary.bin").write_bytes(b"\0\1\2" * 1000)
    return folder


def test_lazy_sync_equals_optax_on_one_device(load: Load, text: Path):
    have, want = load("lazy_gpt").main(steps=6, data=str(text))
    np.testing.assert_allclose(have, want, rtol=1e-5)
    assert have[-1] < have[0]


def train(load: Load, text: Path, out: Path, **options: Any) -> Any:
    flags = {"size": "tiny", "steps": 10, "data": text, "out": out, **options}
    given = [f"--{key}" if value is None else f"--{key}={value}" for key, value in flags.items()]
    return load("train_gpt").main(given)


@pytest.fixture(scope="module")
def gpt(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ten steps beside optax: the result, the folder, what was printed."""
    out, printed = tmp_path_factory.mktemp("gpt") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(EXAMPLES))
        result = train(importlib.import_module, text, out)
    return result, out, printed.getvalue()


def test_gpt_equals_optax_and_reports_what_is_allocated(gpt: Any):
    result, out, printed = gpt
    ours, theirs, summary = result.ours, result.theirs, result.summary

    # Ten float32 steps below the edge of chaos: rounding in another order, and no more.
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=2e-6)
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=2e-5)
    assert ours.held_out.keys() == theirs.held_out.keys() == {2, 4, 6, 8, 10}
    assert ours.held_out[10] < ours.losses[0] - 0.5
    assert summary["loss_difference"] == np.max(np.abs(np.subtract(ours.losses, theirs.losses)))
    assert summary["skipped"] == summary["optax_nonfinite"] == 0
    assert int(result.state.step) == summary["steps"] == 10

    # Parameters are whole on each device; of the state each holds a shard of mu and of nu.
    layout = result.state.layout
    count = sum(x.size for x in jax.tree.leaves(result.params))
    assert summary["buckets"] == len(layout.buckets) > 1
    scalars = sum(x.nbytes for x in jax.tree.leaves(result.state) if x.ndim == 0)
    assert scalars < 100
    moments = 2 * 4 * sum(bucket.shard for bucket in layout.buckets)
    expected = {"param": 4 * count, "state": moments + scalars}
    for device in jax.devices():
        for what, tree in {"param": result.params, "state": result.state}.items():
            shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
            allocated = sum(s.data.nbytes for s in shards if s.device == device)
            assert allocated == summary["jzero"][f"{what}_bytes"] == expected[what]
    # optax: mu and nu whole, and its two counters, of the steps and of the schedule.
    assert summary["optax"]["state_bytes"] == 2 * 4 * count + 2 * 4
    assert summary["state_ratio"] == summary["optax"]["state_bytes"] / expected["state"]

    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / "loss.png").stat().st_size > 10_000
    assert len((out / "sample.txt").read_text(encoding="utf-8")) >= 400
    for part in ("jzero, 8 devices  10/10  loss", "tokens/s", "optimizer state per device"):
        assert part in printed


@pytest.mark.slow
def test_gpt_in_bfloat16_on_two_devices(load: Load, text: Path, tmp_path: Path):
    result = train(load, text, tmp_path, steps=1, devices=2, precision="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(result.params)} == {"bfloat16"}
    # The first loss comes before any update; bfloat16 sums may round to a neighbour.
    np.testing.assert_allclose(result.ours.losses[0], result.theirs.losses[0], rtol=2e-3)
    # mu, nu and the float32 master, halved.
    assert result.summary["state_ratio"] == pytest.approx(2, rel=0.1)


def test_a_run_goes_on_where_it_stopped_on_fewer_devices(
    load: Load, text: Path, gpt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = {"checkpoint": tmp_path / "run", "no-reference": None}
    first = train(load, text, tmp_path, **options, **{"stop-at": 3})
    assert first.summary["steps"] == len(first.ours.losses) == 3
    result = train(load, text, tmp_path, **options, devices=2)
    assert "jzero, 2 devices goes on after step 3" in capsys.readouterr().out
    assert result.summary["steps"] == int(result.state.step) == 10
    assert result.ours.losses[:3] == first.ours.losses
    # Sums over other numbers of devices round otherwise, and no more.
    np.testing.assert_allclose(result.ours.losses, gpt[0].ours.losses, rtol=2e-6)


def test_a_run_without_reference_reports_itself(load: Load, tmp_path: Path):
    report = load("_report")
    curve = report.Curve("jzero", 10, 20, [3.0, 2.0], [1.0, 0.5], [9.0, 0.1], {2: 2.5})
    summary = report.summarize(curve, None, 1, jax.devices(), 4)
    assert summary["skipped"] == 1
    assert summary["jzero"]["step_seconds"] == 0.1
    assert "optax" not in summary
    report.write_plot(tmp_path / "loss.png", curve, None)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    console = report.Console(record=True, width=120, file=io.StringIO())
    report.print_summary(console, summary, tmp_path)
    assert re.search(r"skipped steps.* 1 ", console.export_text())


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        pytest.param(
            ["--batch=12"], r"--batch 12 is not a multiple of 8 devices.*use 8", id="batch"
        ),
        pytest.param(["--devices=9"], r"9 devices asked for; JAX sees 8", id="devices"),
        pytest.param(["--steps=0"], r"--steps: 0 must be at least 1", id="steps"),
        pytest.param(["--data={empty}"], r"holds 0 bytes of text to train on", id="empty"),
        pytest.param(["--data={empty}/no"], r"--data .*no is not a folder", id="no-folder"),
        pytest.param(["--size=huge"], r"invalid choice: 'huge'", id="size"),
        pytest.param(["--precision=int8"], r"invalid choice: 'int8'", id="precision"),
    ],
)
def test_gpt_says_which_flag_is_wrong(
    flags: list[str],
    error: str,
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    given = [flag.format(empty=empty) for flag in flags]
    with pytest.raises(SystemExit) as stop:
        load("train_gpt").main(["--size=tiny", f"--out={out}", *given])
    assert stop.value.code == 2
    assert re.search(error, capsys.readouterr().err)
    assert not out.exists()


def test_the_standard_library_is_found(load: Load):
    text = load("_text").Text(None, 64)
    assert text.train.size > 1_000_000
    assert text.held_out.size > 50_000
    windows = text.batches(2, 3, 64, seed=0)
    assert windows.shape == (2, 3, 65)
    assert windows.dtype == np.uint8
    np.testing.assert_array_equal(windows, load("_text").Text(None, 64).batches(2, 3, 64, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [("linen_ddp", []), ("flax_ddp", []), ("flax_ddp", ["--zero"])],
    ids=["linen", "nnx", "nnx, sharded"],
)
def test_digits_are_learnt_and_devices_stay_equal(
    name: str,
    flags: list[str],
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    epochs = 4
    with jax.numpy_rank_promotion("allow"):  # flax's own broadcasting
        arguments = [f"--epochs={epochs}", "--batch=64", f"--out={tmp_path}", *flags]
        run = load(name).main(arguments)
    assert len(run.accuracies) == epochs
    assert len(run.losses) == epochs * (1438 // 64)
    assert np.mean(run.losses[-10:]) < np.mean(run.losses[:10]) / 2
    assert run.accuracies[-1] > 0.9
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "bit-identical" in printed
    assert f"held-out accuracy: {run.accuracies[-1]:.1%}" in printed
    with pytest.raises(SystemExit):
        load(name).main(["--batch=12"])
    assert "--batch 12 is not a multiple of 8 devices" in capsys.readouterr().err
