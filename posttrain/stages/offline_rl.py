"""Offline reinforcement learning on groups of responses that were sampled and scored before; nothing is sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.collect import SavedGroups
from posttrain.errors import Count, Positive, Several, many, require
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.stages._naming import DataName
from posttrain.stages._plan import DryRun, few_steps, planned_way, training_memory
from posttrain.stages._saved_groups import Saved, read_saved
from posttrain.stages.base import Context, Stage, data_place
from posttrain.stages.train import MaxLength, ReferenceStage, length_limit, trained
from posttrain.types import JSON, Sampling

UNKNOWN = (
    "no log-probs of what sampled these responses are given: each is taken for a sample of the policy itself (importance ratio "
    "1, no off-policy correction), which is biased as far as another policy wrote them"
)


@dataclass(frozen=True, kw_only=True)
class OfflineRLStage(ReferenceStage):
    """Train `model` on the groups in the `data` files, `batch` groups a step. A line is a prompt with responses and rewards, or a
    rollout of a step that a run kept (RUN/rollouts/STAGE/step-N.jsonl). If the file has the log-probs of the sampling policy, the
    algorithm's importance ratio uses them, clipped and corrected by its settings (`correction`, `drop`, `mask_high`). If not, there
    is no correction, and a message says so. New responses of the policy are never sampled or scored."""

    reads = ("rollouts",)
    builds = ("proximal", "reference")
    shares = "batch"
    reads_first = True

    data: tuple[DataName, ...]
    steps: Count = 100
    batch: Several = 16  # groups a step
    max_length: MaxLength = 0
    temperature: Positive = 1.0  # at which the responses were sampled
    algorithm: Algorithm = field(default_factory=GRPO)

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if not self.data:
            yield "give at least one JSONL file of saved groups as data"
        if len(set(self.algorithm.samples(Sampling()))) > 1:
            name = self.algorithm.name
            yield f"{name} compares with an answer that is sampled in another way, which saved groups do not mark; use grpo"
        if self.algorithm.learns_steps:
            yield "supervision=process needs the values of steps, which saved groups do not have"

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if reader.tokenizer is None:
            return
        longest = length_limit(self.name, self.max_length, reader)
        for path in (path for path in self.data if path not in before):
            read_saved(path, reader.tokenizer, longest, self.temperature)

    def read(self, context: Context, policy: Policy) -> list[Saved]:
        places = [data_place(path, context) for path in self.data]
        tokenizer, longest = policy.tokenizer, length_limit(self.name, self.max_length, policy)
        saved = [read_saved(place, tokenizer, longest, self.temperature) for place in places]
        alike = len({one.known for one in saved}) == 1
        require(alike, f"{self.name}: some files of data have logprobs; give them in all, or none")
        return saved

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        step = f"a step: {many(self.batch, 'group')}; {many(self.steps, 'step')}"
        later = [f"groups written by {path}: not there yet" for path in self.data if path in before]
        if later:
            return [step, *later]
        saved = self.read(context, policy)
        sizes = [len(r.ids) for one in saved for g in one.groups for r in g.rollouts]
        way = planned_way(self, policy, max(sizes))
        tokens = min(way.tokens, self.batch * sum(sizes) // sum(len(one.groups) for one in saved))
        others = self.role_bytes(policy, tokens)
        memory = training_memory(self, policy, tokens, way.layered, others)
        return [step, *chain(*(one.lines() for one in saved)), memory.line()]

    def dry_run(self) -> DryRun:
        return few_steps(self)

    def run(self, context: Context) -> dict[str, JSON]:
        policy = self.load(context)
        saved = self.read(context, policy)
        for one in saved:
            context.announce(self.name, one.lines())
        known = saved[0].known
        if not known:
            context.announce(self.name, [UNKNOWN], "warning")
        trainer = self.make_trainer(context, policy, self.make_roles(context, policy))
        groups = [group for one in saved for group in one.groups]
        logprobs = None if known else trainer.logprobs
        source = SavedGroups(
            groups, self.batch, context.seed, self.temperature, policy.device, logprobs
        )
        loop = self.train(context, trainer, source, self.schedule())
        context.save_model(self.name, policy, self.lora)
        return {**trained(loop), "trained_on": len(groups), "logprobs_known": known}
