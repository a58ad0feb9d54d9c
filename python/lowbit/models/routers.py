# SPDX-License-Identifier: Apache-2.0
"""What a router of transformers computes, as arguments of the op `route`.

    logits = x @ weight.T + bias;   weights, index = route(logits, ...)

Routers differ in how they score logits, in which groups they choose, and in how they normalize weights. To find the
arguments that compute the same, a copy of the router with random weights and `route` both route some tokens. Numbers
among the attributes of the router are candidates for groups and scale, its small tensors for the bias, the correction and
the scale of each expert.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.fakes import FLOATS
from lowbit.ops.route import SCORINGS, route

_TOLERANCE = 1e-4  # relative to each weight; both sides compute in float32
_ROWS = 24  # tokens of each spread of logits
_EPS = (0.0, 1e-20, 1e-15, 1e-12, 1e-9, 1e-6)


@dataclass(frozen=True, slots=True)
class Router:
    """A router as arguments of `route`. Tensors are given by their names in the module that has the router."""

    k: int
    weight: str
    bias: str | None
    scoring: str
    correction: str | None
    groups: tuple[int, int, int]
    """The number of groups, of those kept, and of the choices that a group is compared by."""
    zero_outside: bool
    normalize: bool
    eps: float
    least: float
    scale: float
    expert_scale: str | None

    def options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of `route` beside the logits."""
        return _choice(self.scoring, self.correction, self.groups, self.zero_outside, tensors) | {
            "k": self.k,
            "normalize": self.normalize,
            "eps": self.eps,
            "least": self.least,
            "scale": self.scale,
            "expert_scale": None if self.expert_scale is None else tensors[self.expert_scale],
        }


