"""Peers with the optimizer's states in the host's memory train as without, as ours do, and send the same."""

from pathlib import Path
from typing import Any

import pytest
from test_peers import BOUND, imported, run, state_bytes  # noqa: F401  (a fixture)
from test_peers_axes import EVEN
from test_tiers import placed

from lowband.errors import UserError
from lowband.spec.mesh import Levels
from lowband.spec.peers import peer_arguments

WIDE = pytest.mark.wide
BASE: dict[str, Any] = {"steps": 6, "warmup_steps": 3, "grad_clip": 0.5}
CASES = [
    ("fsdp2", "zero3", 2, {"accumulation": 2}),
    ("deepspeed", "zero1", 2, {"accumulation": 2}),
    pytest.param("deepspeed", "zero3", 2, {"accumulation": 2}, marks=WIDE),
    pytest.param("fsdp2", "zero2", 4, {}, marks=WIDE),
    pytest.param("fsdp2", "hsdp", 4, {"accumulation": 2}, marks=WIDE),
    pytest.param("fsdp2", "hpz", 4, {}, marks=WIDE),
    pytest.param("fsdp2", "zero3", 4, {"compute_dtype": "bf16"}, marks=WIDE),
    pytest.param("fsdp2", "zero3", 4, {"model": EVEN, "tensor": 2}, marks=WIDE),
    pytest.param("fsdp2", "zero3", 4, {"model": EVEN, "accumulation": 4, "pipeline": 2}, marks=WIDE),
    pytest.param("deepspeed", "zero2", 4, {"accumulation": 2}, marks=WIDE),
    pytest.param("deepspeed", "hpz", 4, {}, marks=WIDE),
]


@pytest.mark.parametrize(("peer", "name", "ranks", "changes"), CASES)
def test_losses_and_bytes(tmp_path: Path, peer: str, name: str, ranks: int, changes: dict[str, Any]) -> None:
    found = {}
    for engine in (peer, "lowband"):
        for tier in ("device", "host"):
            if (engine, tier) != ("lowband", "device"):  # whose bits are those on the host: test_tiers.py
                folder = tmp_path / tier
                folder.mkdir(exist_ok=True)
                given = {"scheme": placed(name, tier), **BASE, **changes}
                _, losses, outcome = run(folder, engine, name, ranks, **given)
                assert outcome.status == "ok", outcome.cause
                found[engine, tier] = losses, state_bytes(outcome)
    theirs, sent = found[peer, "host"]
    bound = BOUND if changes.get("compute_dtype") is None else 2**-8
    assert theirs == pytest.approx(found[peer, "device"][0], rel=0, abs=bound)
    assert theirs == pytest.approx(found["lowband", "host"][0], rel=0, abs=bound)
    assert sent == found[peer, "device"][1]


@pytest.mark.parametrize(
    ("peer", "tier", "reason"),
    [
        ("ddp", "host", "it shards nothing"),
        ("fsdp2", "disk", "it keeps nothing on disks"),
        ("deepspeed", "disk", "an extension that has to be compiled"),
    ],
)
def test_a_refusal_says_why(peer: str, tier: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"no counterpart: .*{reason}"):
        peer_arguments(peer, placed("zero3", tier), Levels.fit({}, 4))
