"""Every engine has the same optimizer: the fused one on a GPU, torch's default elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from lowband.trainers.trainer import adamw


@pytest.mark.parametrize(
    ("devices", "is_fused"), [(("cuda", "cuda"), True), (("cpu",), None), (("cuda", "cpu"), None)]
)
def test_the_optimizer_is_fused_on_a_gpu(
    devices: tuple[str, ...], is_fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: (parameters, options))
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    model = SimpleNamespace(parameters=lambda: iter(parameters))
    found, options = adamw(model, SimpleNamespace(learning_rate=1e-3, weight_decay=0.1))
    assert found == parameters
    assert options == {"lr": 1e-3, "weight_decay": 0.1, "fused": is_fused}
