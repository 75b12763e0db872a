"""What a model's attention is made of, beyond heads: latent keys and values."""

from pydantic import PositiveInt

from lowband.spec.yaml_model import Strict


class Latent(Strict):
    """Multi-head latent attention: keys and values are products of one short vector a token (MLA of
    DeepSeek-V2, arXiv 2405.04434, section 2.1).

    kv_rank, q_rank: width of that vector, and of the queries' (none: queries come from the hidden state)
    rope, nope: parts of a head's queries and keys with and without positions; keys' are shared by all heads
    value: width of a head's values
    """

    kv_rank: PositiveInt
    q_rank: PositiveInt | None = None
    rope: PositiveInt
    nope: PositiveInt
    value: PositiveInt

    @property
    def query(self) -> int:
        """Width of a head's queries, and of its keys."""
        return self.nope + self.rope

    def entering(self, hidden: int) -> int:
        """Features of a token that go to heads' products and to their keys, and that all heads share."""
        return (hidden if self.q_rank is None else self.q_rank) + self.kv_rank + self.rope

    def shapes(self, hidden: int, heads: int) -> list[tuple[str, tuple[int, ...]]]:
        """Matrices and norms, by name and weight."""
        queries: list[tuple[str, tuple[int, ...]]] = [("attention.q", (heads * self.query, hidden))]
        if self.q_rank is not None:
            queries = [
                ("attention.q_down", (self.q_rank, hidden)),
                ("attention.q_norm", (self.q_rank,)),
                ("attention.q_up", (heads * self.query, self.q_rank)),
            ]
        return [
            *queries,
            ("attention.kv_down", (self.kv_rank + self.rope, hidden)),
            ("attention.kv_norm", (self.kv_rank,)),
            ("attention.kv_up", (heads * (self.nope + self.value), self.kv_rank)),
        ]
