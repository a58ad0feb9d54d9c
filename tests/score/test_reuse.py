# SPDX-License-Identifier: Apache-2.0
"""A program is reused only where it still fits: whatever a mod reads, and however, results and gradients are those of the mod called score by score.

Each probe makes an object, a mod that reads it through one Python protocol, and a change of it. The mod is run, changed, run again, made anew from
the same code, copied, and run in another thread.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reuse_probes
import torch
from reuse_probes import (
    PROBES,
    STATE,
    TABLE,
    Caches,
    Config,
    E,
    H,
    L,
    Mod,
    Probe,
    Relative,
    Slotted,
    first_of_table,
    parameter,
)
from reuse_protocols import Protocols
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex

import lowbit
from lowbit.score import program_cache


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    random.seed(0)
    STATE["gain"], Caches.shared, TABLE[0] = 1.0, 1.0, 1.0
    reuse_probes.GAIN = 1.0
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


@pytest.mark.parametrize("name", ["parameter_list_by_attribute", "getitem", "context_variable", "captured_tensor_itself"])
def test_another_thread_gets_its_own(name: str) -> None:
    mod, change = PROBES[name]()
    check(mod)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            change()
            check(mod)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed
    check(mod)


def mask_of(mask_mod: Mod) -> Tensor:
    return lowbit.create_block_mask(mask_mod, None, None, 256, 256, BLOCK_SIZE=16).to_dense()


MASKS: dict[str, Callable[[], Probe]] = {}


def mask_probe(make: Callable[[], Probe]) -> Callable[[], Probe]:
    MASKS[make.__name__] = make
    return make


@mask_probe
def length_of_an_object() -> Probe:
    thing = Protocols()
    return (lambda b, h, q, k: q - k < len(thing) * 5), lambda: setattr(thing, "values", [9.0])


@mask_probe
def length_of_a_list() -> Probe:
    thing = [0] * 20
    return (lambda b, h, q, k: q - k < len(thing)), lambda: thing.extend([0] * 80)


@mask_probe
def a_captured_bool() -> Probe:
    flag = torch.tensor(True)
    return (lambda b, h, q, k: flag), lambda: flag.logical_not_()


@mask_probe
def a_window_of_an_object() -> Probe:
    config = Config(30.0)
    return (lambda b, h, q, k: q - k < config.gain), lambda: setattr(config, "gain", 100.0)


@mask_probe
def an_environment() -> Probe:
    os.environ["LOWBIT_TEST_GAIN"] = "30"
    return (lambda b, h, q, k: q - k < int(os.environ["LOWBIT_TEST_GAIN"])), lambda: os.environ.update(LOWBIT_TEST_GAIN="100")


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
    module, config = Relative(), Config()
    slotted, caches, space = Slotted(), Caches(), types.SimpleNamespace(gain=2.0)
    bias, ids = parameter(H, L, L), torch.arange(L)
    partial = functools.partial(lambda gain, s, b, h, q, k: s * gain, 2.0)
    mods: list[Mod] = [
        module,
        module.forward,
        lambda s, b, h, q, k: s * config.gain + slotted.gain + caches.doubled + caches.method() + space.gain + reuse_probes.GAIN + first_of_table(),
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
