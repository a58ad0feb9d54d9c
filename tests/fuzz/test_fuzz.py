# SPDX-License-Identifier: Apache-2.0
"""Each op: the texts of its corpus and a fixed list of seeds, so that what fails here fails because of a change. Seeds that
were never tried, for minutes or hours: `python -m tests.fuzz --minutes 60`, or LOWBIT_FUZZ_START=n here for those from n on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .choices import Choices, shrink
from .driver import OPS, Server, findings

CORPUS = Path(__file__).parent / "corpus"
SEEDS = 32  # of each op: 60 s in all


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.mark.parametrize("op", OPS)
def test_no_seed_differs_from_float64_torch(server: Server, op: str) -> None:
    start = int(os.environ.get("LOWBIT_FUZZ_START", 0))
    found = [str(finding) for finding in findings(server, op, range(start, start + SEEDS), shrink_seconds=5.0)]
    assert not found, f"{len(found)} findings, seeds from {start}\n" + "\n".join(found)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.py")), ids=lambda path: path.stem)
def test_what_was_once_wrong_is_right(server: Server, path: Path) -> None:
    answer = server.ask("corpus", [{"text": path.read_text()}])[-1]
    assert answer["status"] == "ok", f"{path}: {answer['signature']}\n{answer['detail']}"


def test_the_server_names_a_crash_a_hang_and_an_exception(server: Server) -> None:
    wanted = {
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)": "crash: SIGSEGV",
        "while True:\n    pass": "hang: no answer in 2 s",
        "raise ValueError('of 5')": "ValueError: of #",
        "pass": None,
    }
    answers = [server.ask("corpus", [{"text": text}], seconds=2.0)[-1] for text in wanted]
    assert [answer.get("signature") for answer in answers] == list(wanted.values())


def test_shrinking_keeps_what_fails_and_no_more() -> None:
    def fails(made: list[int]) -> bool:
        choices = Choices(again=made)
        return max(choices.below(100) for _ in range(9)) >= 40

    seed = next(seed for seed in range(99) if fails([Choices(seed).below(100)] * 9))
    choices = Choices(seed)
    made = [choices.below(100) for _ in range(9)]
    smallest = shrink(made if fails(made) else [77] * 9, fails, 10.0)
    assert fails(smallest) and max(smallest) == 40 and sum(1 for number in smallest if number) == 1
