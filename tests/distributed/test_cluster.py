"""Which process of which job this is."""

import os
import sys
from typing import Any

import pytest

from jzero._cluster import Job, find_job, jax_detects, proxy_in_the_way, split_address

OURS = {
    "JZERO_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JZERO_NUM_PROCESSES": "4",
    "JZERO_PROCESS_ID": "3",
}
JAXS = {"JAX_COORDINATOR_ADDRESS": "j:1", "JAX_NUM_PROCESSES": "5", "JAX_PROCESS_ID": "2"}
TORCHS = {
    "MASTER_ADDR": "10.0.0.2",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "8",
    "RANK": "6",
    "LOCAL_RANK": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-009],other",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def unknown():
    return None, None, None, None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param(OURS, ("10.0.0.1:1234", 4, 3, None), id="ours"),
        pytest.param(JAXS, ("j:1", 5, 2, None), id="jax"),
        pytest.param(TORCHS, ("10.0.0.2:29500", 8, 6, (2,)), id="torchrun"),
        pytest.param(
            {**TORCHS, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("10.0.0.2:29501", 8, 6, (2,)),
            id="torchrun-store-has-the-port",
        ),
        pytest.param(
            {**TORCHS, "MASTER_ADDR": "fe80::1"}, ("[fe80::1]:29500", 8, 6, (2,)), id="torchrun-v6"
        ),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, None, id="torchrun-half"),
        pytest.param({**TORCHS, **JAXS, **OURS}, ("10.0.0.1:1234", 4, 3, None), id="ours-first"),
        pytest.param({**OURS, "JZERO_NUM_PROCESSES": "1", "JZERO_PROCESS_ID": "0"}, None, id="one"),
    ],
)
def test_the_environment_says_who_we_are(env: dict[str, str], expected: Any):
    job = find_job(env=env, detect=unknown)
    assert (job[:4] if job else None) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param(SLURM, ("node007:", 6, 5, (1,)), id="slurm"),
        pytest.param(OPEN_MPI, ("10.96.0.1:", 3, 2, (1,)), id="open-mpi"),
    ],
)
def test_jax_says_who_we_are(
    variables: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
):
    for name in [*SLURM, *OPEN_MPI, "KUBERNETES_SERVICE_HOST", "JAX_COORDINATOR_PORT"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = find_job(env=os.environ, detect=lambda: jax_detects(1))
    assert job is not None
    assert job.coordinator.startswith(expected[0])
    assert job[1:4] == expected[1:]
    assert job.source == "JAX's detection"
    # The arguments come first, and fill in for what is not detected.
    job = find_job("here:1", 7, env=os.environ, detect=lambda: jax_detects(1))
    assert job is not None
    assert job[:3] == ("here:1", 7, expected[2])
    assert find_job(num_processes=1, env=os.environ, detect=lambda: jax_detects(1)) is None


def test_a_pod_of_kubernetes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # not installed
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert find_job(env={}, detect=lambda: jax_detects(1)) is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.warns(UserWarning, match="Kubernetes environment detected"):
        jax_detects(1)


def test_a_place_that_jax_cannot_tell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "nonsense")
    with pytest.raises(RuntimeError, match=r"not this process's place .*num_processes=1 for a"):
        jax_detects(1)


def test_what_is_known_is_not_asked():
    def never():
        raise AssertionError

    assert find_job("a:1", 2, 1, (5,), env={}, detect=never) == Job("a:1", 2, 1, (5,), "arguments")
    assert find_job(num_processes=1, env={}, detect=never) is None


@pytest.mark.parametrize(
    ("arguments", "env", "error"),
    [
        pytest.param(("a:1",), {}, r"arguments give .*address.* not .*num_proc.*id", id="address"),
        pytest.param((), {"JZERO_PROCESS_ID": "1"}, r"jzero launch give \['process_id'\]", id="id"),
        pytest.param((), {**OURS, "JZERO_PROCESS_ID": "x"}, r"JZERO_PROCESS_ID='x' must", id="x"),
        pytest.param((), {**OURS, "JZERO_PROCESS_ID": "4"}, r"process_id=4 .*0 to 3", id="range"),
        pytest.param(("a:1", 0, 0), {}, r"num_processes=0 .*integer from 1", id="none"),
        pytest.param(("a:1", 2, -1), {}, r"process_id=-1 .*integer from 0", id="negative"),
        pytest.param(("a:1", 2, True), {}, r"process_id=True .*integer", id="bool"),
        pytest.param(("a", 2, 1), {}, r"coordinator_address='a' must be host:port", id="no-port"),
        pytest.param((), {**TORCHS, "MASTER_PORT": "-"}, r"MASTER_PORT='-' must be", id="port"),
    ],
)
def test_half_a_description_is_refused(arguments: Any, env: dict[str, str], error: str):
    with pytest.raises(ValueError, match=error):
        find_job(*arguments, env=env, detect=unknown)


def test_addresses():
    assert split_address("host.name:80") == ("host.name", 80)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)
    for wrong in ("fe80::1:80", ":80", "host:", "host:0", "host:70000", "host:-1", "[]:80"):
        with pytest.raises(ValueError, match="must be host:port"):
            split_address(wrong)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"HTTP_PROXY": "p"}, None, id="upper-case-is-not-read"),
        pytest.param({"http_proxy": "p"}, "http_proxy", id="http"),
        pytest.param({"http_proxy": "p", "https_proxy": "q"}, "https_proxy", id="https-first"),
        pytest.param({"http_proxy": "p", "no_proxy": "a, 0.0.1"}, None, id="exempt"),
        pytest.param({"http_proxy": "p", "no_proxy": "10.0.0.2"}, "http_proxy", id="other"),
        pytest.param({"http_proxy": "p", "no_grpc_proxy": "10.0.0.1"}, None, id="exempt-for-grpc"),
        pytest.param({"http_proxy": "", "no_proxy": ""}, None, id="empty"),
    ],
)
def test_proxies_that_catch_the_connection(env: dict[str, str], expected: str | None):
    assert proxy_in_the_way("10.0.0.1:1234", env) == expected
