# SPDX-License-Identifier: Apache-2.0
"""Packed layers whose forward uses only ops that ONNX has. torch.onnx.export gets them in place of lowbit's."""

from __future__ import annotations

from torch import Tensor, nn

from lowbit.export.onnx.matrices import Matrix, matrix_of
from lowbit.export.rewritten import RewrittenEmbedding, rewritten, with_class
from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import kind_of, stored_weight
from lowbit.quant.layout import numbers_of


class OnnxLinear(nn.Linear):
    """A `QuantLinear` in ONNX: computed in float32, rounded once to the dtype of x."""

    matrix: Matrix
    spec: LinearSpec

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = self.matrix.product(wide, self.spec)
        if self.spec.x_format != "float":  # onnxruntime's max skips nan, and integers have none
            y = y + (wide * 0).sum(-1, keepdim=True)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype)


class OnnxEmbedding(RewrittenEmbedding):
    """A `QuantEmbedding` in ONNX."""

    matrix: Matrix

    def rows(self, indices: Tensor) -> Tensor:
        return self.matrix.rows(indices)


def in_onnx(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with its packed layers in ONNX ops. Shared weights stay shared.

    Raises:
        ValueError: ONNX does not support the format of a layer. The message names the layer.
    """
    matrices: dict[tuple[int, LinearSpec], Matrix] = {}

    def write(layer: nn.Module, name: str) -> nn.Module:
        stored = numbers_of(layer.layout)
        looks_up = not kind_of(layer).multiplies
        packed = stored_weight(layer)
        same = [matrix for (weight, _), matrix in matrices.items() if looks_up and weight == id(packed)]
        key = id(packed), stored.spec
        matrix = same[0] if same else matrices.get(key)
        if matrix is None:
            matrix = matrices[key] = matrix_of(packed.detach(), stored, name)
        written = with_class(layer, OnnxEmbedding if looks_up else OnnxLinear)
        written.matrix, written.spec = matrix, stored.spec
        return written

    return rewritten(model, write)
