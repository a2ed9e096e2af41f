"""Checkpoints on disk: damage is found, a kill leaves the last one whole, memory stays small."""

import dataclasses
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import assert_bits, config_for, counting, host, model, replicated

import jzero
from jzero import checkpoint
from jzero._ckpt_files import restore_with
from jzero._ckpt_stream import Ledger


def filled(mesh: Any, params: Any, seed: int = 0, **options: Any) -> Any:
    """A transformation, and a state of random moments with zeros as padding, without a step."""
    tx = jzero.adamw(1e-2, zero=config_for(mesh, **options))
    shapes = jax.eval_shape(tx.init, params)
    rng = np.random.default_rng(seed)
    specs = jzero.partition_specs(shapes)

    def draw(x: Any, spec: Any, size: int = 1) -> Any:
        values = np.asarray(rng.uniform(0.5, 1, x.shape), x.dtype)
        if x.ndim:
            values[size:] = 0
        return jax.device_put(values, NamedSharding(mesh, spec))

    def buckets(arrays: Any, specs: Any) -> Any:
        return tuple(
            None if x is None else draw(x, spec, bucket.size)
            for x, spec, bucket in zip(arrays, specs, shapes.layout.buckets, strict=True)
        )

    state = jax.tree.map(draw, shapes, specs)
    inner = type(state.inner)(*map(buckets, shapes.inner, specs.inner))
    return tx, dataclasses.replace(state, master=buckets(shapes.master, specs.master), inner=inner)


@pytest.fixture(scope="module")
def saved(make_mesh: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    mesh = make_mesh(4)
    params = replicated({**model(), "wide": jnp.arange(6000.0)}, mesh)
    _, state = filled(mesh, params)
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.save(folder, state, params, step=7)
    return mesh, params, state, folder


def data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("c/*") if path.is_file())


# ---------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["cut", "flipped", "missing"])
@pytest.mark.parametrize("which", range(3))
def test_damaged_data_is_found(saved: Any, tmp_path: Path, harm: Any, which: int):
    _, params, state, folder = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    files = data_files(copy)
    assert len(files) >= 3
    harm(files[which * (len(files) - 1) // 2])
    before = [host(x).copy() for x in jax.tree.leaves((state, params))]
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(str(copy))) as error:
        checkpoint.restore(copy, (state, params))
    assert "is missing, cut short or damaged" in str(error.value)
    assert re.match(r"'[\w/]+' cannot be read from", str(error.value)), "names the path"
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(str(copy))):
        checkpoint.verify(copy)
    for x, y in zip(jax.tree.leaves((state, params)), before, strict=True):
        assert host(x).tobytes() == y.tobytes()
    assert checkpoint.verify(folder) == 7


def test_exists(saved: Any, tmp_path: Path):
    _, _, _, folder = saved
    copy = tmp_path / "copy"
    assert not checkpoint.exists(copy)
    shutil.copytree(folder, copy)
    assert checkpoint.exists(copy)
    assert checkpoint.exists(str(copy))
    # A damaged one is not silently begun anew.
    cut(copy / "manifest.json")
    assert checkpoint.exists(copy)
    # What a first save leaves that was cut off before it counted.
    (copy / "manifest.json").unlink()
    assert not checkpoint.exists(copy)
    with pytest.raises(checkpoint.CheckpointError, match="cut off before it counted"):
        checkpoint.verify(copy)


def test_a_file_of_another_checkpoint_is_found_by_verify(saved: Any, tmp_path: Path):
    mesh, params, _, folder = saved
    checkpoint.save(tmp_path / "other", filled(mesh, params, seed=1)[1], params, step=7)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.copy(data_files(tmp_path / "other")[-1], data_files(copy)[-1])
    with pytest.raises(checkpoint.CheckpointError, match=r"c/\d is not the file that was saved"):
        checkpoint.verify(copy)


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        pytest.param(lambda p: p.unlink(), r"manifest\.json is missing", id="missing"),
        pytest.param(lambda p: p.write_text("{"), r"manifest\.json is damaged", id="cut"),
        pytest.param(lambda p: p.write_bytes(b"\xff\xfe"), r"cannot be read", id="binary"),
        pytest.param(
            lambda p: p.write_text("[1]"), r"is not the manifest of a jzero", id="foreign"
        ),
        pytest.param(
            lambda p: p.write_text(p.read_text().replace('"version":1', '"version":9')),
            r"has format version 9, and this jzero reads 1",
            id="version",
        ),
        pytest.param(
            lambda p: p.write_text(p.read_text().replace('"step":7', '"step":8')),
            r"its sha256 does not match",
            id="altered",
        ),
        pytest.param(
            lambda p: shutil.rmtree(next(p.parent.glob("data-*"))),
            r"data-[0-9a-f]{16} is missing",
            id="data",
        ),
        pytest.param(lambda p: shutil.rmtree(p.parent), r"copy is not a folder", id="folder"),
    ],
)
def test_a_damaged_manifest_is_found(saved: Any, tmp_path: Path, harm: Any, error: str):
    _, params, state, folder = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    harm(copy / "manifest.json")
    with pytest.raises(checkpoint.CheckpointError, match=error):
        checkpoint.restore(copy, (state, params))


