"""Tables inside documents, written from results: between `<!-- name:begin -->` and `<!-- name:end -->`."""

import tempfile
from pathlib import Path
from string import Formatter
from typing import Any, Literal, Self

import pandas as pd
from pydantic import Field, model_validator

from lowband.errors import UserError
from lowband.evidence.report.documents import code
from lowband.evidence.report.shipped import write_shipped_tables
from lowband.evidence.report.writers import markdown
from lowband.evidence.tables.view import View
from lowband.spec.csv_tables import made_of, read_benchmark, read_table
from lowband.spec.files import write_if_changed
from lowband.spec.peers import PEER_NAMES
from lowband.spec.plain_data import read_text, read_yaml
from lowband.spec.yaml_model import parse_entry

WORDS = {"peers": PEER_NAMES}
Forms = str | tuple[str, ...]


class Part(View):
    """A table of a document, or lines: how a view's rows are written. Its keys: config/documents.yaml."""

    table: str = ""
    words: dict[str, Literal["peers"] | dict[str, str]] = Field(default={})
    show: dict[str, Forms | None] = Field(default={})
    line: str = ""
    before: str = ""
    code: str = ""

    @model_validator(mode="after")
    def _says_how(self) -> Self:
        if [bool(self.show), bool(self.line), bool(self.code)].count(True) != 1:
            raise ValueError("a part of a document has show, line or code")
        if self.code and self.code not in code.BLOCKS:
            raise ValueError(f"no code '{self.code}' (allowed: {', '.join(code.BLOCKS)})")
        return self

    def frame(self, table: pd.DataFrame) -> pd.DataFrame:
        """The part's view of a table as a frame of text."""
        rows = self.rows(table)
        for column, words in self.words.items():
            named = WORDS[words] if isinstance(words, str) else words
            rows = rows.assign(**{column: rows[column].replace(named)})
        shown = {heading: form or f"{{{heading}}}" for heading, form in self.show.items()} or {"": self.line}
        records = rows.to_dict("records")
        return pd.DataFrame(
            {heading: [_text(form, row) for row in records] for heading, form in shown.items()}
        )

    def lines(self, tables: Path, root: Path) -> list[str]:
        """The part, line by line. tables: the folder of derived tables; root: the one that holds results/"""
        if self.code:
            return code.BLOCKS[self.code](tables, root)
        is_shipped = "/" in self.table
        path = (root / "results" / "reference" if is_shipped else tables) / f"{self.table}.csv"
        table = read_benchmark(path) if is_shipped else read_table(path)
        with made_of(path):
            frame = self.frame(table)
        if self.show:
            return markdown(frame)
        return [*([self.before, ""] if self.before and len(frame) else []), *frame[""]]


class Block(Part):
    """An entry of documents.yaml: a part of a document, and more of them below it."""

    document: str
    more: tuple[Part, ...] = ()

    def all_lines(self, tables: Path, root: Path) -> list[str]:
        """Its parts that have rows, with empty lines between them."""
        parts = [part.lines(tables, root) for part in (self, *self.more)]
        return [line for part in parts if part for line in ("", *part)][1:]


class _Words(Formatter):
    """As `str.format`, with `{column:yes|no}`: the first word for what is true, else the second."""

    def format_field(self, value: Any, spec: str) -> str:
        if "|" in spec:
            return spec.split("|")[0 if value else 1]
        return str(super().format_field(value, spec))


def read_blocks(root: Path) -> dict[str, Block]:
    """The blocks of all documents, by name. root: the folder that holds config/"""
    path = root / "config" / "documents.yaml"
    found: dict[str, Block] = {}
    for document, entries in read_yaml(path).items():
        if not isinstance(entries, dict):
            raise UserError("is not a mapping of blocks to entries", where=f"{path}: {document}")
        for name, entry in entries.items():
            if name in found:
                raise UserError(f"two blocks '{name}'", where=path, allowed="names of their own")
            found[name] = parse_entry(Block, entry, f"{path}: {name}", document=document)
    return found


def write_documents(root: Path) -> None:
    """Write every block into its document. Raises UserError for a document without the block."""
    blocks = read_blocks(root)
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder)
        write_shipped_tables(root, tables)
        built = {name: block.all_lines(tables, root) for name, block in blocks.items()}
    for name, block in blocks.items():
        path = root / block.document
        text = read_text(path)
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise UserError(f"no block '{name}'", where=path, allowed=f"{begin.strip()} ... {end}")
        before, after = text.split(begin)[0], text.split(end)[1]
        write_if_changed(path, before + begin + "\n".join(built[name]) + "\n" + end + after)


def _text(forms: Forms, row: dict[Any, Any]) -> str:
    """The first of the formats of whose columns none is empty in the row, or else the last."""
    *tried, last = (forms,) if isinstance(forms, str) else forms
    for form in tried:
        if not any(name and pd.isna(row[name]) for _, name, _, _ in Formatter().parse(form)):
            return _Words().vformat(form, (), row)
    return _Words().vformat(last, (), row)
