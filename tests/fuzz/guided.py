"""One target under atheris (libFuzzer): inputs that reach new code of lowband are kept and changed further.

libFuzzer changes bytes, which seldom pass a YAML or JSON parser, so most changes are those of `mutate`; what
is kept is chosen by coverage of lowband's modules. Each target has a process of its own, forked from the one
that has imported everything, because libFuzzer ends its process.
"""

import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import atheris

from tests.fuzz.judge import limit_memory, outcome
from tests.fuzz.mutate import mutate
from tests.fuzz.target import Target

OWN_SHARE = 0.25  # of changes that are libFuzzer's own, which know the constants that lowband compares with
LATE_S = 60  # of the processor
MOST_BYTES = 2**14  # of an input


def fuzz(
    target: Target, inputs: int, seconds: float, seed: int, folder: Path, tally: Any, result: Path, log: Path
) -> int:
    """Fuzz in a forked process, which writes `result` and `log`; returns its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        limit = int(seconds) + LATE_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # of one that hangs outside of Python
        try:
            _fuzz(target, inputs, seconds, seed, folder, tally, result)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _fuzz(
    target: Target, inputs: int, seconds: float, seed: int, folder: Path, tally: Any, result: Path
) -> None:
    sounds = target.sounds
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, data in enumerate(sounds):
        (corpus / str(i)).write_bytes(data)
    start = time.process_time()

    def one(data: bytes) -> None:
        if tally.counts.total() >= inputs or time.process_time() - start > seconds:
            examples = {what: data.decode("latin-1") for what, data in tally.examples.items()}
            used = time.process_time() - start
            result.write_text(json.dumps({"counts": tally.counts, "examples": examples, "processor_s": used}))
            sys.stdout.flush()
            os._exit(0)
        tally.add(target, *outcome(target, data, folder), data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < OWN_SHARE:
            return bytes(atheris.Mutate(data, most))
        if not data or draw.random() < 0.1:
            data = draw.choice(sounds)
        return mutate(data.decode("utf-8", "replace"), target.kind, draw)[:most]

    flags = [
        f"-seed={seed}", f"-max_len={MOST_BYTES}", "-timeout=0", "-rss_limit_mb=0", "-reload=0",
        f"-runs={10**9}", f"-artifact_prefix={folder}/", str(corpus),
    ]  # fmt: skip
    with limit_memory():
        atheris.Setup(["fuzz", *flags], one, custom_mutator=change)
        atheris.Fuzz()
