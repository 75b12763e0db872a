"""The command line: dispatch to the verbs. `lowband VERB --help` lists the options of each."""

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches

from lowband import __version__
from lowband.commands import (
    Parser,
    advise,
    benchmarks,
    box,
    box_benches,
    check_context,
    doctor,
    gpu,
    kernels,
    peers,
    plan,
    predict,
    predictor,
    report,
    runs,
    schedules,
    tables,
)
from lowband.errors import UserError, with_hint

MODULES = (
    runs,
    tables,
    report,
    box,
    box_benches,
    peers,
    advise,
    predict,
    plan,
    predictor,
    schedules,
    check_context,
    benchmarks,
    kernels,
    gpu,
    doctor,
)  # the order of --help
# The verbs of somebody with a model and a machine, in the order of --help. The others keep this repository.
USERS = (
    "doctor", "advise", "advise-page", "predict", "plan", "rehearse", "schedules", "check-context", "spec",
    "preflight", "train", "status", "curves", "box", "import-log", "bench-comm", "bench-kernel",
    "bench-softmax",
)  # fmt: skip
BENCH = "bench-"


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit code (2 for bad input, reported in one line)."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parse(given)
        code = int(options.run(options) or 0)
        sys.stdout.flush()  # here, where a closed pipe can be caught
        return code
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not flush the rest
        return 0
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as error:
        from lowband.run.ranks import line_of

        line = line_of(error)
        if line is None:
            raise
        return _bad_input(line)
    except ModuleNotFoundError as error:
        hint = with_hint(error, f"lowband {given[0]}")
        if hint is error:
            raise
        return _bad_input(str(hint))


def _bad_input(line: str) -> int:
    from lowband.run.ranks import print_once

    print_once(f"lowband: {line}")
    return 2


def command_line() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and that of each verb."""
    parser = Parser(
        prog="lowband", usage="lowband VERB ...   lowband VERB --help   lowband --version", add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", action="version", version=f"lowband {__version__}", help=argparse.SUPPRESS
    )
    verbs = parser.add_subparsers(metavar="VERB", prog="lowband", required=True, help=argparse.SUPPRESS)
    for module in MODULES:
        module.add(verbs)
    parser.description = _overview(verbs.choices)
    return parser, verbs.choices


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser, verbs = command_line()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        near = get_close_matches(arguments[0], verbs, n=1)
        raise UserError(
            f"no verb '{arguments[0]}'" + "".join(f"; did you mean '{name}'?" for name in near),
            allowed="" if near else "those of lowband --help",
        )
    return parser.parse_args(arguments)


def _overview(verbs: Mapping[str, argparse.ArgumentParser]) -> str:
    """The verbs in two groups, each with the first line of its description; benchmarks of the repository, of
    which there are many, by name alone."""
    line_of = {name: (verb.description or "").partition("\n")[0] for name, verb in verbs.items()}
    others = [name for name in verbs if name not in USERS]
    benches = [name.removeprefix(BENCH) for name in others if name.startswith(BENCH)]
    line_of[f"{BENCH}..."] = f"time or compare one thing on this machine: {', '.join(benches)}"
    groups = {
        "predict, train and measure:": USERS,
        "reproduce and keep the results of lowband's repository:": [
            *(name for name in others if not name.startswith(BENCH)), f"{BENCH}...",
        ],
    }  # fmt: skip
    return "\n".join(
        "\n".join([heading, *(_entry(name, line_of[name]) for name in names)])
        for heading, names in groups.items()
    )


def _entry(name: str, line: str) -> str:
    return textwrap.fill(line, 80, initial_indent=f"  {name:<13}  ", subsequent_indent=" " * 17)


if __name__ == "__main__":
    sys.exit(main())
