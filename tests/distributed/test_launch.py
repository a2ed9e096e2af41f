"""`jzero launch` with small programs: output, signals, ends, restarts, no one left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import LIGHT_COMMAND

from jzero._launch import _variables
from jzero._watch import PEER_FAILED
from jzero.cli import main

BOUND = 20  # seconds; each of these takes one or two


def launch(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LIGHT_COMMAND, "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=BOUND)
    return process.returncode, out.splitlines(), err


def script(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def wait_for(path: Path, count: int = 1) -> list[int]:
    """Process ids that programs have written, a line each."""
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        if path.exists() and len(ids := path.read_text(encoding="utf-8").split()) >= count:
            return [int(i) for i in ids]
        time.sleep(0.02)
    raise AssertionError(f"{path} did not fill")


def test_output_is_passed_on_line_by_line():
    code = (
        "import os, sys; i = os.environ['JZERO_PROCESS_ID']; print('out', i); "
        "print('err', i, file=sys.stderr); os.write(1, b'\\xff no end')"
    )
    process = subprocess.run(
        [sys.executable, "-m", "jzero.cli", "launch", "-n", "3", *script(code)],
        capture_output=True,
        timeout=BOUND,
        check=True,
    )
    lines = sorted(process.stdout.splitlines())
    expected = [f"[{i}] out {i}".encode() for i in range(3)]
    expected += [f"[{i}] ".encode() + b"\xff no end" for i in range(3)]
    assert lines == sorted(expected)
    assert sorted(process.stderr.splitlines()) == [f"[{i}] err {i}".encode() for i in range(3)]


def test_the_first_to_fail_ends_all_and_gives_the_status(tmp_path: Path):
    # Process 1 fails; the others would sleep on, one of them with a child of its own; process 3
    # does not listen to SIGTERM.
    ids = tmp_path / "ids"
    code = f"""
import os, signal, subprocess, sys, time
me = int(os.environ["JZERO_PROCESS_ID"])
if me == 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if me == 2:
    child = subprocess.Popen(["sleep", "1000"])
    open({str(ids)!r}, "a").write(f"{{child.pid}}\\n")
open({str(ids)!r}, "a").write(f"{{os.getpid()}}\\n")
while len(open({str(ids)!r}).read().split()) < 5:
    time.sleep(0.01)
sys.exit(7) if me == 1 else time.sleep(1000)
"""
    start = time.monotonic()
    status, _, err = finish(launch("-n", "4", "--grace", "1", *script(code)))
    assert status == 7
    assert time.monotonic() - start < BOUND / 2
    assert "process 1 (pid" in err
    assert "failed with exit status 7" in err
    assert "stopping the other 3" in err
    assert "killing what has not ended after 1 s: process 3" in err
    assert all(gone(pid) for pid in wait_for(ids, 5))


def test_what_a_finished_process_has_left_is_ended(tmp_path: Path):
    ids = tmp_path / "ids"
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "1000"])
open({str(ids)!r}, "a").write(f"{{child.pid}}\\n")
"""
    status, _, err = finish(launch("-n", "2", *script(code)))
    assert (status, err) == (0, "")
    assert all(gone(pid) for pid in wait_for(ids, 2))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        pytest.param("os.kill(os.getpid(), 9) if me == 1 else sys.exit(0)", 137, id="killed"),
        # Those that follow a lost peer do not count, even if they are seen first.
        pytest.param(f"sys.exit({PEER_FAILED}) if me == 0 else 0", PEER_FAILED, id="no-culprit"),
        pytest.param(
            f"sys.exit({PEER_FAILED}) if me == 0 else (time.sleep(0.5), sys.exit(9))", 9, id="later"
        ),
        pytest.param("os.abort() if me == 0 else (time.sleep(0.5), sys.exit(9))", 9, id="abort"),
        pytest.param(
            "os.kill(os.getpid(), 19) if me == 1 else (time.sleep(0.5), os.abort())",
            137,
            id="stopped",
        ),
    ],
)
def test_the_status_is_that_of_the_culprit(code: str, status: int):
    before = "import os, sys, time; me = int(os.environ['JZERO_PROCESS_ID']); "
    have, _, err = finish(launch("-n", "2", "--grace", "1", *script(before + code)))
    assert have == status, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: int, tmp_path: Path):
    ids = tmp_path / "ids"
    code = f"""
import os, signal, sys, time
def end(number, frame):
    print("got", number)
    sys.exit(0)
signal.signal({int(number)}, end)
open({str(ids)!r}, "a").write(f"{{os.getpid()}}\\n")
time.sleep(1000)
"""
    process = launch("-n", "2", *script(code))
    pids = wait_for(ids, 2)
    process.send_signal(number)
    status, out, _ = finish(process)
    assert status == 128 + number
    assert sorted(out) == [f"[{i}] got {int(number)}" for i in range(2)]
    assert all(gone(pid) for pid in pids)


