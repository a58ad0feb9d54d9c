# SPDX-License-Identifier: Apache-2.0
"""Experts of mixtures that are trained in low precision, with the products of the linear layers of this folder:

    FakeQuantizedExperts        the values that quantization will give weights and activations (layers.py)
    Int8MixedPrecisionExperts   int8 products (int8_linear.py)
    Float8Experts               float8 products (float8_linear.py)

Rows are sorted by expert, and each expert that has rows is one product. Parameters, names and state dict are those of
the float module, whose class still computes the gate between the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowbit import _C
from lowbit.formats.spec import LinearSpec
from lowbit.ops.autocast import in_autocast_dtype
from lowbit.ops.fake_quantize import WeightFormat, fake_quantize_activations, rounded_weight, weight_gradients
from lowbit.quant.experts import Form, attribute_of_class, check_call, run
from lowbit.training import float8_linear, int8_linear
from lowbit.training.float8_config import Float8LinearConfig

_SETTINGS = "form", "float_class", "spec", "base_config", "weight_format", "x_format", "int8_products", "float8_config"


class TrainedExperts(nn.Module):
    """Base class of experts in training. A subclass says how rows of one expert are multiplied."""

    form: Form
    float_class: type[nn.Module]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__}: made of a float module of experts; {self.end} ends it")

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the float class too, since its gate may use them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return attribute_of_class(self, self.__dict__.get("float_class"), name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the selected experts; arguments are those of `QuantExperts`."""
        name, x = type(self).__name__, hidden_states
        check_call(name, x, top_k_index, top_k_weights)
        form, wanted = self.form, self._parameters[self.form.first].dtype
        if not torch.is_autocast_enabled(x.device.type) and x.dtype is not wanted:
            raise TypeError(f"{name}: hidden_states must be {wanted}, as the weights are, got {x.dtype}")
        if top_k_index.numel():
            low, high = (int(value) for value in top_k_index.aminmax())
            if low < 0 or high > form.experts:
                got = low if low < 0 else high
                raise ValueError(f"{name}: top_k_index must be 0 to {form.experts}, got {got}")
        in_float_order = replace(form, interleaved=False)  # that is the order of packed rows
        return run(self, self.float_class, in_float_order, self._product, x, top_k_index, top_k_weights)

    def _product(self, key: str, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
        x, experts = self.rounded(in_autocast_dtype(x)), index.flatten()
        order = experts.argsort(stable=True)
        rows = x[order // index.shape[1]] if x.dim() == 2 else x.flatten(0, 1)[order]
        counts = experts.bincount(minlength=self.form.experts).tolist()
        y = _Grouped.apply(rows, self._parameters[key], counts, self)
        if bias is not None:
            y = y + bias[experts[order]].to(y.dtype)
        return y[order.argsort()].unflatten(0, index.shape)

    def rounded(self, x: Tensor) -> Tensor:
        """Return the activations as they are multiplied."""
        return x

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the rows ``x @ weight.T`` of one expert, dtype of x."""
        raise NotImplementedError

    def gradients(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, for_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x, if it is wanted, and of the weight, if there is an x."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.float_class.__name__}, {self.form.experts} experts, {self.trained_as}"


class _Grouped(torch.autograd.Function):
    """The products of all experts. Their gradients are written to slices of one tensor: stacking those of each expert
    would copy all of them once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], module: TrainedExperts) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts, ctx.module, ctx.of_x = counts, module, (x.shape, x.dtype)
        y = x.new_empty(len(x), weight.shape[2 if module.form.transposed else 1])
        for rows, matrix in _by_expert(counts, module, weight):
            y[rows] = module.multiply(x[rows], matrix)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, *_ = ctx.needs_input_grad
        shape, dtype = ctx.of_x
        grad_x = grad.new_empty(shape, dtype=dtype) if for_x else None
        grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if for_weight else None
        into = _by_expert(ctx.counts, ctx.module, grad_weight) if for_weight else None
        for rows, matrix in _by_expert(ctx.counts, ctx.module, weight):
            of_x, of_weight = ctx.module.gradients(grad[rows], x[rows] if for_weight else None, matrix, for_x)
            if for_weight:
                next(into)[1].copy_(of_weight)
            if for_x:
                grad_x[rows] = of_x
        return grad_x, grad_weight, None, None


def _by_expert(counts: list[int], module: TrainedExperts, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows and the matrix ``[n, k]`` of each expert that has rows."""
    end = 0
    for matrix, count in zip(weight.mT if module.form.transposed else weight, counts, strict=True):
        begin, end = end, end + count
        if count:
            yield slice(begin, end), matrix


class FakeQuantizedExperts(TrainedExperts):
    """Experts that compute with the values of a `QuantExperts`."""

    end = 'QATConfig(config, step="convert")'
    spec: LinearSpec
    base_config: str
    weight_format: WeightFormat
    x_format: int

    @property
    def trained_as(self) -> str:
        return self.spec.name

    def rounded(self, x: Tensor) -> Tensor:
        return fake_quantize_activations(x, self.x_format, self.weight_format[1]) if self.x_format else x

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ rounded_weight(weight, self.weight_format)[0].to(x.dtype).T

    def gradients(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, for_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        values, *scales = rounded_weight(weight, self.weight_format)
        grad_weight = None
        if x is not None:
            grad_weight, _ = weight_gradients(grad, x, weight.contiguous(), *scales, self.weight_format, False)
        return grad @ values.to(grad.dtype) if for_x else None, grad_weight


class Int8MixedPrecisionExperts(TrainedExperts):
    """Experts that multiply in int8, in forward and backward."""

    end = int8_linear.Int8MixedPrecisionLinear.end
    trained_as = int8_linear.Int8MixedPrecisionLinear.trained_as
    int8_products: tuple[bool, bool, bool]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return int8_linear.product(x, weight, self.int8_products)

    def gradients(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, for_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return int8_linear.gradients(grad, x, weight if for_x else None, self.int8_products, weight.dtype)


class Float8Experts(TrainedExperts):
    """Experts that multiply in float8, in forward and backward. A scale of a whole tensor is that of one expert and
    its rows."""

    end = float8_linear.Float8Linear.end
    float8_config: Float8LinearConfig

    @property
    def trained_as(self) -> str:
        return f"float8 ({self.float8_config})"

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear.product(x, weight, self.float8_config)

    def gradients(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, for_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return float8_linear.gradients(grad, x, weight if for_x else None, self.float8_config, weight.dtype)


def prepare_in_place(module: nn.Module, cls: type[TrainedExperts], **settings: Any) -> None:
    """Turn a float module of experts into one of these classes in place; its parameters and hooks stay the same."""
    module.__dict__ |= {"form": Form.of(module), "float_class": type(module), **settings}
    module.__class__ = cls


def prepare_fake_quantized(module: nn.Module, spec: LinearSpec, base_config: str) -> None:
    """Turn a float module of experts into a `FakeQuantizedExperts` in place."""
    numbers = {"weight_format": spec.fake_quantize_args, "x_format": _C.X_FORMATS[spec.x_format]}
    prepare_in_place(module, FakeQuantizedExperts, spec=spec, base_config=base_config, **numbers)


def restore_in_place(module: TrainedExperts) -> None:
    """Turn the module back into its former float class, in place."""
    module.__class__ = module.float_class
    for name in _SETTINGS:
        module.__dict__.pop(name, None)
