# SPDX-License-Identifier: Apache-2.0
"""Layers for quantization-aware training: they compute in float with the values that quantization will give them.

    FakeQuantizedLinear     y = fake_quantize(x) @ fake_quantize(weight).T + bias
    FakeQuantizedEmbedding  y = fake_quantize(weight)[x]

Names, parameters and state dict are those of the float layer. With learned scales, there is also a parameter
``weight_scale [n, groups]``, and for an asymmetric weight a buffer ``weight_zero``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lowbit import _C
from lowbit.formats.spec import LinearSpec
from lowbit.ops.autocast import in_autocast_dtype
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
    """Base class of the fake-quantized layers."""

    end = 'QATConfig(config, step="convert")'
    spec: LinearSpec
    base_config: str
    """The configuration that prepared the layer, as text; "convert" requires the same one."""
    float_class: type[nn.Module]
    transposed: bool
    """Whether the weight is stored as [k, n], as in a Conv1D."""
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
        """Whether scales are parameters. Otherwise they are computed from the range of each group in every call."""
        return self._parameters[SCALE] is not None

    def matrix(self) -> Tensor:
        """Return the float weight as ``[n, k]``."""
        return self.weight.T if self.transposed else self.weight

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the learned scales and their zero points in float32, whatever the dtype of the model; None for each
        that does not exist."""
        scale, zero = self.weight_scale, self.weight_zero
        return None if scale is None else scale.float(), None if zero is None else zero.float()

    def fake_quantized_weight(self) -> Tensor:
        """Return the weight ``[n, k]`` that ``dequantize()`` of the converted layer will return, bit for bit."""
        return fake_quantize_weight(self.matrix(), self.weight_format, *self.scales())

    def quantize(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes uint8 ``[n, k]``, scales and zero points float32 ``[n, groups]`` of the current weight. For
        a symmetric weight, the zero points are None."""
        codes, scale, zero = quantize_weight(self.matrix(), self.weight_format, *self.scales())
        return codes, scale, zero if self.spec.asymmetric else None

    def extra_repr(self) -> str:
        learned = ", learned scales" if self.learns_scales else ""
        return f"{super().extra_repr()}, {self.spec.name}{learned}"

    def state_dict_problem(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Return the reason why the entries of ``state_dict`` under ``prefix`` do not fit this layer, or None."""
        (weight,) = weights_of(self)
        value = state_dict.get(f"{prefix}{weight.key}")
        if not isinstance(value, Tensor) or value.is_floating_point():
            return None
        return (
            f"{prefix}{weight.key} must be float, as the layer is being trained, got {text_of(value)}: "
            f"a packed weight is loaded after {self.end}"
        )


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """An nn.Linear that computes with the values of a `QuantLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        x = in_autocast_dtype(x)
        if self.x_format:
            x = fake_quantize_activations(x, self.x_format, self.weight_format[1])
        return fake_quantized_linear(x, self.matrix(), self.bias, self.weight_format, *self.scales())


class FakeQuantizedEmbedding(FakeQuantized, nn.Embedding):
    """An nn.Embedding that computes with the values of a `QuantEmbedding`. Since each row has its own scales, only the
    rows that are looked up are rounded."""

    def forward(self, input: Tensor) -> Tensor:
        look_up = self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse
        rows = functional.embedding(input, self.weight, *look_up)
        if rows.numel():
            scale, zero = (None if part is None else part[input.flatten()] for part in self.scales())
            flat = rows.reshape(-1, self.embedding_dim)
            rows = fake_quantize_weight(flat, self.weight_format, scale, zero).view(rows.shape)
        if self.float_class is nn.Embedding:
            return rows
        return rows * rows.new_full((), self.scalar_embed_scale)  # Gemma's embedding


def prepare_in_place(
    module: nn.Module,
    spec: LinearSpec,
    base_config: str,
    scale: nn.Parameter | None = None,
    zero: Tensor | None = None,
) -> None:
    """Turn a float layer into a fake-quantized layer in place; its parameters and hooks stay the same."""
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
    """Turn the layer back into its former float class, in place."""
    module.__class__ = module.float_class
    for name in ("float_class", "transposed", "spec", "base_config", "weight_format", "x_format"):
        del module.__dict__[name]
    del module._parameters[SCALE], module._buffers[ZERO]