def test_another_model_is_refused_by_path(saved: Any, make_mesh: Any):
    mesh, params, _, folder = saved

    def like(**changes: Any) -> Any:
        tree = {k: v for k, v in {**params, **changes}.items() if v is not None}
        tx = jzero.adamw(1e-2, zero=config_for(mesh))
        return jax.eval_shape(tx.init, tree), tree

    for changes, error in (
        ({"extra": jnp.ones(3)}, r"manifest\.json does not fit: there is no parameter 'extra'"),
        ({"shift": jnp.ones(2)}, r"'shift' has shape \(1,\), and like \(2,\)"),
        ({"wide": jnp.ones(6000, jnp.bfloat16)}, r"'wide' has dtype float32, and like bfloat16"),
        ({"wide": jnp.ones(6000, jnp.int32)}, r"'wide' has dtype float32, and like int32"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=error):
            checkpoint.restore(folder, like(**changes), mesh=mesh)
    # Fewer parameters are a part of the model.
    _, tree = checkpoint.restore(folder, like(extra=None, wide=None), mesh=mesh)
    assert_bits(tree, {k: v for k, v in params.items() if k != "wide"})
    # Asked for, a dtype is converted.
    _, tree = checkpoint.restore(
        folder, like(wide=jnp.ones(6000, jnp.bfloat16)), mesh=mesh, cast=True
    )
    assert_bits(tree["wide"], params["wide"].astype(jnp.bfloat16))


def test_integers_are_not_cast_in_silence(make_mesh: Any, tmp_path: Path):
    """cases.md 56: int32 16777217 restored into a float32 template."""
    mesh = make_mesh(2)
    params = replicated({"w": jnp.ones(3), "n": jnp.int32(16777217)}, mesh)
    tx, state = filled(mesh, params)
    checkpoint.save(tmp_path, state, params)
    wrong = {"w": params["w"], "n": jnp.float32(0)}
    tx = jzero.adamw(
        1e-2, param_labels=lambda p: "frozen" if p == "n" else "", zero=config_for(mesh)
    )
    with pytest.raises(checkpoint.CheckpointError, match="'n' has dtype int32, and like float32"):
        checkpoint.restore(tmp_path, (jax.eval_shape(tx.init, wrong), wrong), mesh=mesh)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s, p: checkpoint.save("x", p, p), r"state is a dict without a jzero\.ZeroState"),
        (lambda s, p: checkpoint.save("x", s, {"a": 1.0}), r"params do not belong to the state"),
        (lambda s, p: checkpoint.restore("x", s), r"like must be \(state, params\)"),
        (
            lambda s, p: checkpoint.restore("x", (s, p), hyperparameters="old"),
            r"hyperparameters='old': use 'new' or 'file'",
        ),
        (
            lambda s, p: jax.jit(lambda s, p: checkpoint.save("x", s, p))(s, p),
            r"cannot run under jit",
        ),
        (lambda s, p: checkpoint.Manager("x", keep=0), r"keep=0"),
        (lambda s, p: checkpoint.save("gs://x/y", s, p), r"mounted, got the URL 'gs://x/y'"),
        (lambda s, p: checkpoint.save(Path("s3://x"), s, p), r"the URL 's3:/x'"),
        (lambda s, p: checkpoint.restore("gs://x", (s, p)), r"the URL 'gs://x'"),
        (lambda s, p: checkpoint.verify("file:///x"), r"the URL 'file:///x'"),
        (lambda s, p: checkpoint.Manager("gs://x"), r"the URL 'gs://x'"),
        (lambda s, p: checkpoint.write_safetensors("gs://x", s, p), r"the URL 'gs://x'"),
    ],
    ids=[
        *("state", "params", "like", "hyperparameters", "jit", "keep"),
        *("save URL", "save URL path", "restore URL", "verify URL", "manager URL", "write URL"),
    ],
)
def test_wrong_arguments(saved: Any, call: Any, error: str):
    _, params, state, _ = saved
    with pytest.raises(ValueError, match=error):
        call(state, params)
    assert not any(Path(name).exists() for name in ("x", "gs:", "s3:", "file:"))


