# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights as functions of tensors and names: `linear`, `gather_linear`, `experts`. Layers call
the same ops by numbers, which they look up once."""

from __future__ import annotations

from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import StoredWeight
from lowbit.ops.experts import experts as _experts
from lowbit.ops.experts import gate_of
from lowbit.ops.gather_linear import gather_linear as _gather_linear
from lowbit.ops.linear import LinearArgs
from lowbit.ops.linear import linear as _linear
from lowbit.ops.tracing import constant_in_graphs


def linear(
    x: Tensor,
    weight: Tensor,
    stored: StoredWeight,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    mul: Tensor | None = None,
    add: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Multiply by a packed weight and apply the post-op chain: ``act(x @ w.T + bias) * mul + add``.

    With dynamic activations the gradient is the straight-through one: rounding x counts as the identity, in forward
    mode too. The weight is frozen: gradients go to x, bias, mul and add.

    Args:
        x: activations ``[..., k]``, float32, bfloat16 or float16.
        weight: packed weight, uint8 ``[ceil(n / 16), panel_bytes]``.
        stored: its format and size: `QuantLinear.stored`.
        bias: ``[n]``, any of the three float dtypes.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        mul: factor after the activation, shape and dtype of the result.
        add: term added last, shape and dtype of the result.
        kernel: name of a kernel row that is taken where it can serve the call and no row is forced; None: the first
            that can.

    Returns:
        ``[..., n]``, dtype of x (of autocast inside ``torch.autocast``), accumulated in float32.

    Raises:
        RuntimeError: the last dimension of x is not ``k``, as in torch.nn.functional.linear.
        ValueError: another shape does not fit, or there is no such activation or kernel row.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves these arguments, or the forced one does not (lists each row's reason).

    Example:
        >>> gate = lowbit.linear(x, layer.weight, layer.stored, layer.bias, activation="silu")
    """
    if activation not in _C.ACTIVATIONS:
        raise ValueError(f"linear: activation must be one of {', '.join(_C.ACTIVATIONS)}, got {activation!r}")
    row = 0 if kernel is None else _row_number(kernel)
    op_args = _op_args("linear", "stored", stored)
    return _linear(x, weight, op_args, bias, _C.ACTIVATIONS[activation], mul, add, row)


def gather_linear(x: Tensor, weight: Tensor, index: Tensor, stored: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by the packed weight that ``index`` names, and add its bias: one parallel region a call, in
    which every weight is read once for all of its rows.

    With dynamic activations the gradient is the straight-through one: rounding x counts as the identity. The weights
    are frozen: gradients go to x and bias.

    Args:
        x: ``[T, k]``, where each row is multiplied by J weights, or ``[T, J, k]``; float32, bfloat16 or
            float16, any strides.
        weight: packed weights of one shape, uint8 ``[E, ceil(n / 16), panel_bytes]``: ``torch.stack`` of those that
            `linear` takes.
        index: int32 or int64 ``[T, J]``, 0 to E - 1.
        stored: format and size of one weight: `QuantLinear.stored`.
        bias: ``[E, n]``, any of the three float dtypes.

    Returns:
        ``[T, J, n]``, dtype of x (of autocast inside ``torch.autocast``), accumulated in float32.

    Raises:
        ValueError: a shape does not fit, or ``index`` names no weight.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a derivative in forward mode is wanted.
    """
    op_args = _op_args("gather_linear", "stored", stored)
    return _gather_linear(x, weight, index, op_args, bias)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_stored: StoredWeight,
    down_stored: StoredWeight,
    activation: str = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Run the experts that the router has chosen for each token, and add up their results: one parallel region a call,
    in which the weights of every expert are read once for all of its tokens.

    Between the products is ``f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)``, f the activation; silu
    is ``gate * sigmoid(alpha * gate)``. gpt-oss has alpha 1.702, limit 7 and up_offset 1. Results of a token are added
    in float32, in the order of experts. With dynamic activations rounding has the straight-through gradient. The packed
    weights are frozen: gradients go to x, weights and the biases.

    Args:
        x: ``[T, H]``, float32, bfloat16 or float16, any strides.
        gate_up: packed weights of E experts, uint8 ``[E, panels, panel_bytes]``, each of 2 I x H: the rows of the
            gate, then those of up; I x H without a gate.
        down: the same of n x I; n is H in a model.
        index: int32 or int64 ``[T, k]``: the experts of each token, 0 to E - 1; a pair with E counts nothing.
        weights: ``[T, k]``, any of the three float dtypes: the router's weight of each pair.
        gate_up_stored, down_stored: format and size of one expert's weight: `QuantLinear.stored`. Activations of
            both products are int8, or of both stay float.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu_squared" or "none".
        gated: False: there is no up, and f(gate) goes into the second product.
        interleaved: rows of gate_up are gate, up, gate, up and so on, as gpt-oss has them.
        alpha, limit, up_offset: the parameters of the activation above; alpha with silu alone, limit None for none.
        gate_up_bias: ``[E, 2 I]``, any of the three float dtypes.
        down_bias: ``[E, n]``, the same; each result of an expert has it before its weight.

    Returns:
        ``[T, n]``, dtype of x (of autocast inside ``torch.autocast``).

    Raises:
        ValueError: a shape, an activation or a number does not fit, or ``index`` names no expert.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the call, or a derivative in forward mode is wanted.
    """
    gate_up_args = _op_args("experts", "gate_up_stored", gate_up_stored)
    down_args = _op_args("experts", "down_stored", down_stored)
    gate = gate_of(activation, gated=gated, interleaved=interleaved, alpha=alpha, limit=limit, up_offset=up_offset)
    return _experts(x, gate_up, down, index, weights, gate_up_args, down_args, gate, gate_up_bias, down_bias)


def _op_args(op: str, name: str, stored: StoredWeight) -> LinearArgs:
    """The numbers of one matrix that the kernels can read."""
    if not isinstance(stored, StoredWeight):
        raise TypeError(f"{op}: {name} must be a StoredWeight, as QuantLinear.stored, got {type(stored).__name__}")
    if stored.layout != _C.LAYOUT:
        raise ValueError(f"{op}: {name} must be in layout {_C.LAYOUT}, which lowbit.quant.repack makes, got {stored}")
    return stored.spec.op_args(stored.n, stored.k)


_row_numbers: dict[str, int] = {}  # a look-up asks each backend whether it is there: milliseconds


@constant_in_graphs
def _row_number(kernel: str) -> int:
    number = _row_numbers.get(kernel)
    if number is None:
        number = _row_numbers[kernel] = _C.row_number("linear", kernel)
    return number
