"""doctor: this machine's equipment."""

import argparse
from typing import Any

from lowband.commands import add_verb


def add(commands: Any) -> None:
    doctor = add_verb(commands, "doctor", "what this machine has, and what that allows", "")
    doctor.set_defaults(run=_doctor)


def _doctor(_options: argparse.Namespace) -> None:
    from lowband.run.doctor import examine

    print(examine())
