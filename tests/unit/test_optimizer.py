"""Every engine has the same optimizer: the fused one on a GPU and for states in another tier, torch's default
elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from lowband.trainers.trainer import adamw


@pytest.mark.parametrize(
    ("devices", "has_copies", "is_fused"),
    [
        (("cuda", "cuda"), False, True),
        (("cpu",), False, None),
        (("cuda", "cpu"), False, None),
        (("cpu",), True, True),
    ],
)
def test_the_optimizer_is_fused_on_a_gpu(
    devices: tuple[str, ...], has_copies: bool, is_fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: (parameters, options))
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    model = SimpleNamespace(parameters=lambda: iter(parameters))
    scheme = SimpleNamespace(copies=has_copies)
    found, options = adamw(model, SimpleNamespace(learning_rate=1e-3, weight_decay=0.1, scheme=scheme))
    assert found == parameters
    assert options == {"lr": 1e-3, "weight_decay": 0.1, "fused": is_fused}
