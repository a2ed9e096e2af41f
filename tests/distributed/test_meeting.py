"""Processes meet before JAX starts. Threads stand for them here: nothing is kept per process."""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jzero import _meeting
from jzero._cluster import Job
from jzero._meeting import MeetingError, meet

FACTS = {"jzero": "1", "jax": "2"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_meeting, "_PATIENCE", 1.0)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(
    port: int, processes: Sequence[tuple[int, int, dict[str, str]]], timeout: float = 10.0
) -> list[Any]:
    """What (number, count, facts) each gets: its peers or its error."""

    def one(process: tuple[int, int, dict[str, str]]) -> Any:
        number, count, facts = process
        job = Job(f"127.0.0.1:{port}", count, number, None, f"source {number}")
        try:
            return meet(job, facts, timeout=timeout)
        except MeetingError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def said(result: Any, error: str) -> None:
    assert isinstance(result, str)
    assert re.search(error, result), result


@pytest.mark.parametrize("count", [2, 33])
def test_all_learn_where_all_are(count: int, port: int):
    results = run(port, [(i, count, FACTS) for i in reversed(range(count))])
    assert all(result == results[0] for result in results)
    assert len(results[0]) == count
    assert results[0][0].host == socket.gethostname()
    with socket.create_server(("", port)):  # free at once, for JAX
        pass


@pytest.mark.parametrize(
    ("processes", "error"),
    [
        pytest.param(
            [(0, 3, FACTS), (1, 3, FACTS), (1, 3, FACTS)],
            r"two processes have process_id 1: pid \d+ on .* and pid \d+ on .*from 0 to 2",
            id="one-id-twice",
        ),
        pytest.param(
            [(0, 2, FACTS), (1, 3, FACTS)],
            r"process 0 counts 2 \(from source 0\), process 1 .* counts 3 \(from source 1\)",
            id="counts",
        ),
        pytest.param(
            [(0, 2, FACTS), (1, 2, {**FACTS, "jax": "3"})],
            r"not run the same software: jax is 2 on process 0 .* and 3 on process 1",
            id="versions",
        ),
        pytest.param(
            [(0, 2, FACTS), (1, 2, {"jzero": "1"})], r"jax is 2 .* and absent on", id="absent"
        ),
    ],
)
def test_what_does_not_fit_is_said_to_all(processes: Any, error: str, port: int):
    start = time.monotonic()
    results = run(port, processes)
    assert len(set(results)) == 1
    said(results[0], error)
    assert time.monotonic() - start < 8  # not the time for initialization


def test_missing_processes_are_named(port: int):
    results = run(port, [(0, 4, FACTS), (2, 4, FACTS)], timeout=0.5)
    assert results[0] == results[1]
    said(
        results[0],
        r"after 0.5 s 2 of 4 processes are here; missing: 1, 3\. .*raise initialization_timeout",
    )


def test_no_coordinator(port: int):
    [result] = run(port, [(1, 2, FACTS)], timeout=0.5)
    said(
        result,
        rf"could not reach process 0 at 127.0.0.1:{port} \(from source 1\) within 0.5 s: "
        r"Connection refused\. Check that process 0 has started",
    )
    job = Job(f"no-such-host.invalid:{port}", 2, 1, None, "x")
    with pytest.raises(MeetingError, match=r"could not reach process 0 at no-such-host\.invalid"):
        meet(job, FACTS, timeout=0.5)


def test_the_port_is_taken(port: int):
    with socket.create_server(("127.0.0.1", port)):
        [result] = run(port, [(0, 2, FACTS)], timeout=5)
    said(
        result,
        r"process 0 cannot listen at .*Address already in use.*two processes have process_id 0",
    )


@pytest.fixture
def answering(port: int):
    """A server at the port that gives every connection one answer."""
    servers: list[socket.socket] = []

    def start(answer: bytes) -> None:
        server = socket.create_server(("127.0.0.1", port))
        servers.append(server)

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    link.recv(10)
                    link.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_someone_else_answers(answering: Callable[[bytes], None], port: int):
    answering(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    [result] = run(port, [(1, 2, FACTS)], timeout=20)
    said(
        result,
        r"something that is not a waiting jzero process.*two of them have process_id 1.*another "
        r"program uses the port",
    )


def test_strangers_do_not_disturb(port: int):
    def disturb() -> None:
        for text in (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"",
            b"jzero hello {\n",
            b"jzero hello {}\n",
        ):
            for _ in range(100):
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as link:
                        link.sendall(text)
                        break
                except OSError:
                    time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        results = run(port, [(0, 3, FACTS), (1, 3, FACTS)], timeout=2)
        disturbing.result()
    assert results[0] == results[1]
    said(
        results[0],
        r"2 of 3 .*missing: 2 \(1 connections were not from jzero.distributed.initialize",
    )