def test_a_second_signal_kills(tmp_path: Path):
    ids = tmp_path / "ids"
    code = f"""
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: print("no"))
open({str(ids)!r}, "a").write(f"{{os.getpid()}}\\n")
while True:
    time.sleep(1)
"""
    process = launch("-n", "2", "--grace", "1000", *script(code))
    pids = wait_for(ids, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    status, _, _ = finish(process)
    assert status == 128 + signal.SIGINT
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_no_one_outlives_a_killed_launcher(tmp_path: Path):
    ids = tmp_path / "ids"
    code = f"""
import os, time
open({str(ids)!r}, "a").write(f"{{os.getpid()}}\\n")
time.sleep(1000)
"""
    process = launch("-n", "2", *script(code))
    pids = wait_for(ids, 2)
    process.kill()
    process.communicate(timeout=BOUND)
    assert all(gone(pid) for pid in pids)


def test_restarts_with_those_that_are_left():
    code = """
import os, signal, sys, time
me, count = int(os.environ["JZERO_PROCESS_ID"]), int(os.environ["JZERO_NUM_PROCESSES"])
start = int(os.environ["JZERO_RESTART"])
print("start", start, "of", count)
if (start, me) in ((0, 1), (1, 0)):
    os.kill(os.getpid(), signal.SIGKILL)
if start == 0 and me == 0:
    sys.exit(76)  # because of process 1
"""
    status, out, err = finish(launch("-n", "4", "--restarts", "2", "--grace", "1", *script(code)))
    assert status == 0, err
    assert sorted(line.split("] ")[1] for line in out) == sorted(
        ["start 0 of 4"] * 4 + ["start 1 of 3"] * 3 + ["start 2 of 2"] * 2
    )
    assert "restart 1 of 2 with 3 of 4 processes" in err
    assert "restart 2 of 2 with 2 of 3 processes" in err


def test_no_restart_without_processes():
    status, out, err = finish(launch("-n", "1", "--restarts", "5", *script("print(1); exit(4)")))
    assert (status, out) == (4, ["[0] 1"])
    assert "no process is left to restart with" in err


def test_a_program_that_is_not_there():
    status, _, err = finish(launch("-n", "1", "--", "/no/such/program"))
    assert status == 1
    assert "cannot run '/no/such/program': No such file or directory" in err


def variables(devices: int | None = None, **env: str) -> dict[str, str]:
    return _variables(env, "127.0.0.1:9", 4, 2, devices, 1)


def test_what_each_process_is_told():
    assert variables(A="b") == {
        "A": "b",
        "JZERO_COORDINATOR_ADDRESS": "127.0.0.1:9",
        "JZERO_NUM_PROCESSES": "4",
        "JZERO_PROCESS_ID": "2",
        "JZERO_RESTART": "1",
        "PYTHONUNBUFFERED": "1",
        "JAX_LOCAL_DEVICE_IDS": "2",
    }
    flag = "--xla_force_host_platform_device_count=8"
    told = variables(3, XLA_FLAGS=f"--a=1 {flag} --b", http_proxy="p", no_proxy="x")
    assert told["JAX_LOCAL_DEVICE_IDS"] == "6,7,8"
    assert told["JAX_NUM_CPU_DEVICES"] == "3"
    assert told["XLA_FLAGS"] == "--a=1 --b"
    assert told["no_proxy"] == "x,127.0.0.1"
    assert variables(JAX_LOCAL_DEVICE_IDS="5")["JAX_LOCAL_DEVICE_IDS"] == "5"
    assert variables(XLA_FLAGS=flag)["XLA_FLAGS"] == flag


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param([], "required: COMMAND", id="nothing"),
        pytest.param(["launch", "--", "true"], "required: -n", id="count"),
        pytest.param(["launch", "-n", "0", "--", "true"], "0 must be at least 1", id="zero"),
        pytest.param(["launch", "-n", "2"], "no program to run; write it after --", id="program"),
        pytest.param(["launch", "-n", "2", "--"], "no program to run", id="dashes"),
        pytest.param(
            ["launch", "-n", "2", "--restarts", "-1", "--", "true"], "-1 must be", id="restarts"
        ),
        pytest.param(
            ["launch", "-n", "2", "--grace", "-1", "--", "true"], "--grace -1.0", id="grace"
        ),
    ],
)
def test_wrong_arguments(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert error in capsys.readouterr().err