def test_without_a_mesh_says_how_to_name_one(saved: Any):
    _, params, state, folder = saved
    like = jax.eval_shape(lambda: (state, params))
    with pytest.raises(checkpoint.CheckpointError, match=r"pass mesh=, call jax\.set_mesh"):
        checkpoint.restore(folder, like)


# ---------------------------------------------------------------- what is restored


def test_the_targets_placement(saved: Any, make_mesh: Any):
    _, params, state, folder = saved
    # Explicit axes, the ambient mesh, host arrays, and arrays that are committed nowhere.
    explicit = make_mesh(4, types="explicit")
    like = jax.eval_shape(lambda: (state, params))
    with jax.set_mesh(explicit):
        new_state, new_params = checkpoint.restore(folder, like)
    assert new_state.inner.mu[0].sharding.mesh == explicit
    assert_bits((new_state, new_params), (state, params))
    loose = {**params, "wide": np.zeros(6000, np.float32), "scale": jnp.float32(0)}
    _, new_params = checkpoint.restore(folder, (state, loose))
    assert isinstance(new_params["wide"], np.ndarray)
    assert not new_params["scale"].committed
    assert_bits(new_params, params)


def test_restored_arrays_can_be_donated(saved: Any):
    _, params, state, folder = saved
    new_state, new_params = checkpoint.restore(folder, (state, params))
    leaves = jax.tree.leaves((new_state, new_params))
    large = [x for x in leaves if x.size > 100]
    places = {s.data.unsafe_buffer_pointer() for x in large for s in x.addressable_shards}
    add = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    out = add(large)
    assert all(x.is_deleted() for x in large)
    again = {s.data.unsafe_buffer_pointer() for x in out for s in x.addressable_shards}
    assert again == places, "the memory of a restored array is used again"


def test_resuming_compiles_nothing(saved: Any):
    mesh, params, _, folder = saved
    tx = jzero.adamw(1e-2, zero=config_for(mesh))
    state = tx.init(params)
    step = jax.jit(tx.step)
    grads = jax.tree.map(jnp.ones_like, params)
    step(grads, state, params)
    state, params = checkpoint.restore(folder, (state, params))
    with counting() as compiled:
        step(grads, state, params)
    assert compiled == []


def test_what_else_the_state_holds(make_mesh: Any, tmp_path: Path):
    """Accumulated gradients, a loss scale and the user's own arrays, sharded or not."""
    mesh = make_mesh((2, 4))
    params = replicated(model(), mesh)
    tx = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(mesh)), 2)
    state = tx.init(params)
    grads = replicated(model(seed=3), mesh)
    _, state = tx.step(grads, state, params)
    grid = jax.device_put(
        np.arange(48.0, dtype=np.float32).reshape(6, 8),
        NamedSharding(mesh, jax.sharding.PartitionSpec("replica", "data")),
    )
    extra = {
        "opt": state,
        "scale": jzero.DynamicLossScale(2.0**10),
        "grid": grid,
        "epoch": 3,
        "host": np.arange(5, dtype=np.int16),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    }
    checkpoint.save(tmp_path, extra, params)
    on = make_mesh((2, 3))
    other = jzero.MultiSteps(jzero.adamw(1e-2, zero=config_for(on, bucket_mb=2**-12)), 2)
    like_params = replicated(model(), on)
    like = {
        **extra,
        "opt": jax.eval_shape(other.init, like_params),
        "grid": jax.ShapeDtypeStruct(
            (6, 8),
            np.float32,
            sharding=NamedSharding(on, jax.sharding.PartitionSpec("data", "replica")),
        ),
    }
    found, new_params = checkpoint.restore(tmp_path, (like, like_params))
    assert_bits(new_params, params)
    assert found["epoch"] == 3
    for name in ("grid", "host", "keys", "scale"):
        assert_bits(found[name], extra[name])
    assert int(found["opt"].micro_step) == 1
    _, ours = tx.step(grads, state, params)
    _, theirs = other.step(replicated(model(seed=3), on), found["opt"], new_params)
    have, want = (
        checkpoint.state_dict({"opt": s}, p) for s, p in ((theirs, new_params), (ours, params))
    )
    assert_bits(have, want)


