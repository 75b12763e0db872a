from tests.checkout import ROOT

"""Sentences of a document, to be compared with the files that their numbers come from."""


class Text:
    """A document as one line: a sentence is found whatever lines it is broken into."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._words = " ".join((ROOT / path).read_text(encoding="utf-8").split())

    def says(self, sentence: str) -> None:
        """Fails if the document does not have this sentence, with the numbers as files give them."""
        assert sentence in self._words, f"{self.path} should say: {sentence}"
