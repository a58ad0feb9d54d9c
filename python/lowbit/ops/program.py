# SPDX-License-Identifier: Apache-2.0
"""Programs: the operations of a model as a list of integers for `run_program` (see csrc/ops/program_code.hpp).

Example:
    >>> program = Program(inputs=1)
    >>> program.rms_norm(Program.input(0), program.constant(weight), eps=1e-5)
    >>> run_program(program.code, program.constants, [], [x], [])
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.ops.experts import Gate
from lowbit.ops.linear import LinearArgs

VERSION = 1
NONE = -1
CONSTANT, STATE, INPUT, RESULT = range(4)
SCORE, COLUMNS, RMS_NORM, LINEAR, ROPE_APPEND, ATTENTION, ROUTE, EXPERTS, SCALED_ADD = range(1, 10)
LAYER_NORM, POINTWISE, SELF_ATTENTION, CROSS_ATTENTION = 16, 17, 18, 19
MASK_ROWS, CAUSAL_CONV1D, GATED_DELTA_RULE, SSD, GATED_RMS_NORM, SCALE_COLUMNS, SELECTIVE_SCAN = range(24, 31)
HEADS, HEAD_LINEAR = 32, 33
RESULTS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that a result of `Program.scaled_add` may have."""


class LowRank(NamedTuple):
    """What an adapter adds to a product before its activation: ``inner[..., column:column + rank] @ up.T``."""

    inner: int
    """The operand ``[..., R]``, a product of x."""
    up: int
    """The operand of ``[panels, rank, 16]``, a constant: 16 outputs side by side, 0 behind the last one."""
    parts: tuple[tuple[int, int], ...]
    """The end and the column of each part of the outputs; -1 as a column adds nothing to a part."""


