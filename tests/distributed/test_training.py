"""Real processes train as one process does."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import Outcome, launch, same_training, start, worker

STEPS, OVERFLOW = 20, 7


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One process with four devices: the same program, without a second process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    outcome = launch(out, 1, devices=4, steps=STEPS, overflow=OVERFLOW)
    assert outcome.status == 0, outcome.output
    return outcome


def check(outcome: Outcome, alone: Outcome, processes: int) -> None:
    assert outcome.status == 0, outcome.output
    assert len(outcome.seen) == processes
    first = outcome.seen[0]
    for seen in outcome.seen:
        # The values are process 0's, though each drew its own.
        assert (seen["drawn"] == first["drawn"]) == (seen is first)
        # One process's gradient overflowed; all skipped, and all hold the same bits.
        assert seen["skipped"] == [OVERFLOW]
        assert seen["losses"] == first["losses"]
        assert seen["params"] == first["params"]
    assert len(first["losses"]) == STEPS
    losses = {s: x for s, x in first["losses"].items() if s != str(OVERFLOW)}  # NaN there
    same_training({**first, "losses": losses}, alone.seen[0])


def test_two_processes(alone: Outcome, tmp_path: Path):
    outcome = launch(
        tmp_path / "out",
        2,
        steps=STEPS,
        overflow=OVERFLOW,
        seed_of_process=True,
        replicas=True,
        ddp=True,
    )
    check(outcome, alone, 2)
    # The shard axis lies inside a process, the replica axis across.
    assert outcome.seen[0]["mesh"] == [[0, 0], [1, 1]]


def test_four_processes(alone: Outcome, tmp_path: Path):
    outcome = launch(tmp_path / "out", 4, steps=STEPS, overflow=OVERFLOW, seed_of_process=True)
    check(outcome, alone, 4)
    assert outcome.seen[0]["mesh"] == [[0, 0, 1, 1, 2, 2, 3, 3]]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
def test_two_processes_under_mpirun(alone: Outcome, tmp_path: Path):
    out = tmp_path / "out"
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    options: dict[str, Any] = {"steps": STEPS, "overflow": OVERFLOW, "seed_of_process": True}
    outcome = start([*mpirun, *worker(out, **options)], out, JAX_NUM_CPU_DEVICES="2")
    check(outcome, alone, 2)


@pytest.mark.skipif(shutil.which("srun") is None, reason="no srun: apt-get install slurm-wlm")
def test_two_processes_under_slurm(alone: Outcome, tmp_path: Path):
    if subprocess.run(["timeout", "10", "sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("SLURM's controller does not answer sinfo")
    out = tmp_path / "out"
    srun = ["srun", "--immediate=60", "--ntasks=2"]
    options: dict[str, Any] = {"steps": STEPS, "overflow": OVERFLOW, "seed_of_process": True}
    outcome = start([*srun, *worker(out, **options)], out, JAX_NUM_CPU_DEVICES="2")
    check(outcome, alone, 2)
