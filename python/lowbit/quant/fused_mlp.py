# SPDX-License-Identifier: Apache-2.0
"""MLPs of two or three linear layers that can be steps of a program.

    last(act(first(x)))             plain: Phi, StarCoder 2, GPT-NeoX, Nemotron
    last(xielu(first(x)))           Apertus, with numbers that were learned
    last(act(gate) * up)            gate, up = halves of first(x), in this order or the other: Phi-3, GLM
    last(act(first(x)) * up(x))     gated, where the activation is no module: LFM2
    f last(silu(s first(x)) * up(x))   gated, with two numbers: Falcon-H1
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.linear import activation_functions
from lowbit.ops.pointwise import RELU_SQUARED, XIELU
from lowbit.quant.fused import Fused, has_own_tensors, hooked, probe_of
from lowbit.quant.gated_mlp import GATED_LAYERS
from lowbit.quant.lora_layers import base_of, is_product
from lowbit.quant.unchanged import Attributes

_TOLERANCE = 1e-5  # relative to the largest value
_SILU = activation_functions.index(nn.functional.silu)


class FusedMLP(Fused):
    """An MLP whose activation is known. It runs its own code when it is called; a fused decoder
    layer has it as steps of its program."""

    def is_as_fused(self) -> bool:
        """Return whether its modules and attributes are those that it was fused with, and it is not training."""
        facts = self.facts
        if self.training or hooked(self, self._modules) or not facts["noted"].hold(self):
            return False
        children = [(name, child) for name, child in self._modules.items() if child is not None]
        same = len(children) == len(facts["children"]) and all(
            one == other and type(base_of(child)) is kind and child.__dict__.get("training") is False
            for (one, child), (other, kind) in zip(children, facts["children"], strict=True)
        )
        return same and all(
            notes.hold(self._modules[name]) and (_numbers(self._modules[name]) == numbers or self._refit())
            for name, notes, numbers in facts["activations"]
        )

    def _refit(self) -> bool:
        """Find the numbers of the activation again, which were learned or rounded to another dtype since."""
        found, facts = _facts(self, {}), self.facts
        if found is None or any(found[name] != facts[name] for name in found if name != "numbers"):
            return False
        activations = [(name, notes, _numbers(self._modules[name])) for name, notes, _ in facts["activations"]]
        self.facts = facts | found | {"activations": activations}
        return True


def is_mlp(module: nn.Module) -> bool:
    """Whether the module has two or three quantized layers, else nothing with parameters, and not the names of those that
    `fuse_gated_mlps` looks at."""
    children = [child for child in module._modules.values() if child is not None]
    linears = [base_of(child) for child in children if is_product(child)]
    rest = [child for child in children if not is_product(child)]
    sizes = sorted((layer.in_features, layer.out_features) for layer in linears)
    gated = len(linears) == 3 and sizes[1] in (sizes[0], sizes[2]) and {sizes[0][::-1], sizes[2][::-1]} == {*sizes}
    return (
        (len(linears) == 2 or gated) and (bool(_factors(module)) or not module._modules.keys() >= set(GATED_LAYERS)) and not has_own_tensors(module) and not hasattr(module, "layer_idx")
        and not any(child._modules or any(each.numel() > 1 or each.is_meta for each in scalars_of(child)) for child in rest)
    )  # fmt: skip


def scalars_of(activation: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of an activation."""
    return [each for entries in (activation._parameters, activation._buffers) for each in entries.values() if each is not None]


def _numbers(activation: nn.Module) -> list[float]:
    return [float(each) for each in scalars_of(activation) if each.numel()]


def fuse_mlp(
    module: nn.Module,
    piece: type[FusedMLP] = FusedMLP,
    tried: nn.Module | None = None,
    given: dict[str, Any] | None = None,
    holds: Callable[[dict[str, Any]], bool] = bool,
) -> str:
    """Fuse ``module``, for which `is_mlp` holds, or return the reason why it stays unchanged.

    A probe call, in which both layers return random tensors, shows which is first, and what becomes of its result.

    Args:
        module: the MLP.
        piece: the class that it gets.
        tried: what is called in its place.
        given: more arguments of the call.
        holds: whether what was found out about ``tried`` holds for the module.
    """
    if hook := hooked(module, module._modules):
        return f"hooks on {hook}"
    facts = _facts(module if tried is None else tried, given or {})
    if facts is None or not holds(facts):
        return "its linear layers are not joined by an activation that the op has"
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    linears = (facts["first"], facts["up"], facts["last"])
    facts |= {
        "noted": Attributes(module, without=("facts", "training")),
        "children": [(name, type(base_of(child))) for name, child in children],
        "activations": [
            (name, Attributes(child, ("training",)), _numbers(child)) for name, child in children if name not in linears
        ],
    }
    piece.take(module, facts)
    return ""


