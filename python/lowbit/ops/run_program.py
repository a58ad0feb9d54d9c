# SPDX-License-Identifier: Apache-2.0
"""A program (`lowbit.ops.program`) in one call: the calls of `linear`, `rms_norm`, `rope_append` and `attention` that
its steps are, without a return to Python between them; without a derivative."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowbit import _C
from lowbit.ops import program as codes
from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.program import Program
from lowbit.ops.registration import function_of, register

register()
_call = function_of("run_program_")
_KEPT = 0


def run_program(
    program: Sequence[int],
    constants: Sequence[Tensor],
    states: Sequence[Tensor],
    inputs: Sequence[Tensor],
    starts: Sequence[int],
) -> Tensor:
    """Run the steps of a program, all checked before the first.

    Args:
        program: integers, as `Program` writes them.
        constants, inputs: the tensors that steps read. An input of shape ``[0]`` is a mask that is not given.
        states: keys and values ``[B, Hkv, S, E]``: the new tokens are written to them.
        starts: the number of tokens in each cache, by the index that steps name.

    Returns:
        The result of the last step.

    Raises:
        ValueError: program is none, or a shape does not fit, or a cache has no room for the tokens; nothing is written.
        TypeError: a dtype does not fit; nothing is written.
        NotImplementedError: a derivative is wanted, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("run_program", (*constants, *states, *inputs))
    return _call(program, constants, states, inputs, starts)


class KeptProgram:
    """A program with its constants, which the op keeps: a call hands over states and inputs alone. Threads may share
    it. It holds the constants, whose ``.data`` may change, for as long as it lives.

    A copy hands the program over again. In compiled calls use `run_program`: what is kept is kept in this process.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._number = _C.new_program_number()
        self._code, self._constants = [_KEPT, self._number, *program.code], program.constants
        weakref.finalize(self, _C.forget_program, self._number).atexit = False

    def __reduce__(self) -> Any:
        return KeptProgram, (self.program,)

    def __call__(self, states: Sequence[Tensor], inputs: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
        """As `run_program`."""
        if is_differentiated():
            refuse_derivatives("run_program", (*self.program.constants, *states, *inputs))
        y = _call(self._code, self._constants, states, inputs, starts)
        if self._constants:
            self._code, self._constants = [_KEPT, self._number], []
        return y


def fake(program: Sequence[int], constants: Sequence[Tensor], states: Any, inputs: Any, **_: Any) -> Tensor:
    """A tensor of the shape that the last step has, found step by step: sizes may be symbols. The checks of the op
    itself came before, so that the program is a right one."""
    results: list[Tensor] = []
    lists = {codes.CONSTANT: constants, codes.STATE: states, codes.INPUT: inputs, codes.RESULT: results}

    def of(operand: int) -> Tensor:
        return lists[operand % 4][operand // 4]

    at = 1
    while at < len(program):
        kind, count = program[at : at + 2]
        fields = program[at + 2 : at + 2 + count]
        at += 2 + count
        if kind == codes.SCORE or (kind == codes.LINEAR and count > 13 and fields[13] != codes.NONE):
            continue
        x = of(fields[0])
        shape = list(x.shape)
        if kind == codes.COLUMNS:
            shape[-1] = fields[1]
        elif kind == codes.LINEAR:
            shape[-1] = fields[2]
        elif kind == codes.ROPE_APPEND:
            keys = of(fields[3])
            size = keys.shape[3]
            shape = [shape[0], shape[2] // size - 2 * keys.shape[1], shape[1], size]
        elif kind == codes.ATTENTION:
            shape = [shape[0], shape[2], shape[1] * of(fields[2]).shape[3]]
        results.append(x.new_empty(shape))
    return results[-1]
