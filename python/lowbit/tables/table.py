# SPDX-License-Identifier: Apache-2.0
"""A table of strings that prints as text and renders as HTML in a notebook. Columns that are empty in every row are
left out."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A title, a table and lines below it, as text or as HTML."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    below: Sequence[str] = field(default=())

    def __repr__(self) -> str:
        table = [text_table(self.header, self.rows)] if self.rows else []
        return "\n".join([*([self.title] if self.title else []), *table, *self.below])

    def _repr_html_(self) -> str:
        title = f"<p>{html.escape(self.title)}</p>" if self.title else ""
        table = html_table(self.header, self.rows) if self.rows else ""
        return title + table + "".join(f"<p>{html.escape(line)}</p>" for line in self.below)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns with spaces; the last column is not padded."""
    lines = _used([header, *rows])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render the same table as HTML, escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        written = "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{written}</tr>"

    head, *body = _used([header, *rows])
    return f"<table><thead>{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in body)}</tbody></table>"


def _used(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the lines without the columns whose cells are empty in all lines but the first, if there are others."""
    used = [i for i in range(len(lines[0])) if len(lines) == 1 or any(line[i] for line in lines[1:])]
    return [[line[i] for i in used] for line in lines]
