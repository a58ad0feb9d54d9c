# SPDX-License-Identifier: Apache-2.0
"""Modules of experts: E MLPs as parameters of three dimensions, of which a router names J for each token.

    y[t] = sum over j of weights[t, j] * down_e(gate(first_e(x[t])))        e = index[t, j]

``first`` is ``gate_up_proj`` ([E, 2 I, H], rows of the gate before those of its values, or in turns) or ``up_proj``
([E, I, H]); ``down_proj`` is [E, H, I]; both may lie transposed and have biases. `Form` says which of these a module
has, `run` computes it with any product, and `refuses` compares that with what the class of the module computes.

transformers 5 keeps experts so in its classes under ``use_experts_implementation``; your own class whose forward takes
the same three arguments may do it too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.kinds import LayerWeight

Product = Callable[[str, Tensor, Tensor, "Tensor | None"], Tensor]
"""``(key, x [T, k] or [T, J, k], index [T, J], bias [E, n] or None)`` to ``[T, J, n]``, rows of the packed order."""

DOWN = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")
_GATE, _NORM = "_apply_gate", "post_expert_norm"
_DECORATOR = "transformers.integrations.moe"
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_TOLERANCE = 1e-4  # relative to float64 results: some classes compute a part in float32


@dataclass(frozen=True, slots=True)
class Form:
    """How the weights of a module of experts lie, and what is between them.

    Args:
        first: name of the weight that x is multiplied by.
        experts: their number, which as an index names none of them.
        gated: ``first`` has the rows of a gate and of its values.
        transposed: weights lie as ``[E, k, n]``.
        interleaved: rows of the gate and of its values take turns.
        normed: ``post_expert_norm`` follows ``down_proj``.
    """

    first: str
    experts: int
    gated: bool
    transposed: bool
    interleaved: bool
    normed: bool

    @classmethod
    def of(cls, module: nn.Module) -> Form | None:
        """Read the form off the parameters of a float module, and the attributes that transformers gives it; None: it
        has no such parameters."""
        has, told = module._parameters, module.__dict__
        first = next((name for name in _FIRST if has.get(name) is not None), None)
        if first is None or has.get(DOWN) is None or any(has[name].dim() != 3 for name in (first, DOWN)):
            return None
        gated = first == _FIRST[0]
        return cls(
            first,
            len(has[first]),
            gated,
            told.get("is_transposed", False),
            gated and not told.get("is_concatenated", True),
            told.get("has_post_expert_norm", False),
        )

    @property
    def keys(self) -> tuple[str, str]:
        """Names of both weights."""
        return self.first, DOWN

    def weight(self, module: nn.Module, key: str, n: int, k: int) -> LayerWeight:
        """Describe one of the weights."""
        bias = f"{key}_bias" if module._parameters.get(f"{key}_bias") is not None else None
        interleaved = self.interleaved and key == self.first
        return LayerWeight(key, n, k, bias, self.experts, self.transposed, interleaved)

    def float_weight(self, module: nn.Module, key: str) -> LayerWeight:
        """Describe one of the weights by its float parameter."""
        _, n, k = module._parameters[key].shape
        return self.weight(module, key, *((k, n) if self.transposed else (n, k)))


def may_be_experts(cls: type[nn.Module]) -> bool:
    """Whether the forward of this class is one of transformers' decorator for experts, or takes the same arguments."""
    if getattr(cls.forward, "__globals__", {}).get("__name__") == _DECORATOR:
        return True
    try:
        return [*inspect.signature(cls.forward).parameters][1:] == _ARGUMENTS
    except (TypeError, ValueError):  # a C function has no signature
        return False


def run(
    module: Any, cls: type, form: Form, product: Product, x: Tensor, index: Tensor, router_weights: Tensor
) -> Tensor:
    """Compute the experts of a module; the sum over J is in float32 (of float64 in float64), in the order of J.

    Args:
        module, cls: has the activation and the biases; its class of old has the gate.
        product: multiplies by the weights.
        x: ``[T, H]``.
        index: ``[T, J]``; ``form.experts`` names no expert.
        router_weights: ``[T, J]``, any float dtype.

    Returns:
        ``[T, H]``, dtype of x.
    """
    none = index == form.experts
    index = index.masked_fill(none, 0)
    hidden = _first(module, form, product, x, index)
    hidden = gate(module, cls, form, hidden)
    hidden = hidden.masked_fill(none[..., None], 0)  # so that the product is finite, which is then multiplied by 0
    y = product(DOWN, hidden, index, module._parameters.get(f"{DOWN}_bias"))
    if form.normed:
        y = module._modules[_NORM](y)
    return _weighted_sum(y, router_weights.masked_fill(none, 0)).to(x.dtype)


def gate(module: Any, cls: type, form: Form, hidden: Tensor) -> Tensor:
    """Compute what is between the products of a module, by its class of old."""
    if not form.gated:
        return module.act_fn(hidden)
    if hasattr(cls, _GATE):
        return getattr(cls, _GATE)(module, hidden)
    given, up = hidden.chunk(2, dim=-1)
    return module.act_fn(given) * up


def _first(module: Any, form: Form, product: Product, x: Tensor, index: Tensor) -> Tensor:
    """The first product in the order of the float weight, which the gate reads, with its bias, which has that order."""
    bias = module._parameters.get(f"{form.first}_bias")
    if not form.interleaved:
        return product(form.first, x, index, bias)
    hidden = product(form.first, x, index, None).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return hidden if bias is None else hidden + bias[index].to(hidden.dtype)


def _weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(y.dtype, torch.float32)
    y, weights = y.to(dtype), weights.to(dtype)
    total = y.new_zeros(y.shape[0], y.shape[-1])
    for j in range(y.shape[1]):
        total = torch.addcmul(total, y[:, j], weights[:, j, None])
    return total


