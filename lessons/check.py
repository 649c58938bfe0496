"""Check your answer to a lesson.

python lessons/check.py                             # the lessons
python lessons/check.py grpo_advantage mine.py      # one of them

Copy lessons/NAME.py, write the function that it asks for, and run this. One line reports the first mistake. Your file runs like any
other program of yours. The solutions are in lessons/solutions.
"""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Function = Callable[..., Any]
LONGEST = 80  # characters of an argument in a message
SECONDS = 20.0  # for all checks of a lesson, which take less than one
INSIDE = "--inside"  # of the process that runs your file


class Wrong(Exception):
    """Why an answer does not pass."""


def numbers(value: Any) -> list[float]:
    try:
        return [float(v) for v in (value if isinstance(value, list | tuple) else [value])]
    except (TypeError, ValueError):
        raise Wrong(f"expected a number or a list of numbers, got {value!r}") from None


def close(found: Any, right: Any) -> bool:
    a, b = numbers(found), numbers(right)
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-6) for x, y in zip(a, b, strict=True))


def call(function: Function, *arguments: Any) -> tuple[Any, str]:
    """Call a function. Returns its result, and the call as text."""
    text = f"{function.__name__}({', '.join(repr(a)[:LONGEST] for a in arguments)})"
    try:
        return function(*arguments), text
    except NotImplementedError:
        raise Wrong(f"{function.__name__} is not written yet") from None
    except (Exception, SystemExit) as error:
        raise Wrong(f"{text} raised {type(error).__name__}: {error}") from None


def expect(function: Function, arguments: tuple[Any, ...], right: Any, hints: Mapping[Any, str], otherwise: str = "") -> None:
    """Compare the result with the right value. `hints` has the values that known mistakes give, each with an explanation."""
    found, text = call(function, *arguments)
    if found is None:
        raise Wrong(f"{text} returned None: is there a `return`?")
    if close(found, right):
        return
    known = next((hint for value, hint in hints.items() if close(found, value)), otherwise)
    raise Wrong(f"{text} gave {found}, expected {right}{f'. {known}' if known else ''}")


def grpo_advantage(advantages: Function) -> Iterator[str]:
    half = "That divides by the standard deviation of n: this lesson asks for n - 1."
    hints = {(0.9998, -0.9998, -0.9998, 0.9998): half, (1.0, -1.0, -1.0, 1.0): half}
    plain = "That is the reward less the mean; it is still to be divided by the standard deviation."
    hints |= {(0.5, -0.5, -0.5, 0.5): plain, (1.0, 0.0, 0.0, 1.0): "Subtract the mean of the group."}
    hints |= {(0.866025, -0.866025, -0.866025, 0.866025): "Add 1e-4 to the standard deviation before you divide."}
    expect(advantages, ([1.0, 0.0, 0.0, 1.0],), [0.865875, -0.865875, -0.865875, 0.865875], hints)
    yield "the reward less the mean, over the standard deviation"
    equal = "A group of equal rewards teaches nothing: 0 for each. Test max == min; a rounded deviation may be 1e-17 and not 0."
    expect(advantages, ([0.1, 0.1, 0.1],), [0.0, 0.0, 0.0], {}, equal)
    expect(advantages, ([1.0, 1.0],), [0.0, 0.0], {}, equal)
    yield "a group of equal rewards has advantages of 0"
    zero = "A response that could not be scored is not one with reward 0: leave it out of mean and deviation."
    hints = {
        (0.5, -0.5, -0.5, 0.5): zero,
        (0.865875, -0.865875, -0.865875, 0.865875): zero,
        (0.865875, -0.865875, 0.0, 0.865875): zero,
    }
    right = [0.577250, -1.154501, 0.0, 0.577250]
    expect(
        advantages, ([1.0, 0.0, None, 1.0],), right, hints, "None is a response without a score: it does not vote and gets 0."
    )
    expect(advantages, ([None, 1.0],), [0.0, 0.0], {}, "With one score there is nothing to compare with: 0.")
    yield "a response without a score does not vote"


def kl_bug(kl: Function) -> Iterator[str]:
    likely, unlikely = math.log(0.5), math.log(0.25)
    hints = {
        0.306853: "That is the estimator as it was given. Which of the two ratios has mean 1 when the tokens come from the policy?",
        0.693147: "That is k1, logprob - reference: unbiased, but below 0 for some tokens. The lesson asks for k3.",
        0.240227: "That is k2, half the square of the difference: it is biased. The lesson asks for k3.",
        -0.193147: "The sign is wrong: KL is never below 0.",
    }
    expect(kl, (likely, unlikely), 0.193147, hints)
    expect(kl, (unlikely, likely), 0.306853, {0.193147: hints[0.306853]})
    expect(kl, (likely, likely), 0.0, {}, "Two equal models have KL 0.")
    yield "k3 of single tokens"
    policy, reference = (0.7, 0.2, 0.1), (0.4, 0.4, 0.2)
    exact = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    mean = sum(p * numbers(call(kl, math.log(p), math.log(q))[0])[0] for p, q in zip(policy, reference, strict=True))
    if not close(mean, exact):
        raise Wrong(
            f"the mean over tokens of the policy is {mean:.4f}, but KL(policy || reference) is {exact:.4f}: it is biased"
        )
    yield "its mean over the policy's tokens is the KL"


