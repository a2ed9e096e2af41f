"""A hundred processes killed at random moments of training: nothing is lost beyond the last
checkpoint."""

import os
import random
import re
from pathlib import Path

import pytest
from jobs import launch, same_training

import jzero

KILLS = int(os.environ.get("JZERO_TEST_KILLS", "100"))
STEPS, SAVE_EVERY = 40, 4


@pytest.mark.slow
def test_random_kill_points(tmp_path: Path):
    """Each run starts with four processes of two devices and loses up to three, one at a time."""
    draw = random.Random(0)
    alone = launch(tmp_path / "alone", 1, steps=STEPS)
    assert alone.status == 0, alone.output
    kills = run = 0
    while kills < KILLS:
        run += 1
        save = tmp_path / f"checkpoint-{run}"
        outcome = launch(
            tmp_path / f"out-{run}",
            4,
            "--restarts",
            "3",
            steps=STEPS,
            save=str(save),
            save_every=SAVE_EVERY,
            on=draw.randrange(12),
            pause=0.05,
            kill_after=[draw.uniform(0, 5) for _ in range(3)],
        )
        assert outcome.status == 0, outcome.output
        killed = outcome.output.count("was killed by SIGKILL")
        saved = begun = 0
        for match in re.finditer(r"begins at step (\d+)|saved step (\d+)", outcome.output):
            first, step = match.groups()
            if step is not None:
                saved = max(saved, int(step))
            else:
                begun += 1
                # A checkpoint counts once save has returned anywhere; it may have been complete
                # a moment before the process could say so.
                assert int(first) in (saved, saved + SAVE_EVERY), outcome.output
                assert int(first) % SAVE_EVERY == 0
        # Of a start that is cut short not all may have come to say so.
        assert killed < begun <= sum(4 - i for i in range(killed + 1)), outcome.output
        assert jzero.checkpoint.verify(save) == STEPS
        assert len(outcome.seen) == 4 - killed
        for seen in outcome.seen:
            same_training(seen, alone.seen[0])
        kills += killed
        print(f"run {run}: {killed} killed, {kills} in all", flush=True)
