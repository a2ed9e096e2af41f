"""How long after a fault the last process of a job has ended: the table in docs/many-processes.md.

    PYTHONPATH=tests python tools/measure_faults.py

Two processes of two CPU devices, with heartbeat_timeout=10 and shutdown_timeout=20.
"""

import tempfile
from pathlib import Path
from typing import Any

import jobs

FAULTS: dict[str, dict[str, Any]] = {
    "killed in a step": {"fault": "kill", "at": 3},
    "process 0 killed in a step": {"fault": "kill", "at": 3, "on": 0},
    "killed in a save": {"fault": "kill in save", "at": 3, "save": "checkpoint"},
    "killed at the start": {"fault": "start"},
    "stopped": {"fault": "stop", "at": 3},
    "an exception": {"fault": "raise", "at": 3},
    "sys.exit(3)": {"fault": "exit", "at": 3},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(FAULTS.items()):
            for how, run in (("alone", jobs.scheduled), ("launch", jobs.launch)):
                out = Path(folder, f"{how}-{number}")
                chosen = dict(options)
                if "save" in chosen:
                    chosen["save"] = str(out / "checkpoint")
                outcome = run(out, 2, steps=8, **chosen)
                statuses = outcome.statuses or outcome.status
                print(f"{name:28} {how:7} {outcome.after:5.1f} s  status {statuses}", flush=True)


if __name__ == "__main__":
    main()
