"""doctor: this machine's equipment."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="check this machine's equipment and what it allows")
    doctor.set_defaults(run=_doctor)


def _doctor(_options: argparse.Namespace) -> None:
    from lowband.run.doctor import examine

    print(examine())
