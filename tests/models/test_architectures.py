# SPDX-License-Identifier: Apache-2.0
"""docs/architectures.md: the models of the installed transformers, and what lowbit makes of each."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from architecture_sweep import PAGE, TITLE, classes, line  # noqa: E402

TEXT = PAGE.read_text()
SECTIONS = {part.partition("\n")[0]: part.splitlines() for part in TEXT.split("\n## ")[1:]}
LINES = {
    (kind, text.split()[1]): text
    for kind, section in SECTIONS.items()
    for text in section
    if text.startswith("| ") and not text.startswith("| model |")
}


def test_the_page_has_a_line_for_each() -> None:
    assert TEXT.startswith(TITLE)
    assert LINES.keys() == {(kind, name) for kind, names in classes().items() for name in names}
    assert "**" not in "".join(LINES.values())  # of what is off, and of errors
    assert sum(text.count("| yes") for text in LINES.values()) > 1200


@pytest.mark.parametrize(("kind", "name"), LINES)
def test_its_line_is_true(kind: str, name: str) -> None:
    assert line(kind, name) == LINES[kind, name]
