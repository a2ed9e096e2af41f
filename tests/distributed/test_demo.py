"""The demo trains in two processes as optax does on one device."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import start

DEMO = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.mark.slow
def test_the_demo_in_two_processes(tmp_path: Path):
    text = tmp_path / "text"
    text.mkdir()
    words = np.random.default_rng(0).choice(["the", "quick", "brown", "fox", "jumps"], 8000)
    (text / "words.txt").write_text(" ".join(words), encoding="utf-8")
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "jzero.cli", "launch", "-n", "2", "--devices-per-process", "4"]
    flags = ["--size=tiny", "--steps=6", f"--data={text}", f"--out={out}"]
    outcome = start([*launch, "--", sys.executable, str(DEMO), *flags], tmp_path)
    assert outcome.status == 0, outcome.output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["devices"] == 8
    assert summary["steps"] == 6
    assert summary["loss_difference"] < 1e-5  # of losses of about 5
    assert summary["norm_difference"] < 2e-5
    assert "[0] After 6 steps" in outcome.output
    assert "[1] After" not in outcome.output
