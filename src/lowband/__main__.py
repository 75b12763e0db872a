"""The command line: dispatch to the sub-commands. `lowband COMMAND --help` lists the options of each."""

import argparse
import os
import sys

from lowband.commands import benchmarks, box, doctor, kernels, peers, predict, report, runs, tables
from lowband.errors import UserError

GROUPS = (runs, tables, box, peers, predict, benchmarks, kernels, report, doctor)  # in the order of --help


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command; returns the exit code (2 for bad input, reported in one line)."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()  # here, where a closed pipe can be caught
        return code
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not flush the rest
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"lowband: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"lowband: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowband", description="Partitioned LLM training, measured.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        group.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
