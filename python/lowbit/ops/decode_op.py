# SPDX-License-Identifier: Apache-2.0
"""The ops `lowbit::decode`, `lowbit::kv_quantize_` and `lowbit::kv_dequantize_` as torch sees them: schemas, fake kernels, and CPU kernels
for where C++ could not register its own (csrc/torch/decode.cpp).

The last two write into tensors that they are given, so that a step of a cache allocates its result and nothing else.
"""

from __future__ import annotations

from torch import Tensor

from lowbit import _C
from lowbit.ops.attention_op import dense


def _decode(q, k, v, scale, k_scale, v_scale, rotated, causal, position, window, v_columns, mask=None, sink=None):
    out = q.new_empty((*q.shape[:3], v_columns))
    _C.decode(dense(q), k, v, out, scale, k_scale, v_scale, rotated, causal, position, window, mask, sink)
    return out


def _decode_fake(q, k, v, scale, k_scale, v_scale, rotated, causal, position, window, v_columns, mask=None, sink=None):
    return q.new_empty((*q.shape[:3], v_columns))


def _kv_quantize(x, codes, scale, rotate):
    _C.kv_quantize(dense(x), codes, scale, rotate)


def _kv_dequantize(codes, scale, x, rotated):
    _C.kv_dequantize(codes, scale, x, rotated)


def _writes(*arguments: Tensor | bool) -> None:
    """Nothing to infer: the results are arguments."""


OPS = {
    "decode": (
        "(Tensor q, Tensor k, Tensor v, float scale, Tensor? k_scale, Tensor? v_scale, bool rotated, bool causal, SymInt position, int window, "
        "SymInt v_columns, Tensor? mask=None, Tensor? sink=None) -> Tensor",
        _decode,
        _decode_fake,
    ),
    "kv_quantize_": ("(Tensor x, Tensor(a!) codes, Tensor(b!) scale, bool rotate) -> ()", _kv_quantize, _writes),
    "kv_dequantize_": ("(Tensor codes, Tensor scale, Tensor(a!) x, bool rotated) -> ()", _kv_dequantize, _writes),
}
