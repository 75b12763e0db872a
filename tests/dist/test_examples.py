"""The examples, run as their first lines say: they learn, resume, and leave files that others read."""

import difflib
import os
import re
import runpy
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lowband.run.launch import run_local
from lowband.run.on_ranks import on_ranks
from lowband.run.ranks import Rank
from tests import warm
from tests.ports import held_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TEXT = EXAMPLES / "train.py"


def launched(output: Path, ranks: int, example: str, *arguments: str | Path) -> tuple[int | None, str]:
    """Run an example under torchrun; its exit code and what it printed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun = warm.begun([*launch, EXAMPLES / example, *arguments], output)
    torchrun.join(300)
    return warm.killed(torchrun), output.read_text()


def run(ranks: int, example: str, *arguments: str | Path) -> list[float]:
    """The losses of an example, in order. Ranks are forked: under torchrun each would import torch anew."""
    port, given = held_port(), [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"

        def work(rank: Rank) -> None:
            said = as_under_torchrun(rank, example, given, port)
            if rank.rank == 0:
                printed.write_text(said)
            os._exit(0)  # see run.launch

        run_local(ranks, work, 300)
        return losses_in(printed.read_text())


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]


def set_up(rank: Rank, port: int) -> None:
    """The variables that torchrun sets, and the path of a script in examples/."""
    ranks = {"RANK": rank.rank, "LOCAL_RANK": rank.local_rank, "WORLD_SIZE": rank.world}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))


def as_under_torchrun(rank: Rank, example: str, arguments: list[str], port: int) -> str:
    """What this rank prints."""
    set_up(rank, port)
    sys.argv = [str(EXAMPLES / example), *arguments]
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return said.getvalue()


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
    hier3 = ["train.py", "--scheme", "hier3", "--levels", "package=1,node=2", *options]
    losses = run(2, *hier3)
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    assert run(2, *hier3) == losses[2:]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    zero1 = ["train.py", "--scheme", "zero1", *options]
    code, printed = launched(tmp_path / "output", 1, *zero1)
    assert code == 0, printed
    resumed = losses_in(printed)
    assert len(resumed) == 2
    assert resumed[0] < losses[0]


def test_a_llama_is_fine_tuned_and_read_by_transformers(llama: Path, tmp_path: Path) -> None:
    losses = run(2, "finetune_llama.py", llama, tmp_path / "new", "--text", TEXT, "--steps", 8)
    assert losses[-1] < losses[0] - 0.2
    [(before, after)] = on_ranks(1, losses_of, llama, tmp_path / "new")
    assert after < before - 0.2
    arguments = [llama, tmp_path / "cut", "--text", TEXT, "--steps", 8, "--tensor", 2]
    assert run(4, "finetune_llama.py", *arguments) == pytest.approx(losses, abs=0.05)  # in bf16
    [(_, cut)] = on_ranks(1, losses_of, llama, tmp_path / "cut")
    assert cut == pytest.approx(after, abs=0.05)


def test_states_on_the_host_change_no_bit() -> None:
    """It compares by itself, and fails if any differs."""
    assert run(2, "offload.py") == []


def losses_of(*folders: Path) -> list[float]:
    tokens = torch.tensor(list(TEXT.read_bytes()[:64])).unsqueeze(0)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for model in models]


def test_adapters_learn_and_the_rest_stays(llama: Path, tmp_path: Path) -> None:
    losses = run(2, "lora.py", llama, tmp_path / "adapters", "--text", TEXT, "--steps", 8)
    assert losses[-1] < losses[0]
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 2  # of two layers: queries and values, down and up
    assert all(float(adapters[name].abs().sum()) > 0 for name in adapters)
    [(before, after)] = on_ranks(1, with_adapters, llama, tmp_path / "adapters")
    assert after < before


def with_adapters(folder: Path, adapters: Path) -> tuple[float, float]:
    """Losses without and with them, as PEFT computes them."""
    from peft import PeftModel  # takes seconds

    tokens = torch.tensor(list(TEXT.read_bytes()[:64])).unsqueeze(0)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapters)
    with torch.no_grad():
        after = float(model(input_ids=tokens, labels=tokens).loss)
        with model.disable_adapter():
            return float(model(input_ids=tokens, labels=tokens).loss), after


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


def test_a_llama_in_stages_learns_as_on_one_rank() -> None:
    in_stages = run(2, "pipeline.py", "--schedule", "zb-v", "--steps", 10)
    alone = run(1, "pipeline.py", "--pipeline", 1, "--schedule", "depth", "--steps", 10)
    assert in_stages == alone
    assert alone[-1] < alone[0]


def test_a_replica_learns_at_its_own_pace() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = f"--store 127.0.0.1:{store.port} --replica 3 --begins 3 --every 5 --steps 25"
    losses = run(2, "diloco.py", *words.split())
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.4


def test_an_error_that_every_rank_finds_is_printed_once(tmp_path: Path) -> None:
    code, printed = launched(tmp_path / "output", 2, "train.py", "--scheme", "zero4", "--steps", "1")
    assert code == 1
    said = [line for line in printed.splitlines() if line.startswith("lowband: ")]
    assert len(said) == 1, printed
    assert "no entry 'zero4'" in said[0]
    ours, _, torchruns = printed.partition("failed (exitcode: ")
    assert "Traceback" not in ours
    assert torchruns.startswith("2)")


WRITTEN = " (allowed: what save_pretrained wrote)"


@pytest.mark.parametrize(
    ("example", "arguments", "words"),
    [
        ("finetune_llama.py", "NONE new --text FILE", "NONE: no config.json" + WRITTEN),
        ("finetune_llama.py", "FOLDER FOLDER --text FILE", "FOLDER: exists already (allowed: a new folder)"),
        ("finetune_llama.py", "FOLDER new --text NONE", "NONE: No such file or directory"),
        ("finetune_llama.py", "FOLDER new --text SHORT", "SHORT: 2 bytes (allowed: more than 64)"),
        ("lora.py", "NONE adapters --text FILE", "NONE: no config.json" + WRITTEN),
        ("lora.py", "FOLDER FOLDER --text FILE", "FOLDER: exists already (allowed: a new folder)"),
        ("from_deepspeed.py", "", "0 arguments (allowed: a DeepSpeed configuration)"),
        ("from_deepspeed.py", "NONE", "NONE: cannot be read: No such file or directory"),
        ("from_deepspeed.py", "SHORT", "SHORT:1: is not JSON: Expecting value"),
        ("diloco.py", "", "diloco.py: no store (allowed: --store host:port, or --host)"),
        ("diloco.py", "--store here", "store 'here' (allowed: host:port, port 1 to 65535)"),
        ("train.py", "--levels node=2,", "error: argument --levels: invalid levels value: 'node=2,'"),
    ],
)  # fmt: skip
def test_bad_arguments_end_in_one_line(
    example: str, arguments: str, words: str, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("ab")
    paths = {"FOLDER": llama, "FILE": TEXT, "SHORT": tmp_path / "short", "NONE": tmp_path / "none"}
    for name, path in paths.items():
        arguments, words = arguments.replace(name, str(path)), words.replace(name, str(path))
    [(code, said)] = on_ranks(1, alone, example, arguments.split())
    assert code == 2
    assert said.splitlines()[-1].endswith(words)
    assert "Traceback" not in said


def alone(example: str, arguments: list[str]) -> tuple[object, str]:
    """Exit code and stderr of an example with bad arguments, as the only rank."""
    dist.destroy_process_group()  # there is no other rank that still connects to this one
    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as exited:
        as_under_torchrun(Rank(0, 1, 0, ""), example, arguments, held_port())
    if not dist.is_initialized():  # on_ranks leaves through a barrier
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return exited.value.code, said.getvalue()


def test_every_example_is_short() -> None:
    for path in EXAMPLES.iterdir():
        assert path.is_dir() or len(path.read_text().splitlines()) < 100, path.name