def inputs_of_experts(
    module: Any, form: Form, x: Tensor, index: Tensor
) -> Iterator[tuple[LayerWeight, int, Tensor]]:
    """Yield what a call of a float module multiplies by: a weight, an expert, and a row for each of its pairs
    ``[m, k]``."""
    held, given = module._parameters, dict[str, Tensor]()

    def product(key: str, x: Tensor, picked: Tensor, bias: Tensor | None) -> Tensor:
        given[key] = x[:, None].expand(*index.shape, -1) if x.dim() == 2 else x
        return dense_product(form.float_weight(module, key), held[key], x, picked, bias)

    run(module, type(module), form, product, x, index, torch.ones_like(index, dtype=torch.float32))
    for key, rows in given.items():
        for expert in index[index != form.experts].unique().tolist():
            yield form.float_weight(module, key), expert, rows[index == expert]


def dense_product(weight: LayerWeight, value: Tensor, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
    """`Product` of a float weight: expert by expert of those that are named."""
    x = x[:, None].expand(*index.shape, -1) if x.dim() == 2 else x
    y = x.new_empty(*index.shape, weight.n)
    for expert in index.unique().tolist():
        of_expert = index == expert
        matrix = weight.matrix(value[expert]).to(x.dtype)
        y[of_expert] = nn.functional.linear(x[of_expert], matrix, None if bias is None else bias[expert].to(x.dtype))
    return y


_compared: dict[tuple[Any, ...], str] = {}
"""The result of `_comparison` for modules that are alike."""


def refuses(module: nn.Module, form: Form, packed_class: type[nn.Module]) -> str:
    """Say why a float module is no `Form`, or why it computes something else; empty: it is and does.

    Its class computes a few tokens with random weights, of its own sizes, in float64, and so does `run` for an object
    of ``packed_class`` with the same attributes.
    """
    if reason := _misfit(module, form):
        return reason
    scalars = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    shapes = tuple((name, tuple(value.shape)) for name, value in module._parameters.items() if value is not None)
    parts = tuple((name, repr(part)) for name, part in module._modules.items())
    key = type(module), form, shapes, tuple(sorted(scalars.items())), parts
    if key not in _compared:
        _compared[key] = _comparison(module, form, packed_class)
    return _compared[key]


def _misfit(module: nn.Module, form: Form) -> str:
    first, down = (form.float_weight(module, key) for key in form.keys)
    inner = 2 * down.k if form.gated else down.k
    if (first.n, first.k, len(module._parameters[DOWN])) != (inner, down.n, form.experts):
        shapes = " and ".join(f"{key} {list(module._parameters[key].shape)}" for key in form.keys)
        return f"its weights do not fit each other: {shapes}"
    if not all((form.experts, first.n, first.k)):
        return "its weights are empty"
    wanted = {first.key: None, DOWN: None} | {name: weight.n for weight in (first, down) if (name := weight.bias)}
    held = {name: value for name, value in module._parameters.items() if value is not None}
    others = sorted((held.keys() - wanted.keys()) | module._buffers.keys())
    if others:
        return f"it has {', '.join(others)} beside its weights"
    odd = [name for name, n in wanted.items() if n is not None and tuple(held[name].shape) != (form.experts, n)]
    if odd:
        return f"its {odd[0]} has shape {list(held[odd[0]].shape)}"
    return ""


def _comparison(module: nn.Module, form: Form, packed_class: type[nn.Module]) -> str:
    cls, generator = type(module), torch.Generator().manual_seed(0)
    own, ours = cls.__new__(cls), packed_class.__new__(packed_class)
    held = {name: value for name, value in module._parameters.items() if value is not None}
    parameters = {name: _random(value.shape, generator) for name, value in held.items()}
    parts = parts_in_float64(module)
    for twin in (own, ours):
        twin.__dict__ = module.__dict__ | {"_parameters": parameters, "_modules": parts, "float_class": cls}
    weights = {key: form.float_weight(own, key) for key in form.keys}

    def product(key: str, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
        return dense_product(weights[key], parameters[key], x, index, bias)

    x = torch.randn(5, weights[form.first].k, generator=generator, dtype=torch.float64, device="cpu")
    index = torch.rand(5, form.experts, generator=generator, device="cpu").argsort(-1)[:, :2]
    shares = torch.rand(index.shape, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            wanted = inspect.unwrap(cls.forward)(own, x, index, shares)
            error = float((run(ours, cls, form, product, x, index, shares) - wanted).norm() / wanted.norm())
    except Exception as raised:  # the class is the caller's, and may raise anything
        return f"{cls.__name__} could not be tried: {type(raised).__name__}: {str(raised).splitlines()[0][:100]}"
    return "" if error < _TOLERANCE else f"{cls.__name__} computes something else than experts, off by {error:.1e}"


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Numbers of which each matrix and each row are others, in memory of their sum alone: diagonals are alike."""
    strides = [1] * len(shape)
    values = torch.randn(sum(shape), generator=generator, dtype=torch.float64, device="cpu") * 4 * shape[-1] ** -0.5
    return values.as_strided(shape, strides)


def parts_in_float64(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return copies of the modules inside of a module, for a trial of its class."""
    return {name: _double(part) for name, part in module._modules.items()}


def _double(part: nn.Module | None) -> nn.Module | None:
    """A copy in float64 on the CPU, with values where the part has none, and without hooks."""
    if part is None:
        return None
    part = copy.deepcopy(part)
    for module in part.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    tensors = [*part.parameters(), *part.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        part = part.to_empty(device="cpu")
        for tensor in part.parameters():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return part.to("cpu", torch.float64)
