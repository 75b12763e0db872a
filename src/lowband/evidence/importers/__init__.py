"""Logs of other projects -> one tidy table. A format is a file here and a line in FORMATS.

Lines that are not metric lines of the format are skipped; a metric line that does not parse is reported with
its number and left out: nothing is guessed.

Columns are empty where the log has no value. Rates of all formats are first converted to tokens, so that
FLOP/s of different conventions become comparable:

    model_flop_per_s_per_rank  in our convention (cost.flops)
    reported_over_convention   the log's TFLOPS over its own convention's, from the same tokens: 1 if the log
                               counts as we assume
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lowband.cost.conventions import flops_per_token
from lowband.cost.flops import MODEL_CONVENTION, model_flops_per_token
from lowband.errors import UserError
from lowband.spec.files import writing_whole
from lowband.spec.model import ModelSpec
from lowband.spec.plain_data import read_lines

FORMATS = {  # a Parser, or a class whose instances are Parsers that remember
    "megatron-lm": "megatron.parse", "megatron-deepspeed": "megatron.parse", "deepspeed": "deepspeed.parse",
    "torchtitan": "torchtitan.Steps", "mllog": "mllog.Steps",
}  # fmt: skip

MOST_DIGITS = 18  # of a count: an int64 holds it


class Malformed(Exception):
    """A metric line that does not parse. The message states what is wrong."""


@dataclass(frozen=True)
class ForeignRun:
    """Facts of a run that its log does not contain. recompute: whether activations were recomputed."""

    model: ModelSpec
    seq_len: int
    ranks: int
    recompute: bool = False


# Line -> the step's values; None for a line of another kind.
Parser = Callable[[str], dict[str, Any] | None]

COLUMNS = [
    "format", "line", "step", "loss", "grad_norm", "learning_rate", "step_time_s", "samples_per_step",
    "samples_per_s", "tokens_per_s", "peak_memory_bytes", "reported_tflops_per_rank",
    "reported_over_convention", "model_flop_per_s_per_rank", "flop_convention",
]  # fmt: skip


def import_log(path: Path, form: str, run: ForeignRun, out: Path) -> list[str]:
    """Write the log's steps as a CSV; returns a message for each malformed line.

    One line at a time is in memory. Raises UserError if the log has no line that parses.
    """
    parse: Parser = resolve_name(f"{__name__}.{FORMATS[form]}")
    parse = parse() if isinstance(parse, type) else parse
    theirs = flops_per_token(form, run.model, run.seq_len, recompute=run.recompute)
    ours = int(model_flops_per_token(run.model, run.seq_len))
    constants = {"format": form, "flop_convention": MODEL_CONVENTION}
    messages: list[str] = []
    has_steps = False
    with writing_whole(out) as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for found in _read(read_lines(path, errors="replace"), parse):
            if isinstance(found, str):
                messages.append(f"{path}:{found}")
                continue
            values = constants | found | _rates(found, run, theirs, ours)
            cells = map(values.get, COLUMNS)
            rows.writerow(["" if cell != cell else cell for cell in cells])  # noqa: PLR0124 (not a number)
            has_steps = True
        if not has_steps:
            raise UserError(
                f"none of the {len(messages)} metric lines parses as a step of a {form} log", where=path
            )
    return messages


def _read(lines: Iterable[str], parse: Parser) -> Iterator[dict[str, Any] | str]:
    """The values of each metric line; for a malformed one, its number and the error as text."""
    for number, line in enumerate(lines, start=1):
        try:
            values = parse(line)
        except Malformed as error:
            yield f"{number}: malformed, skipped: {error}"
            continue
        if values is not None:
            values["line"] = number
            yield values


def _rates(values: dict[str, Any], run: ForeignRun, theirs: float | None, ours: float) -> dict[str, Any]:
    """Samples, tokens and FLOP per second, from whichever rate the log contains.

    theirs, ours: FLOPs per token in the convention of the log's format (None: it prints none), and in ours
    """
    samples_per_s = values.get("samples_per_s")
    if samples_per_s is None and values.get("step_time_s") and values.get("samples_per_step"):
        samples_per_s = values["samples_per_step"] / values["step_time_s"]
    if samples_per_s is not None:
        tokens_per_s = samples_per_s * run.seq_len
    elif values.get("tokens_per_s_per_rank") is not None:
        tokens_per_s = values["tokens_per_s_per_rank"] * run.ranks
    else:
        return {}
    tokens_per_rank = tokens_per_s / run.ranks
    reported = values.get("reported_tflops_per_rank")
    return {
        "samples_per_s": samples_per_s,
        "tokens_per_s": tokens_per_s,
        "reported_over_convention": reported * 1e12 / (tokens_per_rank * theirs)
        if reported and tokens_per_rank and theirs
        else None,
        "model_flop_per_s_per_rank": tokens_per_rank * ours,
    }


def whole(text: str, what: str) -> int:
    """A count in decimal digits. Raises Malformed, naming the quantity `what`."""
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise Malformed(f"{what} is {text[:40]!r}")
    return int(text)


def number(text: str, what: str) -> float:
    """A number as logs print it (1,234.5). Raises Malformed, naming the quantity `what`.

    None is negative, and what is no loss or norm is finite.
    """
    wrong = Malformed(f"{what} is {text.strip()!r}")
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise wrong from None
    may_diverge = "loss" in what or "norm" in what
    if value < 0 or "_" in text or not (may_diverge or math.isfinite(value)):
        raise wrong
    return value
