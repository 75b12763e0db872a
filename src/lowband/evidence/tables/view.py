"""Rows made of a table's rows, said as data: by tables.yaml, figures.yaml and documents.yaml."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from pydantic import Field, field_validator

from lowband.cost.tcp import WIRE_BYTES_PER_BYTE
from lowband.evidence.tables.points import POINT
from lowband.spec.yaml_model import Strict

Names = tuple[str, ...]
CONSTANTS = {"WIRE_BYTES_PER_BYTE": WIRE_BYTES_PER_BYTE}


class Other(Strict):
    """The rows that each row is compared with: of those that fulfil `where`, the one that is equal in `on`.

    Each of `columns` of it becomes <name>_other; empty where there is none.
    """

    where: str
    on: Names
    columns: Names


class View(Strict):
    """What is made of a table, in the order of these fields; those left out change nothing.

    An expression is one of pandas (DataFrame.eval) over the table's columns, such as `sent / time_s`, and
    CONSTANTS, such as `@WIRE_BYTES_PER_BYTE`.

    where    expression: the rows to keep
    add      new column -> expression
    other    rows to compare each row with
    by       columns: from here on one row for each group of rows that are equal in them, first come first;
             POINT stands for the columns that identify a point
    of       new column -> statistic and column of a group, as in `median time_s`, `q20 time_s`,
             `sum is_right`, `missing time_s`; `size` is the number of rows
    across   column: each of `of` also as <name>_<value>, over the group's rows with this value
    total    what the first of `by` says in a last row, which is over all rows
    then     new column -> expression
    sort     columns; with a minus, as in `-factor`, descending
    columns  the columns to keep, in this order
    """

    where: str = ""
    add: dict[str, str] = Field(default={})
    other: Other | None = None
    by: Names = ()
    of: dict[str, str] = Field(default={})
    across: str = ""
    total: str = ""
    then: dict[str, str] = Field(default={})
    sort: Names = ()
    columns: Names = ()

    @field_validator("by")
    @classmethod
    def _whole(cls, by: Names) -> Names:
        return tuple(column for name in by for column in (POINT if name == "POINT" else [name]))

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """The view of a table. Raises what pandas raises for a table that does not fit (see `made_of`)."""
        df = table.query(self.where, engine="python") if self.where else table
        df = _with(df, self.add)
        if self.other is not None:
            others = df.query(self.other.where, engine="python").set_index(list(self.other.on))
            others = others[list(self.other.columns)].add_suffix("_other")
            df = df.join(others, on=list(self.other.on))
        df = _with(self._groups(df) if self.by else df, self.then)
        if self.sort:
            ascending = [not name.startswith("-") for name in self.sort]
            names = [name.removeprefix("-") for name in self.sort]
            df = df.sort_values(names, ascending=ascending, kind="stable", ignore_index=True)
        return df[list(self.columns)] if self.columns else df

    def _groups(self, df: pd.DataFrame) -> pd.DataFrame:
        found = self._statistics(df)
        for value, rows in df.groupby(self.across, sort=False) if self.across else ():
            found = found.join(self._statistics(rows).add_suffix(f"_{value}"))
        found = found.reset_index()
        if self.total:
            over_all = self._statistics(df.assign(**{self.by[0]: self.total})).reset_index()
            found = pd.concat([found, over_all], ignore_index=True)
        return found

    def _statistics(self, df: pd.DataFrame) -> pd.DataFrame:
        groups = df.groupby(list(self.by), sort=False, dropna=False)
        return pd.DataFrame({name: _statistic(groups, *text.split()) for name, text in self.of.items()})


def _with(df: pd.DataFrame, added: Mapping[str, str]) -> pd.DataFrame:
    """Each column is made of all before it."""
    for name, expression in added.items():
        df = df.assign(**{name: _value(df, expression)})
    return df


def _value(df: pd.DataFrame, expression: str) -> Any:
    return df.eval(expression, engine="python", local_dict=CONSTANTS)


def _statistic(groups: Any, statistic: str, column: str = "") -> Any:
    if statistic == "size":
        return groups.size()
    if statistic == "missing":
        return groups[column].agg(lambda values: values.isna().sum())
    if statistic.startswith("q") and statistic[1:].isdigit():
        return groups[column].quantile(int(statistic[1:]) / 100)
    return groups[column].agg(statistic)
