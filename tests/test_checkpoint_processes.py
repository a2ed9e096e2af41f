"""Saved by two processes, restored by one, and the other way round."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import assert_bits, config_for, replicated

import jzero
from jzero import checkpoint

PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path[:0] = sys.argv[5:]
import jax, jax.numpy as jnp
number, port, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, number)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jzero
from jzero import checkpoint

mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
everywhere = NamedSharding(mesh, P())

def make(x):
    return jax.make_array_from_callback(x.shape, everywhere, lambda i: x[i])

def params_of(seed):
    rng = np.random.default_rng(seed)
    drawn = {f"w{i}": rng.uniform(1, 2, (37, 11)).astype(np.float32) for i in range(3)}
    return {k: make(v) for k, v in {**drawn, "n": np.int32(3)}.items()}

tx = jzero.adamw(1e-2, zero=jzero.ZeroConfig(mesh=mesh, bucket_mb=2**-9))
params = params_of(0)
grads = jax.tree.map(lambda x: x * 0 + 1, params)
state = tx.init(params)
if what == "save":
    params, state = tx.step(grads, state, params)
    for wait in (True, False, False):  # over the one before
        saving = checkpoint.save(folder, state, params, wait=wait)
        saving.wait()
    moments = (*state.inner.mu, *state.inner.nu)
    local = sum(s.data.nbytes for x in moments for s in x.addressable_shards)
    assert saving.bytes < 2 * local, (saving.bytes, local)
    whole = checkpoint.state_dict(state, params)
    assert whole["w1"]["exp_avg"].shape == (37, 11)
    checkpoint.write_safetensors(folder + ".safetensors", state, params)
    with checkpoint.Manager(folder + ".run", keep=1) as manager:
        for step in (1, 2):
            manager.save(state, params, step=step)
    assert manager.steps() == [2]
    if number == 1:  # one process fails: no process believes in the checkpoint
        import jzero._ckpt_save as saving_module
        def fail(*_):
            raise OSError("no space left")
        saving_module.write_stream = fail
    try:
        checkpoint.save(folder, state, params, step=9)
    except checkpoint.CheckpointError as error:
        assert "no space left" in str(error), error
        assert checkpoint.step_of(folder) == 1
        print("refused", flush=True)
else:
    state, params = checkpoint.restore(folder, (jax.eval_shape(tx.init, params), params))
    params, state = tx.step(grads, state, params)
    checkpoint.save(folder + ".next", state, params)
    print("restored", int(state.step), flush=True)
"""


def run(folder: Path, what: str) -> list[str]:
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    source = [
        str(Path(str(p)).parents[1]) for p in (jzero.__file__, __import__("jzero_kernels").__file__)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), str(port), str(folder), what, *source],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    return outputs


def target(mesh: Any) -> Any:
    tx = jzero.adamw(1e-2, zero=config_for(mesh, bucket_mb=2**-11))
    params = replicated(
        {**{f"w{i}": jnp.zeros((37, 11)) for i in range(3)}, "n": jnp.int32(0)}, mesh
    )
    return tx, (jax.eval_shape(tx.init, params), params)


def test_two_processes_and_one(make_mesh: Any, tmp_path: Path):
    folder = tmp_path / "c"
    assert all("refused" in output for output in run(folder, "save"))
    assert checkpoint.verify(folder) == 1
    assert sorted(p.name for p in next(folder.glob("data-*")).glob("0*")) != []

    # What the two processes had, by hand.
    rng = np.random.default_rng(0)
    start = {f"w{i}": rng.uniform(1, 2, (37, 11)).astype(np.float32) for i in range(3)}
    mesh = make_mesh(3)
    tx, like = target(mesh)
    params = replicated({**{k: jnp.asarray(v) for k, v in start.items()}, "n": jnp.int32(3)}, mesh)
    grads = jax.tree.map(lambda x: x * 0 + 1, params)
    params, state = tx.step(grads, tx.init(params), params)
    found = checkpoint.restore(folder, like)
    want = checkpoint.state_dict(state, params)
    assert_bits(checkpoint.state_dict(*found), want)
    read = checkpoint.read_safetensors(f"{folder}.safetensors")
    assert_bits(read, want)

    # One process saves on three devices; two go on with it on four.
    checkpoint.save(folder, *found)
    assert all("restored 2" in output for output in run(folder, "restore"))
    params, state = tx.step(grads, state, params)
    again = checkpoint.restore(f"{folder}.next", like)
    assert_bits(checkpoint.state_dict(*again), checkpoint.state_dict(state, params))
