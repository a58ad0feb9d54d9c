# SPDX-License-Identifier: Apache-2.0
"""Execution of a program (`lowbit.ops.program`) in one call: its operations `linear`, `rms_norm`, `rope_append`,
`attention`, `gated_delta_rule`, `experts` and others run without returning to Python in between. It has no derivative."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops import program as codes
from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.program import Program
from lowbit.ops.registration import function_of, register

register()
_call = function_of("run_program_")
_KEPT = 0
_N_OF_DOWN = 11
"""The field of a step `experts` that has the number of columns of its result."""
_GATED = 13
"""The field of a step `rope_append` that says whether queries have gates."""


def run_program(
    program: Sequence[int],
    constants: Sequence[Tensor],
    states: Sequence[Tensor],
    inputs: Sequence[Tensor],
    starts: Sequence[int],
) -> Tensor:
    """Run the operations of a program. All of them are checked before the first one runs.

    Args:
        program: the ``code`` of a `Program`.
        constants, inputs: the tensors that operations read. An input of shape ``[0]`` stands for a missing mask.
        states: keys and values ``[B, Hkv, S, E]``, to which the new tokens are written, and the states of recurrent
            layers, from which these go on and which they write.
        starts: the number of tokens in each cache, by the index that operations use.

    Returns:
        The result of the last operation.

    Raises:
        ValueError: the program is invalid, a shape does not fit, or a cache is too short for the tokens; nothing is
            written.
        TypeError: a dtype does not fit; nothing is written.
        NotImplementedError: a derivative is requested, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("run_program", (*constants, *states, *inputs))
    return _call(program, constants, states, inputs, starts)


class KeptProgram:
    """A program whose code and constants the op keeps, so that a call only passes states and inputs.

    Threads may share it. It keeps the constants alive; their ``.data`` may change. A copy passes the program again in
    its first call. Compiled code must use `run_program`, because the kept program only exists in this process.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._number = _C.new_program_number()
        self._code, self._constants = [_KEPT, self._number, *program.code], program.constants
        weakref.finalize(self, _C.forget_program, self._number).atexit = False

    def __reduce__(self) -> Any:
        return KeptProgram, (self.program,)

    def __call__(self, states: Sequence[Tensor], inputs: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
        """Run the program; see `run_program`."""
        if is_differentiated():
            refuse_derivatives("run_program", (*self.program.constants, *states, *inputs))
        y = _call(self._code, self._constants, states, inputs, starts)
        if self._constants:
            self._code, self._constants = [_KEPT, self._number], []
        return y


def fake(program: Sequence[int], constants: Sequence[Tensor], states: Any, inputs: Any, **_: Any) -> Tensor:
    """Return a tensor with the shape of the last operation's result. It is inferred one operation after another, since
    sizes may be symbolic. The op's checks have passed, so the program is valid."""
    results: list[Tensor] = []
    lists = {codes.CONSTANT: constants, codes.STATE: states, codes.INPUT: inputs, codes.RESULT: results}

    def of(operand: int) -> Tensor:
        return lists[operand % 4][operand // 4]

    at = 1
    while at < len(program):
        kind, count = program[at : at + 2]
        fields = program[at + 2 : at + 2 + count]
        at += 2 + count
        if kind in (codes.SCORE, codes.MASK_ROWS) or (kind == codes.LINEAR and count > 13 and fields[13] != codes.NONE):
            continue
        x = of(fields[0])
        shape = list(x.shape)
        if kind == codes.COLUMNS:
            shape[-1] = fields[1]
        elif kind == codes.LINEAR:
            shape[-1] = fields[2]
        elif kind == codes.EXPERTS:
            shape[-1] = fields[_N_OF_DOWN]
        elif kind == codes.ROUTE:
            shape = [math.prod(shape[:-1]), fields[1]]
            results.append(x.new_empty(shape, dtype=torch.float32))
            results.append(x.new_empty(shape, dtype=torch.int64))
            continue
        elif kind == codes.ROPE_APPEND:
            keys = of(fields[3])
            size = keys.shape[3]
            queries = shape[2] // size - 2 * keys.shape[1]
            gated = len(fields) > _GATED and fields[_GATED]
            shape = [shape[0], queries // 2 if gated else queries, shape[1], size]
        elif kind == codes.CAUSAL_CONV1D:
            shape[-1] = of(fields[1]).shape[0]
        elif kind == codes.GATED_DELTA_RULE:
            shape[-1] = fields[6] * fields[7]
        elif kind == codes.SSD:
            shape[-1] = fields[4] * fields[5]
        elif kind == codes.SELF_ATTENTION:
            shape[-1] -= 2 * fields[1] * fields[2]
        elif kind == codes.CROSS_ATTENTION:
            shape[-1] = shape[-1] // of(fields[1]).shape[3] * of(fields[2]).shape[3]
        elif kind == codes.ATTENTION:
            shape = [shape[0], shape[2], shape[1] * of(fields[2]).shape[3]]
        results.append(x.new_empty(shape))
    return results[-1]
