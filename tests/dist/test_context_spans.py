"""Documents along context by our kernel, under Triton's interpreter, with no block's scores in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined.
PROGRAM = """
import json, sys
import torch
import test_context
from lowband.kernels import flash_attention
from lowband.run.on_ranks import on_ranks

def errors(cases, has_products):
    if not has_products:  # called, they would end the rank
        flash_attention.reference = flash_attention.reference_gradients = None
    given = {"dtype": torch.float32, "kernel": "flash2"}
    return [test_context._errors(**given | case)[0] for case in cases]

ranks, cases, has_products = json.loads(sys.argv[1])
print(json.dumps(on_ranks(ranks, errors, cases, has_products)))
"""
RING, GATHER, HEADS = ([{}, 2, way] for way in ("ring", "gather", "heads"))
MIXED = [{"node": 2}, 4, {"node": "gather", "world": "ring"}]


def largest(ranks: int, cases: list[dict[str, Any]], has_products: bool = False) -> float:
    """The largest error of outputs and gradients, of all cases on all ranks."""
    paths = [Path(__file__).parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([ranks, cases, has_products])],
        env={
            **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return max(error for errors in json.loads(done.stdout) for error in errors)


def test_two_ranks() -> None:
    cases = [
        {"case": RING, "zigzag": True, "packed": True, "heads": (4, 2)},
        {"case": GATHER, "zigzag": True, "packed": True, "tokens": 29, "heads": (2, 2)},
        {"case": HEADS, "zigzag": False, "packed": True, "causal": False, "tokens": 29, "heads": (2, 2)},
        {"case": RING, "zigzag": False, "causal": False, "tokens": 27, "heads": (2, 1)},
    ]
    assert largest(2, cases) < 3e-6


def test_documents_in_several_places_are_products() -> None:
    case = {"case": RING, "zigzag": True, "packed": "apart", "heads": (2, 2)}
    assert largest(2, [case], has_products=True) < 3e-6


@pytest.mark.wide
def test_rings_of_nodes_that_gather() -> None:
    cases = [
        {"case": MIXED, "zigzag": zigzag, "packed": True, "causal": causal, "tokens": 30, "heads": (2, 1)}
        for zigzag in (True, False)
        for causal in (True, False)
    ]
    assert largest(4, cases) < 3e-6
