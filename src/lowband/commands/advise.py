"""advise, advise-page: will a job fit, how fast is it, and what would make it faster."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one, root
from lowband.commands.predict import STACK

SCHEMES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz", "zeropp", "hier3-exact", "hier3")
SEQ = 2048


def add(commands: Any) -> None:
    one = add_verb(
        commands, _advise, "advise", "will it fit, how fast, and what would make it faster",
        "--cluster dgx-a100-40gb --model llama-7b --gpus 8 --scheme zero3",
        "Answers on one screen, with the three cheapest changes: micro-batch, recomputation, scheme.",
    )  # fmt: skip
    one.add_argument("--cluster", required=True, help="a folder of slurm/, or a machine file")
    one.add_argument("--model", required=True, help="a name, a YAML file, or a Hugging Face config.json")
    one.add_argument("--gpus", required=True, type=at_least_one, help="ranks")
    one.add_argument("--scheme", required=True, help="a name of config/schemes.yaml, or a file")
    one.add_argument("--micro-batch", type=at_least_one, default=1, help="sequences per pass")
    one.add_argument("--accumulation", type=at_least_one, default=1, help="passes per step")
    one.add_argument("--recompute", choices=["none", "full"], default="full")
    one.add_argument("--seq", type=at_least_one, help=f"default: the model's longest, at most {SEQ}")
    one.add_argument("--json", action="store_true")

    page = add_verb(
        commands, _page, "advise-page", "the same for many jobs, as one HTML page to choose on",
        "--cluster dgx-a100-40gb cuda --model llama-7b --gpus 8 16 32 64 --out advise.html",
    )  # fmt: skip
    page.add_argument("--cluster", required=True, nargs="+", help="folders of slurm/, or machine files")
    page.add_argument("--model", required=True, nargs="+", help="as for advise")
    page.add_argument("--gpus", required=True, nargs="+", type=at_least_one, help="ranks")
    page.add_argument("--scheme", nargs="+", default=list(SCHEMES), help="default: %(default)s")
    page.add_argument("--seq", type=at_least_one, default=SEQ, help="of models that allow it (%(default)s)")
    page.add_argument("--out", required=True, type=Path, help="the page's file")
    for verb in (one, page):
        verb.add_argument("--stack", help=STACK)
        verb.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and slurm/")


def _advise(options: argparse.Namespace) -> None:
    import json

    from lowband.predict.request import sequence, setting
    from lowband.predict.show.advice_text import advise, text
    from lowband.predict.workload import Workload
    from lowband.spec.config import Config

    config = Config(options.root)
    machine, stack = setting(config, options.cluster, options.stack)
    model = config.given_model(options.model)
    scheme = config.given_scheme(options.scheme).on(list(machine.sizes))
    job = Workload(
        machine, stack, model, scheme, options.gpus, options.micro_batch,
        sequence(model, options.seq or min(SEQ, model.seq_len)), options.accumulation,
        recompute=options.recompute,
    )  # fmt: skip
    found = advise(job, [config.scheme(name) for name in SCHEMES])
    print(json.dumps(found, indent=2) if options.json else text(found))


def _page(options: argparse.Namespace) -> None:
    from lowband.predict.show.advice_page import Axes, page
    from lowband.spec.config import Config
    from lowband.spec.files import write_whole

    axes = Axes(options.cluster, options.model, options.gpus, options.scheme, options.seq, options.stack)
    write_whole(options.out, page(Config(options.root), axes))
    print(f"written: {options.out}")
