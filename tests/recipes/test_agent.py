"""The recipe of an agent with a Python interpreter: its stages in both sizes, and one episode as a real model writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sampler_for_tests import ScriptedSampler, completion
from serving_for_tests import TOOL_TEMPLATE

from posttrain import cli
from posttrain.data.calls import calls
from posttrain.data.demonstrations import from_task
from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.evals.evaluate import Evaluation
from posttrain.models.tiny import character_tokenizer
from posttrain.recipes.agent import agent
from posttrain.stages.evaluate import EvaluateStage, summarise
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.tool_use import ToolUse
from posttrain.types import Problem, Sampling

QWEN = (
    "<|system|>{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> <tool_call>{% endif %}<|end|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response><|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_both_sizes_compare_the_same_problems_without_and_with_the_tool() -> None:
    for recipe, more in ((agent(), []), (agent("m", "d", demonstrations=0), []), (agent("m", "d"), ["untrained"])):
        stages = {s.name: s for s in recipe.stages if isinstance(s, EvaluateStage)}
        (rl,) = (s for s in recipe.stages if isinstance(s, RLStage))
        assert list(stages) == ["alone", *more, "before", "after"] and (recipe.before, recipe.after) == ("before", "after")
        assert isinstance(rl.task, ToolUse) and type(stages["alone"].task) is type(rl.task.task)
        assert stages["before"].task == stages["after"].task == rl.task
        assert stages["before"].model == rl.model and stages["after"].model == "rl"
        assert (stages["alone"].model == rl.model) != bool(more), "with demonstrations RL begins at what SFT made"
        assert len({(s.problems, s.sampling) for s in stages.values()}) == 1


@pytest.mark.parametrize(
    ("turns", "value", "outcome"),
    [
        (
            ['```json\n{\n "name": "python",\n "arguments": {"code": "n = 16 - 3 - 4\nn * 2"}\n}\n```', "So 18.0"],
            1.0,
            "correct",
        ),
        (["\\boxed{18}"], 1.0, "correct"),
        (['\\boxed{18} <tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'] * 4, 0.0, "turn limit"),
    ],
)
def test_the_number_of_the_last_turn_is_paid_and_nothing_else(turns: list[str], value: float, outcome: str) -> None:
    (stage,) = (s for s in agent("m", "d", calls="auto").stages if isinstance(s, RLStage))
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = QWEN
    end = tokenizer.eos_token_id
    sampler = ScriptedSampler(lambda r: completion([*tokenizer(turns[r.turn], add_special_tokens=False)["input_ids"], end]))
    problem = Problem("p", "16 eggs, 3 eaten, 4 baked, 2 dollars each. How much?", "18")
    (group,) = rollout_groups(stage.task, sampler, Decoder(tokenizer), [problem], 1, Sampling(320), 0)
    (rollout,) = group.rollouts
    assert (rollout.score.value, rollout.score.outcome) == (value, outcome)
    if len(turns) == 2:
        assert rollout.counts == summarise(Evaluation((group,), ()))["counts"] == {"tool/calls": 1.0}
        assert tokenizer.decode(sampler.requests[1].ids) == (
            "<|user|><tool_response>18\n</tool_response><|end|><|user|>Give the final answer in \\boxed{}.<|end|><|assistant|>"
        )


WORKED = "In May 48/2 = <<48/2=24>>24.\nIn all 48 + 24 = <<48+24=72>>72.\n#### 72"


def test_demonstrations_call_the_tool_as_the_template_does_and_carry_loss_on_what_the_policy_says(tmp_path: Path) -> None:
    for split, questions in (("train", ["48 in April, half in May?", "How?"]), ("test", ["What?"])):
        rows = [{"question": q, "answer": WORKED if "48" in q else "So it is.\n#### 7"} for q in questions]
        (tmp_path / f"gsm8k-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = TOOL_TEMPLATE
    examples = []
    for how in ("auto", "tag"):
        (stage,) = (s for s in agent("m", str(tmp_path), calls=how).stages if isinstance(s, SFTStage))
        (source,) = stage.data
        assert source.task is not None
        (example,) = from_task(source.task, tokenizer, {0: 2})  # the other problem has no notes to make a program of
        examples.append(example)
    example, tagged = examples
    learned = tokenizer.decode(example.ids[example.mask])
    code = "# In May step1.\\nstep1 = 48/2\\n# In all step2.\\nstep2 = 48+step1\\nprint(step2)"
    call = f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'
    assert learned == f"{call}<|end|>\\boxed{{72}}<|end|>"
    whole = tokenizer.decode(example.ids)
    assert '"name": "python", "description"' in whole and f"{call}<|end|><|user|>72.0\n<|end|>" in whole
    assert [c.arguments for c in calls("hermes", learned, ("python",))] == [{"code": code.replace("\\n", "\n")}]
    learned, whole = tokenizer.decode(tagged.ids[tagged.mask]), tokenizer.decode(tagged.ids)
    code = code.replace("\\n", "\n")
    assert learned == f"<python>\n{code}\n</python><|end|>\\boxed{{72}}<|end|>"
    assert "- python(code: string): Run Python." in whole and "<|user|><output>\n72.0\n\n</output><|end|>" in whole
    assert [c.arguments for c in calls("tag", learned, ("python",))] == [code]


def test_the_toy_runs_and_the_real_size_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shorter = ["pretrain.steps=4", "steps=3", "prompts=2", "group=4", "problems=4", "seconds=0.001", "threads=1"]
    assert cli.main(["run", "agent", f"out={tmp_path / 'run'}", *shorter]) == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open() if '"rl"' in line] == [1]
    for split, first in (("train", 1), ("test", 9)):
        rows = [
            {"question": f"Tom has {n} apples and buys {n}. How many?", "answer": f"#### {2 * n}"}
            for n in range(first, first + 8)
        ]
        (tmp_path / f"gsm8k-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["plan", "agent", f"model={tmp_path / 'run' / 'export'}", f"data={tmp_path}", "demonstrations=0"]) == 0
    assert "alone" in capsys.readouterr().out
