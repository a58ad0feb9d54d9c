# SPDX-License-Identifier: Apache-2.0
"""export: a quantized model through torch's exporter, with its packed layers in ops that onnxruntime has."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree

from lowbit.documents.whole_file import replaced_file
from lowbit.export.exported import exported
from lowbit.export.onnx.layers import in_onnx

_OPSETS = range(21, 24)  # DequantizeLinear has blocks from 21 on; torch's exporter ends at 23


def export(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = 21,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a quantized model to ONNX, like ``torch.onnx.export`` with ``dynamo=True``.

    Integer weights become MatMulNBits of onnxruntime, or MatMulInteger if weights are int8 per channel and activations
    int8 per row. nf4 and fp4 become MatMulBnb4, float8 DequantizeLinear. Activations are rounded as in lowbit. An
    embedding looks up rows and decodes them. Attention is exported as torch's own.

    Args:
        model: a module with `QuantLinear` and `QuantEmbedding` layers; fused modules are exported unfused. It does not
            change.
        args, kwargs: example inputs of its forward; a tensor stands for a tuple of one.
        f: the file to write; None to only return the program.
        dynamic_shapes: the argument of torch.onnx.export, such as ``{"x": {0: "batch", 1: "length"}}``.
        opset_version: 21 to 23.
        options: further arguments of torch.onnx.export, such as ``external_data``, ``input_names``, ``output_names``.

    Returns:
        The program; ``program.save(path)`` writes it to a file.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
        ValueError: ONNX does not support the format of a layer, a layer is being trained by `lowbit.training`, a weight
            is on the meta device, or ``opset_version`` is out of range.
        NotImplementedError: the model calls an op of lowbit that ONNX does not have, such as that of a score_mod. The
            message names the layer, and nothing is written.
        ModuleNotFoundError: onnx or onnxscript is not installed.

    Example:
        >>> lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
        >>> lowbit.export.onnx.export(model, (x,), "model.onnx", dynamic_shapes={"x": {0: "batch"}})
    """
    if opset_version not in _OPSETS:
        raise ValueError(f"export: opset_version must be {_OPSETS[0]} to {_OPSETS[-1]}, got {opset_version!r}")
    written = in_onnx(model)
    if model.training:
        warnings.warn("export: the model is in training mode; call model.eval() before", stacklevel=2)
    shapes = _pytree.tree_map_only(str, lambda _: Dim.DYNAMIC, dynamic_shapes)
    program = exported(written, (args,) if isinstance(args, Tensor) else args, kwargs, shapes, "ONNX")
    options = {"verbose": False} | options
    options |= {"dynamo": True, "dynamic_shapes": dynamic_shapes, "opset_version": opset_version}
    if f is None:
        return torch.onnx.export(program, (), **options)
    with replaced_file(f) as file:
        return torch.onnx.export(program, (), file, **options)
