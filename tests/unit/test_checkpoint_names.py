"""The name of a checkpoint's folder depends only on what changes the training or its times."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report_points import BASE, QUICK, other_by

from lowband.model.data import Corpus
from lowband.run.training_loop import _checkpoints
from lowband.spec.run import OPTIONS, RunSpec
from lowband.spec.run_folder import RunFolder

TEXT = Corpus(np.zeros(9, np.uint8), np.zeros(9, np.uint8), 1, {"source": "a", "sha256": "abc"})
GOES_ON = {"time_limit_s", "peer_timeout_s", "fingerprint", "checkpoint_every", "text"}  # the text's path


def name(spec: RunSpec, text: Corpus = TEXT) -> str:
    return _checkpoints(spec, text, RunFolder(Path("any"))).name


@pytest.mark.parametrize("option", OPTIONS)
@settings(QUICK, max_examples=5)
@given(data=st.data())
def test_a_run_goes_on_unless_an_option_changes_the_training(option: str, data: st.DataObject) -> None:
    assert (name(other_by(option, data)) == name(BASE)) == (option in GOES_ON)


def test_what_a_run_is_called_changes_no_training() -> None:
    assert name(BASE.model_copy(update={"run_id": "b", "condition": "c"})) == name(BASE)


def test_another_text_does() -> None:
    moved, other = {"source": "b", "sha256": "abc"}, {"source": "a", "sha256": "abd"}
    assert name(BASE, dataclasses.replace(TEXT, facts=moved)) == name(BASE)
    assert name(BASE, dataclasses.replace(TEXT, facts=other)) != name(BASE)
