# SPDX-License-Identifier: Apache-2.0
"""ExecuTorch: export a quantized model as a program for its XNNPACK partitioner. ExecuTorch need not be installed.

The program uses torch's ops of quantized graphs (``quantized_decomposed``), which round activations to int8 per token,
decode the codes of weights, and multiply. The partitioner replaces them by one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401  registers quantized_decomposed
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from lowbit import _C
from lowbit.export.exported import exported
from lowbit.export.rewritten import RewrittenEmbedding, rewritten, with_class
from lowbit.formats.spec import LinearSpec
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import kind_of
from lowbit.quant.layout import numbers_of

_ops = torch.ops.quantized_decomposed
_GROUP = 32  # XNNPACK's int4 groups are multiples of this
_INT8 = (-128, 127, torch.int8)


class AffineLinear(nn.Linear):
    """A `QuantLinear` in ops of quantized graphs: codes int8 ``[n, k]``, with scale and zero point (0) ``[n, groups]``,
    or ``[n]`` if there is one scale per channel."""

    bits: int
    group_size: int

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(x.float()).to(x.dtype)
        scale, zero = _ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        codes = _ops.quantize_per_token(x, scale, zero, *_INT8)
        x = _ops.dequantize_per_token(codes, scale, zero, *_INT8, torch.float32)
        return functional.linear(x, self._decoded(), self.bias)

    def _decoded(self) -> Tensor:
        most = 2 ** (self.bits - 1)
        stored, limits = (self.codes, self.scale, self.zero), (-most, most - 1, torch.int8)
        if self.group_size:
            return _ops.dequantize_per_channel_group(*stored, *limits, self.group_size, torch.float32)
        return _ops.dequantize_per_channel(*stored, 0, *limits)


class AffineEmbedding(RewrittenEmbedding):
    """A `QuantEmbedding` in ops of quantized graphs: codes int8 ``[n, k]``, scale and zero point float32 ``[n,
    groups]``."""

    def rows(self, indices: Tensor) -> Tensor:
        groups = self.scale.shape[1]
        steps = self.codes[indices].float().unflatten(-1, (groups, -1)) - self.zero[indices][..., None]
        return (steps * self.scale[indices][..., None]).flatten(-2)


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Export a quantized model for ExecuTorch's XNNPACK backend.

    The codes of weights do not change. XNNPACK rounds activations to int8 per token with a zero point, whatever int8
    activations the layer has, and rounds group scales to bfloat16. So results differ from lowbit's by these roundings.

    Args:
        model: a module whose `QuantLinear` layers are symmetric with int8 activations: int4 (or fewer bits) in groups
            or per channel, or int8 per channel. Its `QuantEmbedding` layers have integer codes. It does not change.
        args, kwargs, dynamic_shapes: the arguments of torch.export.export.

    Returns:
        The exported program.

    Raises:
        ValueError: XNNPACK does not support the format of a layer. The message names the layer and the reason.
        NotImplementedError: the model calls an op of lowbit that ExecuTorch does not have. The message names the layer.

    Example:
        >>> config = lowbit.int8_dynamic_activation_int4_weight(group_size=32, scale="absmax")
        >>> lowbit.quantize_(model, config)
        >>> program = lowbit.export.executorch.export(model, (x,))
        >>> lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    """
    return exported(rewritten(model, _written), args, kwargs, dynamic_shapes, "ExecuTorch")


def _written(layer: nn.Module, name: str) -> nn.Module:
    stored = numbers_of(layer.layout)
    looks_up = not kind_of(layer).multiplies
    problem = _problem(stored.spec, stored.k, looks_up)
    if problem:
        raise ValueError(f"export: {name} must {problem} for XNNPACK, got {stored.spec.name} of k={stored.k}")
    weight = CodedWeight.unpack(layer.weight.detach(), stored)
    middle = _C.FORMAT_FACTS[stored.spec.format]["zero"]
    tensors = {"codes": (weight.codes.short() - middle).to(torch.int8), "scale": weight.scale}
    if looks_up:
        written = with_class(layer, AffineEmbedding)
        tensors["zero"] = weight.zero_point - middle
    else:
        written = with_class(layer, AffineLinear)
        written.bits = 4 if _C.FORMAT_FACTS[stored.spec.format]["bits"] <= 4 else 8
        written.group_size = stored.spec.group_size
        if layer.bias is not None:
            written.bias = nn.Parameter(layer.bias.detach().float(), requires_grad=False)
        tensors = _positive(name, **tensors)
    for key, tensor in tensors.items():
        written.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return written


def _problem(spec: LinearSpec, k: int, looks_up: bool) -> str:
    """Return the first requirement of XNNPACK that a layer does not meet, worded to follow "must"."""
    facts = _C.FORMAT_FACTS[spec.format]
    if facts["kind"] != "integer":
        return "have integer codes"
    if spec.group_size and k % spec.group_size:
        return "have whole groups"
    if looks_up:
        return ""
    if "int8" not in spec.x_format:
        return "have int8 activations"
    if spec.asymmetric:
        return "be symmetric"
    if spec.group_size and (facts["bits"] > 4 or spec.group_size % _GROUP):
        return f"have one scale per channel, or 4 bits at most in groups of {_GROUP} or a multiple"
    return ""


def _positive(name: str, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Return the weight with positive scales, as XNNPACK requires. A scale of 0 becomes 1, and its codes 0."""
    if (scale < 0).any():
        count = f"{int((scale < 0).sum())} of {scale.numel()}"
        raise ValueError(f"export: {name} must have no negative scales for XNNPACK, got {count}: use scale='absmax'")
    n, groups = scale.shape
    empty = scale == 0
    codes = codes.view(n, groups, -1).masked_fill(empty[..., None], 0).view_as(codes)
    scale = scale.masked_fill(empty, 1.0)
    scale = scale if groups > 1 else scale.flatten()
    return {"codes": codes, "scale": scale, "zero": torch.zeros_like(scale, dtype=torch.int64)}