def tensors_of(module: nn.Module, router: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the places of the tensors that may belong to a router: its own, and those of the module that has it. Each is
    a dictionary and a key."""
    parts = [
        ("", module),
        *(
            (f"{router}.{name}." if name else f"{router}.", part)
            for name, part in module._modules[router].named_modules()
        ),
    ]
    return {
        f"{prefix}{key}": (entries, key)
        for prefix, part in parts
        for entries in (part._parameters, part._buffers)
        for key, value in entries.items()
        if value is not None
    }


@torch.no_grad()
def router_of(module: nn.Module, name: str, experts: int, hidden: int, extra: Sequence[str]) -> Router | str:
    """Return what the router ``module.<name>`` computes, or the reason why `route` cannot.

    Args:
        module: the module that has the router.
        name: the name of the router in it.
        experts: the number of experts.
        hidden: the number of columns of the router's input.
        extra: the names of the module's tensors that it passes to the router, behind the input.
    """
    places = tensors_of(module, name)
    held = {path: entries[key] for path, (entries, key) in places.items()}
    weights = [path for path, value in held.items() if tuple(value.shape) == (experts, hidden)]
    if len(weights) != 1 or any(value.dtype not in FLOATS for value in held.values()):
        return "its router has no plain weight"
    vectors = [path for path, value in held.items() if value.numel() == experts and value.shape[-1] == experts]
    owner = copy.copy(module)
    router = _without_hooks(module._modules[name]).to("cpu", torch.float32)
    owner._modules, owner._parameters, owner._buffers = {name: router}, {}, {}
    owner._parameters |= {key: None if value is None else value.clone() for key, value in module._parameters.items()}
    owner._buffers |= {key: None if value is None else value.clone() for key, value in module._buffers.items()}
    trial = _Trial(owner, name, weights[0], vectors, hidden)
    return trial.result(extra) or "its router computes something else than route"


def _without_hooks(router: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode."""
    router = copy.deepcopy(router).eval()
    for part in router.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return router


class _Trial:
    """A router with random weights, what it made of some tokens, and the search for the same arguments."""

    def __init__(self, owner: nn.Module, name: str, weight: str, vectors: list[str], hidden: int) -> None:
        self.router, self.weight, self.vectors = owner._modules[name], weight, vectors
        generator = torch.Generator("cpu").manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        for path, (entries, key) in tensors_of(owner, name).items():
            shape = entries[key].shape
            made = torch.rand(shape, generator=generator, device="cpu") + 0.5
            if path == weight:
                made = torch.randn(shape, generator=generator, device="cpu") * shape[-1] ** -0.5
            entries[key].data = made
            self.tensors[path] = made.flatten() if path in vectors else made
        experts = len(self.tensors[weight])
        spread = torch.randn(3, _ROWS, experts, generator=generator, device="cpu")
        # The last logits are so small that a number added to the sum of the scores counts.
        logits = torch.cat([spread[0], 4 * spread[1], spread[2] - 45])
        self.x = (logits.double() @ torch.linalg.pinv(self.tensors[weight].double()).T).float()
        self.experts = experts
        numbers = [value for part in self.router.modules() for value in vars(part).values()]
        self.integers = sorted({value for value in numbers if type(value) is int and 0 < value <= experts})
        self.reals = sorted({float(value) for value in numbers if type(value) in (int, float) and 0 < value < 1e6})

    def result(self, extra: Sequence[str]) -> Router | None:
        routed = self._routed(extra)
        if routed is None:
            return None
        weights, index = routed
        k = index.shape[-1]
        for bias, *choice in self._choices():
            logits = nn.functional.linear(self.x, *self._factors(bias))
            options = _choice(*choice, self.tensors)
            if not self._are_possible(k, *choice) or not route(logits, k, **options)[1].sort(-1).values.equal(index):
                continue
            for weighting in self._weightings(k):
                router = Router(k, self.weight, bias, *choice, *weighting)
                got, of = route(logits, **router.options(self.tensors))
                if torch.allclose(got.gather(-1, of.argsort(-1)), weights, rtol=_TOLERANCE, atol=0):
                    return self._with_negative_choices(router, extra)
        return None

    def _routed(self, extra: Sequence[str]) -> tuple[Tensor, Tensor] | None:
        """Return the router's weights and experts, in the order of the experts."""
        try:
            found = self.router(self.x, *(self.tensors[path] for path in extra))
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):  # another signature
            return None
        pair = weights_and_index(found)
        if pair is None or pair[0].shape != pair[1].shape or len(pair[0]) != len(self.x):
            return None
        index, order = pair[1].sort(-1)
        return pair[0].float().gather(-1, order), index

    def _with_negative_choices(self, router: Router, extra: Sequence[str]) -> Router | None:
        """Return the router with ``zero_outside`` set. Only negative choices show it: then those outside, which are
        0, come first."""
        if router.groups[0] == 1 or router.correction is None:
            return router
        self.tensors[router.correction].sub_(4)
        routed = self._routed(extra)
        if routed is None:
            return None
        logits = nn.functional.linear(self.x, *self._factors(router.bias))
        options = _choice(router.scoring, router.correction, router.groups, False, self.tensors)
        if route(logits, router.k, **options)[1].sort(-1).values.equal(routed[1]):
            return router
        size = self.experts // router.groups[0]
        inside = route(logits, router.groups[1] * size, **options)[1]  # all experts of the groups that are kept
        is_inside = (routed[1][:, :, None] == inside[:, None]).any()
        return None if is_inside else replace(router, zero_outside=True)

    def _factors(self, bias: str | None) -> tuple[Tensor, Tensor | None]:
        return self.tensors[self.weight], None if bias is None else self.tensors[bias]

    def _choices(self) -> Iterator[tuple[str | None, str, str | None, tuple[int, int, int], bool]]:
        kept = [
            (n, k, top)
            for n in self.integers
            for k in self.integers
            for top in (1, 2)
            if n > 1 and k < n and self.experts % n == 0
        ]
        groups = [((1, 1, 1), False), *itertools.product(kept, (False, True))]
        names = [None, *self.vectors]
        for of_groups, bias, correction, scoring in itertools.product(groups, names, names, SCORINGS):
            if bias is None or bias != correction:
                yield bias, scoring, correction, *of_groups

    def _are_possible(self, k: int, _: Any, __: Any, groups: tuple[int, int, int], zero_outside: bool) -> bool:
        size = self.experts // groups[0]
        return groups[2] <= size and (zero_outside or k <= groups[1] * size)

    def _weightings(self, k: int) -> Iterator[tuple[bool, float, float, float, str | None]]:
        scales, scaled = (1.0, *self.reals, 1 / k), (None, *self.vectors)
        for scale, of_expert in itertools.product(scales, scaled):
            yield False, 0.0, 0.0, scale, of_expert
            for eps, least in itertools.product(_EPS, (0.0, *(number for number in self.reals if number < 1))):
                yield True, eps, least, scale, of_expert


def _choice(
    scoring: str, correction: str | None, groups: tuple[int, int, int], zero_outside: bool, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    return {
        "scoring": scoring,
        "correction": None if correction is None else tensors[correction],
        "groups": groups[0],
        "groups_kept": groups[1],
        "group_top": groups[2],
        "zero_outside": zero_outside,
    }


def weights_and_index(results: Any) -> tuple[Tensor, Tensor] | None:
    """Return the two results of a router that go to the experts, or None: the only integers, and the floats of the same
    shape, which come last."""
    if not isinstance(results, tuple) or not all(isinstance(result, Tensor) for result in results):
        return None
    indices = [result for result in results if not result.is_floating_point()]
    if len(indices) != 1:
        return None
    weights = [result for result in results if result.is_floating_point() and result.shape == indices[0].shape]
    return (weights[-1], indices[0]) if weights else None


@torch.no_grad()
def rounds(router: nn.Module, weight: Tensor, dtype: torch.dtype, extra: Sequence[Tensor]) -> bool | None:
    """Return whether a router rounds its logits to ``dtype``, the dtype of its input; None if that cannot be told."""
    if dtype is torch.float32:
        return False
    twin = _without_hooks(router)
    x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(dtype)
    try:
        results = twin(x, *extra)
    except (TypeError, RuntimeError, ValueError):  # the router takes another dtype
        return None
    for logits in results:
        if logits.shape == (_ROWS, len(weight)) and logits.is_floating_point():
            return logits.float().equal(logits.to(dtype).float())
    return None
