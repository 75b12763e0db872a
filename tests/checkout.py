"""The checkout that the tests lie in, and its configuration."""

from pathlib import Path

from lowband.spec.config import Config

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
CONFIG = Config(ROOT)
