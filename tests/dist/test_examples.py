"""The examples, run as their first lines say: they learn, resume, and leave files that others read."""

import difflib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lowband.run.on_ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TEXT = EXAMPLES / "train.py"


def run(ranks: int, example: str, *arguments: str | Path) -> list[float]:
    """Run an example under torchrun; its losses in order."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    on_ranks(1, write_llama, folder)
    return folder


def write_llama(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)


def test_a_plain_loop_learns_and_resumes_on_other_ranks_and_schemes(tmp_path: Path) -> None:
    options = ["--steps", "20", "--checkpoints", tmp_path / "checkpoints"]
    hier3 = ["train.py", "--scheme", "hier3", "--levels", "package=2,node=4", *options]
    losses = run(4, *hier3)
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    assert run(4, *hier3) == losses[2:]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    resumed = run(2, "train.py", "--scheme", "hsdp", "--levels", "node=2", *options)
    assert len(resumed) == 2
    assert resumed[0] < losses[0]


def test_a_llama_is_fine_tuned_and_read_by_transformers(llama: Path, tmp_path: Path) -> None:
    losses = run(2, "finetune_llama.py", llama, tmp_path / "new", "--text", TEXT, "--steps", 8)
    assert losses[-1] < losses[0] - 0.2
    [(before, after)] = on_ranks(1, losses_of, llama, tmp_path / "new")
    assert after < before - 0.2


def losses_of(*folders: Path) -> list[float]:
    tokens = torch.tensor(list(TEXT.read_bytes()[:64])).unsqueeze(0)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for model in models]


def test_adapters_learn_and_the_rest_stays(llama: Path, tmp_path: Path) -> None:
    losses = run(2, "lora.py", llama, tmp_path / "adapters.safetensors", "--text", TEXT, "--steps", 8)
    assert losses[-1] < losses[0]
    adapters = load_file(tmp_path / "adapters.safetensors")
    assert len(adapters) == 2 * 2 * 2  # of two layers: queries and values, down and up
    assert all(float(adapters[name].abs().sum()) > 0 for name in adapters)


def test_five_lines_lead_from_fully_shard_to_the_same_losses() -> None:
    before, after = (
        (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("fully_shard.py", "from_fully_shard.py")
    )
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip() != "+"]
    assert len(added) <= 5, added
    fsdp2, ours = run(2, "fully_shard.py"), run(2, "from_fully_shard.py")
    assert ours == pytest.approx(fsdp2, abs=1e-4)


def test_a_deepspeed_configuration_is_trained_and_what_has_no_counterpart_is_refused(tmp_path: Path) -> None:
    losses = run(4, "from_deepspeed.py", EXAMPLES / "ds_config.json")
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_every_example_is_short() -> None:
    for path in EXAMPLES.iterdir():
        assert path.is_dir() or len(path.read_text().splitlines()) < 100, path.name
