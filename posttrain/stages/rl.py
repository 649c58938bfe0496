"""The rl stage: samples responses, scores them and updates the policy, on problems of a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.cluster.admission import Staleness
from posttrain.cluster.asynchronous import Asynchronous, InFlight
from posttrain.cluster.publish import FP8
from posttrain.cluster.remote import vllm_python
from posttrain.collect import Examples, Rollouts, rate_groups
from posttrain.data.chat import preceded, render_prompt, render_prompts
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.data.steps import check_separator
from posttrain.data.text import Decoder
from posttrain.engine.fp8 import Precision
from posttrain.episodes import rollout_groups
from posttrain.errors import Count, Interval, NotNegative, Several, Whole, prefixed, require
from posttrain.evals import statistics
from posttrain.models.load import Reader, same_vocabulary
from posttrain.models.lora import add_adapters, share_weights
from posttrain.models.policy import Policy, untrained_tags
from posttrain.models.scorer import Scorer, from_policy
from posttrain.monitor.rules import MonitorSettings
from posttrain.stages._answers import proxy_gold_kl
from posttrain.stages._contamination import guard_training
from posttrain.stages._material import Data, check_lengths, check_sources, gather, placed
from posttrain.stages._naming import DataName, ModelName, ScorerName
from posttrain.stages._plan import DryRun, few_steps, model_bytes, rl_plan
from posttrain.stages.base import Context, data_place, load_reward_model, model_places
from posttrain.stages.evaluate import answer_problems
from posttrain.stages.mine import Chosen, read_problems
from posttrain.stages.reward_sources import RewardSource, TaskReward
from posttrain.stages.train import ReferenceStage, trained
from posttrain.system import machine
from posttrain.tasks._judged import Judged
from posttrain.tasks.base import Task
from posttrain.train.memory import cache_bytes, copied_bytes, weight_bytes
from posttrain.train.optimizer import Optimization
from posttrain.train.roles.base import Role
from posttrain.train.roles.critic import Critic
from posttrain.train.roles.pretraining import Pretraining
from posttrain.train.roles.reference import Reference
from posttrain.train.roles.teacher import Teacher
from posttrain.types import JSON, Problem, Rating, Sampler, Sampling


@dataclass(frozen=True, kw_only=True)
class RLStage(ReferenceStage):
    """Each step draws `prompts` problems, samples a group of responses to each, scores them by `reward` and updates the policy. The
    stage also builds the roles that the algorithm needs: a frozen reference, a critic, a teacher, pretraining text."""

    reads = ("rollouts",)
    shares = "prompts"
    builds = ("critic", "pretraining", "proximal", "reference", "teacher")

    task: Task
    steps: Count = 200
    # end the stage after this much time, at the end of a step; 0: no limit
    seconds: NotNegative = 0.0
    prompts: Several = 16
    algorithm: Algorithm = field(default_factory=GRPO)
    sampling: Sampling = field(default_factory=Sampling)
    curriculum: Curriculum = field(default_factory=Curriculum)
    optimizer: Optimization = field(default_factory=Optimization)
    max_rows: Whole = 0  # responses decoded at once; 0: all of a step on a GPU, 256 on a CPU
    # the engine in this process, the engine in other processes, which get the weights after each step, or vLLM in other processes
    sampler: Literal["engine", "process", "vllm"] = "engine"
    sampler_processes: Count = 1  # of sampler=process and vllm
    # train a mixture of experts with the experts that the engine chose on a GPU, and measure how often the trainer's differ
    router_replay: bool = False
    # the engine's MLP products in fp8, on a GPU of compute capability 8.9 or more; a CPU emulates fp8
    sampler_quantization: Literal["none", "fp8"] = "none"
    # free the engine's cache on a GPU before training; allocating it again costs about a second
    release_cache: bool = False
    evaluate_every: Interval = 50
    evaluate_problems: Whole = 200
    # also sample this many held-out problems, and report the reward model's score, the task's own score and the KL
    measure_problems: Whole = 0
    checkpoint_every: Interval = 25
    rollouts_every: Interval = 5
    # keep the starting model to measure the KL to it, even if the algorithm does not need it
    watch_kl: bool = False
    # a reward model (a stage or a directory) for the critic to start from; "": the policy with a new head
    critic: ScorerName = ""
    # the new head of a critic: linear, or mlp with one hidden layer
    critic_head: Literal["linear", "mlp"] = "linear"
    # None: the policy's settings; warm-up and schedule are the policy's in any case
    critic_optimizer: Optimization | None = None
    # of distillation: a model with the same tokenizer (a stage, a directory, a hub name); "": the stage's starting model
    teacher: ModelName = ""
    # a system message before the prompt that only the teacher reads; {answer} is replaced by the problem's answer
    teacher_prompt: str = ""
    # what scores a response in place of the task: models, process, judge, implicit, function or a mix of these
    reward: RewardSource = field(default_factory=TaskReward)
    pretraining: tuple[Data, ...] = ()  # text for the algorithm's ptx term
    pretraining_batch: Several = 16  # texts an optimizer step
    pretraining_length: int = 1024  # longer texts are left out
    # a mine stage, or a file that one wrote: train on these problems instead of the task's own
    problems: DataName = ""
    # how many steps a group may be older than the step that trains on it; 0: a step waits for all that it sampled
    max_staleness: Whole = 0
    # when new weights arrive, responses in flight continue with them, on a recomputed cache or (keep) on the old one; or restart
    in_flight: InFlight = "continue"
    # correction for an algorithm without one, if max_staleness is above 0 or the sampler uses fp8; none: no correction
    staleness_correction: Literal["token", "sequence", "decoupled", "none"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness or self.precision.products:
            corrected = self.algorithm.corrected(self.staleness_correction)
            object.__setattr__(self, "algorithm", corrected)
        if self.precision.products and self.monitor.mismatch == MonitorSettings.mismatch:
            object.__setattr__(self, "monitor", replace(self.monitor, mismatch=FP8))
        rated_alone, branches = self.measure_problems > 0, self.algorithm.branches
        with prefixed(self.name):
            if branches.completions:
                check_separator(branches.separator)
            self.reward.check(self.name, self.task, self.algorithm.group_size, rated_alone)

    @property
    def precision(self) -> Precision:
        """Which parts of the sampler compute in fp8."""
        return Precision(self.sampler_quantization)

    def precision_lines(self) -> list[str]:
        if not self.precision.products:
            return []
        weighed = f"and staleness_correction={self.staleness_correction} gives an algorithm without a correction one"
        said = "generation in fp8 (sampler_quantization=fp8): `mismatch` shows how far its log-probs are from the trainer's"
        return [f"{said}, above {self.monitor.mismatch:g} the run stops, {weighed}"]

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        roles, reward = self.algorithm.roles, self.reward
        near = self.samples_kl()
        if self.sampling.temperature == 0:
            yield f"training needs a temperature above 0, not {self.sampling.temperature}: argmax explores nothing"
        if self.sampling.truncated:
            text = "the tokens they cut off make every importance ratio wrong; use them with eval and sample"
            yield f"top_k and top_p are refused in training: {text}"
        if self.sampler == "engine" and self.sampler_processes > 1:
            yield "sampler_processes is for sampler=process and sampler=vllm; leave it out, or set sampler"
        if self.sampler == "vllm" and self.sampling.min_new_tokens:
            yield "sampler=vllm has no min_new_tokens: vLLM would change the distribution; leave it out"
        if self.sampler != "engine" and self.router_replay:
            yield f"router_replay needs the experts that the engine of this process chose; sampler={self.sampler} does not send them"
        if self.sampler != "engine" and self.lora is not None and self.lora.load_in_4bit:
            yield f"sampler={self.sampler} cannot be sent weights in 4 bits; leave load_in_4bit out"
        low = self.precision
        if low.products and self.sampler == "vllm":
            yield "sampler_quantization=fp8 is for our engine, and sampler=vllm has another; leave it out"
        if low.products and self.lora is not None and self.lora.load_in_4bit:
            yield "sampler_quantization=fp8 would round weights that load_in_4bit has rounded; leave one of them out"
        if self.critic and self.critic_head != "linear":
            yield f"a critic from {self.critic!r} has its head already; leave critic_head out"
        if self.critic and "critic" not in roles:
            yield "critic is given, but this algorithm has none; use ppo"
        if self.critic_optimizer is not None and "critic" not in roles:
            yield "critic_optimizer is given, but this algorithm has no critic; use ppo"
        if self.critic_optimizer is not None and self.critic_optimizer.router_aux_loss_coef:
            yield "critic_optimizer.router_aux_loss_coef has no effect: the loss is the policy's alone; set optimizer's"
        if self.reference and not near:
            yield "reference is given, but this algorithm has no use for one; set its beta above 0, or watch_kl"
        if (self.teacher or self.teacher_prompt) and "teacher" not in roles:
            yield "teacher and teacher_prompt are given, but this algorithm has no teacher; use distillation"
        if "teacher" in roles and not (self.teacher or self.teacher_prompt):
            yield "distillation needs a teacher: name a model, or give the starting model a teacher_prompt to learn from"
        if self.teacher_prompt and type(self.task).run is not Task.run:
            yield "teacher_prompt needs a task of one turn, whose prompt it can come before; leave it out"
        if "pretraining" in roles and not self.pretraining:
            yield "this algorithm mixes pretraining text in (ptx > 0); give some as pretraining, or set ptx to 0"
        if self.pretraining and "pretraining" not in roles:
            yield "pretraining data is given, but this algorithm does not mix it in; use ppo with ptx above 0"
        if self.measure_problems and not (reward.loads() and near):
            needs = "give a reward that loads models, and a beta above 0 or watch_kl"
            yield f"measure_problems compares reward models with the task's score at a KL; {needs}"
        if self.measure_problems and self.moves:
            yield "measure_problems has the KL from where the stage began, and this reference moves; leave one of them out"
        if self.algorithm.compares_episodes and not self.task.resettable:
            why = "cannot be reset to the same start, so its episodes cannot be compared with each other"
            yield f"this task {why}; use ppo, whose baseline is a critic, or reinforce, whose baseline is the batch"
        branches = self.algorithm.branches.completions > 0
        if self.algorithm.learns_steps and not (reward.gives_steps or reward.rated or branches):
            none = f"learns from the values of steps, and the reward {reward.name!r} gives none"
            yield f"supervision=process {none}; use reward=process, or supervision=outcome"
        if branches:
            yield from self.branch_mistakes()
        chosen = self.staleness_correction != "token" and not low.products
        if (self.in_flight != "continue" or chosen) and not self.max_staleness:
            yield "in_flight and staleness_correction are for max_staleness above 0; leave them out, or set max_staleness"
        if self.in_flight == "keep" and (self.sampler != "engine" or self.release_cache):
            yield "in_flight=keep is for sampler=engine without release_cache; use in_flight=continue, which computes caches again"
        if self.max_staleness and self.release_cache and self.sampler != "engine":
            yield "release_cache stops the sampler before training, and max_staleness has it go on; leave one of them out"

    def branch_mistakes(self) -> Iterator[str]:
        """What an algorithm that continues responses from the ends of their steps excludes."""
        name = self.algorithm.name
        if type(self.task).run is not Task.run:
            yield f"{name} continues answers of one turn, and this task has its own episodes; use ppo or grpo"
        if not isinstance(self.reward, TaskReward):
            yield f"{name} scores completions by the task, and the reward is {self.reward.name!r}; give the task a reward"
        if isinstance(self.task, Judged) and self.task.options.get("mode") == "tournament":
            alone = "by a score of its own, and mode=tournament compares completions of it"
            yield f"{name} values the end of a step {alone}; use mode=points"
        if self.max_staleness:
            yield f"{name} needs the sampler after a step's responses are scored, and max_staleness keeps it busy; leave it out"

    def measures(self) -> bool:
        return super().measures() and self.evaluate_problems > 0

    def samples_kl(self) -> bool:
        return "reference" in self.algorithm.roles or self.watch_kl

    def tasks(self) -> list[Task | None]:
        return [self.task, *(d.task for d in self.pretraining)]

    def splits(self) -> list[tuple[str, int | None]]:
        train = [("train", level) for level in self.task.levels] if not self.problems else []
        asked = self.measures() and len(self.task.problems("test")) > 0
        return [*train, *([("test", None)] if self.measure_problems or asked else [])]

    def asks(self, split: str, problems: Sequence[Problem]) -> Sequence[Problem]:
        held_out = max(self.evaluate_problems if self.measures() else 0, self.measure_problems)
        return problems[:held_out] if split == "test" else problems

    def check_ready(self, device: str, names: Collection[str]) -> None:
        super().check_ready(device, names)
        alike = "on a CPU the sampler and the trainer compute in float32 and choose alike"
        text = f"router_replay is for a GPU: {alike}; leave it out"
        require(device.startswith("cuda") or not self.router_replay, text)
        if self.sampler != "engine":
            machine.require_posix(f"sampler={self.sampler}", "use sampler=engine")
        self.precision.check_device(device)
        if self.sampler == "vllm":
            vllm_python()
        self.task.problems("test")  # raises an error if the task cannot be evaluated
        self.reward.ready(self.task)

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if self.problems and self.problems not in before:
            read_problems(self.problems)
        if self.teacher_prompt and reader.tokenizer is not None:
            (first,) = self.teacher_prompts(reader.tokenizer, self.task.problems("train")[:1])
            reader.check_length(len(first) + self.sampling.max_new_tokens)
        check_sources(self.pretraining, reader, before, self.pretraining_length)

    def reads_ids(self) -> tuple[str, ...]:
        own = tuple(name for name in (self.critic, self.teacher) if name)
        return (*super().reads_ids(), *own, *self.reward.reads_ids())

    plan = rl_plan

    def dry_run(self) -> DryRun:
        return replace(few_steps(self, self.evaluate_every), limit=self.sampling.max_new_tokens)

    def optimizers(self) -> dict[str, Optimization]:
        both = {"optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        return {name: settings for name, settings in both.items() if settings is not None}

    def warnings(self) -> list[str]:
        found = super().warnings()
        for name in ("warmup", "schedule", "final") if self.critic_optimizer is not None else ():
            own, usual = getattr(self.critic_optimizer, name), getattr(Optimization, name)
            if own not in (getattr(self.optimizer, name), usual):
                line = f"{self.name}.critic_optimizer.{name} has no effect: the critic follows the warm-up and the schedule of"
                found.append(f"{line} {self.name}.optimizer at a rate of its own")
        return found

    def run(self, context: Context) -> dict[str, JSON]:
        source, measures = self.training_task(context), self.evaluate_every > 0
        text = placed(self.pretraining, context)
        guard_training(context, self.name, self.model, (source,), text, measures)
        policy = self.load(context)
        policy.router_replay = self._replays(policy)
        if not policy.stop_ids:
            endless = "the model has no end token, so every response is cut off at max_new_tokens; set eos_token_id in its config.json"
            context.announce(self.name, [endless], "warning")
        tags = self.task.tags(str(policy.tokenizer.chat_template or ""))
        context.announce(self.name, untrained_tags(policy, tags), "warning")
        roles = self.make_roles(context, policy)
        reference = next((role.policy for role in roles if isinstance(role, Reference)), None)
        rating = self.reward.make(context, policy, self.name, self.optimizer.plain_budget)
        reserved = self.cache_bytes(policy)
        if policy.device.type == "cuda" and context.cluster is None:
            reserved += self.sampler_bytes(policy)
        longest = self.longest(policy.tokenizer)
        trainer = self.make_trainer(context, policy, roles, reserved, longest=longest)
        problems = {level: source.problems("train", level) for level in source.levels}
        sizes = [*map(len, problems.values())]
        curriculum_state = CurriculumState(source.levels, sizes, self.curriculum, context.seed)
        context.announce(self.name, self.algorithm.warnings(self.sampling), "warning")
        context.announce(self.name, self.precision_lines())

        def evaluate() -> dict[str, float]:
            with rollouts.drained():
                return self.evaluate(sampler, policy.tokenizer, context, rating, reference)

        every = self.evaluate_every if self.task.problems("test") else 0
        more = {"curriculum_state": curriculum_state, "problems": problems, "rating": rating}
        with (
            closing(self.make_sampler(context, policy)) as sampler,
            closing(self.rollouts(context, policy, sampler, **more)) as rollouts,
        ):
            loop = self.train(
                context,
                trainer,
                rollouts,
                replace(self.schedule(every, self.seconds), rollouts_every=self.rollouts_every),
                evaluate=evaluate,
                sampler=rollouts,
                release=sampler.release if self.release_cache else None,
            )
        context.save_model(self.name, policy, self.lora)
        return {**trained(loop), "level": curriculum_state.level}

    def _replays(self, policy: Policy) -> bool:
        kind, known = type(policy.model).__name__, bool(policy.routers)
        text = f"router_replay: {kind} has no routers like those of Qwen3-MoE in packed sequences; leave it out"
        require(known or not self.router_replay, text)
        return self.router_replay

    def make_sampler(self, context: Context, policy: Policy) -> Sampler:
        return context.sampler(
            policy,
            rows=self.rows(policy.device.type),
            kind=self.sampler,
            count=self.sampler_processes,
            precision=self.precision,
            keep_caches=self.in_flight == "keep",
        )

    def rollouts(self, context: Context, policy: Policy, sampler: Sampler, **more: Any) -> Rollouts:
        """The source of rollouts: samples when a step asks for them or, with `max_staleness`, ahead of the trainer. `more` are further
        fields of `Rollouts`."""
        context.writer.tokenizer(self.name, policy.tokenizer)
        source: Callable[..., Rollouts] = Rollouts
        if self.max_staleness:
            bound = Staleness(batch=self.prompts, max_staleness=self.max_staleness)
            source = partial(Asynchronous, staleness=bound, steps=self.steps)
            source = partial(source, in_flight=self.in_flight)
        return source(
            task=self.task,
            sampler=sampler,
            tokenizer=policy.tokenizer,
            prompts=self.prompts,
            sampling=self.sampling,
            seed=context.seed,
            device=policy.device,
            events=context.events,
            workers=context.workers,
            **more,
        )

    def training_task(self, context: Context) -> Task:
        """The task, with the problems that a mine stage chose if `problems` names one."""
        if not self.problems:
            return self.task
        return Chosen(self.task, tuple(read_problems(data_place(self.problems, context))))

    def rows(self, device: str) -> int:
        """How many responses are decoded at once. A GPU is fastest with all of them; its cache grows with the tokens in it."""
        every = self.prompts * self.algorithm.group_size
        return self.max_rows or (every if device == "cuda" else 256)

    def longest(self, tokenizer: object) -> int:
        """An estimate of the longest sequence, in tokens: the prompt of the first problem and the longest possible response."""
        prompt = render_prompt(tokenizer, self.task.prompt(self.task.problems("train")[0]))
        return len(prompt) + self.sampling.max_new_tokens

    def cache_bytes(self, policy: Policy, training: bool = True) -> float:
        """Bytes of the KV cache of all rows at full length; with `training`, those that a GPU keeps during training."""
        if training and (self.release_cache or policy.device.type != "cuda"):
            return 0.0
        group, longest = self.algorithm.group_size, self.longest(policy.tokenizer)
        rows = min(self.rows(policy.device.type), self.prompts * group)
        if copied_bytes(policy):  # a paged cache, in which a group shares its prompt
            new = self.sampling.max_new_tokens
            return cache_bytes(policy, 1, rows * new + -(-rows // group) * (longest - new))
        return cache_bytes(policy, rows, longest)

    def sampler_bytes(self, policy: Policy) -> float:
        """Bytes of the sampler's weights: a copy in each sampling process, or the weights that the engine copies."""
        narrow = self.lora is not None and self.lora.load_in_4bit
        if self.sampler == "engine":
            return 0.0 if narrow or self.release_cache else copied_bytes(policy)
        size = weight_bytes(policy)
        if self.lora is not None:
            size += self.lora.weight_bytes(policy.body, policy.dtype.itemsize)
        return self.sampler_processes * size

    def make_roles(self, context: Context, policy: Policy) -> list[Role]:
        roles = super().make_roles(context, policy)
        if self.watch_kl and "reference" not in self.algorithm.roles:
            roles.append(self.make_role("reference", context, policy))
        return roles

    def make_role(self, name: str, context: Context, policy: Policy) -> Role:
        if name == "critic":
            settings = self.critic_optimizer or self.optimizer
            return Critic(self.make_critic(context, policy), settings)
        if name == "pretraining":
            coefficient = self.algorithm.additions["pretraining"]
            return Pretraining(self.make_pretraining(context, policy), coefficient)
        if name == "teacher":
            return self.make_teacher(context, policy)
        return super().make_role(name, context, policy)

    def role_bytes(self, policy: Policy, tokens: int) -> dict[str, float]:
        wanted = self.algorithm.roles | ({"reference"} if self.watch_kl else frozenset())
        adapters = None if self.lora is None else self.lora.parameters(policy.body)
        by_layer = self.optimizer.checkpointing == "layer"
        settings, own_body = self.critic_optimizer or self.optimizer, bool(self.critic)
        own = self.lora is not None and not self.teacher
        # activations of the critic count only if they are alive together with the policy's
        active = 0 if self.algorithm.learns_apart else tokens
        prices = {
            "reference": self.reference_bytes(policy),
            "critic": Critic.price(policy, active, settings, by_layer, adapters, own_body),
            "teacher": 0.0 if own else model_bytes(self.teacher, policy),
        }
        return {name: size for name, size in prices.items() if name in wanted}

    def make_critic(self, context: Context, policy: Policy) -> Scorer:
        """A copy of the policy with a scalar head that starts at 0, or a reward model. With LoRA its body is frozen, too (the
        policy's own weights, shared), and the head is trained together with adapters of its own."""
        share = self.lora is not None
        if self.critic:
            critic = load_reward_model(model_places(self.critic, context)[0], context)
            same_vocabulary(self.name, policy, critic)
        else:
            critic = from_policy(policy, self.critic_head, seed=context.seed, share=share)
        if self.lora is not None:
            add_adapters(critic.model, self.lora, context.seed + 1, learning=("score.",))
        return critic

    def make_teacher(self, context: Context, policy: Policy) -> Teacher:
        """The teacher. If it is the stage's starting model, with LoRA it shares the policy's frozen weights."""
        own = self.lora is not None and not self.teacher
        teacher = share_weights(policy) if own else self.load(context, self.teacher)
        same_vocabulary(self.name, policy, teacher)
        teacher.check_length(self.longest(policy.tokenizer))
        prompts = partial(self.teacher_prompts, policy.tokenizer) if self.teacher_prompt else None
        return Teacher(teacher, self.algorithm.teacher_by_token, prompts)

    def teacher_prompts(
        self, tokenizer: object, problems: Sequence[Problem]
    ) -> list[tuple[int, ...]]:
        """The prompts of problems as the teacher reads them."""
        asked = []
        for problem in problems:
            none = f"teacher_prompt names {{answer}}, and problem {problem.id} has none"
            require(problem.answer or "{answer}" not in self.teacher_prompt, none)
            text = self.teacher_prompt.replace("{answer}", problem.answer)
            turns = preceded(self.task.prompt(problem), text)
            asked.append((f"the teacher's prompt of {problem.id}", turns))
        return render_prompts(tokenizer, asked)

    def make_pretraining(self, context: Context, policy: Policy) -> Examples:
        """Pretraining text for the ptx term, with loss on all tokens."""
        text, seed = placed(self.pretraining, context), context.seed
        material = gather(text, policy.tokenizer, seed, self.pretraining_length, all_tokens=True)
        for report in material.reports:
            context.announce(self.name, [f"pretraining: {line}" for line in report.lines()])
        check_lengths(policy, material.sets, "pretraining_length")
        sets, weights, batch = material.sets, material.weights, self.pretraining_batch
        return Examples(sets, weights, batch, seed, policy.device)

    def evaluate(
        self,
        sampler: Sampler,
        tokenizer: object,
        context: Context,
        rating: Rating | None,
        reference: Policy | None,
    ) -> dict[str, float]:
        """Figures on held-out problems, each with its confidence interval: on `evaluate_problems`, the accuracy of greedy answers, or
        their mean reward if the task cannot tell right from wrong; on `measure_problems`, proxy reward, gold reward and KL of samples,
        which make the curve of over-optimisation."""
        found: dict[str, statistics.Interval] = {}
        task, seed, workers = self.task, context.seed, context.workers
        if self.evaluate_problems:
            problems = task.problems("test")[: self.evaluate_problems]
            greedy = Sampling(max_new_tokens=self.sampling.max_new_tokens, temperature=0.0)
            by = None if task.verifiable else rating
            made = answer_problems(task, sampler, tokenizer, problems, 1, greedy, seed, workers, by)
            found |= made.headlines(task.verifiable)
        if self.measure_problems and rating is not None and reference is not None:
            asked, decoder = task.problems("test")[: self.measure_problems], Decoder(tokenizer)
            groups = rollout_groups(task, sampler, decoder, asked, 1, self.sampling, seed, workers)
            found |= proxy_gold_kl(rate_groups(rating, groups), reference, self.sampling)
        return {k: v for name, one in found.items() for k, v in one.figures(f"{name}/test").items()}
