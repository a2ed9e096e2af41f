"""Starting real processes in tests."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jzero

WORKER = Path(__file__).parent / "distributed" / "worker.py"
BOUND = 120  # seconds in which any job has ended, on a busy machine


# The command without the package's front, which imports jax: the launcher does not need it.
LIGHT_COMMAND = f"""
import sys, types
package = types.ModuleType("jzero")
package.__path__ = [{str(Path(jzero.__file__).parent)!r}]
sys.modules["jzero"] = package
from jzero.cli import main
status = main(sys.argv[1:])
assert "jax" not in sys.modules
sys.exit(status)
"""


@dataclasses.dataclass
class Outcome:
    """How a job ended, and what each of its processes wrote."""

    status: int
    output: str
    ended: float  # seconds since the epoch
    seen: list[dict[str, Any]]
    statuses: list[int] = dataclasses.field(default_factory=list)

    @property
    def after(self) -> float:
        """Seconds from the fault to the end of the last process."""
        at = re.findall(r"fault at ([0-9.]+)", self.output)[0]
        return self.ended - float(at)


def environment() -> dict[str, str]:
    """This process's, without the eight devices that tests simulate."""
    dropped = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    # A process that a failure reaches in its exit handlers may warn; its exit status counts.
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"JAX_PLATFORMS": "cpu"}


def start(command: Sequence[str], out: Path, **env: str) -> Outcome:
    """Run a command whose processes write to ``out``; its standard output and error together."""
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=BOUND,
        env=environment() | env,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, time.time(), written(out))


def written(out: Path) -> list[dict[str, Any]]:
    paths = sorted(out.glob("process-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def scheduled(out: Path, processes: int, **options: Any) -> Outcome:
    """The worker as a job scheduler starts it: no one looks after the processes. One that is
    stopped is killed when the others have ended."""
    out.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"JZERO_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_CPU_DEVICES": "2"}
    running: list[subprocess.Popen[str]] = []
    log = (out / "log").open("w+", encoding="utf-8", errors="replace")
    with log:
        for i in range(processes):
            place = {"JZERO_NUM_PROCESSES": str(processes), "JZERO_PROCESS_ID": str(i)}
            env = environment() | common | place
            running.append(
                subprocess.Popen(worker(out, **options), env=env, stdout=log, stderr=log, text=True)
            )
        end = time.monotonic() + BOUND
        try:
            # The one at fault is the last, if it is stopped.
            for process in running[:-1]:
                process.wait(end - time.monotonic())
            ended = time.time()
            if options.get("fault") != "stop":
                running[-1].wait(end - time.monotonic())
                ended = time.time()
        finally:
            for process in running:
                process.kill()
                process.wait()
        log.seek(0)
        statuses = [process.returncode for process in running]
        return Outcome(statuses[0], log.read(), ended, written(out), statuses)


def worker(out: Path, **options: Any) -> list[str]:
    return [sys.executable, str(WORKER), json.dumps({"out": str(out), **options})]


def launch(out: Path, processes: int, *flags: str, devices: int = 2, **options: Any) -> Outcome:
    """`jzero launch` of the worker."""
    launcher = [sys.executable, "-c", LIGHT_COMMAND, "launch", "-n", str(processes)]
    launcher += ["--devices-per-process", str(devices), *flags, "--"]
    return start([*launcher, *worker(out, **options)], out)


def same_training(a: dict[str, Any], b: dict[str, Any], rtol: float = 2e-6) -> None:
    """Losses (of the steps that both saw) and parameters, to rounding in another order."""
    losses = {s: (x, b["losses"][s]) for s, x in a["losses"].items() if s in b["losses"]}
    pairs = [(f"loss {s}", [have], [want]) for s, (have, want) in losses.items()]
    pairs += [(name, values, b["params"][name]) for name, values in a["params"].items()]
    for name, have, want in pairs:
        for x, y in zip(map(number, have), map(number, want), strict=True):
            assert abs(x - y) <= rtol * abs(y) or x == y, f"{name}: {x} is not {y}"


def number(x: str | float) -> float:
    return float.fromhex(x) if isinstance(x, str) else x
