# SPDX-License-Identifier: Apache-2.0
"""Functions of trl over packed heads: bit for bit what they give for the decoded weight, a part of it at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantLinear
from lowbit.huggingface import fused_head
from lowbit.huggingface.fused_head import DecodedRows, ServedHead, with_globals

pytest.importorskip("trl")
from trl.kernels import chunked_divergence  # noqa: E402
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # noqa: E402
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction  # noqa: E402

N, K, TOKENS = 83, 64, 11  # the last panel is not full
CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "int8_groups": lowbit.int8_dynamic_activation_int8_weight(32),
    "int4_asymmetric": lowbit.int4_weight_only(32, mapping_type=lowbit.MappingType.ASYMMETRIC),
    "nf4": lowbit.nf4_weight_only(64),
    "float8": lowbit.float8_weight_only(),
    "float": lowbit.float_weight(),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed_head(config: Any, bias: bool = True, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(K, N, bias=bias))
    lowbit.quantize_(model, config)
    return model[0]


def log_probs(function: Any, hidden: Tensor, weight: Any, bias: Tensor | None, chunk: int) -> list[Tensor]:
    """All outputs, and the gradients of hidden states and bias, where the bias has one."""
    hidden = hidden.clone().requires_grad_()
    targets = torch.arange(TOKENS) * 7 % N
    outputs = function.apply(hidden, weight, bias, targets, 0.7, chunk, 3.0, 1.5, OPTIONAL_OUTPUTS)
    wanted = [hidden, bias] if bias is not None and bias.requires_grad else [hidden]
    return [*outputs, *torch.autograd.grad((outputs[0] * 0.3 + outputs[1] * 0.2).sum(), wanted)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_the_decoded_weight(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = packed_head(CONFIGS[name])
    asked = []
    decode = fused_head.decoded_rows
    monkeypatch.setattr(fused_head, "decoded_rows", lambda *args: asked.append(args[2:4]) or decode(*args))
    hidden = torch.randn(TOKENS, K, dtype=dtype)
    served = ServedHead(ChunkedLogProbFunction, {1: lambda: head})
    for chunk in (32768, 27):  # 27: parts begin and end inside of panels
        asked.clear()
        got = log_probs(served, hidden, head.weight, head.bias, chunk)
        wanted = log_probs(ChunkedLogProbFunction, hidden, head.dequantize(dtype), head.bias, chunk)
        assert len(got) == 7 and all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
        assert got[-2].abs().sum() > 0
        parts = [(start, min(start + chunk, N)) for start in range(0, N, chunk)]
        assert asked == parts * 2, "each part is decoded once in the forward and once in the backward"


def test_a_packed_weight_has_no_gradient_and_autocast_is_that_of_the_function() -> None:
    head = packed_head(CONFIGS["int8"], bias=False)
    hidden = torch.randn(TOKENS, K)
    with torch.autocast("cpu", torch.bfloat16):
        got = log_probs(ServedHead(ChunkedLogProbFunction, {1: lambda: head}), hidden, head.weight, None, 32)
        wanted = log_probs(ChunkedLogProbFunction, hidden, head.dequantize(), None, 32)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert head.weight.grad is None and not head.weight.requires_grad


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("packed", ["both", "student", "teacher"])
def test_divergences_are_those_of_the_decoded_weights(
    packed: str, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 27)
    heads = {1: packed_head(CONFIGS["int8"]), 4: packed_head(CONFIGS["nf4"], seed=1)}
    chosen = {position: heads[position] for position in {"both": (1, 4), "student": (1,), "teacher": (4,)}[packed]}
    served = ServedHead(ChunkedDivergenceFunction, {at: (lambda head=head: head) for at, head in chosen.items()})
    student, teacher = torch.randn(TOKENS, K), torch.randn(TOKENS, K)

    def run(function: Any, weights: dict[int, Any]) -> list[Tensor]:
        hidden = student.clone().requires_grad_()
        divergence, entropy = function.apply(
            hidden, weights[1], heads[1].bias, teacher, weights[4], heads[4].bias, beta, 1.3
        )
        return [divergence, entropy, *torch.autograd.grad((divergence**2).sum(), [hidden, heads[1].bias])]

    floats = {at: head.dequantize() for at, head in heads.items()}
    got = run(served, floats | {at: head.weight for at, head in chosen.items()})
    wanted = run(ChunkedDivergenceFunction, floats)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_nothing_but_the_packed_weight_is_kept_for_the_backward() -> None:
    head = packed_head(CONFIGS["int8"], bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        log_probs(ServedHead(ChunkedLogProbFunction, {1: lambda: head}), torch.randn(TOKENS, K), head.weight, None, 32)
    assert any(tensor.data_ptr() == head.weight.data_ptr() for tensor in kept)
    assert not any(tensor.numel() >= N * K and tensor.is_floating_point() for tensor in kept)


def test_a_head_that_is_float_or_fake_quantized_now_is_taken_as_it_is() -> None:
    layer = nn.Linear(K, N, bias=False)
    hidden = torch.randn(TOKENS, K)
    served = ServedHead(ChunkedLogProbFunction, {1: lambda: layer})
    wanted = log_probs(ChunkedLogProbFunction, hidden, layer.weight, None, 32)
    assert all(
        torch.equal(*pair) for pair in zip(log_probs(served, hidden, layer.weight, None, 32), wanted, strict=True)
    )
    lowbit.quantize_(nn.Sequential(layer), lowbit.training.QATConfig(lowbit.int4_weight_only(32)))
    rounded = log_probs(ChunkedLogProbFunction, hidden, layer.fake_quantized_weight(), None, 32)
    assert not torch.equal(rounded[0], wanted[0])
    assert all(
        torch.equal(*pair) for pair in zip(log_probs(served, hidden, layer.weight, None, 32), rounded, strict=True)
    )


def test_bytes_that_were_cast_are_refused_and_slices_with_a_step() -> None:
    head = packed_head(CONFIGS["int8"])
    served = ServedHead(ChunkedLogProbFunction, {1: lambda: head})
    with pytest.raises(NotImplementedError, match="must come as its bytes, uint8, got torch.float32"):
        served.apply(torch.randn(TOKENS, K), head.weight.float())
    rows = DecodedRows(head.weight, head.op_args[:-1], torch.empty(0))
    assert rows.shape == (N, K) and rows[5:5].shape == (0, K) and torch.equal(rows[:], head.dequantize())
    assert torch.equal(rows[-3:], head.dequantize()[-3:])
    with pytest.raises(NotImplementedError, match="the step of a slice must be 1, got 2"):
        rows[::2]


def _scaled(x: int, *, by: int = 2) -> int:
    return _of_the_module(x) * by


def _of_the_module(x: int) -> int:
    return x + 1


def test_a_copy_with_other_globals_leaves_the_function_and_its_module() -> None:
    copied = with_globals(_scaled, _of_the_module=lambda x: x + 100)
    assert copied(1) == 202 and copied(1, by=1) == 101
    assert _scaled(1) == 4 and _of_the_module(1) == 2 and copied.__wrapped__ is _scaled