HACKS = (
    ("", "an empty response"),
    ("I do not know.", "a response without an answer"),
    ("Answer: 8", "a wrong answer in the right form"),
    ("The answer is in the question.", "a response without a number"),
    ("3+4=7, as everybody knows.\nAnswer: 8", "the right number in the working, another as the answer"),
    ("Answer: 7\nAnswer: 8", "the right answer, then another: the last one counts"),
    ("Answer: 6 or 7 or 8", "several answers in one line"),
    ("\n".join(f"Answer: {n}" for n in range(8)), "all small numbers as answers, the right one last: count the answers"),
    ("Answer: 71", "an answer that begins with the right one"),
    ("Answer: 17", "an answer that ends with the right one"),
    ("Answer: 0.7", "an answer that contains the right one"),
    ("Answer: nan", "not a number"),
    ("Answer: 7" + " 7" * 400, "the right number again and again: bound the length, or allow one number"),
    ("blah " * 2000 + "\nAnswer: 7", "a response of 10,000 characters: a policy learns to be long; bound the length"),
)
RIGHT = (
    ("3+4=7\nAnswer: 7", "working and an answer"),
    ("Answer: 7", "an answer alone"),
    ("Answer:  7 \n", "spaces around the answer"),
    ("First 3+3=6, one more is 7.\nAnswer: 7.", "a full stop after the answer"),
)


def robust_reward(reward: Function) -> Iterator[str]:
    for response, what in RIGHT:
        paid = numbers(call(reward, "3+4=", response, "7")[0])[0]
        if not 0.9 <= paid <= 1:
            raise Wrong(f"pays {paid:g} for {what} ({response[:40]!r}); a right answer is worth 0.9 to 1")
    yield "right answers are paid"
    for response, what in HACKS:
        paid = numbers(call(reward, "3+4=", response, "7")[0])[0]
        if not 0 <= paid <= 0.2:
            raise Wrong(f"pays {paid:g} for {what} ({response[:40]!r}); at most 0.2, please")
    yield f"{len(HACKS)} hacks are not paid"
    for response, answer in (("3+4=7\nAnswer: 7", "8"), ("Answer: -3", "3"), ("Answer: 3", "-3")):
        paid = numbers(call(reward, "a question", response, answer)[0])[0]
        if not 0 <= paid <= 0.2:
            raise Wrong(f"pays {paid:g} for {response!r} where the answer is {answer}")
    paid = numbers(call(reward, "2-5=", "2-5 is below 0.\nAnswer: -3", "-3")[0])[0]
    if not 0.9 <= paid <= 1:
        raise Wrong(f"pays {paid:g} for the right answer -3: numbers may be negative")
    yield "other answers, and negative ones"


def gae(function: Function) -> Iterator[str]:
    rewards, values = [0.0, 0.0, 1.0], [0.5, 0.6, 0.7]
    hints = {
        (0.1, 0.1, 0.3): "That is delta, the error of one step; add gamma * lam times the advantage of the next token.",
        (0.5, 0.4, 0.3): "That is the return less the value, which is right for lam = 1 alone.",
        (1.0, 1.0, 1.0): "That is the return: subtract the value of each token.",
        (1.2, 1.2, 1.0): "delta = r + gamma * V(next) - V: the value of the token itself is missing.",
        (0.4, 0.6, 1.0): "The last token has no next one: the value after it is 0.",
        (0.725, 0.85, 1.0): "These are returns, advantage + value; the lesson asks for the advantages.",
    }
    expect(function, (rewards, values, 1.0, 0.5), [0.225, 0.25, 0.3], hints, "Go from the last token to the first.")
    yield "gamma 1, lambda 0.5"
    hints = {
        (0.256, 0.27, 0.3): "The advantage of the next token is weighted by gamma * lam; gamma is missing.",
        (0.31, 0.3, 0.3): "The advantage of the next token is weighted by gamma * lam; lam is missing.",
    }
    expect(function, (rewards, values, 0.9, 0.8), [0.21712, 0.246, 0.3], hints, "gamma also weighs V(next) in delta.")
    expect(function, (rewards, values, 1.0, 1.0), [0.5, 0.4, 0.3], {}, "With lam = 1 it is the return less the value.")
    expect(function, ([], [], 1.0, 1.0), [], {}, "An empty response has no advantages.")
    yield "gamma below 1, lambda 1, an empty response"


