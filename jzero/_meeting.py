"""The processes of a job meet before JAX starts, so that what is wrong can be said.

[Note: why a meeting before the start]
When `jax.distributed` cannot start (a wrong address, two processes with one id, another count), the
runtime aborts the process with a stack trace, and no Python code can say why. So the processes
meet first, on the same port, in a few bytes of JSON: each sends a line about itself to process 0,
which compares them and sends everyone the same verdict. Then it closes the port, and JAX opens it.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jzero._cluster import Job, split_address

__all__ = ["MeetingError", "Peer", "meet"]

_HELLO = b"jzero hello "
_VERDICT = b"jzero verdict "
_LONGEST = 1 << 20  # bytes of a message: the verdict lists all processes
_PATIENCE = (
    10.0  # seconds to go on with a port that something else answers, or with a failed meeting
)
_PAUSE = 0.1


class MeetingError(RuntimeError):
    """The processes of a job could not meet, or do not fit each other."""


class Peer(NamedTuple):
    """Where a process runs."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def meet(
    job: Job, facts: Mapping[str, str], *, timeout: float, bind: str | None = None
) -> tuple[Peer, ...]:
    """Meet the other processes of the job at the coordinator's address.

    Args:
      job: this process's place.
      facts: what must be equal everywhere, e.g. versions; name to value.
      timeout: seconds to wait for all to be there.
      bind: "host:port" at which process 0 listens; None: that port on all interfaces.

    Returns:
      The processes, by index.

    Raises:
      MeetingError: on every process that could be reached, saying why: no one listens at the
        address, processes are missing, two have one index, counts or facts differ, the port is
        taken.
    """
    hello = {
        "index": job.process,
        "processes": job.processes,
        "facts": dict(facts),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "source": job.source,
    }
    deadline = time.monotonic() + timeout
    if job.process == 0:
        return _Host(job, hello, deadline, timeout).run(bind)
    return _visit(job, hello, deadline, timeout)


class _Host:
    """Process 0: listens, collects a hello from each process, and answers all alike."""

    def __init__(self, job: Job, hello: dict[str, Any], deadline: float, timeout: float) -> None:
        self.job, self.deadline, self.timeout = job, deadline, timeout
        self.hellos: dict[int, dict[str, Any]] = {0: hello}
        self.open: dict[socket.socket, bytes] = {}
        self.waiting: list[socket.socket] = []  # those that have said hello
        self.fault: str | None = None
        self.strangers = 0

    def run(self, bind: str | None) -> tuple[Peer, ...]:
        with self._listen(bind) as listener, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            answered = 1
            while time.monotonic() < self.deadline:
                if self.fault is None and len(self.hellos) == self.job.processes:
                    break
                if self.fault is not None and answered >= self.job.processes:
                    break
                left = self.deadline - time.monotonic()
                for key, _ in selector.select(max(0.0, min(left, _PAUSE))):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        self.open[connection] = b""
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    if self._read(key.fileobj):
                        selector.unregister(key.fileobj)
                if self.fault is not None:
                    answered += self._answer()
        if self.fault is None and len(self.hellos) < self.job.processes:
            self.fault = self._missing()
        self._answer()
        for connection in self.open:
            connection.close()
        if self.fault is not None:
            raise MeetingError(self.fault)
        return tuple(
            Peer(self.hellos[i]["host"], self.hellos[i]["pid"]) for i in range(self.job.processes)
        )

    def _listen(self, bind: str | None) -> socket.socket:
        host, port = split_address(bind) if bind else ("", split_address(self.job.coordinator)[1])
        patience = min(self.deadline, time.monotonic() + _PATIENCE)
        while True:
            try:
                if not host and socket.has_dualstack_ipv6():
                    return socket.create_server(
                        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
                    )
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family, backlog=4096)
            except OSError as error:
                # A run that is just ending may still hold the port.
                if time.monotonic() >= patience:
                    raise MeetingError(
                        f"process 0 cannot listen at {bind or self.job.coordinator}: "
                        f"{error.strerror or error}. If the port is in use, two processes have "
                        "process_id 0, an earlier run is still alive, or another program has it; "
                        "end it, or choose another port in coordinator_address"
                    ) from error
                time.sleep(_PAUSE)

    def _read(self, connection: socket.socket) -> bool:
        """Take what has arrived; whether the connection need not be read any more."""
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        text = self.open[connection] + part
        self.open[connection] = text
        stranger = not (_HELLO.startswith(text[: len(_HELLO)]) or text.startswith(_HELLO))
        if part and not stranger and not text.endswith(b"\n") and len(text) < _LONGEST:
            return False
        try:
            hello = json.loads(text.removeprefix(_HELLO)) if text.startswith(_HELLO) else None
        except ValueError:
            hello = None
        if not isinstance(hello, dict) or not hello.keys() >= self.hellos[0].keys():
            self.strangers += stranger
            del self.open[connection]
            connection.close()
            return True
        self.waiting.append(connection)
        self._welcome(hello)
        return True

    def _welcome(self, hello: dict[str, Any]) -> None:
        index, mine = hello["index"], self.hellos[0]
        fault = None
        if hello["processes"] != self.job.processes:
            fault = (
                f"the processes do not agree on their number: process 0 counts "
                f"{self.job.processes} (from {self.job.source}), process {index} "
                f"({_where(hello)}) counts {hello['processes']} (from {hello['source']}); start "
                "all with one num_processes"
            )
        elif index in self.hellos:
            fault = (
                f"two processes have process_id {index}: {_where(self.hellos[index])} and "
                f"{_where(hello)}; give each its own id, from 0 to {self.job.processes - 1}"
            )
        elif hello["facts"] != mine["facts"]:
            ours, theirs = mine["facts"], hello["facts"]
            names = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
            fault = "the processes do not run the same software: " + "; ".join(
                f"{name} is {ours.get(name, 'absent')} on process 0 ({_where(mine)}) and "
                f"{theirs.get(name, 'absent')} on process {index} ({_where(hello)})"
                for name in names
            )
        else:
            self.hellos[index] = hello
        if fault is not None and self.fault is None:
            self.fault = fault
            # Those still on their way hear of it too, but not for long.
            self.deadline = min(self.deadline, time.monotonic() + _PATIENCE)

    def _answer(self) -> int:
        """Send the verdict to all that wait for it; how many."""
        peers = [[self.hellos[i]["host"], self.hellos[i]["pid"]] for i in sorted(self.hellos)]
        verdict = {"fault": self.fault, "peers": peers}
        message = _VERDICT + json.dumps(verdict).encode() + b"\n"
        for connection in self.waiting:
            # One that has gone meanwhile is missed by the heartbeat.
            try:
                connection.settimeout(_PATIENCE)
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # they close first, so that the port is free at once
            except OSError:
                pass
            connection.close()
            del self.open[connection]
        count = len(self.waiting)
        self.waiting.clear()
        return count

    def _missing(self) -> str:
        absent = [i for i in range(self.job.processes) if i not in self.hellos]
        shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
        strangers = (
            f" ({self.strangers} connections were not from jzero.distributed.initialize; start "
            "every process with it, not with jax.distributed.initialize)"
            if self.strangers
            else ""
        )
        return (
            f"after {self.timeout:g} s {len(self.hellos)} of {self.job.processes} processes are "
            f"here; missing: {shown}{strangers}. They have failed, were not started, or cannot "
            f"reach {self.job.coordinator}, which must be the machine of process 0 "
            f"({_where(self.hellos[0])}); raise initialization_timeout if they are only slow"
        )


