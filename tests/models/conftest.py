# SPDX-License-Identifier: Apache-2.0
"""What tests count: programs that run, and tokens that are one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of states of the programs that ran."""
    from lowbit.ops.run_program import KeptProgram

    counts: list[int] = []
    run = KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        counts.append(len(states))
        return run(self, states, inputs, starts)

    monkeypatch.setattr(KeptProgram, "__call__", counted)
    yield counts


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each token that was asked for was a run."""
    from lowbit.models.token_run import TokenRun

    seen: list[bool] = []
    of_token = TokenRun.logits

    def noted(self: TokenRun, tokens: Tensor) -> Tensor | None:
        found = of_token(self, tokens)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(TokenRun, "logits", noted)
    yield seen
