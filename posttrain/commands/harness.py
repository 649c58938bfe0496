"""Runs tasks of lm-evaluation-harness on our engine: log-likelihoods by the training pass, generation by the sampler.

Needs the package: pip install 'posttrain[harness]'. A task file is a program of its author: it may name Python functions and
data sets; name only tasks that you trust on the command line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import torch

from posttrain import config_tree
from posttrain.collect import Prompt, generate_groups
from posttrain.commands.models import MachineOptions, open_policy
from posttrain.data.safe_readers import render_template
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.errors import Count, UserError, Whole, first_line, require
from posttrain.evals.statistics import score_interval
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.ops.weights import sequence_sums
from posttrain.train.forward import forward
from posttrain.train.pack import micro_batches, pack_examples
from posttrain.types import JSON, Example, Sampler, Sampling

try:
    from lm_eval.api.model import TemplateLM
except ImportError:
    TemplateLM = object
POSITIONS, TOKENS, BUDGET = 4096, 256, 8192  # defaults of a model, a task and a batch
# names of the number of new tokens, in the order in which the harness reads them
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
ROWS = 1024  # tokens whose logits are computed at once
NAME = re.compile(r"^task:[ \t]*[\"']?([\w./+-]+)[\"']?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class HarnessOptions(MachineOptions):
    """Settings of `posttrain eval MODEL --harness TASK`."""

    limit: Whole = 0  # documents of each task; 0: all
    fewshot: int = -1  # solved examples before each document; -1: as the task sets it
    chat: bool = False  # render prompts with the chat template
    # the most tokens of an input, if the model does not have fewer positions
    max_length: Count = POSITIONS


def evaluate(model: str, tasks: Sequence[str], settings: Sequence[str]) -> dict[str, JSON]:
    """Return the results of each task by its name: the harness's value and, if it is a mean over documents, an interval over
    prompts. `cut` is the number of inputs that lost their beginning, because they were too long."""
    pairs = dict(map(config_tree.pair, settings))
    options: HarnessOptions = config_tree.from_tree(pairs, HarnessOptions, "eval")
    needs = "eval: --harness needs lm-evaluation-harness: pip install 'posttrain[harness]'"
    require(TemplateLM is not object, needs)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from posttrain.stages.base import make_sampler

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    names = [_task_name(Path(task)) if Path(task) in files else task for task in tasks]
    folders = [str(file.parent) for file in files]
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    unknown = [name for name in names if name not in manager.all_tasks]
    require(not unknown, f"eval: lm-evaluation-harness has no task {', '.join(unknown)}")
    policy = open_policy(model, options.device)
    network = HarnessModel(policy, make_sampler(policy), options)
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        found = simple_evaluate(
            network,
            tasks=names,
            num_fewshot=None if options.fewshot < 0 else options.fewshot,
            limit=options.limit or None,
            bootstrap_iters=0,
            apply_chat_template=options.chat,
            task_manager=manager,
            **dict.fromkeys(kinds, options.seed),
        )
    except Exception as error:
        called = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
        if isinstance(error, UserError) or called.count(__name__) > 1:  # an error of ours
            raise
        failed = f"eval: lm-evaluation-harness cannot run {', '.join(names)}"
        raise UserError(f"{failed}: {type(error).__name__}: {first_line(error)}") from error
    rows, parts = found["samples"], found.get("group_subtasks", {})
    # a group or a tag stands for several tasks
    figures = {n: _figures(result, rows.get(n, ())) for n, result in found["results"].items()}

    def documents(name: str) -> int:
        own: int = figures[name]["documents"] if name in figures else 0
        return own or sum(map(documents, parts.get(name, ())))

    counted = {name: {**own, "documents": documents(name)} for name, own in figures.items()}
    return {"tasks": counted, "cut": network.cut}


def _task_name(file: Path) -> str:
    require(file.is_file(), f"eval: there is no task file {file}")
    found = NAME.search(file.read_text("utf-8", errors="replace"))
    if found is None:
        raise UserError(f"eval: {file} has no line task: NAME")
    return found[1]


def _figures(result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, JSON]:
    """Return each metric of a task, by name and filter; documents with the same prompt are one observation."""
    found: dict[str, JSON] = {"documents": len({sample["doc_id"] for sample in samples})}
    for key, value in result.items():
        name, _, kept = key.partition(",")
        if not kept or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        label = name if kept == "none" else f"{name}/{kept}"
        own = [s for s in samples if s.get("filter", kept) == kept and name in s]
        numbers = [float(s[name]) for s in own if isinstance(s[name], int | float)]
        found[label] = float(value)
        mean = numbers and len(numbers) == len(own) and all(map(isfinite, numbers))
        if mean and abs(sum(numbers) / len(numbers) - value) < 1e-9:
            found[label] = score_interval(numbers, [s["prompt_hash"] for s in own]).row()
    return found


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A policy behind the harness's model interface."""

    def __init__(self, policy: Policy, sampler: Sampler, options: HarnessOptions) -> None:
        super().__init__()
        self.policy, self.sampler, self.seed = policy, sampler, options.seed
        self.tokenizer, self.decoder = policy.tokenizer, Decoder(policy.tokenizer)
        self.max_length = min(options.max_length, policy.positions or options.max_length)
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return self.policy.source

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: object
    ) -> list[int]:
        ids = self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]
        return list(ids)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        require(bool(self.tokenizer.chat_template), "eval: this model has no chat template")
        asked = [(chat_history, add_generation_prompt)]
        [found] = render_template(self.tokenizer, asked, None)
        if isinstance(found, Exception):
            raise UserError(f"eval: the chat template refused a conversation: {found}")
        return found[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **more: object
    ) -> list[tuple[float, bool]]:
        """Return log p of each continuation, and whether argmax would write it. A too long input loses its beginning."""
        examples = []
        for _, before, after in requests:
            self.cut += len(before) + len(after) > self.max_length
            ids = np.array([*before, *after][-self.max_length :], dtype=np.int64)
            first = len(ids) - len(after)
            require(first > 0, f"eval: a continuation of {len(after)} tokens leaves no context")
            examples.append(Example(ids, np.arange(len(ids)) >= first))
        batch = pack_examples(examples, self.policy.device)
        found: list[tuple[float, bool]] = []
        with torch.no_grad():
            for piece in micro_batches(batch, BUDGET):
                outputs = forward(self.policy, piece)
                states = outputs.predictions["policy"]
                parts = torch.split(states.hidden_MH, ROWS)
                best_M = torch.cat([head_logits(part, states.head).argmax(-1) for part in parts])
                wrong_T = torch.zeros(piece.tokens, device=best_M.device)
                wrong_T[states.at_M] = (best_M != piece.ids_T[states.at_M]).float()
                where = (piece.mask_T, piece.sequence_T, piece.sequences)
                totals = sequence_sums(outputs.logprob_T.double(), *where).tolist()
                wrongs = sequence_sums(wrong_T, *where).tolist()
                found += [(total, not wrong) for total, wrong in zip(totals, wrongs, strict=True)]
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **more: object) -> list[float]:
        """Return log p of whole texts, in windows that predict every token once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for request in requests:
            ids, first = self.tok_encode(request.args[0]), self.prefix_token_id
            # a window gets one token more than it predicts
            windows = get_rolling_token_windows(ids, first, self.max_length - 1, 1)
            pieces = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(total for total, _ in self._loglikelihood_tokens(pieces)))
        return found

    def generate_until(self, requests: Sequence[Any], **more: object) -> list[str]:
        """Return completions up to the first of the stop texts; greedy unless the task samples. Equal requests are samples of one
        prompt, each with randomness of its own."""
        prompts, stops, seen = [], [], Counter[tuple[int, ...]]()
        for request in requests:
            context, asked = request.args
            length = next((asked[name] for name in LENGTHS if asked.get(name) is not None), TOKENS)
            where = "eval: generation_kwargs of the task:"
            length = config_tree.check_value(f"{where} max_gen_toks", int, length)
            room = self.max_length - length
            long = f"{where} max_gen_toks={length} leaves no room for a prompt in {self.max_length} tokens"
            require(room > 0, f"{long}; raise max_length, if the model has more positions")
            heat = config_tree.check_value(
                f"{where} temperature", float, asked.get("temperature", 1.0)
            )
            greedy = not asked.get("do_sample", heat > 0 and "temperature" in asked)
            drawn = Sampling(
                max_new_tokens=length,
                temperature=0.0 if greedy else heat,
                top_k=0 if greedy else int(asked.get("top_k", 0)),
                top_p=1.0 if greedy else float(asked.get("top_p", 1.0)),
            )
            whole = self.tok_encode(context)
            self.cut += len(whole) > room
            ids = tuple(whole[-room:] or [self.prefix_token_id])
            prompts.append(Prompt(ids, 1, derive(self.seed, seen[ids]), drawn))
            seen[ids] += 1
            until = asked.get("until") or ()
            stops.append([until] if isinstance(until, str) else list(until))
        groups = generate_groups(self.sampler, prompts)
        return [
            cut(self.decoder.decode(said.ids)[0], until)
            for (said,), until in zip(groups, stops, strict=True)
        ]


def cut(text: str, until: Sequence[str]) -> str:
    """Cut a text at the first of some stop texts.

    >>> cut("4\\n\\nQuestion: 5", ["Question:", "\\n"])
    '4'
    """
    return text[: min((text.find(stop) for stop in until if stop and stop in text), default=None)]
