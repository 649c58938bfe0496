"""Reinforcement learning: sample, score, update, with problems that get harder as the policy learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.data.curriculum import Climb, Curriculum
from posttrain.errors import require
from posttrain.loop import Loop, Rhythm
from posttrain.rollouts import Rollouts
from posttrain.stages._material import alphabet
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.stages.evaluate import answer_problems
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import JSON, Sampler, Sampling


@dataclass(frozen=True, kw_only=True)
class RLStage(Stage):
    """`prompts` problems a step, the algorithm's group of samples for each. The reference, where the algorithm needs one, is the
    model the stage starts from, frozen."""

    model: str
    task: Task
    steps: int = 200
    prompts: int = 16
    algorithm: Algorithm = field(default_factory=GRPO)
    sampling: Sampling = field(default_factory=Sampling)
    curriculum: Curriculum = field(default_factory=Curriculum)
    optimizer: Optimization = field(default_factory=Optimization)
    max_rows: int = 256  # responses written at once
    evaluate_every: int = 50
    evaluate_problems: int = 200
    checkpoint_every: int = 25
    rollouts_every: int = 5
    watch_kl: bool = False  # keep the starting model to measure KL from it, also where the algorithm does not need it

    def __post_init__(self) -> None:
        name = self.name
        require(self.steps > 0, f"{name}: steps must be positive, not {self.steps}")
        require(self.prompts > 0, f"{name}: prompts must be positive, not {self.prompts}")
        require(self.algorithm.online, f"{name}: this algorithm learns from given examples; use an sft stage")
        require(self.sampling.temperature > 0, f"{name}: training needs a temperature above 0, not {self.sampling.temperature}: "
                "argmax explores nothing")  # fmt: skip
        require(not self.sampling.truncated, f"{name}: top_k and top_p are refused in training: the tokens they cut off make every "
                "importance ratio wrong; use them with eval and sample")  # fmt: skip

    def alphabet(self) -> str:
        return alphabet([self.task])

    def run(self, context: Context) -> dict[str, JSON]:
        from posttrain.engine.engine import Engine
        from posttrain.train.trainer import Trainer

        policy = load_policy(self.model, context, self.alphabet())
        anchored = self.watch_kl or "reference" in self.algorithm.needs
        reference = load_policy(self.model, context, self.alphabet()) if anchored else None
        engine = Engine(policy, self.max_rows, context.threads)
        sizes = [len(self.task.problems("train", level)) for level in self.task.levels]
        climb = Climb(self.task.levels, sizes, self.curriculum, context.seed)
        loop = Loop(
            stage=self.name,
            rhythm=Rhythm(
                steps=self.steps,
                evaluate_every=self.evaluate_every,
                checkpoint_every=self.checkpoint_every,
                rollouts_every=self.rollouts_every,
            ),
            trainer=Trainer(policy, self.algorithm, self.optimizer, reference),
            source=Rollouts(
                self.task, engine, policy.tokenizer, climb, self.prompts, self.sampling, context.seed, policy.device
            ),
            writer=context.writer,
            checkpoints=context.checkpoints(self.name),
            interrupt=context.interrupt,
            trackers=context.trackers,
            sampler=engine,
            evaluate=lambda: self.evaluate(engine, policy.tokenizer, context.seed),
        )
        loop.run()
        context.save_model(self.name, policy)
        return {"steps": loop.step, "train_seconds": loop.elapsed, "level": climb.level}

    def evaluate(self, sampler: Sampler, tokenizer: object, seed: int) -> Mapping[str, float]:
        """Held-out accuracy by argmax, with its interval."""
        problems = self.task.problems("test")[: self.evaluate_problems]
        greedy = Sampling(max_new_tokens=self.sampling.max_new_tokens, temperature=0.0)
        accuracy = answer_problems(self.task, sampler, tokenizer, problems, 1, greedy, seed).accuracy
        return {"accuracy/test": accuracy.value, "accuracy/test_low": accuracy.low, "accuracy/test_high": accuracy.high}