def test_labels_may_change(make_mesh: Any, tmp_path: Path):
    """Options are the new optimizer's: other groups, a parameter frozen; thawed needs moments."""
    mesh = make_mesh(3)
    params = replicated(model(), mesh)
    _, state = filled(mesh, params)
    checkpoint.save(tmp_path / "a", state, params)
    labels = {"scale": "frozen", "shift": "b", "layers": "c"}
    tx = jzero.adamw(1e-2, param_labels=labels, zero=config_for(mesh))
    new_state, new_params = checkpoint.restore(
        tmp_path / "a", (jax.eval_shape(tx.init, params), params)
    )
    assert_bits(new_params, params)
    have, want = (checkpoint.state_dict(s, params) for s in (new_state, state))
    assert set(have["scale"]) == {"param"}
    del have["scale"], want["scale"]
    assert_bits(have, want)
    checkpoint.save(tmp_path / "b", new_state, new_params)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no exp_avg of 'scale' \(it was frozen\)"
    ):
        checkpoint.restore(tmp_path / "b", (state, params))


def test_injected_hyperparameters_are_the_new_ones(make_mesh: Any, tmp_path: Path):
    import optax

    mesh = make_mesh(2)
    params = replicated(model(), mesh)

    def build(rate: float) -> Any:
        inner = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)
        return jzero.zero(inner, zero=config_for(mesh)).init(params)

    checkpoint.save(tmp_path, build(0.5), params)
    for options, want in (({}, 0.25), ({"hyperparameters": "file"}, 0.5)):
        state, _ = checkpoint.restore(tmp_path, (build(0.25), params), **options)
        assert float(state.inner[""].hyperparams["learning_rate"]) == want


# ---------------------------------------------------------------- memory


def test_at_most_one_bucket_is_staged(make_mesh: Any, tmp_path: Path):
    mesh = make_mesh(8)
    size = 2**18
    params = replicated({f"w{i}": jnp.arange(size, dtype=jnp.float32) for i in range(8)}, mesh)
    _, state = filled(mesh, params, bucket_mb=1)
    assert len(state.layout.buckets) == 8
    bucket = 3 * 4 * size  # parameters and two moments
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        saving = checkpoint.save(tmp_path, state, params)
        traced = tracemalloc.get_traced_memory()[1] - start
        assert saving.bytes == 8 * bucket + 13
        assert 0 < saving.peak_bytes <= bucket
        assert traced <= bucket + 2**20

        ledger = Ledger()
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        like = jax.eval_shape(lambda: (state, params))
        new = restore_with(tmp_path, like, mesh=mesh, ledger=ledger)
        traced = tracemalloc.get_traced_memory()[1] - start
        assert 0 < ledger.peak <= bucket
        assert ledger.live == 0
        assert traced <= bucket + 2**20
        assert_bits(new, (state, params))
    finally:
        tracemalloc.stop()


def test_a_save_in_the_background_survives_donation(make_mesh: Any, tmp_path: Path):
    mesh = make_mesh(4)
    params = replicated(model(), mesh)
    _, state = filled(mesh, params)
    want = checkpoint.state_dict(state, params)
    saving = checkpoint.save(tmp_path, state, params, wait=False)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)
    overwrite((state, params))
    saving.wait()
    assert saving.done
    assert saving.peak_bytes >= saving.bytes  # this process's own shards, copied
    like_params = replicated(model(), mesh)
    _, like = filled(mesh, like_params, seed=1)
    assert_bits(checkpoint.state_dict(*checkpoint.restore(tmp_path, (like, like_params))), want)


def test_a_failing_save_says_so_and_keeps_the_last(saved: Any, tmp_path: Path):
    mesh, params, state, folder = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    _, other = filled(mesh, params, seed=2)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(checkpoint.CheckpointError, match="could not be saved"):
        checkpoint.save(tmp_path / "file", other, params)
    saving = checkpoint.save(tmp_path / "file" / "below", other, params, wait=False)
    with pytest.raises(checkpoint.CheckpointError, match="could not be saved"):
        saving.wait()
    # Over the old one, and the leftovers of one that was cut off.
    (copy / "data-0123456789abcdef").mkdir()
    checkpoint.save(copy, other, params, step=8)
    assert checkpoint.verify(copy) == 8
    assert len(list(copy.glob("data-*"))) == 1
    assert_bits(checkpoint.restore(copy, (state, params))[0], other)


# ---------------------------------------------------------------- a loop


