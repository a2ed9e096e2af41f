"""A process is lost: all end soon, say why, leave no one behind, and a restart goes on."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Outcome, launch, same_training, scheduled, start

import jzero
from jzero._watch import PEER_FAILED

# Far more than was measured (docs/many-processes.md), and less than JAX's own timeouts.
BOUND = 60.0
STEPS = 14


def no_one_is_left(out: Path) -> bool:
    """No process whose arguments name the folder of this test."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out).encode() in path.read_bytes() and path.parent.name != "self":
                return False
        except OSError:
            continue
    return True


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of one process with two devices that restarts are held to."""
    outcome = launch(tmp_path_factory.mktemp("uninterrupted") / "out", 1, steps=STEPS)
    assert outcome.status == 0, outcome.output
    return outcome


@pytest.mark.parametrize(
    ("fault", "process", "first"),
    [
        pytest.param({"fault": "kill", "at": 10}, 1, 8, id="in-a-step"),
        # Process 0 keeps the coordination service, and is the one that publishes a checkpoint.
        pytest.param({"fault": "kill in save", "at": 7}, 0, 4, id="in-a-save"),
        # A folder is left that holds no checkpoint: the restart begins anew.
        pytest.param({"fault": "kill in save", "at": 3}, 0, 0, id="in-the-first-save"),
    ],
)
def test_a_killed_process_and_a_restart_with_fewer(
    fault: Any, process: int, first: int, uninterrupted: Outcome, tmp_path: Path
):
    out, save = tmp_path / "out", tmp_path / "checkpoint"
    outcome = launch(out, 2, "--restarts", "1", steps=STEPS, save=str(save), on=process, **fault)
    assert outcome.status == 0, outcome.output
    assert f"process {process} (pid " in outcome.output
    assert "was killed by SIGKILL" in outcome.output
    assert "restart 1 of 1 with 1 of 2 processes" in outcome.output
    [seen] = outcome.seen
    assert seen["first"] == first  # the last whole checkpoint
    assert sorted(map(int, seen["losses"])) == list(range(first, STEPS))
    same_training(seen, uninterrupted.seen[0])
    assert jzero.checkpoint.verify(save) == 12
    assert no_one_is_left(out)


def test_a_killed_process_without_a_launcher(tmp_path: Path):
    outcome = scheduled(tmp_path / "out", 3, fault="kill", at=1, steps=3)
    assert outcome.statuses == [PEER_FAILED, PEER_FAILED, -9], outcome.output
    # By name, by whoever saw the broken connection first.
    assert re.search(
        r"jzero: no answer from process 2 of 3 \(pid \d+ on \S+\): killed, stopped or cut off",
        outcome.output,
    )
    assert outcome.after < BOUND


@pytest.mark.slow
def test_a_stopped_process_without_a_launcher(tmp_path: Path):
    outcome = scheduled(tmp_path / "out", 2, fault="stop", at=1, steps=3, heartbeat=3)
    assert outcome.statuses[0] == -6, outcome.output  # JAX's
    assert re.search(r"stopped sending heartbeats\):\s+1\s", outcome.output)
    assert outcome.after < BOUND


def test_a_stopped_process(tmp_path: Path):
    out = tmp_path / "out"
    outcome = launch(out, 2, fault="stop", at=1, steps=3, heartbeat=3)
    assert outcome.status == 128 + 9, outcome.output
    assert re.search(r"process 1 \(pid \d+\) is stopped; killing it", outcome.output)
    assert outcome.after < BOUND
    assert no_one_is_left(out)


def test_an_exception_ends_all(tmp_path: Path):
    outcome = scheduled(tmp_path / "out", 2, fault="raise", at=0, steps=3)
    assert outcome.statuses == [PEER_FAILED, 1], outcome.output
    assert re.search(
        r"jzero: process 1 of 2 \(pid \d+ on \S+\) failed: ValueError: the data of this process "
        r"are broken; process 0 of 2 \(pid \d+ on \S+\) ends with it",
        outcome.output,
    )
    assert outcome.after < BOUND


def test_a_process_killed_at_the_start(tmp_path: Path):
    out = tmp_path / "out"
    outcome = launch(out, 2, "--grace", "1", fault="start", steps=3)
    assert outcome.status == 128 + 9, outcome.output
    assert re.search(r"process 1 \(pid \d+\) was killed by SIGKILL", outcome.output)
    assert outcome.after < BOUND
    assert no_one_is_left(out)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "model",
            r"the tree to broadcast: 'c' is float32\[7, 5\] on process 0 and float32\[7, 4\] on "
            r"process 1; 'the layout' is",
            id="shape",
        ),
        # By tx.init, without being asked.
        pytest.param(
            "buckets",
            r"the parameters of 4 shards: 'the layout' is 3 buckets \(\w+\) on process 0 and 2 "
            r"buckets \(\w+\) on process 1",
            id="buckets",
        ),
    ],
)
def test_another_model_is_named_on_all(fault: str, said: str, tmp_path: Path):
    outcome = scheduled(tmp_path / "out", 2, fault=fault, steps=3)
    assert len(outcome.statuses) == 2
    assert set(outcome.statuses) <= {1, PEER_FAILED}, outcome.output
    said = f"ValueError: the processes do not agree on {said}"
    assert len(re.findall(said, outcome.output)) >= 2, outcome.output


def test_a_wrong_coordinator(tmp_path: Path):
    outcome = start(
        [
            sys.executable,
            "-c",
            "import jzero; jzero.distributed.initialize(initialization_timeout=1)",
        ],
        tmp_path,
        JZERO_COORDINATOR_ADDRESS="127.0.0.1:1",
        JZERO_NUM_PROCESSES="2",
        JZERO_PROCESS_ID="1",
    )
    assert outcome.status == 1
    assert re.search(
        r"MeetingError: process 1 could not reach process 0 at 127\.0\.0\.1:1 \(from jzero "
        r"launch\) within 1 s: Connection refused",
        outcome.output,
    )
