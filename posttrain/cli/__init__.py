"""The command line. Each command is one file of this package, found by its name; the package `commands` does the work.

A command file has a docstring (its help), `EXAMPLE`, `add_arguments(parser)` and `call(options)`, which returns an exit code or None.
"""

import argparse
import errno
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from posttrain import __version__ as VERSION
from posttrain import catalogue, errors, trust
from posttrain.cli.base import fail, print_lines
from posttrain.system import processes
from posttrain.system.processes import OUT_OF_MEMORY, PEER_FAILED, STARTED, end_with_parent

# what commands are called elsewhere
RUN = "run RECIPE"
OTHERS = {"train": RUN, "finetune": RUN, "generate": "sample", "sweep": f"{RUN} KEY=VALUE,VALUE"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 a crash (with its traceback) or doctor reported a problem, 2 bad input, 3 stopped by
    a guard, 75 another process of the run failed, 129 its terminal was closed, 130 interrupted."""
    try:
        processes.open_streams()
        end_with_parent()
        try:
            os.getcwd()
        except OSError:
            gone = "the current directory has been removed; change to another (cd)"
            raise errors.UserError(gone) from None
        options = parse(sys.argv[1:] if arguments is None else arguments)
        return options.call(options) or 0
    except errors.UserError as error:
        return fail(str(error), 2)
    except errors.GuardStop as error:
        return fail(str(error), 3)
    except errors.Waiting as error:
        print_lines([f"{error}; then {go_on(error.directory, options)}"])
        return 0
    except errors.Interrupted as error:
        more = f"; {go_on(error.directory, options)}" if error.directory else ""
        return fail(f"{error}{more}", error.code)
    except errors.PeerFailed as error:
        # the process that started them reports which one failed
        return PEER_FAILED if STARTED in os.environ else fail(str(error), PEER_FAILED)
    except errors.OutOfMemory as error:
        return OUT_OF_MEMORY if STARTED in os.environ else fail(str(error), 1)
    except KeyboardInterrupt as error:
        place = getattr(error, "directory", None)
        return fail(f"interrupted{f'; {go_on(place, options)}' if place else ''}", 130)
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
            return fail(f"{error.filename}: permission denied; ask its owner to allow it", 2)
        if error.errno == errno.EMFILE:
            return fail("too many open files for one process; allow more (ulimit -n 1024)", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return fail(f"{error.filename or 'a file'} cannot be written: no space left on its disk", 2)
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # of the standard library
            raise
        return fail("no further thread can be started; allow this user more (ulimit -u)", 2)


def go_on(directory: Path | None, options: argparse.Namespace) -> str:
    """How to continue a run or a sweep, with the option that it needs if its directory names code."""
    trusted, place = getattr(options, "allow_code", False), Path(directory or "")
    found = [*place.glob("config.yaml"), *place.glob("*/config.yaml")]  # of a sweep: its runs
    if found and not trusted:
        from posttrain import config
        from posttrain.runs.read import Run

        try:
            config.from_config(Run(found[0].parent).config, str(found[0]))
            recipe = getattr(options, "recipe", "")
            trusted = found[0].parent != place and trust.code_place(recipe) is not None
        except errors.UserError:
            trusted = True
    return f"continue with: posttrain resume {shlex.quote(str(place))}{' --allow-code' * trusted}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    top = parser()
    options, rest = top.parse_known_args(words)
    if options.command is None and not rest:
        options.call = lambda _: top.print_help()
    # argparse does not accept key=value after an option; here they are settings at any position
    elif rest and "settings" in options and all(re.match("[^-].*=|=", word) for word in rest):
        options.settings += rest
    elif rest:
        place = f"posttrain {options.command or ''} --help"
        staged = options.command in ("run", "plan", "resume")
        example = "such as rl.steps=10" if staged else "without dashes"
        hint = f"settings are KEY=VALUE, {example}; " if "settings" in options else ""
        raise errors.UserError(f"unknown argument {rest[0]!r}; {hint}see '{place}'")
    return options


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as a UserError of one line, with the nearest name if one was mistyped."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if found is None:
            wrong = message.replace(", key=value", "")
            raise errors.UserError(f"{wrong}; see '{self.prog} --help'")
        kind, name, choices = found.groups()
        known = [choice.strip(" '") for choice in choices.split(",")]
        what = "command" if kind == "COMMAND" else f"{kind} of '{self.prog}'"
        if kind == "COMMAND" and name in (*OTHERS, *catalogue.names("recipe")):
            use = OTHERS.get(name, f"run {name}")
            raise errors.UserError(f"unknown command {name!r}; use: posttrain {use}")
        raise errors.unknown(what, name, known)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    text = "Reinforcement learning for language models, from a laptop up."
    top = Parser(prog="posttrain", description=text)
    top.add_argument("--version", action="version", version=f"posttrain {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name in catalogue.names("command"):
        module = importlib.import_module(f"posttrain.cli.{name}")
        about, example = module.__doc__, f"example: {module.EXAMPLE}"
        made = commands.add_parser(
            name, help=about, description=about, epilog=example, conflict_handler="resolve"
        )
        module.add_arguments(made)
        made.set_defaults(call=module.call)
    return top