def test_manager(make_mesh: Any, tmp_path: Path):
    mesh = make_mesh(2)
    params = replicated(model(), mesh)
    states = {step: filled(mesh, params, seed=step)[1] for step in range(1, 10)}
    folder = tmp_path / "run"
    like = states[1], params
    with checkpoint.Manager(folder, keep=2, every=2) as manager:
        assert manager.latest() is None
        with pytest.raises(checkpoint.CheckpointError, match="holds no whole checkpoint"):
            manager.restore(like)
        for step, state in states.items():
            saving = manager.save(state, params, step=step)
            assert (saving is None) == (step % 2 == 1)
        assert manager.save(states[9], params, step=9, force=True) is not None
        assert manager.save(states[9], params, step=9, force=True) is None
    assert manager.steps() == [8, 9]
    assert sorted(p.name for p in folder.iterdir()) == ["step_0000000008", "step_0000000009"]
    assert_bits(manager.restore(like)[0], states[9])
    assert_bits(manager.restore(like, step=8)[0], states[8])

    # One that was cut off is none; a damaged one is passed over.
    (manager.path(10) / "data-0123456789abcdef").mkdir(parents=True)
    flip(data_files(manager.path(9))[0])
    assert manager.latest() == 9
    with pytest.warns(UserWarning, match="step_0000000009 is passed over"):
        state, _ = manager.restore(like)
    assert_bits(state, states[8])
    with pytest.raises(checkpoint.CheckpointError):
        manager.restore(like, step=9)
    # A later save clears what was cut off before it.
    with checkpoint.Manager(folder, keep=1, background=False) as manager:
        manager.save(states[1], params, step=11)
    assert sorted(p.name for p in folder.iterdir()) == ["step_0000000011"]


def test_orbax_checkpoint_manager(make_mesh: Any, tmp_path: Path):
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = make_mesh(4)
    params = replicated(model(), mesh)
    _, state = filled(mesh, params)
    zero = checkpoint.orbax_handler()
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(tmp_path.absolute(), options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=zero.Save(state, params))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        on = make_mesh(3)
        tx = jzero.adamw(1e-2, zero=config_for(on))
        like_params = replicated(model(), on)
        like = jax.eval_shape(tx.init, like_params), like_params
        found = manager.restore(2, args=zero.Restore(like))
    assert_bits(checkpoint.state_dict(*found), checkpoint.state_dict(state, params))


# ---------------------------------------------------------------- kill -9

KILLED = """
import sys
sys.path[:0] = sys.argv[3:]
import jax, jax.numpy as jnp, numpy as np
import jzero
from jzero import checkpoint
mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
tx = jzero.adamw(1e-2, zero=jzero.ZeroConfig(mesh=mesh, bucket_mb=0.25))
params = {f"w{i}": jnp.zeros(60_000) for i in range(4)}
state = tx.init(params)
wait = sys.argv[2] == "wait"
for step in range(1, 100_000):
    fill = jax.tree.map(lambda x: jnp.full_like(x, step), (state, params))
    print(step, flush=True)
    checkpoint.save(sys.argv[1], *fill, step=step, wait=wait).wait()
"""


def kill_while_saving(folder: Path, kills: int, seed: int) -> None:
    """Kill a process at random moments of saving over and over to one folder; each time what is
    there is whole, and one of the last two."""
    draw = random.Random(seed)
    like = None
    source = [
        str(Path(p).parents[1]) for p in (jzero.__file__, __import__("jzero_kernels").__file__)
    ]
    for attempt in range(kills):
        arguments = [str(folder), "wait" if attempt % 2 else "background", *source]
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and int(line) < 3:
                pass
            time.sleep(draw.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        begun = int(rest[-1] if rest else line)
        step = checkpoint.verify(folder)
        assert begun - 1 <= step <= begun
        if like is None:
            mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
            tx = jzero.adamw(1e-2, zero=jzero.ZeroConfig(mesh=mesh))
            params = {f"w{i}": jnp.zeros(60_000) for i in range(4)}
            like = tx.init(params), params
        state, params = checkpoint.restore(folder, like)
        for arrays in (params.values(), state.inner.mu, state.inner.nu):
            for array in arrays:
                values = set(np.unique(np.asarray(array)))
                assert values - {0.0} == {float(step)}, (attempt, step, values)


def test_a_kill_leaves_the_last_one_whole(tmp_path: Path):
    kill_while_saving(tmp_path / "c", 2, seed=0)


@pytest.mark.slow
def test_fifty_kills_leave_the_last_one_whole(tmp_path: Path):
    kill_while_saving(tmp_path / "c", 50, seed=1)
