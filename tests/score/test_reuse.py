# SPDX-License-Identifier: Apache-2.0
"""A program is reused only where it still fits: whatever a mod reads, and however, results and gradients are those of the mod called score by score.

Each probe is an object, a mod that reads it through one Python protocol, and a change of it: those of the fuzzer, here as variables of a closure,
and some where the mod itself is what changes. The mod is run, changed, run again, made anew from the same code, copied, and run in another thread.
"""

from __future__ import annotations

import ast
import copy
import functools
import textwrap
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from settings import ambient
from tests.fuzz.ops.flex_state import AXES, ENTERED, IMPORTS, with_value
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex

import lowbit
from lowbit.score import program_cache

H, L, E = 2, 5, 4
Mod = Callable[..., Tensor]
Probe = tuple[Mod, Callable[[], Any]]
SCORE, MASK = "s, b, h, q, k", "b, h, q, k"


@functools.cache
def maker(name: str, body: str, arguments: str = SCORE) -> Callable[[], Probe]:
    """The function that makes the mod of an axis, whose ``body`` has "{}" where it reads, and its change; each call has the same code."""
    axis = AXES[name]
    scope = "global" if name == "globals" else "nonlocal"
    stored = {node.id for node in ast.walk(ast.parse(axis.change)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    declared = f"{scope} {', '.join(sorted(stored))}\n" if stored else ""
    read = body.replace("{}", axis.read)
    parts = [
        with_value(declared * (scope == "global") + axis.make, 2),
        f"def mod({arguments}):\n    return {read}",
        "def change():\n" + textwrap.indent(declared + with_value(axis.change, 5), "    "),
        "return mod, change",
    ]
    known: dict[str, Any] = {"torch": torch, "numpy": numpy} | {module: __import__(module) for module in IMPORTS.split(", ")}
    exec(ENTERED + "def make():\n" + textwrap.indent("\n\n".join(parts), "    "), known)
    return known["make"]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Relative(nn.Module):
    """A bias per distance, held in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList([parameter(H), parameter(H), parameter()])
        self.layer, self.gain = 0, 1.0

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.gain + self.biases[self.layer][h]


def hooked(module: Relative) -> Callable[[], None]:
    gain = [1.0]
    module.register_forward_hook(lambda module, args, result: result * gain[0])
    return lambda: gain.__setitem__(0, 3.0)


OF_MODULES: dict[str, Callable[[Relative], Callable[[], Any]]] = {
    "another layer": lambda module: lambda: setattr(module, "layer", 1),
    "another parameter": lambda module: lambda: module.biases.__setitem__(0, parameter(H)),
    "gain of a module": lambda module: lambda: setattr(module, "gain", 1.7),
    "another forward": lambda module: lambda: setattr(module, "forward", lambda s, b, h, q, k: s * 0.25),
    "a forward hook": hooked,
}


def of_module(name: str) -> Callable[[], Probe]:
    def make() -> Probe:
        module = Relative()
        return module, OF_MODULES[name](module)

    return make


def attribute_of_the_mod() -> Probe:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * mod.gain

    mod.gain = 1.0
    return mod, lambda: setattr(mod, "gain", 1.3)


def default_argument() -> Probe:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gain: float = 1.0) -> Tensor:
        return s * gain

    return mod, lambda: setattr(mod, "__defaults__", (1.3,))


def negative_zero() -> Probe:
    zeros = [0.0]
    return (lambda s, b, h, q, k: torch.where(torch.atan(zeros[0] / s.abs()) * 0 + 1 / torch.tensor(zeros[0]) > 0, s, -s)), lambda: zeros.__setitem__(0, -0.0)


def numbers_in_the_default_dtype() -> Probe:
    return (lambda s, b, h, q, k: s + (q / 3).to(torch.float32)), lambda: None


PROBES: dict[str, Callable[[], Probe]] = {
    **{name: maker(name, "s * {}") for name in AXES},
    **{f"{name}, itself": maker(name, "{}") for name, axis in AXES.items() if axis.kind == "tensor"},
    **{name: of_module(name) for name in OF_MODULES},
    **{make.__name__: make for make in (attribute_of_the_mod, default_argument, negative_zero, numbers_in_the_default_dtype)},
}


@pytest.fixture(autouse=True)
def default_dtype_comes_back() -> Any:
    with ambient():
        yield


def eager(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, return_lse: bool) -> tuple[Tensor, Tensor]:
    """The mod called score by score; torch's eager flex_attention refuses the backward on a CPU (2.13)."""
    scores, place = q @ k.transpose(-2, -1) / E**0.5, [torch.arange(size, dtype=torch.int32) for size in (1, H, L, L)]
    modified = [
        torch.as_tensor(score_mod(scores[0, h, i, j], place[0][0], place[1][h], place[2][i], place[3][j]))
        for h in range(H) for i in range(L) for j in range(L)
    ]  # fmt: skip
    scores = torch.stack(modified).view(scores.shape)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def result_of(function: Callable[..., Any], inputs: list[Tensor], mod: Mod, parameters: list[Tensor]) -> list[Tensor | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = function(*inputs, score_mod=mod, return_lse=True)
    wanted = [*inputs, *(parameter for parameter in parameters if parameter.requires_grad)]
    loss = (out * torch.arange(out.numel()).view(out.shape).sin()).sum() + lse.square().sum()
    return [out, lse, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def parameters_of(mod: Mod) -> list[Tensor]:
    """Every tensor that wants a gradient, found by the garbage collector's view of what the mod refers to."""
    import gc

    found, seen, left = [], set(), [mod]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, (types.ModuleType, type)) or (isinstance(item, dict) and "__builtins__" in item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found += [item] if item.requires_grad else []
            continue
        left += gc.get_referents(item)
    return found


def check(mod: Mod) -> None:
    inputs = [torch.randn(1, H, L, E, requires_grad=True) for _ in range(3)]
    parameters = parameters_of(mod)
    theirs = result_of(eager, inputs, mod, parameters)
    ours = result_of(lowbit.flex_attention, inputs, mod, parameters)
    for got, wanted in zip(ours, theirs, strict=True):
        wanted = torch.zeros_like(got) if wanted is None and got is not None else wanted
        got = torch.zeros_like(wanted) if got is None and wanted is not None else got
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", PROBES)
def test_a_mod_that_changed_is_not_served_by_its_old_program(name: str) -> None:
    mod, change = PROBES[name]()
    check(mod)
    check(mod)
    change()
    check(mod)
    other, _ = PROBES[name]()
    check(other)
    if isinstance(mod, nn.Module):
        copied = copy.deepcopy(mod)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.add_(1)
        check(copied)
    check(mod)


@pytest.mark.parametrize("name", ["another layer", "__getitem__", "contextvar", "tensor in a list, itself"])
def test_another_thread_gets_its_own(name: str) -> None:
    mod, change = PROBES[name]()
    check(mod)
    with ThreadPoolExecutor(1) as pool:  # of a thread without our context variables
        pool.submit(lambda: (change(), check(mod))).result()
    check(mod)


def mask_of(mask_mod: Mod) -> Tensor:
    return lowbit.create_block_mask(mask_mod, None, None, 256, 256, BLOCK_SIZE=16).to_dense()


def a_captured_bool() -> Probe:
    flag = torch.tensor(True)
    return (lambda b, h, q, k: flag), lambda: flag.logical_not_()


BODIES = {"number": "q - k < {} * 20", "tensor": "q - k < {}.detach() * 20"}
MASKS = {name: maker(name, BODIES[axis.kind], MASK) for name, axis in AXES.items()} | {"a captured bool": a_captured_bool}


@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_is_never_stale(name: str) -> None:
    mask_mod, change = MASKS[name]()
    for step in range(3):
        wanted = torch_flex.create_block_mask(mask_mod, None, None, 256, 256, "cpu", BLOCK_SIZE=16).to_dense()
        assert torch.equal(mask_of(mask_mod), wanted)
        if step == 0:
            change()


def test_what_is_known_is_traced_once() -> None:
    """Else every call of an ordinary mod would be traced."""
    module, space = Relative(), types.SimpleNamespace(gain=2.0)
    read = [maker(name, "s + {}")()[0] for name in ("dataclass", "__slots__", "property", "method", "a helper's list", "a module's attribute")]
    bias, ids = parameter(H, L, L), torch.arange(L)
    partial = functools.partial(lambda gain, s, b, h, q, k: s * gain, 2.0)
    mods: list[Mod] = [
        module,
        module.forward,
        *read,
        lambda s, b, h, q, k: s * space.gain,
        lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s + bias[h, q, k], -torch.inf),
        lambda s, b, h, q, k: nn.functional.softplus(s).to(torch.float32).abs() + max(1, 2) + sum([0.5 for _ in range(3)]),
        lambda s, b, h, q, k: partial(s, b, h, q, k),
        lowbit.attention.mods.alibi(H),
        lowbit.attention.mods.softcap(2.0),
        lowbit.attention.mods.learned_bias(bias),
    ]
    masks = lowbit.attention.masks
    mask_mods = [masks.causal & masks.document(ids), masks.document(ids, masks.causal) | masks.sliding_window(3), ~masks.prefix_lm(ids), lowbit.noop_mask,
                 lowbit.and_masks(masks.causal, lambda b, h, q, k: ids[q] == 1), masks.natten(3, 3, 3), masks.global_window(2, ids > 3)]  # fmt: skip
    for _ in range(2):  # the names that one code reaches are learned from all mods made of it
        for mod in mods:
            program_cache.bind("test", mod, mask=False)
        for mod in mask_mods:
            program_cache.bind("test", mod, mask=True)
    before = program_cache.traces
    for mod in mods:
        program_cache.bind("test", mod, mask=False)
        assert program_cache.traces == before, mod
    for mod in mask_mods:
        program_cache.bind("test", mod, mask=True)
        assert program_cache.traces == before, mod
