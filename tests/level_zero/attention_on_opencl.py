# SPDX-License-Identifier: Apache-2.0
"""Calls of attention by the modules of csrc/level_zero on OpenCL: what csrc/level_zero/attention/rows.cpp launches."""

from __future__ import annotations

import struct

import torch
from modules import ROOT, specialised
from opencl import machine
from tests import internals
from tests.cuda.attention_calls import AttentionCase, AttentionData
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.score.program import ProgramBuilder
from lowbit.score.program_cache import bind

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 8, None: 9}
THREADS, SUB_GROUPS, KEYS = 128, 8, 32
CALL = "<42q7i?b2xf4x5Q4q2Qf4x4Q5q20q4q3QQQqqb7xQi?3x2i2b6x"
TABLE_WORDS = 128
DPAS = ROOT / "tests" / "level_zero" / "dpas.cl"


def at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(tensor: Tensor | None) -> list[int]:
    return [0] * 4 if tensor is None else [tensor.data_ptr(), *tensor.stride()[:3]]


def tiling(length: int, block: int, tile: int) -> list[int]:
    """As csrc/ops/tiling.hpp."""
    block = block or max(length, 1)
    tile = min(tile, block)
    per_block = -(-block // tile)
    return [length, block, tile, per_block, length // block * per_block + -(-(length % block) // tile)]


class Mods:
    """The mods of a case: linked, and their tables written by the kernel for it."""

    def __init__(self, case: AttentionCase, captured: list[Tensor]) -> None:
        score = case.score_mod and bind("test", lambda s, b, h, q, k: case.score_mod(s, b, h, q, k, *captured), mask=False, dtype=case.dtype)
        mask = case.mask_mod and bind("test", case.mask_mod, mask=True)
        self.any = bool(score or mask)
        builder = ProgramBuilder()
        same = builder.finish(builder.op("score"))
        codes = [(score.code, list(score.captured)) if score else (same, []), (mask.code, list(mask.captured)) if mask else (same, [])]
        names = [("score_mod", 0, False), ("score_mod_gradient", 0, True), ("mask_mod", 1, False)]
        self.words = internals.score_programs_spirv([(name, *codes[which], gradient) for name, which, gradient in names])
        self.captured = [tensors for _, tensors in codes]
        self.faults, self.tables = torch.full((2, 4), 77, dtype=torch.int32), torch.full((2, TABLE_WORDS), -1)
        self.there = [bool(score), bool(mask)]
        for which, tensors in enumerate(self.captured):
            layout = [number for tensor in tensors for number in (*tensor.shape, *tensor.stride())]
            words = [at(self.faults[which]), *map(at, tensors), *layout]
            argument = struct.pack(f"<QQ{TABLE_WORDS}q", at(self.faults[which]), at(self.tables[which]), *words, *[0] * (TABLE_WORDS - len(words)))
            launch("attention_prepare", "write_table", 1, argument)

    def table(self, which: int) -> int:
        return at(self.tables[which]) if self.there[which] else 0


def launch(module: str, kernel: str, groups: int, argument: bytes, mods: bytes = b"", constants: tuple[int, ...] = (), text: str = "") -> None:
    functions = [part for part in (mods, mods and _C.level_zero.module("score_ops"), text) if part]
    machine().launch(machine().program(specialised(module, constants), *functions), kernel, groups, THREADS, argument)


class Call:
    """One case with its memory: forward, by dpas of so many lanes or without, then backward."""

    def __init__(self, case: AttentionCase, data: AttentionData, out_dtype: torch.dtype = torch.float32, lanes: int = 0) -> None:
        self.case, self.data, self.mods, self.lanes = case, data, Mods(case, data.captured), lanes
        b, hq, _, length, s, _, ev = case.shape
        self.out = torch.full((b, hq, length, ev), 7.0, dtype=out_dtype)
        self.lse, self.largest = torch.full((2, b, hq, length), 7.0)
        self.grads = [torch.full_like(t, 7.0) for t in (data.q, data.k, data.v)]
        self.grad_sink = torch.full((hq,), 7.0)
        self.grad_out, self.statistics, self.unit = data.grad_out.float(), torch.full((b, hq, length, 2), 7.0), torch.full((b, hq, length), torch.nan)
        self.lists, self.classes = [], None
        if case.mask_mod:
            made = lowbit.create_block_mask(case.mask_mod, None, None, length, s, BLOCK_SIZE=case.block_size)
            self.lists = [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices]
            self.classes = torch.full((*made.kv_num_blocks.shape, -(-s // case.block_size[1])), 9, dtype=torch.uint8)

    def packed(self, q_tile: int, kv_tile: int) -> bytes:
        case, data = self.case, self.data
        b, hq, hkv, length, s, e, ev = case.shape
        scale = e**-0.5 if case.scale is None else case.scale
        blocks = case.block_size if self.lists else (0, 0)
        bias = None if data.bias is None else data.bias.expand(b, hq, length, s)
        lists = [0] * 20
        if self.lists:
            lists = [n for c, i in (self.lists[:2], self.lists[2:]) for n in (at(c), at(i), *c.stride(), *i.stride(), i.shape[3])]
        counts = self.lists[0].shape if self.lists else (1, 1, 1)
        columns = 0 if self.classes is None else self.classes.shape[-1]
        classes = [columns * counts[2] * counts[1] if counts[0] > 1 else 0, columns * counts[2] if counts[1] > 1 else 0, columns, counts[2], counts[1]]
        heads = [n for t in (data.q, data.k, data.v, self.out, self.grad_out, *self.grads) for n in rows_of(t)]
        return struct.pack(
            CALL, *heads, *tiling(length, blocks[0], q_tile), *tiling(s, blocks[1], kv_tile), b, hq, hq // hkv, 0, b * hq, 0, 0, case.causal,
            DTYPES[self.out.dtype], scale, at(self.lse), at(self.largest), at(data.sink), at(data.grad_lse), at(bias),
            *([0] * 4 if bias is None else bias.stride()), at(data.seed), int(case.dropout_p * 2**32), 1 / (1 - case.dropout_p), self.mods.table(0),
            self.mods.table(1), at(self.mods.faults[0]), at(self.classes), *classes, *lists, *rows_of(self.grad_out), at(self.statistics), at(self.unit),
            at(self.grad_sink), 0, 0, 0, 0, 9, 0, 0, False, e, ev, DTYPES[case.dtype], DTYPES[case.bias],
        )  # fmt: skip

    def run(self, module: str, kernel: str, groups: int, argument: bytes) -> None:
        constants, text = ((int(self.case.dtype == torch.float16),), DPAS.read_text()) if self.lanes else ((), "")
        with_mods = (f"{module}_mods", self.mods.words) if self.mods.any else (module, b"")
        launch(with_mods[0], kernel, groups, argument, with_mods[1], constants, text)

    def forward(self) -> dict[str, Tensor]:
        b, hq, _, length, _, e, ev = self.case.shape
        columns = 64 if max(e, ev) <= 64 else 128 if max(e, ev) <= 128 else 256
        tile = min(8, 64 * self.lanes // columns) * THREADS // self.lanes if self.lanes else {64: 32, 128: 16, 256: 8}[columns]
        module = f"attention_forward_dpas{self.lanes}" if self.lanes else "attention_forward"
        argument = self.packed(tile, KEYS)
        if self.lists:
            launch("attention_prepare", "make_classes", self.lists[0].numel(), argument)
        self.run(module, f"forward_{columns}", b * hq * tiling(length, self.case.block_size[0] if self.lists else 0, tile)[4], argument)
        return {"out": self.out, "lse": self.lse, "largest": self.largest}

    def backward(self) -> dict[str, Tensor]:
        b, hq, hkv, length, s, e, ev = self.case.shape
        columns = 64 if max(e, ev) <= 64 else 128 if max(e, ev) <= 128 else 256
        tile = 16 if columns == 64 else 8
        blocks = self.case.block_size if self.lists else (0, 0)
        by_queries, by_keys = self.packed(tile, KEYS), self.packed(KEYS, tile)
        launch("attention_rows", "row_statistics", -(-b * hq * length // SUB_GROUPS), by_queries)
        self.run("attention_backward", f"queries_{columns}", b * hq * tiling(length, blocks[0], tile)[4], by_queries)
        self.run("attention_backward", f"keys_{columns}", b * hkv * tiling(s, blocks[1], tile)[4], by_keys)
        if self.data.sink is not None:
            launch("attention_rows", "sink_gradient", hq, by_queries)
        made = dict(zip(("grad_q", "grad_k", "grad_v"), self.grads, strict=True))
        return made | ({"grad_sink": self.grad_sink} if self.data.sink is not None else {})
