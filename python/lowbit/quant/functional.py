# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights as functions: `linear`, `gather_linear`, `experts`, `linear_cross_entropy`.

These functions take formats, activations and kernel rows by name. Layers call the same ops with the numbers of these
names, which they look up once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import StoredWeight
from lowbit.ops.experts import experts as _experts
from lowbit.ops.experts import gate_of
from lowbit.ops.gather_linear import gather_linear as _gather_linear
from lowbit.ops.linear import LinearArgs
from lowbit.ops.linear import linear as _linear
from lowbit.ops.linear_cross_entropy import REDUCTIONS, LossFormula
from lowbit.ops.linear_cross_entropy import linear_cross_entropy as _linear_cross_entropy
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
    """Multiply by a packed weight and apply the post-ops: ``act(x @ w.T + bias) * mul + add``.

    If activations are rounded dynamically, gradients are straight-through: rounding counts as the identity, in forward
    mode too. The weight is frozen; x, bias, mul and add get gradients.

    Args:
        x: activations ``[..., k]``, float32, bfloat16 or float16.
        weight: packed weight, uint8 ``[ceil(n / 16), panel_bytes]``.
        stored: format and size of the weight, such as `QuantLinear.stored`.
        bias: ``[n]``, any of the three float dtypes.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        mul: factor after the activation, with the shape and dtype of the result.
        add: term that is added last, with the shape and dtype of the result.
        kernel: name of the preferred kernel row. It is used if it can serve the call and no row is forced. None is the
            first kernel row that can serve the call.

    Returns:
        ``[..., n]``, dtype of x (inside ``torch.autocast``, autocast's dtype), accumulated in float32.

    Raises:
        RuntimeError: the last dimension of x is not ``k``, as in torch.nn.functional.linear.
        ValueError: another shape does not fit, or the activation or kernel row does not exist.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row, or not the forced one, can serve these arguments; the message lists the
            reason of each row.

    Example:
        >>> gate = lowbit.linear(x, layer.weight, layer.stored, layer.bias, activation="silu")
    """
    if activation not in _C.ACTIVATIONS:
        raise ValueError(f"linear: activation must be one of {', '.join(_C.ACTIVATIONS)}, got {activation!r}")
    row = 0 if kernel is None else _row_number(kernel)
    op_args = _op_args("linear", "stored", stored)
    return _linear(x, weight, op_args, bias, _C.ACTIVATIONS[activation], mul, add, row)


