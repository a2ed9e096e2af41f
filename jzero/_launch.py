"""Start the processes of a job on this machine, and see to it that they end together.

[Note: who failed first]
When a process dies, the others soon end too, with errors of their own. The one that counts is the
one that ended by itself: killed by a signal, or with a status other than those that follow from a
lost peer (``PEER_FAILED``, and SIGABRT, by which JAX ends a process whose service reports an
error). A process that is stopped (SIGSTOP) has not ended at all, but is why the others have.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, NamedTuple

from jzero._cluster import proxy_in_the_way
from jzero._watch import PEER_FAILED

__all__ = ["launch"]

_SETTLE = 1.0  # seconds after the first failure in which others may still end by themselves
_DRAIN = 0.5  # seconds to wait for the last output of a process that has ended
_TICK = 0.05
_LONGEST_LINE = 1 << 16
# Becomes the program after asking Linux to kill it when the launcher dies in whatever way.
_TRAMPOLINE = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"jzero launch: cannot run {sys.argv[2]!r}: {error.strerror}")
"""


class Ended(NamedTuple):
    """How a process ended: its number, its exit status (negative: a signal), by itself or not."""

    process: int
    status: int
    own: bool


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    restarts: int = 0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``command`` in several processes until all have ended.

    Each gets ``JZERO_COORDINATOR_ADDRESS``, ``JZERO_NUM_PROCESSES``, ``JZERO_PROCESS_ID`` and
    ``JZERO_RESTART`` (how often the job was restarted), and is the leader of a process group of its
    own. Lines of its output come out with its number in front. SIGINT, SIGTERM and SIGHUP are
    passed on; a second one kills. When one fails, the others get SIGTERM, and what is left of any
    group after ``grace`` seconds is killed.

    Args:
      command: the program and its arguments.
      processes: how many.
      devices_per_process: devices that each sees: of simulated CPU devices, or of accelerators the
        next so many. None: one accelerator each; CPU devices as the environment says.
      restarts: how often to start again after a failure, with the processes that were not lost.
      grace: seconds between asking and killing.
      env: None: this process's.

    Returns:
      0 if all ended well; else the status of the one that failed first (128 + the signal that
      killed it), of the last start.
    """
    base = dict(os.environ if env is None else env)
    started = processes
    with _Signals() as signals:
        for attempt in range(restarts + 1):
            ended = _Job(command, started, devices_per_process, attempt, grace, base).run(signals)
            bad = [e for e in ended if e.status != 0]
            if not bad and not signals.received:
                return 0
            first = next((e for e in bad if e.own), bad[0] if bad else None)
            status = 128 + signals.received if signals.received else _code(first)
            left = started - sum(e.own for e in bad)
            if signals.received or attempt == restarts:
                return status
            if left < 1:
                _say("no process is left to restart with")
                return status
            _say(f"restart {attempt + 1} of {restarts} with {left} of {started} processes")
            started = left
    raise AssertionError("unreachable")


def _code(ended: Ended | None) -> int:
    assert ended is not None
    return ended.status if ended.status >= 0 else 128 - ended.status


class _Signals:
    """Signals of the launcher, remembered until the loop looks at them."""

    PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received = 0
        self.count = 0

    def __enter__(self) -> _Signals:
        self.before = {number: signal.signal(number, self.note) for number in self.PASSED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1


class _Job:
    """One start of all processes."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        devices: int | None,
        attempt: int,
        grace: float,
        env: Mapping[str, str],
    ) -> None:
        self.grace, self.count = grace, processes
        self.selector = selectors.DefaultSelector()
        self.pending: dict[int, bytes] = {}  # by file descriptor: an unfinished line
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: list[Ended] = []
        address = f"127.0.0.1:{_free_port()}"
        self.start = time.monotonic()
        try:
            for index in range(processes):
                self.spawn(
                    index, command, _variables(env, address, processes, index, devices, attempt)
                )
        except BaseException:
            self.send(signal.SIGKILL)
            raise

    def spawn(self, index: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.running[index] = process
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.pending[stream.fileno()] = b""
            self.selector.register(stream, selectors.EVENT_READ, (index, out))

    def run(self, signals: _Signals) -> list[Ended]:
        """Until all have ended; in the order in which they did."""
        asked: float | None = None  # when they were told to end
        failed: float | None = None  # when the first failure was seen
        passed = signals.count
        try:
            while self.running:
                self.read(_TICK)
                now = time.monotonic()
                if self.reap(asked=asked is not None) and failed is None:
                    failed = now
                if signals.count > passed:
                    name = signal.Signals(signals.received).name
                    _say(f"{name}: {'killing' if passed else 'passed on'}")
                    self.send(signal.SIGKILL if passed else signals.received)
                    asked, passed = asked or now, signals.count
                if asked is None and failed is not None and now - failed >= _SETTLE:
                    self.note_stopped()
                    if self.running:
                        _say(f"stopping the other {len(self.running)}")
                    self.send(signal.SIGTERM)
                    asked = now
                if asked is not None and now - asked > self.grace and self.running:
                    names = ", ".join(map(str, self.running))
                    _say(f"killing what has not ended after {self.grace:g} s: process {names}")
                    self.send(signal.SIGKILL)
                    asked = float("inf")
        finally:
            self.send(signal.SIGKILL)  # whatever happens here, no one is left behind
            for process in self.running.values():
                process.wait()
            self.drain()
            self.selector.close()
        return self.ended

    def reap(self, asked: bool) -> bool:
        """Note who has ended (by itself, or because it was asked to); whether one failed."""
        bad = False
        for index, process in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[index]
            _kill(process.pid)  # its children, if it left any
            own = not asked and status not in (0, PEER_FAILED, -signal.SIGABRT)
            self.ended.append(Ended(index, status, own))
            bad = bad or status != 0
            if status != 0 and not asked:
                self.drain()
                seconds = time.monotonic() - self.start
                how = (
                    f"was killed by {signal.Signals(-status).name}"
                    if status < 0
                    else "ended because another had"
                    if status == PEER_FAILED
                    else f"failed with exit status {status}"
                )
                _say(f"process {index} (pid {process.pid}) {how} after {seconds:.1f} s")
        return bad

    def note_stopped(self) -> None:
        """Those that are stopped count as lost: they are why the others have failed."""
        for index, process in list(self.running.items()):
            if _is_stopped(process.pid):
                _say(f"process {index} (pid {process.pid}) is stopped; killing it")
                _kill(process.pid)
                process.wait()
                del self.running[index]
                self.ended.append(Ended(index, -signal.SIGKILL, True))

    def send(self, number: int) -> None:
        for process in self.running.values():
            _kill(process.pid, number)

    def read(self, timeout: float) -> bool:
        """Pass on what has been written; whether there was anything."""
        if not self.selector.get_map():
            time.sleep(timeout)
            return False
        ready = self.selector.select(timeout)
        for key, _ in ready:
            index, out = key.data
            descriptor = key.fd
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                continue
            *lines, rest = (self.pending[descriptor] + part).split(b"\n")
            if rest and (not part or len(rest) > _LONGEST_LINE):
                lines, rest = [*lines, rest], b""
            for line in lines:
                _write(out, f"[{index}] ".encode() + line + b"\n")
            self.pending[descriptor] = rest
            if not part:
                self.selector.unregister(key.fileobj)
                del self.pending[descriptor]
                key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        return bool(ready)

    def drain(self) -> None:
        """What those that have ended had still to say; someone else may hold the pipe open."""
        end = time.monotonic() + _DRAIN
        while self.selector.get_map() and time.monotonic() < end and self.read(0.01):
            pass


def _variables(
    env: Mapping[str, str],
    address: str,
    processes: int,
    index: int,
    devices: int | None,
    attempt: int,
) -> dict[str, str]:
    """The environment of one process."""
    each = devices or 1
    found = {
        **env,
        "JZERO_COORDINATOR_ADDRESS": address,
        "JZERO_NUM_PROCESSES": str(processes),
        "JZERO_PROCESS_ID": str(index),
        "JZERO_RESTART": str(attempt),
        "PYTHONUNBUFFERED": "1",
        # Of accelerators only; a number that the user has set is left alone.
        "JAX_LOCAL_DEVICE_IDS": env.get(
            "JAX_LOCAL_DEVICE_IDS", ",".join(str(index * each + i) for i in range(each))
        ),
    }
    if proxy_in_the_way(address, env):
        name = "no_grpc_proxy" if env.get("no_grpc_proxy") else "no_proxy"
        found[name] = ",".join(filter(None, [env.get(name), "127.0.0.1"]))
    if devices is not None:
        found["JAX_NUM_CPU_DEVICES"] = str(devices)
        flags = found.get("XLA_FLAGS", "").split()
        kept = [f for f in flags if "xla_force_host_platform_device_count" not in f]
        if kept != flags:  # JAX refuses both at once
            found["XLA_FLAGS"] = " ".join(kept)
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _kill(group: int, number: int = signal.SIGKILL) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says so of zombies
        return


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # not Linux, or gone
        return False


def _write(out: IO[str], line: bytes) -> None:
    try:
        out.buffer.write(line)  # pyright: ignore[reportAttributeAccessIssue]
        out.flush()
    except (BrokenPipeError, ValueError):  # no one reads any more; the job goes on
        return


def _say(text: str) -> None:
    _write(sys.stderr, f"jzero launch: {text}\n".encode())
