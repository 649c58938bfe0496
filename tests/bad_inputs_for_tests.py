"""The table of bad inputs that tests/cli/test_bad_inputs.py goes through.

A case is a pipeline (a list of stages, as a YAML file has them) or the words of a command, the files that differ from the good ones
below, and fragments of the line that refuses it. A late case has a good stage first: its mistake is in a later one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
PAIR = {"prompt": "hi", "chosen": "ho", "rejected": "no"}
GOOD: dict[str, str | bytes] = {
    "rows.jsonl": lines(*[CHAT] * 3),
    "pairs.jsonl": lines(*[PAIR | {"prompt": f"hi {n}"} for n in range(12)]),
    "labels.jsonl": lines(*[{"prompt": f"hi {n}", "completion": "ho", "label": n % 2 == 0} for n in range(12)]),
    "prompts.jsonl": lines(*[{"prompt": f"say {n}", "answer": str(n), "style": "calm"} for n in range(20)]),
    "questions.jsonl": lines(*[{"question": f"what is {n}+1?", "answer": str(n + 1)} for n in range(40)]),
    "mine.py": (
        "import math\nLIMIT = 3\n"
        "def short(response): return float(len(response) < LIMIT)\n"
        "def styled(response, style): return 1.0\n"
        "def toned(response, tone): return 1.0\n"
        "def limited(prompt, response, answer, limit=3): return 1.0\n"
    ),
    "broken.py": "def short(response:\n    return 1\n",
    "raises.py": "import json\nraise RuntimeError('no licence')\n",
    "rubric.txt": "be kind",
}

# stages that are right as they stand
SFT = {"stage": "sft", "name": "sft", "model": "tiny:nano", "data": [{"file": "rows.jsonl"}], "steps": 2}
DPO = {"stage": "preference", "name": "dpo", "model": "tiny:nano", "data": ["pairs.jsonl"], "steps": 2}
KTO = DPO | {"name": "kto", "data": ["labels.jsonl"], "algorithm": {"name": "kto"}}
RM = {"stage": "reward_model", "name": "rm", "model": "tiny:nano", "data": ["pairs.jsonl"], "steps": 2}
ARITHMETIC = {"name": "arithmetic", "level": 1}
PROMPTS = {"name": "prompts", "file": "prompts.jsonl", "reward": "length", "held_out": 2}
QUESTIONS = {"name": "jsonl", "file": "questions.jsonl"}
RL = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": ARITHMETIC, "steps": 2, "prompts": 2, "evaluate_every": 0}
EVAL = {"stage": "evaluate", "name": "eval", "model": "tiny:nano", "task": ARITHMETIC, "problems": 4}
SAMPLE = {"stage": "sample", "name": "samples", "model": "tiny:nano", "task": ARITHMETIC, "prompts": 4}
COMPARE = {"stage": "comparisons", "name": "compared", "model": "tiny:nano", "task": ARITHMETIC, "prompts": 4}
MINE = {"stage": "mine", "name": "mined", "model": "tiny:nano", "task": ARITHMETIC, "prompts": 4}
VERSUS = {"stage": "versus", "name": "versus", "model": "tiny:nano", "against": "tiny:nano", "task": ARITHMETIC, "problems": 4}
BEST = {"stage": "best", "name": "best", "models": ["sft"], "measured": ["eval"]}
TOOLS = {"name": "tool_use", "task": ARITHMETIC, "tools": ["calculator"]}
SILENT = 'def silent(x: int) -> int:\n    return x\n\n\ndef untyped(x):\n    """Say x."""\n    return x\n'
BARE = "from posttrain.tasks.base import Task\nclass Bare(Task): pass\n"
LIVE = "from posttrain.tasks.arithmetic import Arithmetic\n\n\nclass Live(Arithmetic):\n    resettable = False\n"
CURVE = {"stage": "overoptimisation", "name": "curve", "model": "tiny:nano", "task": ARITHMETIC, "trained": ["rl"]}
AGREE = {"stage": "agreement", "name": "agree", "data": "pairs.jsonl", "judge": {"model": "tiny:nano"}}


@dataclass(frozen=True)
class Case:
    """`of` is a pipeline, or a whole file or command where it is a text; `said` are fragments of the line; `files` are written besides
    the good ones, or in their place. Of a command alone there is no plan."""

    id: str
    of: Any
    said: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    plan: bool = True


def case(name: str, of: Any, *said: str, settings: Sequence[str] = (), plan: bool = True, **files: str | bytes) -> Case:
    """A case whose files are given as rows_jsonl=TEXT."""
    named = {".".join(key.replace("__", "/").rsplit("_", 1)): text for key, text in files.items()}
    return Case(name, of, said, named, tuple(settings), plan)


def late(name: str, stage: Any, *said: str, **more: Any) -> Case:
    """The same stage after one that would train."""
    return case(f"late-{name}", [SFT | {"name": "first"}, stage], *said, **more)


def data_cases(kind: str, stage: dict[str, Any], file: str, row: dict[str, Any]) -> list[Case]:
    """What can be wrong with a file of rows, whatever they are."""
    good, name, at = lines(row), stage["name"], file

    def of(what: str, *said: str, **more: Any) -> Case:
        return case(f"{kind}-{what}", [stage], name, *said, **more)

    key = file.replace(".", "_")
    return [
        of("empty-file", f"{at} is empty", **{key: ""}),
        of("blank-lines-only", f"{at} is empty", **{key: "\n\n"}),
        of("not-json", f"{at} line 2: not JSON", **{key: good + "{'a': 1}\n"}),
        of("cut-short", f"{at} line 3: not JSON", **{key: good * 2 + good[:9]}),
        of("list-row", f"{at} line 1: expected a JSON object, not list", **{key: "[1]\n"}),
        of("number-row", f"{at} line 2: expected a JSON object, not int", **{key: good + "7\n"}),
        of("not-utf8", f"{at} line 2: not UTF-8", **{key: good.encode() + b'{"a": "\xff"}\n'}),
        of(
            "half-a-character",
            f"{at} line 1: half a character",
            **{key: good.replace("hi", "\\ud83d").replace("say", "\\ud83d").replace("what", "\\ud83d")},
        ),
        of(
            "wrong-fields",
            f"{at} line 2",
            {"sft": "has no format that is read here", "dpo": "no chosen", "prompts": "it has"}[kind],
            **{key: good + '{"colour": "red"}\n'},
        ),
    ]


SFT_ROWS = [
    ("message-no-role", {"messages": [{"content": "hi"}]}, "message 0 has role None"),
    ("message-role", {"messages": [{"role": "robot", "content": "hi"}]}, "role 'robot'; expected one of system"),
    ("message-no-content", {"messages": [{"role": "user"}]}, "message 0 has no content"),
    ("messages-text", {"messages": "hi"}, "expected a list of messages"),
    ("messages-empty", {"messages": []}, "expected a list of messages"),
    ("message-is-text", {"messages": ["hi"]}, "message 0 is not an object"),
    ("prompt-alone", {"prompt": "hi"}, "nearest is prompt_completion", "add completion"),
    ("completion-alone", {"completion": "hi"}, "nearest is prompt_completion", "add prompt"),
    ("text-number", {"text": 5}, "text is not a string"),
    ("control-token", {"prompt": "<|end|>", "completion": "x"}, "control token '<|end|>'", "rewrite it"),
    ("image", {"messages": CHAT["messages"], "image": "x.png"}, "the column image would be dropped"),
    ("tools-text", {"messages": CHAT["messages"], "tools": "{"}, "tools: not JSON"),
]
PAIR_ROWS = [
    ("no-rejected", {"prompt": "hi", "chosen": "ho"}, "rejected"),
    ("chosen-number", {"prompt": "hi", "chosen": 1, "rejected": "no"}, "chosen and rejected must both"),
    ("no-prompt", {"chosen": "ho", "rejected": "no"}, "no prompt"),
    ("empty-prompt", {"prompt": "", "chosen": "ho", "rejected": "no"}, "no prompt, or an empty one"),
    ("margin-text", PAIR | {"margin": "big"}, "margin must be a finite number"),
    ("margin-nan", PAIR | {"margin": float("nan")}, "NaN is not JSON"),
    ("demonstration", {"prompt": "hi", "completion": "ho"}, "use the stage sft for it"),
]

DATA = [
    *data_cases("sft", SFT, "rows.jsonl", CHAT),
    *data_cases("dpo", DPO, "pairs.jsonl", PAIR),
    *data_cases("prompts", RL | {"task": PROMPTS}, "prompts.jsonl", {"prompt": "say x"}),
    *(
        case(f"row-{name}", [SFT], "sft: rows.jsonl line 2", *said, rows_jsonl=lines(CHAT, row))
        for name, row, *said in SFT_ROWS
    ),
    *(
        case(f"pair-{name}", [DPO], "dpo: pairs.jsonl line", *said, pairs_jsonl=lines(row, row))
        for name, row, *said in PAIR_ROWS
    ),
    case(
        "sft-broken-gzip",
        [SFT | {"data": [{"file": "rows.jsonl.gz"}]}],
        "rows.jsonl.gz",
        "cannot read",
        **{"rows_jsonl.gz": b"no gzip"},
    ),
    case(
        "sft-short-gzip",
        [SFT | {"data": [{"file": "rows.jsonl.gz"}]}],
        "rows.jsonl.gz",
        "cannot read",
        **{"rows_jsonl.gz": gzip.compress(lines(*[CHAT] * 99).encode())[:60]},
    ),
    case("sft-json-object", [SFT | {"data": [{"file": "rows.json"}]}], "rows.json line 1", rows_json='{"rows":\n[]}'),
    case(
        "sft-csv-cells",
        [SFT | {"data": [{"file": "rows.csv"}]}],
        "rows.csv line 3: expected 2 cells",
        rows_csv="prompt,completion\na,b\nc\n",
    ),
    case("sft-parquet", [SFT | {"data": [{"file": "rows.parquet"}]}], "rows.parquet", rows_parquet=b"PAR0"),
    case("sft-all-too-long", [SFT | {"max_length": 3}], "sft: no example is left to train on", "max_length=3"),
    case("sft-no-answers", [SFT], "sft: ", "no assistant turn", rows_jsonl=lines({"messages": CHAT["messages"][:1]})),
    case(
        "sft-longer-than-model",
        [SFT | {"max_length": 5000}],
        "2048 positions; lower sft.max_length",
        rows_jsonl=lines({"prompt": "x" * 3000, "completion": "y"}),
    ),
    case("dpo-longer-than-model", [DPO | {"max_length": 5000}], "2048 positions; lower dpo.max_length"),
    case(
        "dpo-all-equal",
        [DPO],
        "dpo: pairs.jsonl: no row is left to train on",
        "equal",
        pairs_jsonl=lines(PAIR | {"rejected": "ho"}),
    ),
    case(
        "dpo-unpaired", [DPO | {"data": ["labels.jsonl"]}], "dpo: labels.jsonl holds rows of kind unpaired", "learns from pair"
    ),
    case(
        "kto-all-good",
        [KTO],
        "kto: all 1 labelled responses to train on are good",
        labels_jsonl=lines({"prompt": "a", "completion": "b", "label": True}),
    ),
    case(
        "kto-label-text",
        [KTO],
        "kto: labels.jsonl line 1: label must be true or false, or 1 or 0",
        labels_jsonl=lines({"prompt": "a", "completion": "b", "label": "yes"}),
    ),
    case(
        "rm-rows-of-steps",
        [RM | {"algorithm": {"name": "process_reward_model"}}],
        "rm: pairs.jsonl holds rows of kind pair",
        "learns from steps",
    ),
    case(
        "rm-one-prompt",
        [RM | {"min_accuracy": 0.5}],
        "rm: min_accuracy is judged on held-out data, and one prompt leaves none",
        pairs_jsonl=lines(PAIR),
    ),
    case("agreement-rows", [AGREE | {"data": "labels.jsonl"}], "labels.jsonl line 1", "pairs are needed"),
    case(
        "held-out-rows",
        [DPO | {"held_out_data": ["rows.jsonl"]}],
        "dpo: rows.jsonl line 1: a row of messages is one of conversations; use the stage sft",
    ),
    case(
        "evaluate-text",
        [EVAL | {"text": [{"file": "pairs.jsonl"}]}],
        "eval: pairs.jsonl line 1: a row of prompt, chosen, rejected is one of pairs; use the stage preference",
    ),
    case(
        "pretraining",
        [RL | {"algorithm": {"name": "ppo", "ptx": 1.0}, "pretraining": [{"file": "pairs.jsonl"}]}],
        "rl: pairs.jsonl line 1",
    ),
    case("problems-of-others", [RL | {"problems": "rows.jsonl"}], "rl: rows.jsonl line 1: no id", "give a mine stage"),
    case("mine-again", [MINE | {"again": "rows.jsonl"}], "mined: rows.jsonl line 1: no id"),
    case(
        "question-empty",
        [RL | {"task": QUESTIONS}],
        "questions.jsonl line 1",
        "'question' is empty",
        questions_jsonl=lines({"question": "", "answer": "1"}),
    ),
    case(
        "question-missing",
        [RL | {"task": QUESTIONS}],
        "questions.jsonl line 2: no field 'question'; it has answer; the task's key question names the field",
        questions_jsonl=lines({"question": "a", "answer": "1"}, {"answer": "1"}),
    ),
    case(
        "answer-missing",
        [RL | {"task": QUESTIONS}],
        "it has question; the task's key answer names the field; rows without answers are for the task prompts",
        questions_jsonl=lines({"question": "a"}),
    ),
    case(
        "answer-after",
        [RL | {"task": QUESTIONS | {"answer_after": "####"}}],
        "questions.jsonl line 1: '####' is not in the field 'answer'",
    ),
    case(
        "answer-unpaid",
        [RL | {"task": QUESTIONS}],
        "the reward math does not pay the gold answers",
        questions_jsonl=lines(*[{"question": f"q{n}", "answer": " "} for n in range(40)]),
    ),
    case("question-column", [RL | {"task": PROMPTS | {"question": "asked"}}], "prompts.jsonl line 1: no field 'asked'"),
    case(
        "test-leaks", [RL | {"task": QUESTIONS | {"test_file": "questions.jsonl"}}], "questions.jsonl: 40 questions are also in"
    ),
]

FILES = [
    case(
        "sft-no-file",
        [SFT | {"data": [{"file": "row.jsonl"}]}],
        "sft.data: there is no file row.jsonl in",
        "did you mean 'rows.jsonl'?",
    ),
    case(
        "sft-directory",
        [SFT | {"data": [{"file": "folder"}]}],
        "sft.data: folder is a directory; name a file in it",
        folder__x_txt="",
    ),
    case("dpo-no-file", [DPO | {"data": ["nothing.jsonl"]}], "dpo.data: there is no file nothing.jsonl"),
    case(
        "dpo-held-out-no-file",
        [DPO | {"held_out_data": ["nothing.jsonl"]}],
        "dpo.held_out_data: there is no file nothing.jsonl",
    ),
    case("task-no-file", [RL | {"task": QUESTIONS | {"file": "question.jsonl"}}], "there is no data file question.jsonl", "rl"),
    case("task-no-test-file", [RL | {"task": QUESTIONS | {"test_file": "test.jsonl"}}], "there is no data file test.jsonl"),
    case("task-directory", [RL | {"task": PROMPTS | {"file": "folder"}}], "folder", "rl", folder__x_txt=""),
    case("agreement-no-file", [AGREE | {"data": "nothing.jsonl"}], "agree.data: there is no file nothing.jsonl"),
    *(
        case(f"tools-{name}", [RL | {"task": TOOLS | {"tools": [tool]}}], *said, mine_py=SILENT)
        for name, tool, *said in (
            ("unknown", "calculater", "unknown tool 'calculater'; did you mean 'calculator'?"),
            ("key", {"name": "python", "walls": 3}, "walls"),
            ("range", {"name": "python", "wall": 0}, "wall must be in (0, 600], not 0"),
            ("file", "mine.py:none", "none"),
            ("no-docstring", "mine.py:silent", "tool silent: the model reads its docstring; give it one"),
            ("no-type", "mine.py:untyped", "tool untyped: the parameter x needs a type hint"),
        )
    ),
    case("hint-without-answer", [SAMPLE | {"hint": "think"}], "samples: hint='think' has no {answer} in it"),
    case("hint-too-long", [SAMPLE | {"hint": "1" * 3000 + "{answer}"}], "tiny:nano has 2048 positions"),
    case("hint-with-labels", [SAMPLE | {"hint": "{answer}", "labels": True}], "samples: an answer that was given with a hint"),
    case("turns-as-data", [SAMPLE | {"task": TOOLS}], "samples: the episodes of this task have several turns"),
    case("tools-none", [RL | {"task": TOOLS | {"tools": []}}], "stages[0].task: tool_use: give at least one tool"),
    case("tools-twice", [RL | {"task": TOOLS | {"task": TOOLS}}], "stages[0].task: tool_use: the task has episodes of its own"),
    case(
        "tools-limit",
        [RL | {"task": TOOLS | {"max_turns": 0}}],
        "stages[0].task: tool_use: max_turns must be at least 1, not 0",
    ),
    *(
        case(
            f"no-reset-{algorithm}",
            [RL | {"task": {"name": "live.py:Live"}, "algorithm": {"name": algorithm, "group": 2}}],
            "this task cannot be reset to the same start",
            "use ppo, whose baseline is a critic, or reinforce",
            live_py=LIVE,
        )
        for algorithm in ("grpo", "rloo", "raft", "online_dpo")
    ),
    case("problems-no-file", [RL | {"problems": "nothing.jsonl"}], "rl.problems: there is no file nothing.jsonl"),
    case("rubric-no-file", [AGREE | {"judge": {"model": "tiny:nano", "rubric": "rubrik.txt"}}], "agree", "rubrik.txt"),
    case(
        "reward-rubric-no-file",
        [RL | {"reward": {"name": "judge", "model": "tiny:nano", "rubric": "rubrik.txt"}}],
        "rl",
        "rubrik.txt",
    ),
    case(
        "gsm8k-no-folder",
        [RL | {"task": {"name": "gsm8k", "data": "nothing"}}],
        "rl",
        "gsm8k: there is no folder or file nothing",
    ),
    case(
        "gsm8k-no-files", [RL | {"task": {"name": "gsm8k", "data": "folder"}}], "gsm8k: folder holds none of", folder__x_txt=""
    ),
]

MODELS = [
    case("model-none", [SFT | {"model": ""}], "sft", "model"),
    case("model-size", [SFT | {"model": "tiny:nan"}], "sft.model: unknown tiny model size 'nan'; did you mean 'nano'"),
    case("model-word", [SFT | {"model": "qwen"}], "sft.model: there is no model 'qwen'", "org/name"),
    case(
        "model-no-directory", [SFT | {"model": "./nothing"}], "sft.model: there is no model directory ./nothing; check the path"
    ),
    case("model-file", [SFT | {"model": "rows.jsonl"}], "sft.model: rows.jsonl is a file; give the model directory"),
    case("model-no-gguf", [SFT | {"model": "nothing.gguf"}], "sft.model: there is no GGUF file nothing.gguf"),
    case("model-empty-directory", [SFT | {"model": "folder"}], "sft.model: folder has no config.json", folder__x_txt=""),
    case("model-config-json", [SFT | {"model": "folder"}], "config.json is not valid JSON", folder__config_json="{"),
    case("model-config-type", [SFT | {"model": "folder"}], "names no model_type", folder__config_json="{}"),
    case(
        "model-no-weights", [SFT | {"model": "folder"}], "folder has no weights", folder__config_json='{"model_type": "llama"}'
    ),
    case(
        "model-adapter", [SFT | {"model": "folder"}], "folder holds a LoRA adapter; merge it", folder__adapter_config_json="{}"
    ),
    case(
        "model-pickled",
        [SFT | {"model": "folder"}],
        "has only pickled weights",
        folder__config_json='{"model_type": "llama"}',
        folder__pytorch_model_bin="x",
    ),
    case(
        "model-corrupt",
        [SFT | {"model": "folder"}],
        "model.safetensors is corrupt",
        folder__config_json='{"model_type": "llama"}',
        folder__model_safetensors="x",
    ),
    case("reference-none", [DPO | {"reference": "nothing"}], "dpo.reference: there is no model 'nothing'"),
    case("critic-none", [RL | {"algorithm": {"name": "ppo"}, "critic": "nothing"}], "rl.critic: there is no model 'nothing'"),
    case("reward-model-none", [RL | {"reward": {"name": "models", "models": ["rm"]}}], "rl.reward: there is no model 'rm'"),
    case(
        "reward-model-is-language-model",
        [RL | {"reward": {"name": "models", "models": ["./model"]}}],
        "rl.reward: ./model is a language model, no reward model",
        "reward_model stage",
    ),
    case("reward-model-tiny", [RL | {"reward": {"name": "models", "models": ["tiny:nano"]}}], "rl.reward", "tiny:nano"),
    case("against-none", [VERSUS | {"against": "nothing"}], "versus.against: there is no model 'nothing'"),
    case("judge-none", [AGREE | {"judge": {"model": "nothing"}}], "agree.judge: there is no model 'nothing'"),
    case(
        "no-chat-template",
        [SFT | {"model": "./plain"}],
        "sft: rows.jsonl line 1: this tokenizer has no chat template",
        "put chat_template.jinja",
    ),
    case(
        "no-chat-template-turns",
        [RL | {"model": "./plain", "task": {"name": "calculator"}}],
        "rl.task: this tokenizer has no chat template",
        "put chat_template.jinja",
    ),
    case(
        "other-vocabulary",
        [DPO | {"reference": "./letters"}],
        "dpo: ./letters has another vocabulary",
        "use models of one family",
    ),
    case(
        "prompts-too-long",
        [RL | {"model": "./model", "sampling": {"max_new_tokens": 4000}}],
        "rl.task: problem train/",
        "prompt and response may be",
        "2048 positions; lower max_new_tokens",
    ),
    case(
        "eval-too-long",
        [EVAL | {"sampling": {"max_new_tokens": 4000, "temperature": 0}}],
        "eval.task: problem ",
        "prompt and response may be",
        "2048 positions",
    ),
]

STAGES = [
    case("no-stages", [], "a recipe needs at least one stage"),
    case("duplicate-names", [SFT, SFT], "stage names must differ: sft, sft"),
    case("name-of-a-path", [SFT | {"name": "../sft"}], "stage name '../sft' is not a plain name"),
    case("no-kind", [{"name": "sft"}], "stages[0]: no 'stage' says which stage it is"),
    case("unknown-kind", [SFT | {"stage": "stf"}], "unknown stage 'stf'; did you mean 'sft'"),
    case("stage-is-text", ["sft"], "stages[0]: give a stage by its name or settings, not str"),
    case("algorithm-as-stage", [SFT | {"stage": "grpo"}], "grpo is an algorithm; write stage: rl with algorithm: grpo"),
    case("pairs-as-stage", [SFT | {"stage": "dpo"}], "dpo is an algorithm; write stage: preference with algorithm: dpo"),
    case("no-model", [{k: v for k, v in SFT.items() if k != "model"}], "stages[0]: missing model"),
    case("no-task", [{k: v for k, v in RL.items() if k != "task"}], "stages[0]: missing task"),
    case("no-data", [{k: v for k, v in SFT.items() if k != "data"}], "sft: a supervised stage needs data"),
    case("own-model", [SFT | {"model": "sft"}], "sft.model: 'sft' runs at the same time or later"),
    case("later-model", [SFT | {"model": "rl"}, RL], "sft.model: 'rl' runs at the same time or later", "none before it"),
    case("model-of-evaluation", [EVAL, SFT | {"model": "eval"}], "sft.model: the stage 'eval' leaves no model"),
    case(
        "data-of-training",
        [SFT | {"name": "first"}, SFT | {"data": [{"file": "first"}]}],
        "sft.data: the stage 'first' leaves no data",
    ),
    case("mistyped-model", [SFT, RL | {"model": "stf"}], "rl.model: there is no model 'stf'", "did you mean 'sft'?"),
    case(
        "mistyped-data",
        [SAMPLE, SFT | {"data": [{"file": "sample"}]}],
        "sft.data: there is no file sample",
        "did you mean 'samples'?",
    ),
    case("later-data", [SFT | {"data": [{"file": "samples"}]}, SAMPLE], "sft.data: 'samples' runs at the same time or later"),
    case("as-long-as", [SFT | {"as_long_as": "rll"}], "sft.as_long_as: no stage is called 'rll'"),
    case("as-long-as-later", [SFT | {"as_long_as": "rl"}, RL], "sft.as_long_as: 'rl' runs at the same time or later"),
    case(
        "best-measured",
        [SFT, EVAL, BEST | {"measured": ["evl"]}],
        "best.measured: no stage is called 'evl'; did you mean 'eval'?",
    ),
    case("best-models", [EVAL, BEST], "best.models: there is no model 'sft'"),
    case("best-counts", [SFT, EVAL, BEST | {"measured": []}], "best: give as many stages that measured as models"),
    case("curve-trained", [CURVE], "curve.trained: no stage is called 'rl'"),
    case("compared-before", [COMPARE | {"before": "other"}], "compared.before: there is no file other"),
    case(
        "dpo-data-stage",
        [COMPARE, DPO | {"data": ["compare"]}],
        "dpo.data: there is no file compare",
        "did you mean 'compared'?",
    ),
    case("rounds-text", [{"rounds": "three", "stages": [SFT]}], "stages[0].rounds"),
    case("rounds-key", [{"rounds": 2, "stage": [SFT]}], "unknown key in stages[0]: 'stage'; did you mean 'stages'"),
    case("only-unknown", [SFT], "unknown stage in only: 'rl'", settings=["only=rl"], plan=False),
    case(
        "only-needs",
        [SFT, RL | {"model": "sft"}],
        "only: rl needs sft, which has not been run",
        settings=["only=rl"],
        plan=False,
    ),
]

KEYS = [
    case("top-key", "stges: []\n", "unknown key in p.yaml: 'stges'; did you mean 'stages'"),
    case("stage-key", [SFT | {"stps": 3}], "unknown key 'stages[0].stps': no 'stps'; did you mean 'steps'"),
    case("optimizer-key", [SFT | {"optimizer": {"lrr": 1}}], "unknown key in stages[0].optimizer: 'lrr'; did you mean 'lr'"),
    case(
        "sampling-key", [RL | {"sampling": {"temprature": 1}}], "stages[0].sampling: 'temprature'; did you mean 'temperature'"
    ),
    case("task-key", [RL | {"task": ARITHMETIC | {"levle": 1}}], "stages[0].task: 'levle'; did you mean 'level'"),
    case(
        "algorithm-key", [RL | {"algorithm": {"name": "grpo", "grup": 4}}], "stages[0].algorithm: 'grup'; did you mean 'group'"
    ),
    case("monitor-key", [RL | {"monitor": {"kll": 1}}], "stages[0].monitor: 'kll'; did you mean 'kl'"),
    case("curriculum-key", [RL | {"curriculum": {"windw": 1}}], "stages[0].curriculum: 'windw'"),
    case("lora-key", [RL | {"lora": {"rnk": 1}}], "stages[0].lora: 'rnk'; did you mean 'rank'"),
    case(
        "reward-key", [RL | {"reward": {"name": "models", "model": ["x"]}}], "stages[0].reward: 'model'; did you mean 'models'"
    ),
    case("data-key", [SFT | {"data": [{"fil": "rows.jsonl"}]}], "stages[0].data[0]: 'fil'; did you mean 'file'"),
    case("judge-key", [AGREE | {"judge": {"modle": "x"}}], "stages[0].judge: 'modle'; did you mean 'model'"),
    case("typed-stage", [SFT], "unknown stage 'stf'; did you mean 'sft'", settings=["stf.steps=3"]),
    case("typed-key", [SFT], "unknown key 'sft.stps': no 'stps'; did you mean 'steps'", settings=["sft.stps=3"]),
    case("typed-nested-key", [SFT], "no 'lrr'; did you mean 'lr'", settings=["sft.optimizer.lrr=3"]),
    case("typed-top-key", [SFT], "unknown key 'seedd'; did you mean 'seed'", settings=["seedd=3"]),
    case("typed-no-value", [SFT], "'steps' is not key=value", settings=["steps"]),
    case("typed-leaf", [SFT], "sft.steps.x: steps has no keys of its own", settings=["sft.steps.x=3"]),
    case("algorithm-name", [RL | {"algorithm": {"name": "gpro"}}], "unknown algorithm 'gpro'; did you mean", "'grpo'"),
    case("task-name", [RL | {"task": {"name": "arithmetics"}}], "unknown task 'arithmetics'; did you mean 'arithmetic'"),
    case("reward-source-name", [RL | {"reward": {"name": "model"}}], "unknown reward_source 'model'; did you mean 'models'"),
    case("reward-source-rule", [RL | {"reward": "math"}], "math is a rule, the reward of a task: task.reward=math"),
    case(
        "reward-source-function",
        [RL | {"reward": "mine.py:b"}],
        "or the function as task.reward=mine.py:b",
        mine_py="b = len\n",
    ),
    case("reward-name", [RL | {"task": QUESTIONS | {"reward": "mth"}}], "unknown reward 'mth'; did you mean 'math'"),
    case("recipe-name", "posttrain run quickstrat", "unknown recipe 'quickstrat'; did you mean 'quickstart'"),
    case("recipe-key", "posttrain run quickstart siz=nano", "unknown key 'siz'; did you mean 'size'"),
    case("recipe-no-file", "posttrain run nothing.yaml", "recipe file nothing.yaml does not exist"),
    case("recipe-no-python", "posttrain run nothing.py:recipe", "recipe file", "nothing.py' does not exist"),
    case("recipe-no-function", "posttrain run mine.py:recipee", "unknown name in", "mine.py 'recipee'"),
    case("recipe-syntax", "posttrain run broken.py:short", "broken.py line 1"),
    case("recipe-raises", "posttrain run raises.py:short", "raises.py line 2", "RuntimeError: no licence"),
    case("yaml-syntax", "stages: [", "p.yaml is not valid YAML"),
    case("yaml-list", "- a\n", "p.yaml must hold keys"),
    case("yaml-empty", "", "p.yaml must hold keys"),
    case("yaml-stages", "stages: {a: 1}\n", "p.yaml: 'stages' must be a list"),
    case("yaml-tag", "stages: !!python/object:os.system []\n", "p.yaml"),
]

REWARDS = [
    case(
        "option-unknown",
        [RL | {"task": QUESTIONS | {"options": {"marke": "x"}}}],
        "unknown option of the reward math: 'marke'; did you mean 'marker'",
    ),
    case("option-type", [RL | {"task": PROMPTS | {"options": {"limit": "long"}}}], "length: limit must be"),
    case("options-list", [RL | {"task": QUESTIONS | {"options": ["a"]}}], "stages[0].task.options"),
    case("compose-parts", [RL | {"task": QUESTIONS | {"reward": "compose", "options": {}}}], "compose: give a list of parts"),
    case(
        "compose-how",
        [RL | {"task": QUESTIONS | {"reward": "compose", "options": {"how": "sum", "parts": [{"reward": "math"}]}}}],
        "compose: how is weighted, product or gate, not 'sum'",
    ),
    case(
        "compose-part",
        [RL | {"task": QUESTIONS | {"reward": "compose", "options": {"parts": [{"reward": "mth"}]}}}],
        "unknown reward 'mth'; did you mean 'math'",
    ),
    case("judge-no-url", [RL | {"task": QUESTIONS | {"reward": "judge"}}], "the judge reward needs the options url and model"),
    case(
        "task-scores-nothing",
        [RL | {"task": {"name": "prompts", "file": "prompts.jsonl"}}],
        "rl: the task scores nothing by itself",
        "task.reward",
    ),
    case(
        "eval-scores-nothing",
        [EVAL | {"task": {"name": "prompts", "file": "prompts.jsonl"}}],
        "eval: the task scores nothing by itself",
    ),
    case("style", [RL | {"task": QUESTIONS | {"style": "boxd"}}], "jsonl: style is one of direct"),
    case(
        "function-no-file",
        [RL | {"task": PROMPTS | {"reward": "nothing.py:short"}}],
        "rl: reward nothing.py:short: cannot read",
        "nothing.py",
    ),
    case(
        "function-no-name",
        [RL | {"task": PROMPTS | {"reward": "mine.py:shrt"}}],
        "rl: unknown name in",
        "mine.py: 'shrt'; did you mean 'short'",
    ),
    case(
        "function-constant",
        [RL | {"task": PROMPTS | {"reward": "mine.py:LIMIT"}}],
        "rl: reward mine.py:LIMIT: LIMIT at",
        "mine.py line 2 is no function",
    ),
    case(
        "function-syntax",
        [RL | {"task": PROMPTS | {"reward": "broken.py:short"}}],
        "rl: reward broken.py:short: ",
        "broken.py line 1 is not Python",
    ),
    case(
        "function-parameter",
        [RL | {"task": PROMPTS | {"reward": "mine.py:toned"}}],
        "reward toned (mine.py line 5) asks for tone",
        "nor a column of the data (prompt, answer, style)",
    ),
    case(
        "function-option",
        [RL | {"task": PROMPTS | {"reward": "mine.py:limited", "options": {"limt": 3}}}],
        "unknown option of the reward mine.py:limited: 'limt'; did you mean 'limit'",
    ),
    case(
        "source-function-name",
        [RL | {"reward": {"name": "function", "reward": "mine.py:shrt"}}],
        "rl: unknown name in",
        "mine.py: 'shrt'",
    ),
    case(
        "source-function-parameter",
        [RL | {"reward": {"name": "function", "reward": "mine.py:styled"}}],
        "rl: reward styled (mine.py line 4) asks for style",
    ),
    case(
        "source-function-shipped",
        [RL | {"reward": {"name": "function", "reward": "math"}}],
        "rl: reward.reward is FILE.py:NAME, not 'math'",
    ),
    case("mix-no-parts", [RL | {"reward": {"name": "mix", "parts": []}}], "stages[0].reward: parts: give at least one"),
    case(
        "mix-alike",
        [RL | {"reward": {"name": "mix", "parts": [{"reward": {"name": "task"}}] * 2}}],
        "parts: task, task must differ",
    ),
    case(
        "mix-weight",
        [RL | {"reward": {"name": "mix", "parts": [{"reward": {"name": "task"}, "weight": float("inf")}]}}],
        "weight must be",
    ),
    case("models-none", [RL | {"reward": {"name": "models", "models": []}}], "models: name at least one reward model"),
    case("task-file-no-class", [RL | {"task": {"name": "mine.py:Tusk"}}], "unknown name in", "mine.py 'Tusk'"),
    case("task-file-undecorated", [RL | {"task": {"name": "mine.py:Bare"}}], "mine.py:Bare: write @dataclass", mine_py=BARE),
    case("task-file-function", [RL | {"task": {"name": "mine.py:short"}}], "mine.py:short is no task"),
    case(
        "algorithm-file-raises",
        [RL | {"algorithm": {"name": "raises.py:Mine"}}],
        "raises.py line 2",
        "RuntimeError: no licence",
    ),
]

BAD_NUMBERS: list[tuple[dict[str, Any], str, Any, str]] = [
    (SFT, "steps", 0, "sft: steps must be at least 1, not 0"),
    (SFT, "steps", -5, "sft: steps must be at least 1, not -5"),
    (SFT, "steps", "many", "stages[0].steps"),
    (SFT, "steps", 1.5, "stages[0].steps"),
    (RL, "steps", None, "stages[0].steps"),
    (SFT, "steps", float("nan"), "stages[0].steps"),
    (SFT, "steps", float("inf"), "stages[0].steps"),
    (SFT, "steps", [3], "stages[0].steps"),
    (SFT, "steps", True, "stages[0].steps"),
    (SFT, "batch", 0, "sft: batch must be at least 1"),
    (SFT, "max_length", 1, "max_length must be at least 2"),
    (DPO, "max_length", -1, "dpo: max_length must be 0 (the model's positions) or a number of tokens"),
    (DPO, "max_length", 1, "max_length must be at least 2"),
    (SFT, "data", "x", "sft.data: there is no file x"),
    (SFT, "data", [{"file": "rows.jsonl", "weight": -1}], "weight must be at least 0"),
    (SFT, "data", [{"file": "rows.jsonl", "weight": 1}, {"file": "rows.jsonl"}], "give every source a weight, or none"),
    (SFT, "data", [{}], "give either a file or a task"),
    (SFT, "data", [{"task": ARITHMETIC}], "a task needs counts"),
    (SFT, "data", [{"task": ARITHMETIC, "counts": {1: 10**7}}], "problems, not 10000000"),
    (SFT, "data", [{"task": ARITHMETIC, "counts": {99: 1}}], "level"),
    (SFT, "optimizer", {"lr": 0}, "stages[0].optimizer: lr must be above 0"),
    (SFT, "optimizer", {"lr": -1e-4}, "lr must be above 0"),
    (SFT, "optimizer", {"lr": float("nan")}, "lr must be"),
    (SFT, "optimizer", {"lr": float("inf")}, "lr must be finite"),
    (SFT, "optimizer", {"lr": "fast"}, "stages[0].optimizer.lr"),
    (SFT, "optimizer", {"warmup": -1}, "warmup must be"),
    (SFT, "optimizer", {"schedule": "cosin"}, "stages[0].optimizer.schedule: input should be 'constant'"),
    (SFT, "optimizer", 3, "stages[0].optimizer takes keys, not 3"),
    (DPO, "held_out", 1, "held_out must be a share of the prompts"),
    (DPO, "held_out", float("nan"), "held_out must be"),
    (RM, "min_accuracy", 2, "rm: min_accuracy must be in [0, 1)"),
    (RM, "members", 0, "rm: members must be at least 1"),
    (RL, "prompts", 0, "rl: prompts must be at least 1"),
    (RL, "sampling", {"temperature": -1}, "temperature"),
    (RL, "sampling", {"temperature": 0}, "rl: training needs a temperature above 0"),
    (RL, "sampling", {"temperature": float("nan")}, "temperature"),
    (RL, "sampling", {"top_k": 5}, "rl: top_k and top_p are refused in training"),
    (RL, "sampling", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    (RL, "algorithm", {"name": "grpo", "group": 0}, "group"),
    (RL, "algorithm", {"name": "dpo"}, "rl: dpo learns from pairs; use a preference stage"),
    (SFT, "algorithm", {"name": "grpo"}, "sft: grpo learns from rollouts; use an rl stage"),
    (RL, "task", {"name": "arithmetic", "level": 99}, "level"),
    (RL, "task", {"name": "nothing:x"}, "unknown task 'nothing:x'"),
    (RL, "task", QUESTIONS | {"held_out": 1.5}, "jsonl: held_out is a share, 0 for none"),
    (RL, "task", PROMPTS | {"held_out": 20}, "leaves none to train on"),
    (RL, "task", QUESTIONS | {"score_seconds": 0}, "score_seconds must be positive"),
    (RL, "critic", "x", "rl: critic is given, but this algorithm has none"),
    (RL | {"algorithm": {"name": "dapo"}}, "reference", "x", "rl: reference is given, but this algorithm has no use for one"),
    (RL, "lora", {"rank": 0}, "rank must be"),
    (EVAL, "problems", 0, "eval: problems must be at least 1"),
    (EVAL, "samples", 4, "eval: 4 samples at temperature 0 are all the same"),
    (EVAL, "task", QUESTIONS | {"held_out": 0}, "eval.task: the task has no held-out problem"),
    (COMPARE, "samples", 1, "compared: samples must be at least 2"),
    (AGREE, "min_agreement", 2, "agree: min_agreement must be in [0, 1]"),
    (VERSUS, "problems", 1, "versus: problems must be at least 2"),
    (MINE, "max_solved", 1, "mined: max_solved must be a share"),
]
NUMBERS = [
    case(f"{stage['name']}-{key}={str(value)[:60]}", [stage | {key: value}], said) for stage, key, value, said in BAD_NUMBERS
]

TOP = [
    case("seed-negative", [SFT], "seed is a whole number", settings=["seed=-1"]),
    case("seed-text", [SFT], "seed: input should be a valid integer", settings=["seed=x"]),
    case("device-unknown", [SFT], "device must be auto, cpu, mps, cuda or cuda:0", settings=["device=gpu"]),
    case("device-absent", [SFT], "cuda:99", "use device", settings=["device=cuda:99"], plan=False),
    case("device-mps-absent", [SFT], "device 'mps' cannot be used here", settings=["device=mps"]),
    case("threads-many", [SFT], "threads=9999 is more than", settings=["threads=9999"]),
    case("threads-negative", [SFT], "threads must be a number of threads", settings=["threads=-1"]),
    case("trackers", [SFT], "unknown tracker 'wanb'; did you mean 'wandb'", settings=["trackers=wanb"], plan=False),
    case("keep", [SFT], "checkpoint_keep must be at least 1", settings=["checkpoint_keep=0"]),
    case("hook-quotes", [SFT], "checkpoint_hook", "not a command line", settings=["checkpoint_hook=a 'b"]),
    case("out-in-a-file", [SFT], "cannot write the run directory rows.jsonl/run", settings=["out=rows.jsonl/run"], plan=False),
    case("out-too-long", [SFT], "cannot write the run directory", settings=["out=a/b/" + "x" * 300], plan=False),
    case("out-is-a-file", [SFT], "rows.jsonl", settings=["out=rows.jsonl"], plan=False),
    case("out-nowhere", [SFT], "cannot write the run directory /proc/run", settings=["out=/proc/run"], plan=False),
    case("resume-nothing", "posttrain resume nothing", "nothing", plan=False),
    case("eval-no-model", "posttrain eval nothing --task arithmetic", "nothing", plan=False),
    case(
        "eval-no-task",
        "posttrain eval tiny:nano --task arithmetics",
        "unknown task 'arithmetics'; did you mean 'arithmetic'",
        plan=False,
    ),
    case("sample-no-model", "posttrain sample nothing hello", "nothing", plan=False),
    case("show-nothing", "posttrain show nothing 1", "nothing", plan=False),
    case("compare-nothing", "posttrain compare nothing nobody", "nothing", plan=False),
    case("command", "posttrain trane", "unknown command 'trane'", plan=False),
    case("command-option", "posttrain run quickstart --fast", "unknown argument '--fast'; settings are KEY=VALUE", plan=False),
]

LATE = [
    late("no-file", SFT | {"data": [{"file": "nothing.jsonl"}]}, "sft.data: there is no file nothing.jsonl"),
    late(
        "bad-row",
        SFT | {"data": [{"file": "other.jsonl"}]},
        "sft: other.jsonl line 2: not JSON",
        other_jsonl=lines(CHAT) + "{\n",
    ),
    late(
        "bad-field",
        DPO | {"data": ["rows.jsonl"]},
        "dpo: rows.jsonl line 1: a row of messages is one of conversations; use the stage sft",
    ),
    late("too-long", DPO | {"model": "first", "max_length": 5000}, "2048 positions; lower dpo.max_length"),
    late("no-model", RL | {"model": "frist"}, "rl.model: there is no model 'frist'", "did you mean 'first'?"),
    late(
        "no-test-problem",
        EVAL | {"model": "first", "task": PROMPTS | {"held_out": 0}},
        "eval.task: the task has no held-out problem",
    ),
    late("no-function", RL | {"task": PROMPTS | {"reward": "mine.py:shrt"}}, "rl: unknown name in", "mine.py: 'shrt'"),
    late("parameter", RL | {"task": PROMPTS | {"reward": "mine.py:toned"}}, "asks for tone"),
    late("task-file", RL | {"task": QUESTIONS | {"file": "nothing.jsonl"}}, "rl: there is no data file nothing.jsonl"),
    late(
        "prompt-too-long",
        RL | {"model": "first", "task": PROMPTS},
        "rl.task: problem prompts.jsonl:5: prompt and response may be",
        prompts_jsonl=lines(*[{"prompt": "x" * 2100 + str(n)} for n in range(5)]),
    ),
    late(
        "vocabulary",
        RL | {"model": "first", "reward": {"name": "implicit", "model": "./letters", "reference": "./letters"}},
        "rl: ./letters has another vocabulary",
    ),
    late(
        "one-prompt",
        RM | {"min_accuracy": 0.5},
        "rm: min_accuracy is judged on held-out data, and one prompt leaves none",
        pairs_jsonl=lines(PAIR),
    ),
    late(
        "labels",
        KTO,
        "kto: all 1 labelled responses to train on are bad",
        labels_jsonl=lines(*[{"prompt": str(n), "completion": "b", "label": False} for n in range(2)]),
    ),
    late(
        "reference",
        RL | {"algorithm": {"name": "grpo", "beta": 0.1}, "reference": "nothing"},
        "rl.reference: there is no model 'nothing'",
    ),
    late(
        "policy-as-reward",
        RL | {"reward": {"name": "models", "models": ["first"]}},
        "rl.reward: the stage 'first' leaves no reward model",
    ),
    late("level", SFT | {"data": [{"task": ARITHMETIC, "counts": {1: 10**7}}]}, "problems, not 10000000"),
]

CASES = [*DATA, *FILES, *MODELS, *STAGES, *KEYS, *REWARDS, *NUMBERS, *TOP, *LATE]
