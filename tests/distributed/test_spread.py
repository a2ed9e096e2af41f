"""Values and batches onto the devices, in one process; many are in test_training."""

import importlib
import inspect
import tomllib
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_bits

import jzero
from jzero.distributed import check_same, global_batch, local_rows


def fake_mesh(processes: list[int]) -> Any:
    """As much of a mesh as local_rows reads."""
    devices = np.array([types.SimpleNamespace(process_index=p) for p in processes])
    return types.SimpleNamespace(devices=devices, size=len(processes))


def test_rows_of_a_process():
    assert jax.process_index() == 0
    assert local_rows(fake_mesh([0, 0, 1, 1]), 8).tolist() == [0, 1, 2, 3]
    assert local_rows(fake_mesh([1, 0, 2, 0]), 8).tolist() == [2, 3, 6, 7]
    assert local_rows(fake_mesh([1, 2]), 4).tolist() == []
    assert local_rows(fake_mesh([0, 1]), 0).tolist() == []
    for size in (7, -4, 4.0, True):
        with pytest.raises(ValueError, match=r"cannot be split over 4 devices .*multiple of 4"):
            local_rows(fake_mesh([0, 0, 1, 1]), size)


@pytest.mark.parametrize("shape", [8, (2, 4)], ids=["one-axis", "two-axes"])
def test_global_batch(shape: Any, make_mesh: Any):
    mesh = make_mesh(shape)
    x = np.arange(48).reshape(16, 3)
    batch = {"x": x, "y": jnp.asarray(x[:, 0]), "scale": np.float32(2), "none": None}
    rows = local_rows(mesh, 16)
    assert rows.tolist() == list(range(16))
    placed = global_batch(batch, mesh)
    assert placed["none"] is None
    for name in ("x", "y"):
        assert_bits(placed[name], jax.device_put(batch[name]))
        assert placed[name].sharding == NamedSharding(mesh, P(mesh.axis_names))
    assert placed["scale"].sharding.is_fully_replicated
    steps = global_batch(np.arange(32).reshape(2, 16), mesh, dim=1)
    assert steps.sharding == NamedSharding(mesh, P(None, mesh.axis_names))
    np.testing.assert_array_equal(steps, np.arange(32).reshape(2, 16))
    with pytest.raises(ValueError, match=r"at 'x' has 12 rows, which the 8 devices of process 0"):
        global_batch({"x": x[:12]}, mesh)


def test_global_batch_is_what_value_and_grad_splits(make_mesh: Any):
    mesh = make_mesh((2, 4))
    zero = jzero.ZeroConfig(mesh=mesh, replica_axis="replica")
    step = jax.jit(jzero.value_and_grad(lambda w, x: jnp.mean(x * w), zero=zero))
    loss, _ = step(jnp.float32(2), global_batch(np.arange(16, dtype=np.float32), mesh))
    assert float(loss) == 15.0


def test_a_lone_process_agrees_with_itself():
    check_same({"w": jnp.ones(3), "rate": 0.1, "none": None}, values=True)
    jzero.distributed.barrier("here")
    jzero.distributed.shutdown()


def test_a_lone_process_starts_nothing(monkeypatch: pytest.MonkeyPatch):
    for name in ("JZERO_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "MASTER_ADDR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    jzero.distributed.initialize()
    jzero.distributed.initialize()
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param({"initialization_timeout": 0}, "initialization_timeout=0 must be", id="zero"),
        pytest.param({"heartbeat_timeout": float("nan")}, "heartbeat_timeout=nan must", id="nan"),
        pytest.param({"shutdown_timeout": True}, "shutdown_timeout=True must be", id="bool"),
        pytest.param({"coordinator_address": "a:1"}, r"but not \['num_processes'", id="half"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=error):
        jzero.distributed.initialize(**arguments)


def test_too_late_and_proxies(monkeypatch: pytest.MonkeyPatch):
    jax.devices()
    with pytest.raises(RuntimeError, match=r"comes too late: a device of JAX has been used"):
        jzero.distributed.initialize("10.0.0.1:1234", 2, 0)
    monkeypatch.setattr(jzero.distributed, "_backends_exist", lambda: False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(
        ValueError, match=r"https_proxy='http://proxy:3128' sends .*no_proxy=10\.0\.0\.1,\$no_proxy"
    ):
        jzero.distributed.initialize("10.0.0.1:1234", 2, 0)


# As PUBLIC in test_public_api: a new name or option is a decision.
NAMES: dict[str, str] = {
    "MeetingError": "args kwargs",
    "barrier": "name timeout",
    "check_same": "tree name values timeout",
    "global_batch": "local mesh dim",
    "initialize": (
        "coordinator_address num_processes process_id local_device_ids initialization_timeout "
        "heartbeat_timeout shutdown_timeout coordinator_bind_address meeting"
    ),
    "local_rows": "mesh size",
    "make_mesh": "axis replica_axis shards devices axis_types",
    "shutdown": "",
}


def test_the_public_names_are_these():
    assert sorted(NAMES) == sorted(jzero.distributed.__all__)
    for name, parameters in NAMES.items():
        value = getattr(jzero.distributed, name)
        assert (value.__doc__ or "").strip()
        if not isinstance(value, type):
            assert " ".join(inspect.signature(value).parameters) == parameters


def test_the_command_leads_somewhere():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    module, name = tomllib.loads(text)["project"]["scripts"]["jzero"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
