# SPDX-License-Identifier: Apache-2.0
"""is_traced: True in the thread whose calls become a graph, and there alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.ops.tracing import is_traced

SEEN: dict[str, bool] = {}


def in_another_thread() -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(is_traced).result()


class Noted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_traced() else x - 1


def note(graph: torch.fx.GraphModule, _: Any) -> Any:
    SEEN.update(process=torch.compiler.is_compiling(), other=in_another_thread())
    return graph


def test_nothing_is_traced_in_eager_mode() -> None:
    assert not is_traced()


def test_dynamo_traces_its_own_thread_alone() -> None:
    torch._dynamo.reset()
    assert torch.compile(Noted(), backend=note, fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]
    assert SEEN == {"process": True, "other": False}  # torch's flag is of the process, or this test would show nothing


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_traced(strict: bool) -> None:
    program = torch.export.export(Noted(), (torch.zeros(2),), strict=strict)
    assert program.module()(torch.zeros(2)).tolist() == [1, 1]
