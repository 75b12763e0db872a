"""docs/parallel.md: its program runs, and the ranks exchange messages with whom its table says."""

import re

import torch
from modules import Tower, inputs, is_layer

import lowband
from lowband.engine.api import engine_of
from lowband.evidence.report.documents.parallel import AXES, INNER, RANKS, SCHEME, SHOWN
from lowband.run.on_ranks import on_ranks
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "parallel.md"


def trained(program: str) -> tuple[list[int], set[str]]:
    """With whom this rank has exchanged messages in a step, and in which rows."""
    scope = {"lowband": lowband, "model": Tower(), "Block": is_layer}
    exec(program, scope)
    assert (dict(scope["topology"].inner), scope["topology"].axes) == (INNER, AXES)
    engine = engine_of(scope["model"])
    assert engine.collectives.scheme.name == SCHEME
    scope["model"](inputs(0, 0).to(torch.float32)).backward()
    return sorted(engine.axis.message_times.take()), {sent.collective for sent in engine.ledger.take()}


def test_the_program_and_the_partners_of_a_rank() -> None:
    of_data, _, _ = PAGE.read_text().partition("## How it composes")
    [program] = re.findall(r"```python\n(.*?)```", of_data, re.DOTALL)
    found = on_ranks(RANKS, trained, program)
    rows = re.findall(r"^\| `(\w+)` .*\| ([^|]*) \|$", of_data, re.MULTILINE)
    assert found[SHOWN][1] == {name for name, _ in rows}
    told = {int(number) for _, partners in rows for number in re.findall(r"\d+", partners)}
    assert told == set(found[SHOWN][0])
