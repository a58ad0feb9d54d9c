# SPDX-License-Identifier: Apache-2.0
"""Block classes: empty, partial and full as the dense mask says, and decided without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from score_programs import MASKS, causal, code_of, dense, document, everything, nothing, window
from tests import internals

from lowbit import _C, testing
from lowbit.score.program import ProgramBuilder, Value


@pytest.mark.core(*(row["name"] for row in testing.rows("block_classes")))
@pytest.mark.parametrize("q_block, kv_block", [(128, 128), (32, 64), (16, 300), (1, 1), (400, 400)])
@pytest.mark.parametrize("lengths", [(256, 256), (100, 300), (257, 129), (1, 1), (7, 0)], ids=str)
@pytest.mark.parametrize("build", MASKS, ids=lambda build: build.__name__)
def test_block_classes_are_those_of_the_dense_mask(
    build: Callable[[ProgramBuilder], Value], lengths: tuple[int, int], q_block: int, kv_block: int
) -> None:
    (q_len, kv_len), code = lengths, code_of(build)
    captured = [(torch.arange(300) // 37 * (1 - 2 * (torch.arange(300) > 200).long()))] if build is document else []
    if build is dense:
        captured = [(torch.rand(1, 1, -(-q_len // 16), -(-kv_len // 16)) < 0.4).repeat_interleave(16, 2).repeat_interleave(16, 3).expand(2, 3, -1, -1)]
    q_blocks, kv_blocks = -(-q_len // q_block), -(-kv_len // kv_block)
    classes = torch.full((2, 3, q_blocks, kv_blocks), 9, dtype=torch.uint8)
    _C.block_classes(code, captured, 2, 3, q_len, kv_len, q_block, kv_block, classes)
    for b in range(2):
        for h in range(3):
            whole = torch.zeros(q_blocks * q_block, kv_blocks * kv_block)
            if q_len and kv_len:
                scores = torch.zeros(q_len, kv_len)
                internals.score_program_eval(code, captured, b, h, 0, 0, scores)
                whole[:q_len, :kv_len] = (scores == 0).float()
            counts = whole.view(q_blocks, q_block, kv_blocks, kv_block).sum((1, 3))
            wanted = (counts > 0).int() + (counts == q_block * kv_block).int()
            assert torch.equal(classes[b, h].int(), wanted)


@pytest.mark.parametrize("build, most", [(causal, 64), (window, 128), (document, 64 + 2 * 8), (everything, 0), (nothing, 0)])
def test_intervals_decide_most_blocks(build: Callable[[ProgramBuilder], Value], most: int) -> None:
    ids = torch.arange(8192) * 8 // 8192
    classes = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    captured = [ids] if build is document else []
    assert _C.block_classes(code_of(build), captured, 1, 1, 8192, 8192, 128, 128, classes) <= most
