# SPDX-License-Identifier: Apache-2.0
"""Modules of experts: E MLPs with three-dimensional parameters, of which a router selects J for each token.

    y[t] = sum over j of weights[t, j] * down_e(gate(first_e(x[t])))        e = index[t, j]

``first`` is ``gate_up_proj`` ([E, 2 I, H], the rows of the gate before those of up, or interleaved) or ``up_proj``
([E, I, H]); ``down_proj`` is [E, H, I]. Both may be transposed and may have biases. `Form` describes which of these a
module has, `run` computes the result with any product, and `refuses` compares it with what the module's class computes.

The classes of transformers 5 under ``use_experts_implementation`` store experts in this way. So may any other class
whose forward takes the same three arguments.
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
"""A function of ``(key, x [T, k] or [T, J, k], index [T, J], bias [E, n] or None)`` that returns ``[T, J, n]``, with
the n outputs in the order of the packed rows."""

DOWN = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")
_GATE, _NORM = "_apply_gate", "post_expert_norm"
_DECORATOR = "transformers.integrations.moe"
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_TOLERANCE = 1e-4  # relative to the float64 results; some classes compute a part in float32


@dataclass(frozen=True, slots=True)
class Form:
    """The structure of a module of experts: how its weights are stored, and what is computed around them.

    Args:
        first: name of the weight that x is multiplied by.
        experts: the number of experts. As an index, this value means no expert.
        gated: whether ``first`` has rows for a gate and for up.
        transposed: whether weights are stored as ``[E, k, n]``.
        interleaved: whether the rows of gate and up alternate.
        normed: whether ``post_expert_norm`` follows ``down_proj``.
    """

    first: str
    experts: int
    gated: bool
    transposed: bool
    interleaved: bool
    normed: bool

    @classmethod
    def of(cls, module: nn.Module) -> Form | None:
        """Return the form of a float module, from its parameters and the attributes that transformers sets; None if it
        does not have such parameters."""
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
        """The names of both weights."""
        return self.first, DOWN

    def weight(self, module: nn.Module, key: str, n: int, k: int) -> LayerWeight:
        """Return the description of one of the weights."""
        bias = f"{key}_bias" if module._parameters.get(f"{key}_bias") is not None else None
        interleaved = self.interleaved and key == self.first
        return LayerWeight(key, n, k, bias, self.experts, self.transposed, interleaved)

    def float_weight(self, module: nn.Module, key: str) -> LayerWeight:
        """Return the description of one of the weights, with its size from the float parameter."""
        _, n, k = module._parameters[key].shape
        return self.weight(module, key, *((k, n) if self.transposed else (n, k)))


def may_be_experts(cls: type[nn.Module]) -> bool:
    """Return whether this class's forward has transformers' decorator for experts, or takes the same arguments."""
    if getattr(cls.forward, "__globals__", {}).get("__name__") == _DECORATOR:
        return True
    try:
        return [*inspect.signature(cls.forward).parameters][1:] == _ARGUMENTS
    except (TypeError, ValueError):  # a C function has no signature
        return False


def run(
    module: Any, cls: type, form: Form, product: Product, x: Tensor, index: Tensor, router_weights: Tensor
) -> Tensor:
    """Compute the result of a module of experts. The sum over J is in float32 (float64 for float64), in order of J.

    Args:
        module: the module with the activation and the biases.
        cls: its float class, which may have a method for the gate.
        form: the structure of the module.
        product: the function that multiplies by the weights.
        x: ``[T, H]``.
        index: ``[T, J]``; the value ``form.experts`` means no expert.
        router_weights: ``[T, J]``, any float dtype.

    Returns:
        ``[T, H]``, dtype of x.
    """
    none = index == form.experts
    index = index.masked_fill(none, 0)
    hidden = _first(module, form, product, x, index)
    hidden = gate(module, cls, form, hidden)
    hidden = hidden.masked_fill(none[..., None], 0)  # the product must be finite, since it is multiplied by 0 later
    y = product(DOWN, hidden, index, module._parameters.get(f"{DOWN}_bias"))
    if form.normed:
        y = module._modules[_NORM](y)
    return _weighted_sum(y, router_weights.masked_fill(none, 0)).to(x.dtype)


def gate(module: Any, cls: type, form: Form, hidden: Tensor) -> Tensor:
    """Compute what is between the two products of a module, as its float class does."""
    if not form.gated:
        return module.act_fn(hidden)
    if hasattr(cls, _GATE):
        return getattr(cls, _GATE)(module, hidden)
    given, up = hidden.chunk(2, dim=-1)
    return module.act_fn(given) * up


def _first(module: Any, form: Form, product: Product, x: Tensor, index: Tensor) -> Tensor:
    """Return the first product plus bias, with its columns in the order of the float weight, which the gate expects."""
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


def check_call(name: str, x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Raise ValueError or TypeError, in the name of a class, for arguments that no module of experts takes."""
    if x.dim() != 2:
        raise ValueError(f"{name}: hidden_states must have shape [T, H], got {list(x.shape)}")
    if index.dim() != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: top_k_index must have shape [{x.shape[0]}, J], got {list(index.shape)}")
    if weights.shape != index.shape:
        raise ValueError(f"{name}: top_k_weights must have shape {list(index.shape)}, got {list(weights.shape)}")
    if not weights.is_floating_point():
        got = str(weights.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: top_k_weights must be floats, got {got}")


def attribute_of_class(module: nn.Module, cls: type[nn.Module] | None, name: str) -> Any:
    """Return the attribute that an object of ``cls`` would have; AttributeError if there is none."""
    for base in getattr(cls, "__mro__", ()):
        if name in vars(base):
            found = vars(base)[name]
            return found.__get__(module, type(module)) if hasattr(found, "__get__") else found
    raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``hidden_states``, ``top_k_index`` and ``top_k_weights`` of a call; gpt-oss names them differently."""
    given = inspect.signature(inspect.unwrap(type(module).forward)).bind(module, *args, **kwargs)
    return given.args[1:4]


def inputs_of_experts(
    module: Any, form: Form, x: Tensor, index: Tensor
) -> Iterator[tuple[LayerWeight, int, Tensor, Tensor]]:
    """Yield the inputs of each product in a call of a float module: a weight, an expert, rows ``[r, k]`` of all experts,
    which nothing else changes, and the numbers of those of this expert."""
    held, given = module._parameters, dict[str, Tensor]()

    def product(key: str, x: Tensor, picked: Tensor, bias: Tensor | None) -> Tensor:
        given[key] = x.detach().clone() if key == form.first else x.detach().flatten(0, 1)
        return dense_product(form.float_weight(module, key), held[key], x, picked, bias)

    run(module, type(module), form, product, x, index, torch.ones_like(index, dtype=torch.float32))
    for key, rows in given.items():
        for expert in index[index != form.experts].unique().tolist():
            pairs = (index.flatten() == expert).nonzero()[:, 0]
            picked = pairs // index.shape[1] if key == form.first else pairs
            yield form.float_weight(module, key), expert, rows, picked


def dense_product(weight: LayerWeight, value: Tensor, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a float weight, one selected expert at a time; see `Product`."""
    x = x[:, None].expand(*index.shape, -1) if x.dim() == 2 else x
    y = x.new_empty(*index.shape, weight.n)
    for expert in index.unique().tolist():
        of_expert = index == expert
        matrix = weight.matrix(value[expert]).to(x.dtype)
        y[of_expert] = nn.functional.linear(x[of_expert], matrix, None if bias is None else bias[expert].to(x.dtype))
    return y


_compared: dict[tuple[Any, ...], str] = {}
"""Results of `_comparison`, by everything that it depends on."""


def refuses(module: nn.Module, form: Form, packed_class: type[nn.Module]) -> str:
    """Return the reason why a float module does not have this form or computes something else, or an empty string.

    The module's class and `run`, with an object of ``packed_class``, both compute a few tokens in float64, with random
    weights of the module's size and with its attributes; the results must agree.
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
    except Exception as raised:  # the class is the caller's and may raise anything
        return f"{cls.__name__} could not be tried: {type(raised).__name__}: {str(raised).splitlines()[0][:100]}"
    return "" if error < _TOLERANCE else f"{cls.__name__} computes something else than experts, off by {error:.1e}"


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return a random tensor in which all matrices and rows differ. Its memory grows with the sum of the sizes, not
    their product: elements repeat. Strides differ by dimension, since equal ones would make square matrices symmetric,
    and those that a class stores transposed could not be told from others."""
    strides = range(1, len(shape) + 1)
    count = 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    values = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu") * 4 * shape[-1] ** -0.5
    return values.as_strided(shape, [*strides])


def parts_in_float64(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return float64 copies of a module's children, for a trial call of its class."""
    return {name: _double(part) for name, part in module._modules.items()}


def _double(part: nn.Module | None) -> nn.Module | None:
    """Return a float64 copy on the CPU without hooks. Parameters on the meta device get random values."""
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
