# SPDX-License-Identifier: Apache-2.0
"""docs/architectures.md: every causal language model of the installed transformers, and what lowbit makes of it."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from architecture_sweep import PAGE, TITLE, line, names  # noqa: E402

LINES = {text.split(" | ")[0].removeprefix("| "): text for text in PAGE.read_text().splitlines() if text.startswith("| ") and " | " in text}
del LINES["model"]


def test_the_page_has_a_line_for_each() -> None:
    assert LINES.keys() == names().keys() and PAGE.read_text().startswith(TITLE)
    verdicts = [verdict for text in LINES.values() for verdict in text.strip("| ").split(" | ")[1:]]
    assert verdicts.count("yes") > 400
    assert [name for name, text in LINES.items() if "**" in text] == ["inkling2_text"]  # its convolutions have linear layers for weights


@pytest.mark.parametrize("name", LINES)
def test_its_line_is_true(name: str) -> None:
    assert line(name) == LINES[name]
