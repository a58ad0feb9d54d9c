# SPDX-License-Identifier: Apache-2.0
"""linear, QuantLinear, quantize and dequantize against the float64 reference."""

from __future__ import annotations

import dataclasses

import torch
from tests.settings import ambient
from torch import Tensor, nn

import lowbit
from lowbit import _C, testing
from lowbit.formats.spec import LinearSpec
from lowbit.ops.linear import linear as lowbit_linear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.reference import linear as reference
from lowbit.reference.quantize import QuantizedWeight
from lowbit.testing import LinearCase, budget, decode_weight, pack_weight

from .compare import UNIT, Wrong, refused, within


def _weight(n: int, k: int, values: str) -> Tensor:
    if values == "ones":
        return torch.ones(n, k)
    return torch.randn(n, k) * (50.0 if values == "large" else 1.0)


def linear(
    x: Tensor, n: int, format: str, *, group_size: int, mapping: str, x_format: str, bias: Tensor | None = None, activation: str = "none",
    mul: int = 0, add: int = 0, x_gradient: bool = False, under: str = "", values: str = "normal",
) -> None:  # fmt: skip
    """One call, and the gradients of x and bias: within the budget of float32 sums and one rounding to the dtype of x."""
    k, name = x.shape[-1], str(x.dtype).removeprefix("torch.")
    if x.numel() == 0:
        x_format = "float"  # the reference has no scale of nothing
    weight = _weight(n, k, values)
    if values == "outliers":  # of x, where the weight is 0
        weight[:, :1] = 0
        x = x.detach() * torch.ones(k, dtype=x.dtype).index_fill_(0, torch.tensor([0]), 1e4 if name == "float16" else 1e30)
    packed = pack_weight(weight, format, group_size, mapping)
    decoded = decode_weight(packed, n, k, format, group_size, mapping)
    case = LinearCase(1, n, k, name, format, group_size, mapping, x_format, activation=activation)
    given = {"mul": mul, "add": add}
    terms = {what: torch.randn(*x.shape[:-1], n).to(x.dtype) if size else None for what, size in given.items()}
    flat = x.detach().reshape(-1, k)
    flat_terms = {what: None if term is None else term.reshape(-1, n).double() for what, term in terms.items()}
    bias64 = None if bias is None else bias.detach().double()
    wanted = reference.linear(flat, decoded, x_format, bias64, activation, **flat_terms)
    magnitude, product = reference.magnitude(flat, decoded, x_format), reference.product(flat, decoded, x_format)
    if bias64 is not None:
        magnitude, product = magnitude + bias64.abs(), product + bias64
    allowed = budget(name, k, magnitude=magnitude, linear_result=product, post=case, **flat_terms)
    x = x.detach().requires_grad_() if x_gradient else x
    stepwise = x_gradient or (bias is not None and bias.requires_grad)
    if stepwise:  # torch's own post-ops: each rounds to the dtype of x
        there = {what: term.abs() for what, term in flat_terms.items() if term is not None}
        parts = product.abs() + wanted.abs() + sum(there.values(), torch.zeros(()))
        steps = (activation != "none") + len(there)
        allowed = allowed + steps * 4 * UNIT[x.dtype] * parts * (1 + there.get("mul", 0))
    with ambient(under):
        y = lowbit_linear(x, packed, case.op_args, bias, _C.ACTIVATIONS[activation], terms["mul"], terms["add"])
    if y.dtype != x.dtype or y.shape != (*x.shape[:-1], n):
        raise Wrong(f"y is {y.dtype} {list(y.shape)}, wanted {x.dtype} {[*x.shape[:-1], n]}")
    within(y.reshape(-1, n), wanted, allowed, "y")
    if stepwise and under != "inference mode" and activation == "none" and not mul:
        _gradients(x, bias, y, decoded, n)


