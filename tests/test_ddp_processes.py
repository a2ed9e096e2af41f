"""Two real processes: one start, one plan, one result; what differs is found and named."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROCESSES, DEVICES = 2, 2


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What each process of one run reports."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    environment["JZERO_TEST_PORT"] = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ddp_worker.py")), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_what_differs_between_processes_is_found_and_named(results):
    for rank, found in enumerate(results):
        assert found["values before"] == [rank] * 4
        assert found["difference before"] == "count"
        assert found["one difference"] == "middle/kernel"
        assert "'x' is float32[3] on process 0 and float32[4] on process 1" in found["other shapes"]


def test_everything_starts_from_the_first_process(results):
    for found in results:
        assert found["values after"] == [0] * 4
        assert found["dtypes after"] == ["int32", "bfloat16", "float32", "bool"]
        assert found["difference after"] is None
    assert results[0]["key after"] == results[1]["key after"]


def test_both_train_as_one_process_does(results):
    one, two = results
    assert one["order"] == two["order"]
    assert one["order"] != sorted(one["order"], reverse=True)  # that of the backward pass
    assert one["params"] == two["params"]
    assert one["losses"] == two["losses"]
    np.testing.assert_allclose(one["losses"], one["alone losses"], rtol=1e-6)
    np.testing.assert_allclose(one["params"], one["alone params"], rtol=1e-5)
    assert one["still equal"] is two["still equal"] is None
