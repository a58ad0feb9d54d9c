# SPDX-License-Identifier: Apache-2.0
"""The steps of a model as the integers that `run_program` runs (csrc/ops/program_code.hpp has their meaning).

Example:
    >>> program = Program(inputs=1)
    >>> program.rms_norm(Program.input(0), program.constant(weight), eps=1e-5)
    >>> run_program(program.code, program.constants, [], [x], [])
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from lowbit.ops.linear import LinearArgs

VERSION = 1
NONE = -1
CONSTANT, STATE, INPUT, RESULT = range(4)
SCORE, COLUMNS, RMS_NORM, LINEAR, ROPE_APPEND, ATTENTION = range(1, 7)


class Program:
    """Steps, written one behind the other; each returns its result, an operand of those that follow.

    Attributes:
        code: the integers.
        constants: the tensors that the steps read in every call.
    """

    def __init__(self) -> None:
        self.code = [VERSION]
        self.constants: list[Tensor] = []
        self._results = 0
        self._scores: dict[tuple[int, ...], int] = {}

    @staticmethod
    def state(index: int) -> int:
        """The operand of a tensor that steps write to."""
        return 4 * index + STATE

    @staticmethod
    def input(index: int) -> int:
        """The operand of a tensor of a call."""
        return 4 * index + INPUT

    def constant(self, tensor: Tensor | None) -> int:
        """The operand of a tensor of every call; none for None."""
        if tensor is None:
            return NONE
        self.constants.append(tensor)
        return 4 * (len(self.constants) - 1) + CONSTANT

    def columns(self, x: int, count: int) -> int:
        """A result ``[..., count]`` with the rows of x, which other steps write to."""
        return self._step(COLUMNS, x, count)

    def rms_norm(self, x: int, weight: int, eps: float, offset: float = 0.0, add: int = NONE) -> int:
        """As `rms_norm`."""
        return self._step(RMS_NORM, x, weight, _bits(eps), _bits(offset), add)

    def linear(
        self,
        x: int,
        weight: int,
        op_args: LinearArgs,
        bias: int = NONE,
        activation: int = 0,
        mul: int = NONE,
        add: int = NONE,
        row: int = 0,
        into: int = NONE,
        first_column: int = 0,
    ) -> int:
        """As `linear`. With ``into``, a result of one row, y is its columns from ``first_column`` on."""
        fields = (x, weight, *map(int, op_args), bias, activation, mul, add, row, into, first_column)
        return self._step(LINEAR, *fields, own=into == NONE)

    def rope_append(
        self,
        qkv: int,
        cos: int,
        sin: int,
        keys: int,
        values: int,
        start: int,
        q_weight: int = NONE,
        k_weight: int = NONE,
        eps: float = 0.0,
        offset: float = 0.0,
    ) -> int:
        """As `rope_append`, of ``qkv [B, L, (Hq + 2 Hkv) E]``; ``start`` is an index of ``starts``."""
        fields = (qkv, cos, sin, keys, values, start, q_weight, k_weight, _bits(eps), _bits(offset))
        return self._step(ROPE_APPEND, *fields)

    def attention(
        self,
        q: int,
        keys: int,
        values: int,
        start: int,
        scale: float,
        mask: int = NONE,
        causal: bool = False,
        score_mod: Sequence[int] = (),
        sink: int = NONE,
    ) -> int:
        """As `attention` of the first ``start + L`` tokens of a cache; ``[B, L, Hq Ev]``. ``mask`` may be an input of
        shape [0]: then all is seen, or, where ``causal``, each token and those before it."""
        return self._step(ATTENTION, q, keys, values, start, _bits(scale), mask, causal, self._score(score_mod), sink)

    def _score(self, score_mod: Sequence[int]) -> int:
        key = tuple(score_mod)
        if key and key not in self._scores:
            self._scores[key] = len(self._scores)
            self._step(SCORE, *key, own=False)
        return self._scores[key] if key else NONE

    def _step(self, kind: int, *fields: int, own: bool = True) -> int:
        self.code += (kind, len(fields), *fields)
        self._results += own
        return 4 * (self._results - 1) + RESULT


def _bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
