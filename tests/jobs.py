"""Starting real processes in tests."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "distributed" / "worker.py"
BOUND = 120  # seconds in which any job has ended, on a busy machine


@dataclasses.dataclass
class Outcome:
    """How a job ended, and what each of its processes wrote."""

    status: int
    output: str
    seconds: float
    seen: list[dict[str, Any]]


def environment() -> dict[str, str]:
    """This process's, without the eight devices that tests simulate."""
    dropped = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    # A process that a failure reaches in its exit handlers may warn; its exit status counts.
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"JAX_PLATFORMS": "cpu"}


def start(command: Sequence[str], out: Path, **env: str) -> Outcome:
    """Run a command whose processes write to ``out``; its standard output and error together."""
    out.mkdir(exist_ok=True)
    begin = time.monotonic()
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
    seconds = time.monotonic() - begin
    seen = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob("process-*.json"))]
    return Outcome(done.returncode, done.stdout, seconds, seen)


def worker(out: Path, **options: Any) -> list[str]:
    return [sys.executable, str(WORKER), json.dumps({"out": str(out), **options})]


def launch(out: Path, processes: int, *flags: str, devices: int = 2, **options: Any) -> Outcome:
    """`jzero launch` of the worker."""
    launcher = [sys.executable, "-m", "jzero.cli", "launch", "-n", str(processes)]
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
