"""doctor: this machine's equipment, or a site's as a job would find it."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, root


def add(commands: Any) -> None:
    doctor = add_verb(
        commands, _doctor, "doctor", "what this machine has, and what that allows", "--site frontier"
    )
    doctor.add_argument(
        "--site", help="on its login node: what a job of slurm/<SITE> would miss; exit code 1 if anything"
    )
    doctor.add_argument("--root", type=root, default=Path(), help="folder that holds slurm/")


def _doctor(options: argparse.Namespace) -> int:
    if options.site is None:
        from lowband.run.doctor import examine

        print(examine())
        return 0
    from lowband.run.site import examine_site
    from lowband.spec.config import Config

    findings, missing = examine_site(Config(options.root), options.site)
    print(findings)
    return 1 if missing else 0
