"""What a run is doing, and whether it is learning: each claim on figures that are known."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs_for_tests import make_run

from posttrain.errors import Interrupted
from posttrain.runs.index import Index
from posttrain.runs.layout import LOCK
from posttrain.runs.lock import live_owner
from posttrain.runs.read import Run
from posttrain.runs.status import Verdict, last_score, status, verdict
from posttrain.runs.write import RunWriter
from posttrain.types import JSON


def judge(directory: Path, rows: Sequence[dict[str, float]], stage: str = "rl", alarm: str = "") -> Verdict:
    with RunWriter.create(directory, {}) as writer:
        writer.event("stage", {"stage": stage})
        for step, figures in enumerate(rows):
            writer.metrics(stage, step, figures)
        if alarm:
            writer.event("alarm", {"stage": stage, "step": 1, "text": alarm, "level": "warning"})
    index = Index(Run(directory))
    index.read_metrics()
    return verdict(index)


def last(directory: Path, rows: Sequence[dict[str, float]]) -> JSON:
    judge(directory, rows)
    return last_score(Index(Run(directory)), "rl")


def measured(*values: float, error: float = 0.02) -> list[dict[str, float]]:
    """Held-out accuracies with their 95% intervals."""
    return [{"accuracy/test": v, "accuracy/test_low": v - 1.96 * error, "accuracy/test_high": v + 1.96 * error} for v in values]


def graded(*rows: tuple[float, float], first: str = "reward") -> list[dict[str, float]]:
    """(reward, accuracy) of held-out problems, in the order in which a row has them; the first of them decides."""
    made = [{"reward/test": reward, "accuracy/test": accuracy} for reward, accuracy in rows]
    return made if first == "reward" else [dict(reversed(row.items())) for row in made]


NOISE = [0.01 * math.sin(7 * n) for n in range(100)]
CASES = [
    (measured(0.5, 0.7, 0.9), "yes", "Yes: held-out accuracy rose from 50.0% to 90.0%."),
    (measured(0.5, 0.51), "unclear", "Not clear yet: held-out accuracy went from 50.0% to 51.0%, which may be chance."),
    (measured(0.5, 0.3), "no", "No: held-out accuracy went from 50.0% to 30.0%."),
    (
        measured(0.5, 0.9, 0.7),
        "careful",
        "Careful: held-out accuracy was 90.0% at step 1 and is now 70.0%: the best lies behind.",
    ),
    # points of a game, of which the accuracy counts how many reach 1; at first every score is 0, and the accuracy stands alone
    (graded((6.0, 1.0), (7.0, 1.0)), "yes", "Yes: held-out reward rose from 6 to 7."),
    ([*measured(0.0, error=0.0), *graded((0.4, 0.0), (0.9, 0.0))], "yes", "Yes: held-out reward rose from 0 to 0.9."),
    (graded((6.0, 0.5), (7.0, 0.9), first="accuracy"), "yes", "Yes: held-out accuracy rose from 50.0% to 90.0%."),
    (measured(0.5), "early", "Too early to say: held-out accuracy of rl was measured once."),
    ([{"loss/held_out": 2.0}, {"loss/held_out": 1.0}], "yes", "Yes: held-out loss fell from 2 to 1."),
    ([{"reward": n / 100 + e} for n, e in enumerate(NOISE)], "yes", "Yes: the reward rose from 0.0956 to 0.896."),
    ([{"reward": e} for e in NOISE], "unclear", "Not clear yet: the reward went from"),
    ([{"reward": 1 - n / 100 + e} for n, e in enumerate(NOISE)], "no", "No: the reward went from"),
    ([{"nll": 2 / (n + 1) + e} for n, e in enumerate(NOISE)], "yes", "Yes: the loss fell from"),
    ([{"reward": 1.0}] * 3, "early", "Too early to say: 3 steps of rl cannot show a trend"),
    ([{"length": 1.0}] * 30, "unclear", "rl has no score that could rise."),
    ([*measured(0.5, 0.9), {"loss": math.nan}], "no", "No: loss is not a number at step 2 of rl."),
    ([], "early", "Too early to say: nothing has been measured yet."),
]


@pytest.mark.parametrize(("rows", "answer", "headline"), CASES)
def test_the_verdict_by_hand(tmp_path: Path, rows: list[dict[str, float]], answer: str, headline: str) -> None:
    found = judge(tmp_path, rows)
    assert found.answer == answer and found.headline.startswith(headline)


def test_the_last_score_is_that_of_the_figure_that_decides(tmp_path: Path) -> None:
    """By the reward; where the last scores are all 0 or 1, the accuracy alone is measured, and is the reward."""
    assert last(tmp_path / "a", graded((6.0, 1.0), (7.0, 1.0))) == [7.0, None, None, "reward/test"]
    assert last(tmp_path / "b", [*graded((0.4, 0.2)), {"accuracy/test": 1.0}]) == [1.0, None, None, "reward/test"]
    assert last(tmp_path / "c", [{"accuracy/test": 0.5, "accuracy/test_low": 0.4}]) == [0.5, 0.4, None, "accuracy/test"]
    assert last(tmp_path / "d", [{"reward": 1.0}]) is None


def test_an_alarm_takes_the_verdict_back(tmp_path: Path) -> None:
    found = judge(tmp_path, measured(0.5, 0.9), alarm="length: it is paid for")
    assert found.answer == "careful" and found.because[0] == "length: it is paid for"
    assert found.headline == "Careful: yes: held-out accuracy rose from 50.0% to 90.0%. But an alarm was raised."


def test_what_a_run_is_doing_is_read_off_its_files(tmp_path: Path) -> None:
    def now(name: str) -> str:
        run = Run(tmp_path / name)
        return status(run, run.events()).kind

    make_run(tmp_path / "finished")
    assert now("finished") == "finished"
    make_run(tmp_path / "crashed", 10, finish=False)
    assert now("crashed") == "crashed"
    for name, error in (("interrupted", Interrupted), ("broken", RuntimeError)):
        with pytest.raises(error), RunWriter.create(tmp_path / name, {}):
            raise error("text with a secret")
    assert now("interrupted") == "interrupted" and now("broken") == "crashed"
    assert "secret" not in (tmp_path / "broken" / "events.jsonl").read_text()
    with RunWriter.create(tmp_path / "guard", {}) as writer:
        writer.event("alarm", {"level": "stop", "text": "kl: 9 nats"})
        assert now("guard") == "live"
    run = Run(tmp_path / "guard")
    assert status(run, run.events()).said == "kl: 9 nats" and now("guard") == "stopped"
    with RunWriter.resume(tmp_path / "guard") as writer:
        writer.event("waiting", {"text": "for labels"})
    assert now("guard") == "waiting"


def test_a_killed_writer_is_not_live(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5, finish=False)
    opened = f"RunWriter.resume({str(tmp_path / 'run')!r}); print('open', flush=True); input()"
    program = f"from posttrain.runs.write import RunWriter; {opened}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline() == b"open\n"
        assert live_owner(tmp_path / "run" / LOCK) == writer.pid
        writer.kill()
        writer.wait(10)
    assert live_owner(tmp_path / "run" / LOCK) is None