@torch.no_grad()
def activation_of(module: nn.Module) -> int | None:
    """Return the number of the op's activation that ``module``, without parameters or submodules, computes, or None."""
    if module.training or module._modules or scalars_of(module) or hooked(module, ()):
        return None
    x = torch.randn(2, 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 3
    try:
        y = module(x)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):  # another signature
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return next((number for number, act in enumerate(activation_functions) if alike(act(x), y)), None)


@torch.no_grad()
def _facts(module: nn.Module, more: dict[str, Any]) -> dict[str, Any] | None:
    generator = torch.Generator("cpu").manual_seed(0)
    linears = {name: base_of(child) for name, child in module._modules.items() if is_product(child)}
    calls: list[tuple[str, Tensor]] = []
    results = {
        name: torch.randn(2, linear.out_features, generator=generator, device="cpu") * 3
        for name, linear in linears.items()
    }

    def stand_in(name: str) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            calls.append((name, x.clone()))
            return results[name].clone()

        probe = probe_of(linears[name])
        probe.forward = forward
        return probe

    probe = probe_of(module, **{name: stand_in(name) for name in linears})
    for child in probe._modules.values():
        if child is not None and child.training:
            return None
    widths = {linear.in_features for linear in linears.values()}
    for width in widths:
        calls.clear()
        x = torch.randn(2, width, generator=generator, device="cpu")
        try:
            y = probe(x, **more)
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):  # another signature
            continue
        if len(calls) != len(linears) or not isinstance(y, Tensor) or not all(given.equal(x) for _, given in calls[:-1]):
            continue
        *inner, last = [name for name, _ in calls]
        factor = next((number for number in (1.0, *_factors(module)) if y.equal(results[last] * number)), None)
        if len({*inner, last}) != len(linears) or factor is None:
            continue
        h = calls[-1][1]
        if len(inner) == 1:
            between = _between(results[inner[0]], h)
        else:
            between = _gated([results[name] for name in inner], h, (1.0, *_factors(module)))
        inputs = [linears[name].in_features for name in (*inner, last)]
        if between is not None and inputs == [*len(inner) * [width], h.shape[-1]]:
            first, scale = between.pop("first", 0), between.pop("of_gate", 1.0)
            up = inner[1 - first] if len(inner) == 2 else None
            scaled = (scale, factor) != (1.0, 1.0)
            if scaled and (between["activation"] != _SILU or up is None or linears[last].bias is not None):
                return None
            scales = (scale, factor) if scaled else None
            return {"first": inner[first], "up": up, "last": last, "scale": scales, **between}
    return None


def _factors(module: nn.Module) -> list[float]:
    """Return the numbers that a module may multiply by: its attributes."""
    return [value for value in module.__dict__.values() if type(value) is float and value not in (0.0, 1.0)]


def _gated(results: list[Tensor], h: Tensor, scales: Sequence[float]) -> dict[str, Any] | None:
    """Return how h is a product of one of the two results and the activation of the other, the first, times a number."""
    for number, act in enumerate(activation_functions):
        for first, scale in itertools.product((0, 1), scales):
            gate, up = results[first], results[1 - first]
            if gate.shape == up.shape == h.shape and alike(act(gate * scale) * up, h):
                return {"activation": number, "function": 0, "gate": None, "first": first, "of_gate": scale}
    return None


def _between(a: Tensor, h: Tensor) -> dict[str, Any] | None:
    """Return how h follows from a: the activation, and whether a is gate and up."""
    halves = a.chunk(2, dim=-1)
    for number, act in enumerate(activation_functions):
        if h.shape == a.shape and alike(act(a), h):
            return {"activation": number, "function": 0, "gate": None}
        for gate, up in ((0, 1), (1, 0)) if h.shape == halves[0].shape else ():
            if halves[gate].shape == halves[up].shape and alike(act(halves[gate]) * halves[up], h):
                return {"activation": number, "function": 0, "gate": gate}
    if h.shape == a.shape and alike(a.relu().square(), h):
        return {"activation": 0, "function": RELU_SQUARED, "gate": None}
    return _xielu(a.double(), h.double()) if h.shape == a.shape else None


def _xielu(a: Tensor, h: Tensor) -> dict[str, Any] | None:
    """Return the three numbers of a xIELU."""
    below = a.clamp(max=0)
    terms = torch.stack([a.relu().square().flatten(), (below.expm1() - below).flatten(), a.flatten()], dim=1)
    numbers = torch.linalg.lstsq(terms, h.flatten()[:, None]).solution
    if not alike((terms @ numbers).view_as(h), h):
        return None
    return {"activation": 0, "function": XIELU, "gate": None, "numbers": tuple(numbers.flatten().tolist())}


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by no more than the order of their sums."""
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
