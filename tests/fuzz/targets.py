"""Every parser of files that a stranger may write, with a sound file to begin from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowband.__main__ import main as lowband
from lowband.claims.claim import read_claims
from lowband.claims.experiments import read_experiments
from lowband.engine.checkpoint.manifest import MANIFEST, Manifest
from lowband.engine.checkpoint.manifest import _sum as checksum
from lowband.importers import FORMATS, ForeignRun, import_log
from lowband.spec.config import Config
from lowband.spec.exchange import import_scheme
from lowband.spec.huggingface import model_of_config
from lowband.spec.job import SlurmRequest
from lowband.spec.run import RunSpec
from lowband.spec.yaml_model import Strict
from lowband.tables.collect import collect

ROOT = Path(__file__).parents[2]
SOUND = Config(ROOT)
RUNS = 200  # of a suite, at most: a larger one is sound but takes long
DEEPSPEED = """{"train_batch_size": 16, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
 "zero_hpz_partition_size": 8, "zero_quantized_weights": true, "overlap_comm": true}}"""
LLAMA = """{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
 "tie_word_embeddings": false, "hidden_act": "silu", "rms_norm_eps": 1e-5}"""


@dataclass(frozen=True)
class Target:
    """A parser.

    file: where its file lies, under the folder that `call` is given
    kind: how a mutation reads the file (mutate)
    text: a sound file
    seal: applied to a changed file, where a checksum would hide the change
    """

    name: str
    file: str
    kind: str
    text: str
    call: Callable[[Path], object]
    seal: Callable[[bytes], bytes] = bytes


def predict(*given: str) -> Callable[[Path], object]:
    def call(root: Path) -> None:
        values = {"--cluster": "frontier", "--model": "gpt-20b", "--scheme": "zero3", "--gpus": "64"}
        values |= dict(zip(given[::2], given[1::2], strict=True))
        code = lowband(["predict", "--root", str(root), *(x for pair in values.items() for x in pair)])
        if code == 2:
            raise Refused

    return call


class Refused(Exception):
    """The command line refused its input; the message went to stderr."""


def runs_of_suite(root: Path) -> None:
    config = Config(root)
    suite = config.suite("fuzzed")
    if len(suite.axes) < 6 and suite.repeats < RUNS:
        config.runs(["fuzzed"])


def in_a_run(sound_run: Path, file: str) -> Callable[[Path], None]:
    """Collect a run of which this file is a stranger's."""

    def call(root: Path) -> None:
        for path in sound_run.iterdir():
            if path.is_file() and path.name != file:
                shutil.copy(path, root / "run" / path.name)
        collect([root / "run"], root / "tables")

    return call


def sound(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def logs() -> list[Target]:
    model = SOUND.model("gpt-20b")

    def reader(form: str) -> Callable[[Path], object]:
        return lambda root: import_log(root / "log", form, ForeignRun(model, 2048, 8), root / "out.csv")

    return [
        Target(f"log: {form}", "log", "lines", sound(f"tests/fixtures/foreign/{form}.log"), reader(form))
        for form in FORMATS
    ]


def read_run(cls: type[Strict], name: str) -> Callable[[Path], object]:
    return lambda root: cls.read_json(root / name)


def targets(sound_run: Path, manifest: str) -> list[Target]:
    """sound_run: the folder of a run that has ended; manifest: a checkpoint's"""
    spec = (sound_run / "spec.json").read_text(encoding="utf-8")
    of_run = [
        Target(
            f"collect: {path.name}",
            f"run/{path.name}",
            kind,
            path.read_text(),
            in_a_run(sound_run, path.name),
        )
        for path in sorted(sound_run.iterdir())
        if (kind := {".json": "json", ".jsonl": "lines"}.get(path.suffix))
    ]
    of_checkpoint = (
        f"step-00000002/{MANIFEST}", "json", manifest, lambda root: Manifest.read(root / "step-00000002"),
    )  # fmt: skip
    return [
        Target("schemes.yaml", "config/schemes.yaml", "yaml", sound("config/schemes.yaml"), predict()),
        Target("models.yaml", "config/models.yaml", "yaml", sound("config/models.yaml"), predict()),
        Target(
            "machine.yaml", "slurm/fuzzed/machine.yaml", "yaml", sound("slurm/frontier/machine.yaml"),
            predict("--cluster", "fuzzed"),
        ),
        Target(
            "stack", "config/stacks/fuzzed.yaml", "yaml", sound("config/stacks/deepspeed-zero.yaml"),
            predict("--stack", "fuzzed"),
        ),
        Target(
            "job.yaml", "slurm/frontier/job.yaml", "yaml", sound("slurm/frontier/job.yaml"),
            lambda root: _job(root).resources(RunSpec.parse(json.loads(spec), "sound")),
        ),
        Target(
            "config.yaml", "config/config.yaml", "yaml", sound("config/config.yaml"),
            lambda root: Config(root).default_suites,
        ),
        Target(
            "suite", "config/suites/fuzzed.yaml", "yaml", sound("config/suites/box-dgx2.yaml"), runs_of_suite
        ),
        Target("claims.yaml", "config/claims.yaml", "yaml", sound("config/claims.yaml"), _claims),
        Target(
            "experiments.yaml", "config/experiments.yaml", "yaml", sound("config/experiments.yaml"),
            lambda root: read_experiments(root / "config"),
        ),
        Target("spec.json", "spec.json", "json", spec, read_run(RunSpec, "spec.json")),
        Target(
            "DeepSpeed JSON", "ds.json", "json", DEEPSPEED,
            lambda root: import_scheme(SOUND, root / "ds.json", "frontier", 16),
        ),
        Target(
            "Hugging Face config.json", "hf.json", "json", LLAMA,
            lambda root: model_of_config(root / "hf.json"),
        ),
        Target("checkpoint's manifest", *of_checkpoint),
        Target("manifest with its checksum", *of_checkpoint, _sealed),
        *of_run,
        *logs(),
    ]  # fmt: skip


def _job(root: Path) -> SlurmRequest:
    shutil.copy(ROOT / "slurm" / "frontier" / "machine.yaml", root / "slurm" / "frontier")
    return Config(root).job("frontier")


def _sealed(data: bytes) -> bytes:
    """A changed manifest with the checksum that belongs to it."""
    try:
        plain = json.loads(data)
        plain.pop("sha256", None)
        return json.dumps(plain | {"sha256": checksum(plain)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def _claims(root: Path) -> None:
    shutil.copy(ROOT / "config" / "experiments.yaml", root / "config" / "experiments.yaml")
    read_claims(root / "config" / "claims.yaml")
