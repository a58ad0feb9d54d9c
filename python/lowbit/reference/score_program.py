# SPDX-License-Identifier: Apache-2.0
"""The meaning of a score program: every op in torch, in float64 and int32, with one element of the scores per (q,
k)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a narrower dtype, with derivative 1."""
    return x + torch.where(x.isfinite(), x.to(dtype).double() - x, 0.0).detach()


OPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "remainder": torch.remainder, "fmod": torch.fmod,
    "floor_divide": lambda a, b: torch.floor_divide(a.detach(), b.detach()), "pow": torch.pow, "neg": torch.neg,
    "sign": torch.sign, "abs": torch.abs, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "round": torch.round, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "atan": torch.atan, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "erf": torch.erf, "to_bfloat16": lambda x: _rounded(x, torch.bfloat16),
    "to_float16": lambda x: _rounded(x, torch.float16), "add_int": torch.add, "sub_int": torch.sub,
    "mul_int": torch.mul, "floor_divide_int": torch.floor_divide, "remainder_int": torch.remainder,
    "trunc_divide_int": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "fmod_int": torch.fmod,
    "maximum_int": torch.maximum, "minimum_int": torch.minimum, "neg_int": torch.neg, "abs_int": torch.abs,
    "sign_int": torch.sign, "and_int": torch.bitwise_and, "or_int": torch.bitwise_or, "xor_int": torch.bitwise_xor,
    "not_int": torch.bitwise_not, "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne, "lt_int": torch.lt, "le_int": torch.le,
    "eq_int": torch.eq, "ne_int": torch.ne, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "not": torch.logical_not, "where": torch.where, "where_int": torch.where, "where_bool": torch.where,
    "int_to_float": lambda x: x.double(), "bool_to_float": lambda x: x.double(), "bool_to_int": lambda x: x.int(),
    "float_to_int": lambda x: x.int(), "float_to_bool": lambda x: x != 0, "int_to_bool": lambda x: x != 0,
}  # fmt: skip


def evaluate(
    code: Sequence[int],
    opcodes: Mapping[str, tuple[int, str]],
    captured: Sequence[Tensor],
    scores: Tensor,
    *,
    b: int = 0,
    h: int = 0,
    q0: int = 0,
    k0: int = 0,
) -> Tensor:
    """Evaluate a program over a tile. It is differentiable in the scores and the captured tensors.

    Args:
        code: the program (lowbit.score.program).
        opcodes: ``_C.SCORE_OPS``: the number and the types of every op.
        captured: its captured tensors.
        scores: float64 ``[rows, cols]``, the scores of queries from ``q0`` on and keys from ``k0`` on.
        b, h: the batch entry and query head.
        q0, k0: the first query and key.

    Returns:
        The modified scores, float64 ``[rows, cols]``, or the mask, bool ``[rows, cols]``.
    """
    names = {opcode: name for name, (opcode, _) in opcodes.items()}
    rows, cols = scores.shape
    leaves = {
        "score": scores,
        "b": torch.tensor(b, dtype=torch.int32),
        "h": torch.tensor(h, dtype=torch.int32),
        "q": torch.arange(q0, q0 + rows, dtype=torch.int32)[:, None],
        "k": torch.arange(k0, k0 + cols, dtype=torch.int32)[None, :],
    }
    count = code[1]
    output, at, values = code[2 + 2 * count], 3 + 2 * count, list[Tensor]()
    while at < len(code):
        name = names[code[at]]
        if name in leaves:
            value, used = leaves[name], 0
        elif name == "float_const":
            value, used = torch.tensor(code[at + 1]).view(torch.float64), 1
        elif name in ("int_const", "bool_const"):
            value, used = torch.tensor(code[at + 1], dtype=torch.int32 if name == "int_const" else torch.bool), 1
        elif name == "gather":
            tensor = captured[code[at + 1]]
            value, used = tensor[tuple(values[i].long() for i in code[at + 2 : at + 2 + tensor.ndim])], 1 + tensor.ndim
            value = value.double() if value.is_floating_point() else value
        else:
            used = len(opcodes[name][1].partition(">")[0])
            value = OPS[name](*(values[i] for i in code[at + 1 : at + 1 + used]))
        values.append(value)
        at += 1 + used
    return values[output].expand(rows, cols)