def dpo_loss(function: Function) -> Iterator[str]:
    hints = {
        0.201413: "beta is missing.",
        0.644397: "That is without the reference: DPO compares how much each log-prob has moved from it.",
        0.770957: "Chosen and rejected are swapped.",
        0.537430: "That is sigmoid(margin), the probability of the choice; the loss is its negative logarithm.",
        -0.620957: "That is log sigmoid(margin): a loss is its negative.",
        0.668460: "The log-probs of the reference are subtracted, not added.",
        0.15: "That is the margin; the loss is -log sigmoid of it.",
    }
    expect(function, (-2.0, -3.0, -2.5, -2.0, 0.1), 0.620957, hints)
    expect(function, (-4.0, -9.0, -4.0, -9.0, 0.3), math.log(2), {}, "At the start the policy is the reference: log 2.")
    yield "-log sigmoid of the margin"
    stable = "exp overflows: -log sigmoid(x) = max(-x, 0) + log1p(exp(-|x|))"
    try:
        expect(function, (-8000.0, 0.0, 0.0, 0.0, 0.1), 800.0, {}, stable)
        expect(function, (0.0, -8000.0, 0.0, 0.0, 0.1), 0.0, {}, stable)
    except Wrong as wrong:
        raise Wrong(f"{wrong}" if stable in str(wrong) else f"{wrong}. {stable}") from None
    yield "margins of 800 in either direction"


def mask(function: Function) -> Iterator[str]:
    logprobs, masks = [[-1.0, -2.0, -3.0], [-4.0, -5.0]], [[0, 1, 1], [0, 1]]
    hints = {
        0.3: "The mask is not used: the prompt is trained on.",
        0.5: "That divides by all tokens; divide by those that the mask has, or a long prompt makes the step small.",
        0.0: "That is the mean of the sequences' means; the lesson asks for the mean over all tokens of the batch.",
        -0.833333: "The sign is wrong: a loss falls when tokens of a positive advantage get more likely.",
        2.5: "That is the sum; divide by the number of tokens with loss.",
    }
    expect(function, (logprobs, [1.0, -0.5], masks), 2.5 / 3, hints)
    yield "prompts carry no loss"
    tool = "What a tool said in the middle of a response is not the model's: the mask is 0 there."
    expect(function, ([[-1.0, -50.0, -3.0]], [1.0], [[1, 0, 1]]), 2.0, {18.0: tool, 2.0 / 1.5: tool}, tool)
    yield "text of a tool in the middle"
    expect(function, ([[-1.0]], [1.0], [[0]]), 0.0, {}, "Without any token that carries loss it is 0.")
    choose = "0 * nan is nan: leave masked tokens out, do not multiply them by 0."
    expect(function, ([[math.nan, -2.0]], [1.0], [[0, 1]]), 2.0, {}, choose)
    yield "no token at all, and nan under the mask"


LESSONS: dict[str, tuple[str, Callable[[Function], Iterator[str]]]] = {
    "grpo_advantage": ("advantages", grpo_advantage),
    "kl_bug": ("kl", kl_bug),
    "robust_reward": ("reward", robust_reward),
    "gae": ("gae", gae),
    "dpo_loss": ("dpo_loss", dpo_loss),
    "mask": ("policy_loss", mask),
}


def check(name: str, file: Path) -> Iterator[str]:
    """Yield a line for each check that passes. Raises Wrong at the first that does not."""
    wanted, checks = LESSONS[name]
    try:
        found = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        raise Wrong(f"{file} cannot be run: {type(error).__name__}: {error}") from None
    if not callable(found.get(wanted)):
        raise Wrong(f"{file} has no function {wanted}")
    yield from checks(found[wanted])


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in LESSONS or not Path(words[1]).is_file():
        if len(words) == 2:
            print(f"no lesson {words[0]!r}" if words[0] not in LESSONS else f"no file {words[1]}", file=sys.stderr)
        print(f"python lessons/check.py NAME FILE; lessons: {', '.join(LESSONS)}", file=sys.stderr)
        return 2
    try:
        for line in check(words[0], Path(words[1])):
            print(f"ok     {line}", flush=True)
    except Wrong as wrong:
        print(f"wrong  {wrong}")
        return 1
    print(f"{words[0]} is solved")
    return 0


def bounded(words: list[str]) -> int:
    """Run the check in another process, which is ended after a time limit."""
    try:
        return subprocess.run([sys.executable, __file__, INSIDE, *words], timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"wrong  the check that comes next did not end within {SECONDS:g} s; look for an endless loop in {words[-1]}")
        return 1


if __name__ == "__main__":
    inside = sys.argv[1:2] == [INSIDE]
    raise SystemExit(main(sys.argv[2:]) if inside else bounded(sys.argv[1:]))
