"""The campaign: targets in turns, a row of counts for each, an input for each distinct defect."""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lowband.run.environment import code_version
from tests import campaign_rows
from tests.fuzz.arguments import import_all
from tests.fuzz.judge import DEFECTS, OUTCOMES, limit_memory, outcome, place
from tests.fuzz.mutate import mutate
from tests.fuzz.sound import sound_run
from tests.fuzz.target import Target
from tests.fuzz.targets import targets

COLUMNS = ["parser", "group", "guided", "inputs", *OUTCOMES, "defects", "edges", "processor_s", "commit"]


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if there was a defect."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        every = all_targets(folder / "sound")
        names, groups = options.target, options.group
        chosen = [t for t in every if t.name in (names or [t.name]) and t.group in (groups or [t.group])]
        if options.seed is not None:
            return _show(chosen[0], options.seed, folder)
        import_all()  # before any limit of time
        rows, refused = [], 0
        for target in chosen:
            work = folder / "work"
            work.mkdir()
            refused += not is_sound(target, work)
            tally = guided(target, options, work) if options.guided else drawn(target, options, work)
            rows.append(row(target, tally, is_guided=options.guided))
            if options.defects and tally.examples:
                kept = options.defects / re.sub(r"\W+", "_", target.name)
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir(parents=True)
                for i, (what, data) in enumerate(tally.examples.items(), start=1):
                    (kept / str(i)).write_bytes(data)
                    (kept / f"{i}.txt").write_text(what, errors="backslashreplace")
            shutil.rmtree(work)
            if options.out:
                write(rows, options.out, [target.name for target in every])
    return int(any(r[key] for r in rows for key in DEFECTS) or refused > 0)


def is_sound(target: Target, folder: Path) -> bool:
    """Whether the target accepts what its inputs are made from; what is behind a refusal is not tried."""
    expected = "refused" if target.is_unfinished else "accepted"
    found = [(data, *outcome(target, data, folder)) for data in target.sounds]
    for data, how, text in found:
        if how != expected:
            print(f"{target.name}: sound input: {how}: {data[:200]!r} {text[-600:]}", flush=True)
    return all(how == expected for _, how, _ in found)


class Tally:
    """Counts of outcomes, and an input of each distinct defect."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, bytes] = {}
        self.processor_s = 0.0
        self.edges: int | None = None

    def add(self, target: Target, how: str, text: str, data: bytes) -> None:
        self.counts[how] += 1
        if how not in DEFECTS:
            return
        what = f"{how}: {place(text) if how == 'traceback' else text[:60]}"
        if what not in self.examples:
            self.examples[what] = data
            print(f"{target.name}: {what}: {data[:60]!r} {text[-300:]!r}", flush=True)


def drawn(target: Target, options: argparse.Namespace, folder: Path) -> Tally:
    """Inputs of fixed seeds, in this process."""
    tally = Tally()
    start = time.process_time()
    with limit_memory():
        for seed in range(options.first, options.first + options.inputs):
            data = mutate(target.text, target.kind, random.Random(f"{target.name} {seed}"))
            tally.add(target, *outcome(target, data, folder), data)
    tally.processor_s = time.process_time() - start
    return tally


def guided(target: Target, options: argparse.Namespace, folder: Path) -> Tally:
    """Inputs that coverage chooses, in a process of its own, whose end by a crash is one more defect."""
    from tests.fuzz.guided import fuzz

    tally = Tally()
    result, log = folder / "result.json", folder / "log"
    code = fuzz(target, options.inputs, options.seconds, options.first + 1, folder, tally, result, log)
    text = log.read_text(errors="replace")
    if result.exists():
        found = json.loads(result.read_text())
        tally.counts.update(found["counts"])
        tally.processor_s = found["processor_s"]
        tally.examples = {what: data.encode("latin-1") for what, data in found["examples"].items()}
    if code or not result.exists():
        print(f"{target.name}: crash, {code}: {text[-600:]}", flush=True)
        tally.counts["crash"] += 1
        tally.examples["crash"] = (folder / "root" / target.file).read_bytes()
    edges = re.findall(r"cov: (\d+)", text)
    tally.edges = int(edges[-1]) if edges else 0
    return tally


def row(target: Target, tally: Tally, *, is_guided: bool) -> dict[str, Any]:
    found = {
        "parser": target.name, "group": target.group, "guided": is_guided, "inputs": tally.counts.total(),
        **{key: tally.counts[key] for key in OUTCOMES}, "defects": len(tally.examples), "edges": tally.edges,
        "processor_s": round(tally.processor_s, 1), "commit": code_version()[0],
    }  # fmt: skip
    print(*found.values(), flush=True)
    return found


def write(rows: list[dict[str, Any]], path: Path, order: list[str]) -> None:
    """Write the rows in the order of the targets, with those of the file that are of other parsers."""
    known = {row["parser"]: row for row in (*campaign_rows.read(path), *rows)}
    campaign_rows.write(path, COLUMNS, [known[name] for name in order if name in known])


def all_targets(folder: Path) -> list[Target]:
    """folder: receives a sound run"""
    return targets(*sound_run(folder / "run"))


def _show(target: Target, seed: int, folder: Path) -> int:
    """Print the input of a seed and what happens."""
    data = mutate(target.text, target.kind, random.Random(f"{target.name} {seed}"))
    sys.stdout.write(data.decode(errors="replace")[:3000] + "\n")
    print(*outcome(target, data, folder), sep="\n")
    return 0
