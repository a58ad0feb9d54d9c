# SPDX-License-Identifier: Apache-2.0
"""Fused losses of other packages, which multiply hidden states by slices of ``lm_head.weight``, on a packed head.

Such a loss is an autograd.Function with ``apply(hidden, weight, bias, ...)``. In its forward, and again in its
backward, it takes ``weight[start:stop]`` for a part of the vocabulary. `ServedHead` has the same ``apply`` and runs the
forward and backward of that Function with `DecodedRows` in place of the weight. So rows are decoded on demand, the
gradient of the hidden states is that of the decoded weight, and the packed weight is frozen and gets none.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.decoded_rows import WeightArgs, decoded_rows
from lowbit.quant.kinds import is_fake_quantized
from lowbit.quant.permuted_linear import PermutedLinear
from lowbit.quant.quant_linear import QuantLinear


class DecodedRows:
    """A packed weight ``[n, k]`` that decodes slices of its rows.

    Args:
        packed: uint8 ``[panels, panel_bytes]``.
        weight_args: ``(n, k, format, group_size, asymmetric)``.
        like: a tensor with the dtype of the decoded rows.
    """

    def __init__(self, packed: Tensor, weight_args: WeightArgs, like: Tensor) -> None:
        self.packed, self.weight_args, self.like = packed, weight_args, like
        self.shape, self.device, self.dtype = torch.Size(weight_args[:2]), packed.device, like.dtype

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise NotImplementedError(f"DecodedRows: the step of a slice must be 1, got {step}")
        return decoded_rows(self.packed, self.weight_args, start, max(start, stop), self.like)


class ServedHead:
    """A replacement for a Function whose ``apply`` gets weights of output heads.

    Args:
        function: the Function.
        heads: functions that return the head of a weight, by the position of the weight in the arguments of ``apply``.
    """

    def __init__(self, function: type[torch.autograd.Function], heads: Mapping[int, Callable[[], nn.Module]]) -> None:
        self.function, self.heads = function, heads

    def apply(self, *args: Any) -> Any:
        given, packed = list(args), {}
        for position, find in self.heads.items():
            head = find()
            if isinstance(head, QuantLinear):
                check_bytes(self.function.__name__, given[position], head)
                given[position] = head.W_q
                packed[position] = head.op_args[:-1]
            elif is_fake_quantized(head):
                given[position] = head.fake_quantized_weight()
        return _ByRows.apply(self.function, packed, *given) if packed else self.function.apply(*given)


def check_bytes(function: str, weight: Tensor, head: QuantLinear) -> None:
    """Raise unless ``weight`` are the bytes of this head."""
    dtype = weight.detach().dtype  # a `TypedQuantLinear` says another one
    if weight is not head.weight and dtype == torch.uint8:  # the head of a copy of the model
        raise ValueError(
            f"{function}: the output head must be that of the model that the trainer was given, got another one's "
            "weight: give a copy of the model to a trainer of its own"
        )
    if dtype != torch.uint8:  # FSDP2's shards, gathered and cast
        raise NotImplementedError(
            f"{function}: the packed weight of the output head must come as its bytes, uint8, got {dtype}; "
            "leave the head float (LowbitConfig(head=None), filter_fn of quantize_)"
        )


class _ByRows(torch.autograd.Function):
    """The forward and backward of another Function, which gets `DecodedRows` in place of packed weights."""

    @staticmethod
    def forward(ctx: Any, function: type[torch.autograd.Function], packed: dict[int, WeightArgs], *args: Any) -> Any:
        ctx.function = function
        rows = [  # The argument before a weight is the hidden states that it multiplies.
            DecodedRows(value, packed[position], args[position - 1]) if position in packed else value
            for position, value in enumerate(args)
        ]
        return function.forward(_Context(ctx), *rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.function.backward(_Context(ctx), *grads)


class _Context:
    """The context that the other Function sees within `_ByRows`. It hides the first two arguments and holds
    `DecodedRows` among the saved tensors, for which torch saves the packed weights."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return self._ctx.needs_input_grad[2:]

    def save_for_backward(self, *saved: Any) -> None:
        rows = {index: value for index, value in enumerate(saved) if isinstance(value, DecodedRows)}
        self._ctx.rows = {index: (value.weight_args, value.like.new_empty(0)) for index, value in rows.items()}
        self._ctx.save_for_backward(*(value.packed if index in rows else value for index, value in enumerate(saved)))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        rows = self._ctx.rows
        return tuple(
            DecodedRows(value, *rows[index]) if index in rows else value
            for index, value in enumerate(self._ctx.saved_tensors)
        )


def with_globals(function: types.FunctionType, **names: Any) -> types.FunctionType:
    """Return a copy of ``function`` in which these names, if looked up in its module, refer to these objects. The
    module does not change."""
    globals_ = {**function.__globals__, **names}
    copied = types.FunctionType(
        function.__code__, globals_, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the output head of ``model``, without the adapter that peft put around it, or None if there is none."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return getattr(head, "base_layer", head)


def is_served(function: str, head: nn.Module | None) -> bool:
    """Whether this head needs `ServedHead`. It does not if its weight can be read as it is.

    Raises:
        ValueError: it is a layer of lowbit whose product is not with the rows of its weight.
    """
    if isinstance(head, PermutedLinear):
        raise ValueError(
            f"{function}: the output head must read its inputs in their order, got a permutation of them (act order of "
            "GPTQ); lowbit.dequantize_ makes it float"
        )
    if isinstance(head, QuantLinear) or (head is not None and is_fake_quantized(head)):
        return True
    if type(head).__module__.startswith("lowbit.") and not getattr(head, "multiplies_weight", False):
        raise ValueError(
            f"{function}: the output head must be a float, packed or fake-quantized layer, whose weight others can "
            f"read, got {type(head).__name__}; leave it float (filter_fn of the function that made it)"
        )
    return False
