"""Text, split and batches."""

import numpy as np
import pytest

from lowband.errors import UserError
from lowband.model.data import TRAIN_SHARE, batch, read_corpus


def test_stdlib_is_real_and_stable() -> None:
    a, b = read_corpus("stdlib"), read_corpus("stdlib")
    assert a.facts == b.facts
    assert a.facts["tokens"] > 5_000_000
    assert b"def " in a.train[:100_000].tobytes()
    assert len(a.train) == int(a.facts["tokens"] * TRAIN_SHARE)


def test_own_text_and_token_file(tmp_path) -> None:
    text = tmp_path / "mine.txt"
    text.write_bytes(b"hello world " * 10)
    assert read_corpus(str(text)).train[:5].tobytes() == b"hello"
    tokens = tmp_path / "mine.bin"
    np.arange(300, dtype="<u2").tofile(tokens)
    corpus = read_corpus(str(tokens))
    assert corpus.vocab == 300
    assert corpus.train[299 - 40] == 259


def test_bad_files_are_refused(tmp_path) -> None:
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    short = tmp_path / "short.txt"
    short.write_bytes(b"ab")
    for text, words in (
        (str(tmp_path / "none.txt"), "no text file"),
        (str(odd), "2-byte"),
        (str(short), "too few"),
    ):
        with pytest.raises(UserError, match=words):
            read_corpus(text)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_batches_do_not_depend_on_the_split(parts: int) -> None:
    tokens = np.arange(200, dtype=np.uint8)
    whole = batch(tokens, 3, 17, 0, 8, 8, 9)
    size = 8 // parts
    split = [batch(tokens, 3, 17, i * size, size, 8, 9) for i in range(parts)]
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in split]), whole[side])
    assert np.array_equal(whole[0][:, 1:], whole[1][:, :-1])
    assert not np.array_equal(batch(tokens, 3, 18, 0, 8, 8, 9)[0], whole[0])


def test_every_place_can_be_drawn() -> None:
    starts = {int(batch(np.arange(12, dtype=np.uint8), 0, s, 0, 1, 1, 10)[0][0, 0]) for s in range(40)}
    assert starts == {0, 1}