def _where(hello: Mapping[str, Any]) -> str:
    return str(Peer(hello["host"], hello["pid"]))


def _visit(job: Job, hello: dict[str, Any], deadline: float, timeout: float) -> tuple[Peer, ...]:
    """Another process: says hello, again and again until process 0 is there, and is answered."""
    address = split_address(job.coordinator)
    message = _HELLO + json.dumps(hello).encode() + b"\n"
    reason, foreign_since = "nothing was tried", None
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(_PAUSE, min(left, 10.0))) as link:
                link.sendall(message)
                # Process 0 answers when all are there, or its own time is up.
                answer = _receive(link, deadline + _PATIENCE)
        except OSError as error:
            reason, foreign_since = error.strerror or str(error), None
            time.sleep(_PAUSE)
            continue
        if answer.startswith(_VERDICT) and answer.endswith(b"\n"):
            verdict = json.loads(answer.removeprefix(_VERDICT))
            if verdict["fault"] is not None:
                raise MeetingError(verdict["fault"])
            return tuple(Peer(*peer) for peer in verdict["peers"])
        if not answer:  # process 0 went away: it may be restarted
            reason, foreign_since = "the connection was closed without an answer", None
        else:
            reason = "something that is not a waiting jzero process answers there"
            foreign_since = foreign_since or time.monotonic()
            if time.monotonic() - foreign_since > _PATIENCE:
                raise MeetingError(
                    f"process {job.process} came to {job.coordinator}, but {reason}: either the "
                    f"job there has all of its processes (then two of them have process_id "
                    f"{job.process}, or it is an earlier run), or another program uses the port. "
                    "Give each process its own id, or choose another port"
                )
        time.sleep(_PAUSE)
    raise MeetingError(
        f"process {job.process} could not reach process 0 at {job.coordinator} (from {job.source}) "
        f"within {timeout:g} s: {reason}. Check that process 0 has started, that "
        "coordinator_address is the address of its machine as seen from here, and that no "
        "firewall closes the port"
    )


def _receive(link: socket.socket, deadline: float) -> bytes:
    """What comes until the other side ends, or a line of ours is complete."""
    text = b""
    while len(text) < _LONGEST:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        link.settimeout(left)
        part = link.recv(1 << 16)
        if not part:
            break
        text += part
        ours = text.startswith(_VERDICT[: len(text)])
        if text.endswith(b"\n") or not ours:
            break
    return text
