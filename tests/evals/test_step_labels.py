"""Step labels by Monte-Carlo completions: where steps end, what is asked of the sampler, and what its answers make of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest
from sampler_for_tests import ScriptedSampler, completion

from posttrain.algorithms.process_reward_model import ProcessRewardModel
from posttrain.data.text import Decoder
from posttrain.errors import UserError
from posttrain.evals.step_labels import label_steps
from posttrain.models.tiny import character_tokenizer
from posttrain.tasks.base import Task
from posttrain.train.pack import pack_examples
from posttrain.types import Completion, Problem, Request, Rollout, Sampling, Score, Segment

TOKENIZER = character_tokenizer("abcx\n ")
DECODER = Decoder(TOKENIZER)
END = TOKENIZER.eos_token_id
PROBLEM = Problem("p", "aa", "ac")
PROMPT = np.array([3, 6, 6])


class Ends(Task):
    """Solved where the response ends in `answer`; a response with an x cannot be judged."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [PROBLEM]

    def score(self, problem: Problem, response: str) -> Score:
        if "x" in response:
            raise RuntimeError("the judge is out")
        return Score(float(response.endswith(problem.answer)))


def scripted(answers: dict[str, list[str]]) -> ScriptedSampler:
    """A sampler that answers each prompt text with the given completions, one for each sample."""
    left = {text: cycle(found) for text, found in answers.items()}

    def reply(request: Request) -> Completion:
        text = next(left[DECODER.decode(request.ids)[0]])
        return completion([*TOKENIZER(text)["input_ids"], END])

    return ScriptedSampler(reply)


def answered(text: str, finish: str = "stop") -> Rollout:
    ids = np.array([*TOKENIZER(text)["input_ids"], *([END] if finish == "stop" else [])])
    decoded, offsets = DECODER.decode(ids)
    assert decoded == text
    response = Segment(ids, text, True, np.zeros(len(ids), np.float32), offsets, np.zeros(len(ids), np.int32), finish)
    task = Ends()
    score = Score.failed("timeout") if "x" in text else task.score(PROBLEM, text)
    return Rollout(PROBLEM, 0, (Segment(PROMPT, "aa", False), response), score)


@pytest.mark.parametrize(("hard", "first"), [(False, 0.5), (True, 1.0)])
def test_a_step_is_labelled_by_how_its_completions_end(hard: bool, first: float) -> None:
    """From the first step 2 of 4 completions are solved, from the second none; the third is the answer itself, which is right."""
    script = scripted({"aaab\n": ["ac", "b", "c\nac", "cc"], "aaab\nb\n": ["b", "b", "c", "a"]})
    labels = label_steps(Ends(), script, DECODER, [answered("ab\nb\nac")], 4, Sampling(8), seed=3, hard=hard)
    (example,) = labels.examples
    expected = np.full(11, np.nan)
    expected[[4, 6, 9]] = [first, 0.0, 1.0]
    np.testing.assert_array_equal(example.steps, expected)
    assert example.mask.tolist() == [False] * 3 + [True] * 8 and example.reward == 1.0
    assert (labels.steps, labels.completions, labels.failed, labels.unlabelled) == (3, 8, 0, 0)
    assert [list(r.ids[3:]) for r in script.requests[::4]] == [TOKENIZER(t)["input_ids"] for t in ("ab\n", "ab\nb\n")]
    assert len({r.seed for r in script.requests}) == 8


def test_what_cannot_be_scored_does_not_vote() -> None:
    """Two of three completions of the first step fail; all of the second; a rollout without a score labels no last step."""
    script = scripted({"aaab\n": ["x", "ac", "x"], "aaab\nb\n": ["x", "x", "x"], "aab\n": ["c", "ac", "x"]})
    rollouts = [answered("ab\nb\nc"), answered("b\nx")]
    labels = label_steps(Ends(), script, DECODER, rollouts, 3, Sampling(8), seed=0)
    first, second = labels.examples
    assert first.steps is not None and second.steps is not None
    assert first.steps[[4, 6, 8]].tolist() == [1.0, pytest.approx(np.nan, nan_ok=True), 0.0]
    assert second.steps[3] == 0.5 and np.isnan(second.steps[4:]).all() and np.isnan(second.reward)
    assert (labels.steps, labels.completions, labels.failed, labels.unlabelled) == (3, 9, 6, 2)


def test_a_response_that_was_cut_off_is_completed_from_its_end() -> None:
    script = scripted({"aab\na": ["c", "b"], "aab\n": ["ac", "ac"]})
    labels = label_steps(Ends(), script, DECODER, [answered("b\na", "length")], 2, Sampling(8), seed=0)
    assert labels.examples[0].steps is not None
    assert labels.examples[0].steps[[3, 5]].tolist() == [1.0, 0.5]


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    def seeds(seed: int) -> list[int]:
        script = scripted({"aab\n": ["c"]})
        label_steps(Ends(), script, DECODER, [answered("b\nac")] * 2, 1, Sampling(8), seed)
        return [r.seed for r in script.requests]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 2, "two rollouts with the same text have randomness of their own"


def test_the_examples_train_a_process_reward_model() -> None:
    script = scripted({"aab\n": ["ac", "c"]})
    labels = label_steps(Ends(), script, DECODER, [answered("b\nac"), answered("\n")], 2, Sampling(8), 0)
    assert len(labels.examples) == 1, "a response without a step has no label"
    prepared = ProcessRewardModel().prepare(pack_examples(labels.examples), {})
    assert prepared.mask_T.nonzero()[:, 0].tolist() == [3, 6]


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least one completion a step, not 0"):
        label_steps(Ends(), scripted({}), DECODER, [], 0, Sampling(8), 0)
