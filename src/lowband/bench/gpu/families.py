"""What a call measures, by family: how much it is worth, what it takes, and which files it measures.

value, seconds: of one item. Items run in the order of value per second, so what every other row rests on
comes first and what seldom changes last. The seconds are a first guess: those that an item took on a device
of the same name take their place.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from lowband.errors import UserError

ROOT = Path(__file__).parents[4]  # the tree that this package was imported from
_KERNELS, _BENCH = "src/lowband/kernels", "src/lowband/bench/kernels"
_MEASURE = (f"{_BENCH}/measure.py", f"{_KERNELS}/device.py")
_QUANT = (f"{_KERNELS}/block_quant*.py",)
_FLASH = (f"{_KERNELS}/flash_attention*.py", f"{_KERNELS}/spans.py")
_TURNS = ("src/lowband/bench/turns.py",)
# With the cases that they share with the tests on a CPU.
_TESTS = (
    "tests/gpu/*.py", "tests/kernels/inner.py", "tests/kernels/cases/*.py", "tests/dist/test_parity.py",
    "tests/dist/alike.py",
)  # fmt: skip
_ENGINE = ("src/lowband/engine/**/*.py", "src/lowband/model/*.py")


class Family(NamedTuple):
    """sources: the files whose content decides whether rows are still those of today, below the tree"""

    value: float
    seconds: float
    sources: tuple[str, ...]


FAMILIES = {
    "ceilings": Family(50, 2, (*_MEASURE, f"{_BENCH}/ceilings.py")),
    "attention": Family(
        6, 2, (*_MEASURE, *_FLASH, "src/lowband/cost/attention.py", f"{_BENCH}/attention.py")
    ),
    "attention_kinds": Family(
        6,
        4,
        (*_MEASURE, *_FLASH, "src/lowband/cost/attention.py", f"{_BENCH}/attention*.py"),
    ),
    "tests": Family(500, 80, (*_ENGINE, f"{_KERNELS}/*.py", *_TESTS)),
    "steps": Family(480, 60, (*_ENGINE, *_TURNS, "src/lowband/bench/compile.py")),
    "mfu": Family(
        700,
        120,
        (*_ENGINE, *_TURNS, f"{_KERNELS}/*.py", "src/lowband/bench/mfu.py", "src/lowband/bench/compile.py"),
    ),
    "overhead": Family(280, 40, (*_ENGINE, "tests/gpu/overhead.py")),
    "block_quant": Family(6, 1, (*_MEASURE, *_QUANT, "src/lowband/spec/wire.py", f"{_BENCH}/block_quant.py")),
    "training": Family(50, 10, (*_MEASURE, *_FLASH, "src/lowband/model/*.py", f"{_BENCH}/training.py")),
    "experts": Family(
        20, 8, (*_MEASURE, "src/lowband/engine/parallel/expert_products.py", f"{_BENCH}/experts.py")
    ),
    "one-gpu": Family(
        60,
        25,
        (*_ENGINE, "src/lowband/run/*.py", "src/lowband/trainers/*.py", "config/suites/one-gpu*.yaml"),
    ),
    "softmax": Family(2, 1, (*_MEASURE, f"{_KERNELS}/softmax*.py", f"{_BENCH}/softmax.py")),
    "products": Family(0.2, 0.5, (*_MEASURE, f"{_BENCH}/products.py")),
}


def sources_sha256(family: str, root: Path = ROOT) -> str:
    """Checksum of a family's files in a tree. Raises UserError for a tree that lacks them."""
    digest = hashlib.sha256()
    for pattern in FAMILIES[family].sources:
        paths = sorted(root.glob(pattern))
        if not paths:
            raise UserError(f"no file {pattern}", where=root, allowed="a copy of the whole tree")
        for path in paths:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