class Program:
    """A program under construction. Each method appends an operation and returns its result, which can be an operand of
    later operations.

    Attributes:
        code: the integers.
        constants: the tensors that are the same in every call.
    """

    def __init__(self) -> None:
        self.code = [VERSION]
        self.constants: list[Tensor] = []
        self._results = 0
        self._scores: dict[tuple[int, ...], int] = {}

    @staticmethod
    def state(index: int) -> int:
        """Return the operand for a tensor that operations write to."""
        return 4 * index + STATE

    @staticmethod
    def input(index: int) -> int:
        """Return the operand for an input tensor of a call."""
        return 4 * index + INPUT

    def constant(self, tensor: Tensor | None) -> int:
        """Return the operand for a tensor that is the same in every call; ``NONE`` for None."""
        if tensor is None:
            return NONE
        self.constants.append(tensor)
        return 4 * (len(self.constants) - 1) + CONSTANT

    def columns(self, x: int, count: int) -> int:
        """Append the allocation of a result ``[..., count]`` with the rows of x, which other operations write to."""
        return self._step(COLUMNS, x, count)

    def rms_norm(self, x: int, weight: int, eps: float, offset: float = 0.0, add: int = NONE) -> int:
        """Append a call of `rms_norm`."""
        return self._step(RMS_NORM, x, weight, _bits(eps), _bits(offset), add)

    def layer_norm(self, x: int, weight: int, bias: int, eps: float, offset: float = 0.0, add: int = NONE) -> int:
        """Append a call of `layer_norm`."""
        return self._step(LAYER_NORM, x, weight, bias, _bits(eps), _bits(offset), add)

    def pointwise(self, x: int, function: int = 0, scale: float = 1.0, add: int = NONE, parameters: Sequence[float] = ()) -> int:
        """Append a call of `pointwise`. ``parameters`` are its positive, negative and linear."""
        return self._step(POINTWISE, x, function, _bits(scale), add, *map(_bits, parameters))

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
        low_rank: LowRank | None = None,
    ) -> int:
        """Append a call of `linear`. With ``into``, a result of one row, the columns from ``first_column`` on of
        ``into`` become y."""
        fields = (x, weight, *map(int, op_args), bias, activation, mul, add, row, into, first_column)
        if low_rank is not None:
            fields += (low_rank.inner, low_rank.up, len(low_rank.parts), *chain.from_iterable(low_rank.parts))
        return self._step(LINEAR, *fields, results=int(into == NONE))

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
        rotation: int = 0,
        grouped: bool = False,
        norm_behind: bool = False,
        gated: bool = False,
    ) -> int:
        """Append a call of `rope_append` with ``qkv [B, L, (Hq + 2 Hkv) E]``, or ``[B, L, (2 Hq + 2 Hkv) E]`` if
        ``gated``. ``start`` is an index into ``starts``. Without cos and sin nothing is rotated."""
        fields = (qkv, cos, sin, keys, values, start, q_weight, k_weight, _bits(eps), _bits(offset))
        fields += (rotation, grouped, norm_behind)
        return self._step(ROPE_APPEND, *fields, *([gated] if gated else []))

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
        cu_seqlens: int = NONE,
    ) -> int:
        """Append a call of `attention` of ``q [B, Hq, L, E]`` or ``[B, L, Hq E]`` over the first ``start + L`` tokens of
        a cache, with the result ``[B, L, Hq Ev]``. ``mask`` may be an input of shape [0]; then nothing is masked, except later tokens if
        ``causal``. ``cu_seqlens`` may be one too; otherwise B is 1, its entries ``[N + 1]`` are the ends of packed
        sequences, each of which sees itself alone, and the mask ``[1, 1 or Hq, M, M]`` is that of each, from its first
        token on."""
        score = self._score(score_mod)
        fields = (q, keys, values, start, _bits(scale), mask, causal, score, sink)
        return self._step(ATTENTION, *fields, *([] if cu_seqlens == NONE else [cu_seqlens]))

    def self_attention(
        self, qkv: int, kv_heads: int, e: int, scale: float, mask: int = NONE, cu_seqlens: int = NONE
    ) -> int:
        """Append a call of `attention` of the tokens of ``qkv [B, L, (Hq + 2 Hkv) E]`` to themselves, with the result
        ``[B, L, Hq E]``. ``mask`` and ``cu_seqlens`` are those of `attention`."""
        return self._step(SELF_ATTENTION, qkv, kv_heads, e, _bits(scale), mask, cu_seqlens)

    def cross_attention(self, q: int, keys: int, values: int, scale: float, mask: int = NONE) -> int:
        """Append a call of `attention` of ``q [B, L, Hq E]`` to all tokens of ``keys [B, Hkv, S, E]`` and ``values
        [B, Hkv, S, Ev]``, with the result ``[B, L, Hq Ev]``. ``mask`` may be an input of shape [0] for none."""
        return self._step(CROSS_ATTENTION, q, keys, values, _bits(scale), mask)

    def route(
        self,
        x: int,
        k: int,
        scoring: int,
        weight: int = NONE,
        bias: int = NONE,
        rounds: bool = False,
        correction: int = NONE,
        groups: int = 1,
        groups_kept: int = 1,
        group_top: int = 1,
        zero_outside: bool = False,
        normalize: bool = False,
        eps: float = 0.0,
        least: float = 0.0,
        scale: float = 1.0,
        expert_scale: int = NONE,
    ) -> tuple[int, int]:
        """Append a call of `route` and return its results, weights and index ``[T, k]``, T being all rows of x.

        x are the logits ``[..., E]``, or the inputs ``[..., H]`` of a router with ``weight [E, H]`` and ``bias [E]``.
        Its product is computed in float32, and rounded to the dtype of x if ``rounds``."""
        choice = correction, groups, groups_kept, group_top, zero_outside
        weighting = normalize, _bits(eps), _bits(least), _bits(scale), expert_scale
        index = self._step(ROUTE, x, k, scoring, weight, bias, rounds, *choice, *weighting, results=2)
        return index - 4, index

    def experts(
        self,
        x: int,
        gate_up: int,
        down: int,
        index: int,
        weights: int,
        gate_up_args: LinearArgs,
        down_args: LinearArgs,
        gate: Gate,
        gate_up_bias: int = NONE,
        down_bias: int = NONE,
    ) -> int:
        """Append a call of `experts` with all rows of x; the result has the other dimensions of x."""
        activation, gated, interleaved, *numbers = gate
        fields = (*map(int, gate_up_args), *map(int, down_args), activation, gated, interleaved, *map(_bits, numbers))
        return self._step(EXPERTS, x, gate_up, down, index, weights, *fields, gate_up_bias, down_bias)

    def scaled_add(
        self, x: int, add: int = NONE, gate: int = NONE, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> int:
        """Append ``scale * sigmoid(gate) * x + add``, computed in float32 and rounded once. A gate ``[..., 1]`` has one
        element for each row of x; without one, the factor is ``scale``. The result has this dtype, by default that of x;
        ``add`` has either."""
        more = (0, 0, 0, 0, 1 + RESULTS.index(dtype)) if dtype is not None else ()
        return self._step(SCALED_ADD, x, add, gate, _bits(scale), *more)

    def gated_heads(self, x: int, gate: int, size: int, column: int, step: int, silu: bool = False) -> int:
        """Append ``sigmoid(gate) * x``, or ``silu(gate) * x``, with heads of ``size`` columns of x. The gate of the first
        one has the columns from ``column`` on, and each further one is ``step`` columns behind."""
        fields = (x, NONE, gate, _bits(1.0), size, column, step)
        return self._step(SCALED_ADD, *fields, *([1] if silu else []))

    def scale_columns(self, x: int, factors: int) -> None:
        """Append the multiplication of the columns of a result ``[..., n]`` by the float32 constant ``factors [n]``, in
        place."""
        self._step(SCALE_COLUMNS, x, factors, results=0)

    def mask_rows(self, x: int, mask: int) -> None:
        """Append the multiplication of the rows of a result ``[B, T, n]`` by those of ``mask [B, T, 1]``, in place. An
        input of shape [0] stands for a missing mask."""
        self._step(MASK_ROWS, x, mask, results=0)

    def causal_conv1d(
        self, x: int, weight: int, state: int, bias: int = NONE, column: int = 0, silu: bool = False
    ) -> int:
        """Append a call of `causal_conv1d` with the columns of x from ``column`` on. The state is written in place."""
        return self._step(CAUSAL_CONV1D, x, weight, state, bias, column, silu)

    def gated_delta_rule(
        self,
        qkv: int,
        g: int,
        beta: int,
        state: int,
        heads: tuple[int, int, int, int],
        scale: float,
        l2norm: bool = False,
        a_log: int = NONE,
        dt_bias: int = NONE,
        g_column: int = 0,
        beta_column: int = 0,
        beta_scale: float = 1.0,
        per_channel: bool = False,
    ) -> int:
        """Append a call of `gated_delta_rule`, with the result ``[B, T, Hv Dv]``. ``heads`` are Hk, Dk, Hv and Dv; q, k
        and v are side by side in ``qkv``; g and beta are Hv columns of their operands. With ``a_log [Hv]`` they become
        ``-exp(A_log) softplus(g + dt_bias)`` and ``beta_scale * sigmoid(beta)`` first. With ``per_channel`` g are Hv Dk
        columns, and so is dt_bias. The state is written in place."""
        gates = a_log, dt_bias, g_column, beta_column, _bits(beta_scale), *([True] if per_channel else [])
        return self._step(GATED_DELTA_RULE, qkv, g, beta, state, *heads, _bits(scale), l2norm, *gates)

    def ssd(
        self,
        xbc: int,
        dt: int,
        a: int,
        state: int,
        heads: tuple[int, int, int, int],
        dt_limit: tuple[float, float],
        d: int = NONE,
        dt_bias: int = NONE,
        softplus: bool = False,
        dt_column: int = 0,
    ) -> int:
        """Append a call of `ssd`, with the result ``[B, T, H P]``. ``heads`` are H, P, G and S; x, B and C are side by
        side in ``xbc``; dt are H columns of its operand. The state is written in place."""
        return self._step(SSD, xbc, dt, a, state, *heads, *map(_bits, dt_limit), d, dt_bias, softplus, dt_column)

    def selective_scan(
        self,
        x: int,
        dt: int,
        a: int,
        b: tuple[int, int],
        c: tuple[int, int],
        state: int,
        s: int,
        dt_limit: tuple[float, float],
        d: int = NONE,
        dt_bias: int = NONE,
        z: tuple[int, int] = (NONE, 0),
        softplus: bool = False,
    ) -> int:
        """Append a call of `selective_scan`, with the result ``[B, T, D]``. B, C and the gate z are operands and their
        first columns, of which B and C have ``s``. The state is written in place."""
        fields = (x, dt, a, b[0], c[0], state, s, *map(_bits, dt_limit), d, dt_bias, z[0], softplus)
        return self._step(SELECTIVE_SCAN, *fields, b[1], c[1], z[1])

    def gated_rms_norm(
        self,
        x: int,
        gate: int,
        weight: int,
        eps: float,
        group_size: int,
        sigmoid: bool = False,
        gate_first: bool = False,
        gate_column: int = 0,
    ) -> int:
        """Append a call of `gated_rms_norm` over each ``n`` columns of x, with ``weight [n]``. The gate has as many
        columns as x, from ``gate_column`` on."""
        return self._step(GATED_RMS_NORM, x, gate, weight, _bits(eps), group_size, sigmoid, gate_first, gate_column)

    def heads(
        self,
        x: int,
        heads: int,
        size: int,
        column: int,
        step: int,
        into: int = NONE,
        into_column: int = 0,
        start: int = NONE,
        cos: int = NONE,
        sin: int = NONE,
        rotation: int = 0,
        weight: int = NONE,
        eps: float = 0.0,
        offset: float = 0.0,
    ) -> int:
        """Append a copy of heads, normalized if there is a ``weight [size]``, and then rotated if there are cos and sin,
        as `rope_append` does it. They are ``size`` columns of ``x [B, L, n]`` each, from ``column`` on, ``step`` columns
        apart. The result is ``[B, L, heads size]``. With ``into``, a result ``[B, L, heads m]`` or a state
        ``[B, heads, S, m]``, they are written there, to the columns of each head from ``into_column`` on; of a state,
        to the tokens from ``start`` on, an index into ``starts``."""
        fields = (x, heads, size, column, step, into, into_column, start, cos, sin, rotation, weight)
        return self._step(HEADS, *fields, _bits(eps), _bits(offset), results=int(into == NONE))

    def head_linear(self, x: int, weight: int, op_args: LinearArgs) -> int:
        """Append a call of `gather_linear` in which each head of ``x [B, L, heads k]`` has a weight of its own, of
        ``weight [heads, panels, panel_bytes]``, with the result ``[B, L, heads n]``."""
        return self._step(HEAD_LINEAR, x, weight, *map(int, op_args))

    def _score(self, score_mod: Sequence[int]) -> int:
        key = tuple(score_mod)
        if key and key not in self._scores:
            self._scores[key] = len(self._scores)
            self._step(SCORE, *key, results=0)
        return self._scores[key] if key else NONE

    def _step(self, kind: int, *fields: int, results: int = 1) -> int:
        """Append a step and return its last result."""
        self.code += (kind, len(fields), *map(int, fields))
        self._results += results
        return 4 * (self._results - 1) + RESULT


def _bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
