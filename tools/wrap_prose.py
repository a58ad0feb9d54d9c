# SPDX-License-Identifier: Apache-2.0
"""Wrap prose at 120 columns, and leave no word alone on the last line of a paragraph.

    python tools/wrap_prose.py README.md docs/quantize.md python/lowbit/ops/fakes.py    # in place

In a Markdown page every paragraph and list item is wrapped; tables, code, headings and HTML stay. In Python (docstrings
and comments) and C++ (comments) only a paragraph is wrapped that has a line of more columns, or a short line after a
full one, as a tool leaves it that breaks lines one by one. Words are never changed.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

WIDTH = 120
FULL, SHORT = 95, 70  # columns: a line that had no room for a long word, and one that had
FEWEST_WORDS = 3  # on the last line of what is wrapped
PYTHON = {".py", ".pyi"}
SUFFIXES = PYTHON | {".cpp", ".hpp", ".cuh", ".h"}
ITEM = re.compile(r"(?:[-*]|\d+\.) +")
FIELD = re.compile(r"[\w*`., ]+: ")  # an argument or an error in a section of a docstring
SECTION = re.compile(r"\s*(?:Args|Raises|Returns|Yields|Attributes):$")
WHOLE = re.compile(r"(`+).+?\1|\[[^\]]*\]\([^)]*\)")  # code and links: not broken


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Return ``text`` in lines after ``first`` and ``rest``: narrower than they could be where words would be left."""

    def lines(width: int) -> list[str]:
        whole = WHOLE.sub(lambda piece: piece[0].replace(" ", "\0"), " ".join(text.split()))
        options = {"initial_indent": first, "subsequent_indent": rest}
        return textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False, **options)

    widest = lines(WIDTH)
    tries = (lines(width) for width in range(WIDTH, WIDTH - 40, -1))
    best = next((tried for tried in tries if len(tried[-1].split()) >= FEWEST_WORDS), widest)
    return [line.replace("\0", " ") for line in (best if len(best) == len(widest) else widest)]


def is_broken(lines: list[str]) -> bool:
    """Whether a line is too long, or a short one follows a full one: alone at the end, or with room for the next."""
    for index in range(1, len(lines)):
        full, line = len(lines[index - 1]) > FULL, lines[index]
        last = index == len(lines) - 1
        if full and (len(line.split()) == 1 if last else len(line) < SHORT):
            return True
    return any(len(line) > WIDTH for line in lines)


def ends(line: str, following: str) -> bool:
    """Whether the author ended ``line``: a sentence is over, and the next word would have had room."""
    return line.endswith((".", ":", ";")) and len(line) + 1 + len(following.split()[0]) <= WIDTH


def wrap_lines(lines: list[str], *, everywhere: bool, stays: Callable[[str], bool], base: int = WIDTH) -> list[str]:
    """Wrap the paragraphs among ``lines``: all of them (``everywhere``), or those that are broken.

    Lines that ``stays`` names belong to no paragraph, nor do those indented by more than ``base`` outside of a section.
    """
    out: list[str] = []
    section: str | None = None
    index = 0
    while index < len(lines):
        line = lines[index]
        indent, begin = indent_of(line), index
        index += 1
        if SECTION.match(line):
            section = indent
        elif line.strip() and section is not None and len(indent) <= len(section):
            section = None
        code = section is None and len(indent) > base
        if not line.strip() or stays(line) or SECTION.match(line) or code:
            out.append(line)
            continue
        item = ITEM.match(line.lstrip())
        first = indent + (item[0] if item else "")
        field = section is not None and FIELD.match(line.lstrip())
        rest = indent + ("    " if field else " " * len(item[0]) if item else "")
        while index < len(lines) and lines[index].strip() and not stays(lines[index]):
            following = lines[index].lstrip()
            if indent_of(lines[index]) != rest or ITEM.match(following):
                break
            if section is not None and not field and FIELD.match(following):
                break
            if not everywhere and ends(lines[index - 1], following):
                break
            index += 1
        part = lines[begin:index]
        text = " ".join(part).strip()
        out += wrap(text[len(item[0]) :] if item else text, first, rest) if everywhere or is_broken(part) else part
    return out


def wrap_page(text: str) -> str:
    """Wrap a Markdown page."""

    def stays(line: str) -> bool:
        return line.lstrip().startswith(("|", "#", "<", "!["))

    parts = re.split(r"(^```.*?^```$|^<!--.*?-->$)", text, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):  # what stands between blocks of code
        parts[index] = "\n".join(wrap_lines(parts[index].split("\n"), everywhere=True, stays=stays))
    return "".join(parts)


def wrap_comments(text: str, mark: str) -> str:
    """Wrap the comments of whole lines that begin with ``mark``."""
    out: list[str] = []
    block: list[str] = []

    def flush() -> None:
        if block:
            lead = f"{indent_of(block[0])}{mark}"
            bodies = [line.replace(mark, " " * len(mark), 1) for line in block]
            for line in wrap_lines(bodies, everywhere=False, stays=lambda line: False, base=len(lead) + 1):
                out.append((lead + line[len(lead) :]).rstrip())
            block.clear()

    for line in text.split("\n"):
        is_comment = line.lstrip().startswith(mark) and "SPDX-License-Identifier" not in line
        if block and (not is_comment or indent_of(line) != indent_of(block[0])):
            flush()
        (block if is_comment else out).append(line)
    flush()
    return "\n".join(out)


def wrap_python(text: str) -> str:
    """Wrap docstrings and comments of a Python file."""
    lines = text.split("\n")
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, owners) and ast.get_docstring(node)]
    for node in sorted(nodes, key=lambda node: -node.body[0].lineno):
        value = node.body[0].value
        span = slice(value.lineno - 1, value.end_lineno)
        lines[span] = _wrap_docstring(lines[span])
    return wrap_comments("\n".join(lines), "#")


def _wrap_docstring(lines: list[str]) -> list[str]:
    """The quotes stand for themselves: the opening ones count as columns of the first line only."""
    opening = re.match(r'\s*[rR]?"""', lines[0])
    if opening is None or not lines[-1].endswith('"""') or len(lines) == 1:
        return lines
    base = len(indent_of(lines[0]))
    return wrap_lines(lines, everywhere=False, stays=lambda line: line.strip() == '"""', base=base)


def wrapped(path: Path) -> str:
    """Return the text of a file with its prose wrapped."""
    text = path.read_text()
    if path.suffix == ".md":
        return wrap_page(text)
    return wrap_python(text) if path.suffix in PYTHON else wrap_comments(text, "//")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        text = wrapped(path)
        if text != path.read_text():
            path.write_text(text)
            print(path)
