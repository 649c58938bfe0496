"""The command line. Each command is a few lines over a function that Python users can call as well."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from posttrain import __version__ as VERSION
from posttrain.errors import GuardStop, Interrupted, UserError, unknown

EXAMPLES = {
    "run": "posttrain run quickstart seed=1 rl.lr=1e-4",
    "resume": "posttrain resume runs/quickstart-1",
    "plan": "posttrain plan quickstart rl.prompts=64",
    "list": "posttrain list algorithms --json",
    "eval": "posttrain eval runs/quickstart-1/export --task arithmetic task.level=3 problems=1000",
    "compare": "posttrain compare runs/quickstart-1 runs/quickstart-2",
    "sample": "posttrain sample runs/quickstart-1/export '128+394='",
    "show": "posttrain show runs/quickstart-1 rl/600/0",
    "advise": "posttrain advise math --have demonstrations,verifier --compute laptop",
    "doctor": "posttrain doctor --json",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a crash (with its traceback) or a doctor who found something, 2 bad input, 3 stopped by a guard,
    130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, rest = parser().parse_known_args(words)
    except UserError as error:
        return complain(str(error), 2)
    # argparse does not take key=value after an option; they are settings wherever they stand
    if rest and not (
        hasattr(options, "settings")
        and all("=" in word and not word.startswith("-") for word in rest)
    ):
        return complain(
            f"unknown argument {rest[0]!r}; see 'posttrain {options.command or ''} --help'", 2
        )
    if rest:
        options.settings = [*options.settings, *rest]
    if options.command is None:
        parser().print_help()
        return 0
    try:
        return options.call(options) or 0
    except UserError as error:
        return complain(str(error), 2)
    except GuardStop as error:
        return complain(str(error), 3)
    except Interrupted as error:
        where = getattr(options, "where", None)
        return complain(
            f"{error}; continue with: posttrain resume {where}" if where else str(error), 130
        )
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    except BrokenPipeError:
        return 0


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line, with the nearest name where one was mistyped."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if found is None:
            raise UserError(f"{message.replace(', key=value', '')}; see '{self.prog} --help'")
        kind, name, choices = found.groups()
        known = [choice.strip(" '") for choice in choices.split(",")]
        raise unknown("command" if kind == "COMMAND" else f"{kind} of '{self.prog}'", name, known)


def complain(text: str, code: int) -> int:
    from posttrain.runs.console import write_text

    write_text(f"posttrain: {' '.join(text.split())}\n", sys.stderr)
    return code


TRUST = (
    "trust the YAML file or the run like a program: code, addresses, files and links that it names"
)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="posttrain",
        description="Reinforcement learning for language models, from a laptop up.",
    )
    top.add_argument("--version", action="version", version=f"posttrain {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def command(
        name: str, call: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=f"example: {EXAMPLES[name]}"
        )
        made.set_defaults(call=call)
        return made

    one = command("run", run, "run a recipe: a shipped name, a YAML file, or file.py:function")
    one.add_argument("recipe")
    one.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="settings of the recipe and of its stages; only=STAGE,... runs "
        "some alone; several values, as in seeds=0,1,2 rl.lr=1e-4,3e-4, make a sweep",
    )
    one.add_argument("--allow-code", action="store_true", help=TRUST)
    one = command("resume", resume, "continue a run that was stopped or killed")
    one.add_argument("run", type=Path)
    one.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="what changes how, not what: threads, token_budget, ...",
    )
    one.add_argument("--allow-code", action="store_true", help=TRUST)
    one = command("plan", plan, "say what a recipe would do, and what it needs, without training")
    one.add_argument("recipe")
    one.add_argument("settings", nargs="*", metavar="key=value")
    one.add_argument("--allow-code", action="store_true", help=TRUST)
    one.add_argument(
        "--dry",
        action="store_true",
        help="try a few steps of every stage, to say how long it takes",
    )
    one = command("list", list_, "what there is: recipes, algorithms, tasks, rewards")
    one.add_argument("kind", nargs="?", choices=["recipes", "algorithms", "tasks", "rewards"])
    one.add_argument("--json", action="store_true", help="for programs")
    one = command("eval", evaluate, "measure a model on a task's held-out problems")
    one.add_argument("model")
    one.add_argument("--task", required=True)
    one.add_argument("--json", action="store_true", help="for programs")
    one.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="problems, samples, task.KEY, sampling.KEY, reference, text, "
        "against, save, seed, device",
    )
    one = command(
        "compare",
        compare,
        "two runs: held-out results in pairs, curves in one picture, settings that differ",
    )
    one.add_argument("first", type=Path, metavar="RUN")
    one.add_argument("second", type=Path, metavar="RUN")
    one.add_argument(
        "--stage", default="", help="the evaluation to compare; ONE:OTHER where it has two names"
    )
    one.add_argument("--out", type=Path, help="the picture; without it, compare-RUN-RUN.png here")
    one.add_argument("--json", action="store_true", help="for programs")
    one = command("sample", sample, "let a model answer a prompt")
    one.add_argument("model")
    one.add_argument("prompt")
    one.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="temperature, max_new_tokens, group, seed, ...",
    )
    one = command(
        "show", show, "print rollouts; one of them as a Markov decision process, token by token"
    )
    one.add_argument("run", type=Path)
    one.add_argument(
        "rollout",
        nargs="?",
        default="",
        help="STAGE/STEP/NUMBER; without it, the rollouts of the last step",
    )
    one = command(
        "advise", advise, "which method for a goal, with the data and the compute at hand"
    )
    one.add_argument("goal", nargs="*", help="without one, the goals there are")
    one.add_argument(
        "--have",
        default="nothing",
        help="data at hand, with commas between: demonstrations, comparisons, thumbs, "
        "verifier, judge",
    )
    one.add_argument("--compute", default="gpu", help="laptop, gpu or cluster")
    one.add_argument(
        "--config", action="store_true", help="print the recipe alone, to be saved as a YAML file"
    )
    one.add_argument("--json", action="store_true", help="for programs")
    one = command(
        "doctor", doctor, "look at this machine: versions, GPU, sandbox, disk; and say what to fix"
    )
    one.add_argument("--json", action="store_true", help="for programs")
    return top


def doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from posttrain.commands import doctor as clinic

    findings = clinic.examine()
    sound = clinic.healthy(findings)
    text = (
        json.dumps({"healthy": sound, "findings": [asdict(f) for f in findings]}, indent=2)
        if options.json
        else None
    )
    sys.stdout.write((text or "\n".join(clinic.lines(findings))) + "\n")
    return 0 if sound else 1


def run(options: argparse.Namespace) -> int:
    from posttrain import config, pipeline
    from posttrain.commands import sweep

    if sweep.is_sweep(options.settings):
        return _swept(sweep.run(options.recipe, options.settings, options.allow_code))
    settings = config.parse(options.recipe, options.settings, options.allow_code)
    if not settings.out:
        import dataclasses

        settings = dataclasses.replace(
            settings, out=str(pipeline.fresh(Path("runs"), settings.name))
        )
    options.where = settings.out
    pipeline.start(settings)
    return 0


def _swept(failed: int) -> int:
    return (
        complain(
            f"{failed} of the sweep's runs failed; their directories say why in failure.txt", 1
        )
        if failed
        else 0
    )


def resume(options: argparse.Namespace) -> int:
    from posttrain import pipeline
    from posttrain.commands import sweep

    options.where = options.run
    if (options.run / sweep.RECORD).is_file():
        if options.settings:
            return complain("the settings of a sweep cannot change when it is resumed", 2)
        return _swept(sweep.resume(options.run, options.allow_code))
    pipeline.resume(options.run, options.allow_code, options.settings)
    return 0


def plan(options: argparse.Namespace) -> None:
    from posttrain import config
    from posttrain.commands.plan import describe
    from posttrain.runs.console import printable, write_text

    for line in describe(
        config.parse(options.recipe, options.settings, options.allow_code), options.dry
    ):
        write_text(printable(line) + "\n", sys.stdout)


def list_(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from posttrain import catalogue

    kinds = [options.kind] if options.kind else ["recipes", "algorithms", "tasks", "rewards"]
    entries = {kind: catalogue.describe(kind.removesuffix("s")) for kind in kinds}
    if options.json:
        sys.stdout.write(
            json.dumps(
                {kind: [asdict(e) for e in found] for kind, found in entries.items()}, indent=2
            )
            + "\n"
        )
        return
    for kind, found in entries.items():
        sys.stdout.write(f"{kind}\n")
        width = max((len(entry.name) for entry in found), default=0)
        for entry in found:
            paper = f"  [{entry.paper}]" if entry.paper else ""
            sys.stdout.write(f"  {entry.name:<{width}} {entry.summary}{paper}\n")


def advise(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from posttrain.commands import advise as advice

    if not options.goal:
        goals = {name: goal.title for name, goal in advice.GOALS.items()}
        text = (
            json.dumps(goals) + "\n"
            if options.json
            else "".join(f"{name:<10} {title}\n" for name, title in goals.items())
        )
        sys.stdout.write(text)
        return
    found = advice.advise(
        " ".join(options.goal), [word for word in options.have.split(",") if word], options.compute
    )
    if options.config:
        sys.stdout.write(advice.recipe_text(found))
    elif options.json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(advice.lines(found)) + "\n")


def evaluate(options: argparse.Namespace) -> None:
    from posttrain.commands import inspect as tools

    tools.evaluate(options.model, options.task, options.settings, options.json)


def compare(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from posttrain.commands.compare import compare_runs, lines
    from posttrain.runs.console import printable, write_text
    from posttrain.runs.layout import encode

    found = compare_runs(options.first, options.second, options.out, options.stage)
    text = (
        json.dumps(encode(asdict(found)), indent=2)
        if options.json
        else "\n".join(map(printable, lines(found)))
    )
    write_text(text + "\n", sys.stdout)


def sample(options: argparse.Namespace) -> None:
    from posttrain.commands import inspect as tools

    tools.sample(options.model, options.prompt, options.settings)


def show(options: argparse.Namespace) -> None:
    from posttrain.commands import inspect as tools

    tools.show(options.run, options.rollout)


if __name__ == "__main__":
    sys.exit(main())
