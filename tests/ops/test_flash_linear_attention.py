# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule of CUDA tensors goes to flash-linear-attention. The package is emulated: modules of its names with
functions of its documented signatures, which compute by the float64 reference. No GPU is needed or tested."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from test_gated_delta_rule import made
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit
from lowbit.ops.flash_linear_attention import gated_delta_rule_by_fla
from lowbit.reference import linear_attention as reference

Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The emulated package; the calls of its functions."""
    calls: Calls = []

    def function(name: str) -> Any:
        def emulated(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: None = None, gv: None = None, beta: Tensor | None = None,
            scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
            cu_seqlens: Tensor | None = None, **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
            assert not kwargs and gk is gv is None and beta is not None and output_final_state and q.shape[:3] == k.shape[:3] == v.shape[:3]
            assert initial_state is None or initial_state.dtype == torch.float32
            assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
            calls.append((name, {"scale": scale, "l2norm": use_qk_l2norm_in_kernel}))
            if q.is_cuda:  # without data
                return torch.empty_like(v), q.new_empty(q.shape[0], v.shape[2], q.shape[3], v.shape[3]).float()
            o, state = reference.gated_delta_rule(
                q, k, v, g, beta, initial_state, scale=scale, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens
            )
            return o.to(v.dtype), state.float()

        return emulated

    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for room, ending in (("gated_delta_rule", "gated_delta_rule"), ("kda", "kda")):
        for name in (f"chunk_{ending}", f"fused_recurrent_{ending}"):
            setattr(modules[f"fla.ops.{room}"], name, function(name))
    return calls


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_functions_get_what_they_want(fla: Calls, dtype: torch.dtype, tokens: int, per_channel: bool) -> None:
    """With CPU tensors, which the emulation can compute: groups of heads, states in both dtypes, packed sequences."""
    ending = "kda" if per_channel else "gated_delta_rule"
    for state_dtype in (None, torch.float32, torch.bfloat16):
        call = made((2, tokens, 2, 4, 16, 24), dtype, per_channel=per_channel, with_state=state_dtype is not None)
        call["state"] = None if state_dtype is None else call["state"].to(state_dtype)
        packed = {name: each.flatten(0, 1)[None] for name, each in call.items() if name != "state"}
        ends = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
        for tensors, boundaries in ((call, None), (packed | {"state": call["state"]}, ends)):
            fla.clear()
            o, state = gated_delta_rule_by_fla(*tensors.values(), l2norm=True, scale=0.3, cu_seqlens=boundaries)
            of_token = tensors["q"].shape[1] == 1
            assert fla == [(f"{'fused_recurrent' if of_token else 'chunk'}_{ending}", {"scale": 0.3, "l2norm": True})]
            wanted = lowbit.gated_delta_rule(**tensors, l2norm=True, scale=0.3, cu_seqlens=boundaries)
            for ours, theirs in zip((o, state), wanted, strict=True):
                assert ours.dtype is theirs.dtype
                torch.testing.assert_close(ours, theirs)


def test_gradients_go_through_the_function_that_has_them(fla: Calls) -> None:
    """fla's recurrent function has no backward, so that a token with gradients goes through the chunks too."""
    call = made((2, 1, 2, 4, 16, 24))
    leaves = [tensor.requires_grad_() for tensor in call.values()]
    o, state = gated_delta_rule_by_fla(*leaves, l2norm=True, scale=0.3, cu_seqlens=None)
    assert fla[0][0] == "chunk_gated_delta_rule"
    found = torch.autograd.grad(o.sum() + state.sum(), leaves)
    o, state = lowbit.gated_delta_rule(*leaves, l2norm=True, scale=0.3)
    for ours, theirs in zip(found, torch.autograd.grad(o.sum() + state.sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def cuda_call() -> dict[str, Tensor]:
    return {name: torch.empty(tensor.shape, device="cuda") for name, tensor in made((2, 5, 2, 4, 16, 24)).items()}


def test_cuda_tensors_go_there(fla: Calls) -> None:
    with FakeTensorMode():  # tensors without data may be on any device
        o, state = lowbit.gated_delta_rule(**cuda_call())
        assert o.is_cuda and o.shape == (2, 5, 4, 24) and state.shape == (2, 4, 16, 24)
        assert fla == [("chunk_gated_delta_rule", {"scale": 0.25, "l2norm": False})]
        with pytest.raises(ValueError, match=r"gated_delta_rule: beta must have shape \[2, 5, 4\], got \[2, 5, 3\]"):
            lowbit.gated_delta_rule(**cuda_call() | {"beta": torch.empty(2, 5, 3, device="cuda")})
    assert len(fla) == 1


def test_without_the_package_they_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="CUDA tensors are served through the package flash-linear-attention alone, which is not installed: pip install"):
        lowbit.gated_delta_rule(**cuda_call())


def test_a_package_without_the_function_is_named(fla: Calls) -> None:
    del sys.modules["fla.ops.kda"].chunk_kda
    call = made((2, 5, 4, 4, 16, 24), per_channel=True)
    with pytest.raises(NotImplementedError, match="of which fla.ops.kda.chunk_kda cannot be imported: .*chunk_kda"):
        gated_delta_rule_by_fla(*call.values(), l2norm=True, scale=1.0, cu_seqlens=None)


def test_a_call_that_a_version_refuses_is_refused_in_words(fla: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ChunkGatedDeltaRuleFunction does not support float32")

    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", refuse)
    call = made((1, 20, 2, 2, 16, 16), torch.float32)
    with pytest.raises(NotImplementedError, match="gated_delta_rule: flash-linear-attention refuses this call: .* float32"):
        gated_delta_rule_by_fla(**call, l2norm=False, scale=0.25, cu_seqlens=None)