def _gradients(x: Tensor, bias: Tensor | None, y: Tensor, decoded: QuantizedWeight | Tensor, n: int) -> None:
    grad = torch.randn(y.shape, device="cpu", dtype=torch.float64).to(y.dtype)
    leaves = [tensor for tensor in (x, bias) if tensor is not None and tensor.requires_grad]
    found = torch.autograd.grad(y, leaves, grad)
    dense = decoded.decode() if isinstance(decoded, QuantizedWeight) else decoded.double()
    for leaf, mine in zip(leaves, found, strict=True):
        if leaf is x:
            wanted, magnitude = grad.double() @ dense.double(), grad.double().abs() @ dense.double().abs()
        else:
            wanted, magnitude = grad.double().reshape(-1, n).sum(0), grad.double().abs().reshape(-1, n).sum(0)
        terms = n + grad.numel()
        allowed = (terms + 16) * 2.0**-24 * magnitude + UNIT[leaf.dtype] * wanted.abs() + 1e-30
        if leaf is x and x.dtype is torch.bfloat16:  # decoded weights are rounded to it where the CPU has its products
            allowed = allowed + UNIT[x.dtype] * magnitude
        within(mine, wanted, allowed + UNIT[leaf.dtype] * allowed, "gradient of x" if leaf is x else "gradient of bias")


def large_k(k: int, n: int, m: int, format: str, group_size: int, x_format: str, values: str) -> None:
    """A sum of k products, of one sign or random."""
    sign = {"ones": 1.0, "minus": -1.0, "random": 0.0}[values]
    x = torch.full((m, k), sign) if sign else torch.randn(m, k)
    weight = torch.ones(n, k) if sign else torch.randn(n, k)
    case = LinearCase(m, n, k, "float32", format, group_size, "symmetric", x_format)
    data = testing.make_data(case, x, weight)
    within(testing.run_linear(case, data), data.wanted, data.allowed, f"y of k = {k} products")


def feature_size(config: object, k: int, given: int, gradient: bool = False) -> None:
    """A QuantLinear of k features takes k and nothing else, as nn.Linear does."""
    model = nn.Sequential(nn.Linear(k, 128))
    lowbit.quantize_(model, config)
    if not isinstance(model[0], QuantLinear):
        return
    x = torch.randn(3, given)
    if gradient:
        x.requires_grad_()
    if given != k:
        refused(lambda: model(x), "a wrong number of features")


def quantized(weight: Tensor, format: str, group_size: int, mapping: str, under: str = "") -> None:
    """from_linear, dequantize and unpack: within a step of the weight, and the two agree. A search may leave a weight
    farther off: its squared error is at most that of the ranges' scales."""
    spec = LinearSpec(format, group_size if format.startswith("int") else 0, mapping == "asymmetric", "float", mapping)
    least = _quantized(weight, dataclasses.replace(spec, scale="absmax"), under)
    if spec.takes_absmax:
        return
    exact = weight.detach().double()
    with ambient(under):
        searched = QuantLinear.from_linear(_module(weight), spec).dequantize().double()
    errors = [float((tensor - exact).square().sum()) for tensor in (searched, least)]
    if not errors[0] <= 1.0001 * errors[1] + 1e-12:
        raise Wrong(f"the search's squared error is {errors[0]}, that of absmax {errors[1]}")


def _module(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = nn.Parameter(weight.detach())
    return module


def _quantized(weight: Tensor, spec: LinearSpec, under: str) -> Tensor:
    """The dequantized weight in float64, compared."""
    format, group_size, mapping = spec.format, spec.group_size, spec.mapping
    n, k = weight.shape
    with ambient(under):
        layer = QuantLinear.from_linear(_module(weight), spec)
        dense = layer.dequantize()
        plain = layer.unpack() if format.startswith("int") else None
    exact = weight.detach().double()
    if _C.FORMAT_FACTS[format]["kind"] == "lookup":  # half of the widest gap of levels is 0.167 of the largest
        within(dense, exact, 0.18 * exact.abs().amax(1, keepdim=True) + 2.0**-24, "dequantized weight")
        return dense.double()
    if plain is None:
        within(dense, exact, UNIT[getattr(torch, format)] * exact.abs() + 2.0**-24, "dequantized weight")
        return dense.double()
    codes, scale, zero = plain
    spread = group_size or k
    widened = [tensor.double().repeat_interleave(spread, 1)[:, :k] for tensor in (scale, zero)]
    again = widened[0] * (codes.double() - widened[1])
    of_two = 8 * 2.0**-24 * (again.abs() + widened[0].abs() * widened[1].abs()) + 1e-30
    within(dense, again, of_two, "dequantize against unpack")
    step = widened[0].abs() * (1.02 if mapping != "asymmetric" else 1.6)
    within(dense, exact, step + 1e-2 * exact.abs() * (format == "int8") + 1e-12, "dequantized weight")
    return dense.double()
