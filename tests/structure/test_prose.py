# SPDX-License-Identifier: Apache-2.0
"""Prose is wrapped as people wrap it: lines of 120 columns, none broken in mid-sentence, no word alone on the last one.
A sentence has a subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from in_folder import module_in

ROOT = Path(__file__).parents[2]
ROOMS = ("csrc", "python", "benchmarks", "examples", "tools")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_in("tools", "wrap_prose")


def test_docstrings_and_comments_are_whole(tool: ModuleType) -> None:
    """`python tools/wrap_prose.py FILE` mends a file."""
    broken = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in tool.SUFFIXES):
        if tool.wrapped(path) != path.read_text():
            broken.append(str(path.relative_to(ROOT)))
    assert not broken, f"python tools/wrap_prose.py {' '.join(broken)}"


def test_pages_are_wrapped(tool: ModuleType) -> None:
    """The API page is made of docstrings; the changelog is a list of long lines."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.name not in ("api.md", "changelog.md")]
    ragged = [str(page.relative_to(ROOT)) for page in pages if tool.wrapped(page) != page.read_text()]
    assert not ragged, f"python tools/wrap_prose.py {' '.join(ragged)}"


def test_a_broken_docstring_is_found_and_mended(tool: ModuleType) -> None:
    full = "Make one from a float layer with ``quantize_`` or ``from_linear``, from plain codes with ``pack``. The constructor"
    broken = f'"""Name.\n\n{full}\nmakes\nan unset layer, to load a state dict into.\n\n    code  stays\n    as it is\n"""\n'
    mended = tool.wrap_python(broken)
    assert f"{full} makes\nan unset layer, to load a state dict into.\n" in mended
    assert mended.endswith("\n\n    code  stays\n    as it is\n\"\"\"\n")
    assert tool.wrap_python(mended) == mended


def test_an_argument_of_a_docstring_keeps_its_indent(tool: ModuleType) -> None:
    long = "the number of elements that share one scale, a power of two from 32 to 4096, and of the classes with 4 bits 128 as"
    lines = ["Args:", f"    block_size: {long}", "        in", "        torchao.", "    dtype: of the bias."]
    mended = tool.wrap_lines(lines, everywhere=False, stays=lambda line: False)
    assert mended[0] == "Args:" and mended[-1] == "    dtype: of the bias." and all(len(line) <= 120 for line in mended)
    assert mended[1].startswith("    block_size: ") and all(line.startswith("        ") for line in mended[2:-1])
    assert " ".join(mended).split() == " ".join(lines).split()


def test_no_word_stands_alone_and_code_stays_in_one_piece(tool: ModuleType) -> None:
    lines = tool.wrap("word " * 24 + "`a name of several words` last", "- ", "  ")
    assert len(lines) == 2 and len(lines[-1].split()) >= tool.FEWEST_WORDS and all(len(line) <= 120 for line in lines)
    assert sum("`a name of several words`" in line for line in lines) == 1


def test_tables_code_and_headings_of_a_page_stay(tool: ModuleType) -> None:
    stays = f"# {'title ' * 30}\n\n| {'cell ' * 40}|\n|---|\n\n```\n{'x = 1; ' * 30}\n```\n\n<!-- {'note ' * 40}-->\n"
    assert tool.wrap_page(stays) == stays
    assert tool.wrap_page(f"{stays}\n- {'item ' * 30}\n") == f"{stays}\n- {'item ' * 22}item\n  {'item ' * 6}item\n"


HEADS = re.compile(r"[\s>*(\d.-]*(?:What|Who|Whoever|Nobody|Somebody|Anybody)\b")
PRONOUNS = re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", re.IGNORECASE)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")


def prose_of(path: Path) -> Iterator[str]:
    """The docstrings and comments of a file, or the paragraphs and cells of a page, without code and headings."""
    text = re.sub(r"^.*SPDX-License-Identifier.*$", "", path.read_text(), flags=re.MULTILINE)
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```$|^#.*?$|^<!--.*?-->$", "\n", text, flags=re.MULTILINE | re.DOTALL)
        yield from re.split(r"\n\s*\n|\n(?=[-*|])|\|", text)
        return
    mark = "#" if path.suffix in (".py", ".pyi") else "//"
    for block in re.findall(rf"(?:^[ \t]*{mark} [^\n]*\n)+", text, re.MULTILINE):
        yield re.sub(rf"^[ \t]*{mark}", "", block, flags=re.MULTILINE)
    yield from re.findall(rf"^[ \t]*[^\s#/][^\n]*?  {mark} ([^\n]*)$", text, re.MULTILINE)
    if mark == "#":
        nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
        yield from (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def headless(text: str) -> list[str]:
    """The sentences without a subject: those that begin with a pronoun and are no question, or have a vague person."""
    sentences = re.split(r"(?<=[.?!])\s+", QUOTED.sub("it", text))
    return [
        " ".join(sentence.split())
        for sentence in sentences
        if (HEADS.match(sentence) and not sentence.rstrip().endswith("?")) or PRONOUNS.search(sentence)
    ]


def test_a_sentence_has_a_subject(tool: ModuleType) -> None:
    """No "What a task needs." as a comment, no "whoever": docs/style.md, Text. A heading of a page may ask."""
    files = [path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*") if path.suffix in tool.SUFFIXES]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in sorted([*files, *pages])
        if path.name != "changelog.md"
        for text in prose_of(path)
        for sentence in headless(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text, count",
    [
        ("What a task needs in scratch memory.", 1),
        ("The memory of a task. What is left is freed.", 1),
        ("The file that somebody made.", 1),
        ("What is a task? A part of a call, which says what is wrong.", 0),
        ('It refuses the row "nobody", and `whoever`.', 0),
    ],
)
def test_a_sentence_without_a_subject_is_found(text: str, count: int) -> None:
    assert len(headless(text)) == count
