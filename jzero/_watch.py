"""When one process fails, all of them end, and each says why.

[Note: how a failure travels]
A process that dies in the middle of a step leaves the others in a collective that never ends, or
that fails with a text about sockets. So a process that is about to end with an exception first
writes that into the coordination service, where a thread of every other process is waiting for it:
they say what happened, answer a roll call (who does not answer is dead, stopped or cut off), and
end at once. Without that, they would wait for JAX's heartbeat and shutdown timeouts.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jzero._meeting import Peer

__all__ = ["PEER_FAILED", "watch"]

PEER_FAILED = 76
"""Exit status of a process that ended because another one had (EX_PROTOCOL, which no one uses)."""

_FAILURE = "jzero/failure"
_ROLL = "jzero/roll"
_LEFT = "jzero/left"
_ROLL_CALL = 3.0  # seconds in which a live process answers
_POLL = 0.25  # seconds between questions, for up to 128 processes; more ask less often
_LOST = ("gloo", "nccl", "connection", "unavailable", "heartbeat", "coordination service", "peer")


def watch(client: Any, index: int, peers: Sequence[Peer], name: str = "jzero") -> None:
    """From now on tell the other processes of an exception that ends this one, and end with them.

    Changes ``sys.excepthook`` (the old hook still prints), adds a daemon thread and an exit
    handler. A process that ends because another failed exits with ``PEER_FAILED``; handlers that
    were registered with ``atexit`` before this call do not run then.
    """
    watcher = _Watcher(client, index, peers, name)
    previous = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        previous(kind, value, trace)
        watcher.failed(kind, value)

    sys.excepthook = hook
    atexit.register(watcher.exit)
    watcher.thread.start()


class _Watcher:
    def __init__(self, client: Any, index: int, peers: Sequence[Peer], name: str) -> None:
        self.client, self.index, self.peers, self.name = client, index, peers, name
        self.lock = threading.Lock()  # taken by whoever ends this process, and never given back
        self.status: int | None = None
        self.pause = _POLL * max(1.0, len(peers) / 128)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.wait, name="jzero-watch", daemon=True)

    def failed(self, kind: type[BaseException], value: BaseException) -> None:
        """This process ends with an exception: say so, and see who is still there."""
        self.lock.acquire()
        text = f"{kind.__name__}: {str(value).splitlines()[0] if str(value) else ''}".strip()
        lost = kind.__name__ == "JaxRuntimeError" and any(w in str(value).lower() for w in _LOST)
        said = "lost another process" if lost else "failed"
        message = json.dumps([self.index, f"{self.who(self.index)} {said}: {text[:500]}"])
        try:
            self.client.key_value_set(_FAILURE, message)
        except Exception as error:  # someone was first, or there is no one left to tell
            lost = lost or "ALREADY_EXISTS" in str(error)
        self.status = PEER_FAILED if lost else 1
        self.roll_call(lost)

    def wait(self) -> None:
        """Wait for the failure of another process; the thread's body."""
        while not self.over.wait(self.pause):
            try:
                index, text = json.loads(self.client.key_value_try_get(_FAILURE))
                break
            except Exception as error:
                if "NOT_FOUND" not in str(error):
                    return  # the end of the run, or of the coordinator, of which JAX speaks
        else:
            return
        if index == self.index:
            return
        self.lock.acquire()
        self.say(f"{text}; {self.who(self.index)} ends with it")
        self.roll_call(lost=False)
        _flush()
        os._exit(PEER_FAILED)

    def roll_call(self, lost: bool) -> None:
        """Answer, and where a process was lost, name those that do not."""
        end = time.monotonic() + _ROLL_CALL
        try:
            self.client.key_value_set(f"{_ROLL}/{self.index}", "here", allow_overwrite=True)
            while True:
                here = {int(key.split("/")[-1]) for key, _ in self.client.key_value_dir_get(_ROLL)}
                absent = [i for i in range(len(self.peers)) if i not in here]
                if not absent or time.monotonic() > end:
                    break
                time.sleep(self.pause / 4)
        except Exception:
            return
        if absent and lost:
            names = ", ".join(self.who(i) for i in absent[:5])
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            self.say(f"no answer from {names}{more}: killed, stopped or cut off")
        self.leave({i for i in range(len(self.peers)) if i not in absent})

    def leave(self, others: set[int]) -> None:
        """Process 0 keeps the service, without which JAX aborts the others: it goes last."""
        end = time.monotonic() + _ROLL_CALL
        try:
            self.client.key_value_set(f"{_LEFT}/{self.index}", "left", allow_overwrite=True)
            while self.index == 0 and time.monotonic() < end:
                left = {int(key.split("/")[-1]) for key, _ in self.client.key_value_dir_get(_LEFT)}
                if others <= left:
                    break
                time.sleep(self.pause / 4)
        except Exception:
            return
        if self.index == 0:
            time.sleep(0.3)  # for their exit handlers

    def exit(self) -> None:
        """The exit handler."""
        if self.status is not None:
            # Not through JAX's shutdown, which would wait for processes that are no more.
            _flush()
            os._exit(self.status)
        self.over.set()  # no thread may be in a call when the interpreter goes
        self.thread.join(_ROLL_CALL)

    def who(self, index: int) -> str:
        return f"process {index} of {len(self.peers)} ({self.peers[index]})"

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or a broken pipe
            continue