def gather_linear(x: Tensor, weight: Tensor, index: Tensor, stored: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by the packed weight that ``index`` selects, and add the bias of that weight.

    A call is one parallel region, in which each weight is read once for all of its rows. If activations are rounded
    dynamically, gradients are straight-through: rounding counts as the identity. The weights are frozen; x and bias get
    gradients.

    Args:
        x: ``[T, k]``, where each row is multiplied by J weights, or ``[T, J, k]``; float32, bfloat16 or
            float16, any strides.
        weight: E packed weights of the same shape, uint8 ``[E, ceil(n / 16), panel_bytes]``: ``torch.stack`` of weights
            for `linear`.
        index: int32 or int64 ``[T, J]``, 0 to E - 1.
        stored: format and size of one weight, such as `QuantLinear.stored`.
        bias: ``[E, n]``, any of the three float dtypes.

    Returns:
        ``[T, J, n]``, dtype of x (inside ``torch.autocast``, autocast's dtype), accumulated in float32.

    Raises:
        ValueError: a shape does not fit, or ``index`` is out of range.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a forward-mode derivative is requested.

    Example:
        >>> weights = torch.stack([layer.weight for layer in layers])
        >>> y = lowbit.gather_linear(x, weights, index, layers[0].stored)
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
    """Run the experts that a router has chosen for each token, and return the weighted sum of their results.

    A call is one parallel region, in which the weights of each expert are read once for all of its tokens. The value
    between the two products is ``f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)``, where f is the
    activation; silu is ``gate * sigmoid(alpha * gate)``. gpt-oss has alpha 1.702, limit 7 and up_offset 1. The results
    of a token are added in float32, in the order of the experts. If activations are rounded dynamically, gradients are
    straight-through. The packed weights are frozen; x, weights and the biases get gradients.

    Args:
        x: ``[T, H]``, float32, bfloat16 or float16, any strides.
        gate_up: packed weights of E experts, uint8 ``[E, panels, panel_bytes]``. Each is a matrix ``[2 I, H]``, with
            the rows of the gate before those of up; without a gate, ``[I, H]``.
        down: packed weights of E experts, uint8 ``[E, panels, panel_bytes]``. Each is a matrix ``[n, I]``; in a model,
            n is H.
        index: int32 or int64 ``[T, k]``, the experts of each token, 0 to E - 1; the value E means no expert.
        weights: ``[T, k]``, any of the three float dtypes: the router's weight for each pair of token and expert.
        gate_up_stored, down_stored: format and size of one expert's weight, such as `QuantLinear.stored`. Either both
            round activations to int8, or neither does.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu_squared" or "none".
        gated: False if there is no up, and f(gate) is the input of the second product.
        interleaved: whether the rows of gate_up alternate between gate and up, as in gpt-oss.
        alpha, limit, up_offset: parameters of the formula above. alpha other than 1 needs silu. limit=None does not
            clamp.
        gate_up_bias: ``[E, 2 I]``, any of the three float dtypes.
        down_bias: ``[E, n]``, any of the three float dtypes. It is added before the router's weight is applied.

    Returns:
        ``[T, n]``, dtype of x (inside ``torch.autocast``, autocast's dtype).

    Raises:
        ValueError: a shape, the activation or a number does not fit, or ``index`` is out of range.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row can serve the call; or a second or forward-mode derivative, or one of
            torch.func, is requested.
    """
    gate_up_args = _op_args("experts", "gate_up_stored", gate_up_stored)
    down_args = _op_args("experts", "down_stored", down_stored)
    gate = gate_of(activation, gated=gated, interleaved=interleaved, alpha=alpha, limit=limit, up_offset=up_offset)
    return _experts(x, gate_up, down, index, weights, gate_up_args, down_args, gate, gate_up_bias, down_bias)


def linear_cross_entropy(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    stored: StoredWeight | None = None,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the cross entropy of labels and the logits ``x @ head.T + bias``, whose ``[T, V]`` is never in memory.

    ``s = logit_scale * logits``, or ``softcap * tanh(s / softcap)``; ``lse = log(sum(exp(s)))``; the loss of a row is
    ``lse - (1 - label_smoothing) * s[label] - label_smoothing * mean(s) + z_loss * lse**2``. The logarithm of a label's
    probability is ``-loss`` without smoothing and z_loss.

    Sums are float32, and the same bits for any number of threads. x, bias and a float head get gradients; a packed head
    is frozen. If the head rounds activations, gradients are straight-through. With a mean or a sum, the forward computes
    the gradients too, by the way of logits that it has; of losses per row, the backward computes the logits again.
    Second derivatives are refused.

    Args:
        x: hidden states ``[..., H]``, float32, bfloat16 or float16.
        head: a packed weight, uint8 ``[ceil(V / 16), panel_bytes]``, or a float matrix ``[V, H]`` of the three dtypes.
        labels: int64 ``[...]``, 0 to V - 1, or ignore_index. Rows with ignore_index are not computed: their loss, lse
            and gradient are 0, whatever is in x.
        stored: format and size of a packed head, such as `QuantLinear.stored`; None for a float head.
        bias: ``[V]``, any of the three float dtypes.
        reduction: "mean" over the rows that have a label (nan if none has), "sum" or "none".
        logit_scale: factor of the logits, finite and not 0.
        softcap: positive bound of the logits after the scale; None for none.
        label_smoothing: 0 to 1: the part of the target that is spread over the vocabulary.
        z_loss: factor of ``lse**2``, finite and not negative.
        return_lse: whether lse is returned too.

    Returns:
        float32: the loss, or ``[...]`` losses if reduction is "none". With return_lse also lse ``[...]``, which has no
        gradient.

    Raises:
        ValueError: a label is outside of the vocabulary, a shape does not fit, or an option is not one of the above.
        TypeError: a dtype is not one of the above, or a packed head has no ``stored``.
        NotImplementedError: no kernel row serves the device, or a forward-mode derivative is requested.

    Example:
        >>> loss = lowbit.linear_cross_entropy(hidden[:, :-1], lm_head.weight, ids[:, 1:], lm_head.stored)
    """
    op = "linear_cross_entropy"
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive, or None for none, got {softcap}")
    if x.dim() == 0 or labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: labels must have the shape of x without the last dimension, here {list(x.shape[:-1])}, "
            f"got {list(labels.shape)}"
        )
    if stored is not None:
        head = head.detach()  # it may say the dtype of its model (typed_linear.py)
    op_args = args_of_head(op, head, stored)
    formula = LossFormula(ignore_index, logit_scale, softcap or 0.0, label_smoothing, z_loss)
    rows = x.reshape(-1, x.shape[-1])
    loss, lse = _linear_cross_entropy(rows, head, labels.reshape(-1), op_args, bias, formula, reduction)
    loss = loss.reshape(labels.shape) if reduction == "none" else loss
    return (loss, lse.reshape(labels.shape)) if return_lse else loss


FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def args_of_head(op: str, head: Tensor, stored: StoredWeight | None) -> LinearArgs:
    """Return the numbers that describe a packed or float head to the op."""
    if head.dtype is torch.uint8 or stored is not None:
        if head.dtype is not torch.uint8:
            raise TypeError(f"{op}: stored must be None for a head that is not packed, got a head of {head.dtype}")
        return _op_args(op, "stored", stored)  # type: ignore[arg-type]
    if head.dtype not in FLOATS:
        raise TypeError(f"{op}: head must be packed uint8, or {', '.join(FLOATS.values())}, got {head.dtype}")
    if head.dim() != 2:
        raise ValueError(f"{op}: head must have shape [V, H], got {list(head.shape)}")
    return (*head.shape, _C.FORMATS[FLOATS[head.dtype]], 0, False, _C.X_FORMATS["float"])


def _op_args(op: str, name: str, stored: StoredWeight) -> LinearArgs:
    """Return the numbers that describe one matrix to the op, after checking that its layout is that of the kernels."""
    if not isinstance(stored, StoredWeight):
        raise TypeError(f"{op}: {name} must be a StoredWeight, as QuantLinear.stored, got {type(stored).__name__}")
    if stored.layout != _C.LAYOUT:
        raise ValueError(f"{op}: {name} must be in layout {_C.LAYOUT}, which lowbit.quant.repack makes, got {stored}")
    return stored.spec.op_args(stored.n, stored.k)


_row_numbers: dict[str, int] = {}  # a lookup is slow, since it asks every backend whether it is available


@constant_in_graphs
def _row_number(kernel: str) -> int:
    number = _row_numbers.get(kernel)
    if number is None:
        number = _row_numbers[kernel] = _C.row_number("linear", kernel)
    return number
