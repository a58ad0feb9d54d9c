# SPDX-License-Identifier: Apache-2.0
"""Layers that compute in float with the numbers that they will have when they are quantized.

    FakeQuantizedLinear     y = fake_quantize(x) @ fake_quantize(weight).T + bias
    FakeQuantizedEmbedding  y = fake_quantize(weight)[x]

Names, parameters and state dict are those of the float layer. With learned scales there is a parameter
``weight_scale [n, groups]`` beside them, and for an asymmetric weight a buffer ``weight_zero``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit import _C
from lowbit.formats.spec import LinearSpec
from lowbit.ops.fake_quantize import (
    WeightFormat,
    fake_quantize_activations,
    fake_quantize_weight,
    fake_quantized_linear,
    quantize_weight,
)
from lowbit.quant.kinds import kind_of, weights_of
from lowbit.quant.layout import text_of

SCALE, ZERO = "weight_scale", "weight_zero"


class FakeQuantized(nn.Module):
    """The common part of both layers."""

    end = 'QATConfig(config, step="convert")'
    spec: LinearSpec
    base_config: str
    """The configuration that prepared the layer, as text; "convert" wants the same."""
    float_class: type[nn.Module]
    transposed: bool
    """Whether the weight lies as [k, n], as that of a Conv1D does."""
    weight_format: WeightFormat
    x_format: int
    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_zero: Tensor | None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__}: quantize_(model, QATConfig(config)) makes one of a float layer")

    @property
    def trained_as(self) -> str:
        return self.spec.name

    @property
    def learns_scales(self) -> bool:
        """Whether scales are parameters; else they are those of the range of each group, in every call."""
        return self._parameters[SCALE] is not None

    def matrix(self) -> Tensor:
        """The float weight as ``[n, k]``."""
        return self.weight.T if self.transposed else self.weight

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Learned scales and the zero points beside them, float32 whatever the model is in; else None twice."""
        scale, zero = self.weight_scale, self.weight_zero
        return None if scale is None else scale.float(), None if zero is None else zero.float()

    def fake_quantized_weight(self) -> Tensor:
        """Return the weight ``[n, k]`` that ``dequantize()`` of the converted layer has, bit for bit."""
        return fake_quantize_weight(self.matrix(), self.weight_format, *self.scales())

    def quantize(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes uint8 ``[n, k]``, scales and zero points float32 ``[n, groups]`` of the weight as it is now; the
        zero point of a symmetric weight is None."""
        codes, scale, zero = quantize_weight(self.matrix(), self.weight_format, *self.scales())
        return codes, scale, zero if self.spec.asymmetric else None

    def extra_repr(self) -> str:
        learned = ", learned scales" if self.learns_scales else ""
        return f"{super().extra_repr()}, {self.spec.name}{learned}"

    def state_dict_problem(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Say why the entries of ``state_dict`` under ``prefix`` cannot be this layer's, or return None."""
        (weight,) = weights_of(self)
        value = state_dict.get(f"{prefix}{weight.key}")
        if not isinstance(value, Tensor) or value.is_floating_point():
            return None
        return (
            f"{prefix}{weight.key} must be float, as the layer is being trained, got {text_of(value)}: "
            f"a packed weight is loaded after {self.end}"
        )


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """An nn.Linear with the numbers of a `QuantLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        x = in_autocast_dtype(x)
        if self.x_format:
            x = fake_quantize_activations(x, self.x_format, self.weight_format[1])
        return fake_quantized_linear(x, self.matrix(), self.bias, self.weight_format, *self.scales())


class FakeQuantizedEmbedding(FakeQuantized, nn.Embedding):
    """An nn.Embedding with the numbers of a `QuantEmbedding`. Only the rows that are looked up are rounded, as a row
    has scales of its own."""

    def forward(self, input: Tensor) -> Tensor:
        look_up = self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse
        rows = functional.embedding(input, self.weight, *look_up)
        if rows.numel():
            scale, zero = (None if part is None else part[input.flatten()] for part in self.scales())
            flat = rows.reshape(-1, self.embedding_dim)
            rows = fake_quantize_weight(flat, self.weight_format, scale, zero).view(rows.shape)
        if self.float_class is nn.Embedding:
            return rows
        return rows * rows.new_full((), self.scalar_embed_scale)  # a table of Gemma


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast first, as the op `linear` in autocast: rounded before it, x would have other codes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def prepare_in_place(
    module: nn.Module,
    spec: LinearSpec,
    base_config: str,
    scale: nn.Parameter | None = None,
    zero: Tensor | None = None,
) -> None:
    """Turn a float layer into the one that is trained; the object, its parameters and hooks stay the same."""
    (weight,) = weights_of(module)
    module.float_class, module.transposed = type(module), weight.transposed
    if kind_of(module).multiplies:
        module.out_features, module.in_features = weight.n, weight.k
        module.__class__ = FakeQuantizedLinear
    else:
        module.__class__ = FakeQuantizedEmbedding
    module.spec, module.base_config = spec, base_config
    module.weight_format, module.x_format = spec.fake_quantize_args, _C.X_FORMATS[spec.x_format]
    module.register_parameter(SCALE, scale)
    module.register_buffer(ZERO, zero)


def restore_in_place(module: FakeQuantized) -> None:
    """Turn it back into the float layer that it was."""
    module.__class__ = module.float_class
    for name in ("float_class", "transposed", "spec", "base_config", "weight_format", "x_format"):
        del module.__dict__[name]
    del module._parameters[SCALE], module._buffers[ZERO]
