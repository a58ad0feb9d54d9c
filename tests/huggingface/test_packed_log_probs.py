# SPDX-License-Identifier: Apache-2.0
"""TRL's log-probabilities over packed heads by linear_cross_entropy: every output and gradient against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import testing
from lowbit.huggingface.packed_log_probs import PackedLogProbs
from lowbit.reference import linear as reference_linear
from lowbit.reference import linear_cross_entropy as reference
from lowbit.reference.activations import quantize_activations
from lowbit.testing import ROUNDOFF, assert_within

pytest.importorskip("trl")
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction  # noqa: E402

N, K, TOKENS = 283, 64, 21
CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "int8 activations": lowbit.int8_dynamic_activation_int8_weight(),
    "int8 activations in groups": lowbit.int8_dynamic_activation_int8_weight(32),
    "int4": lowbit.int4_weight_only(32),
    "nf4": lowbit.nf4_weight_only(64),
    "float8": lowbit.float8_weight_only(),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = ("log_probs", *OPTIONAL_OUTPUTS)
CHUNK = 100


def head_of(config: Any, bias: bool = False) -> lowbit.QuantLinear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=bias))
    model[0].weight.data *= 3
    lowbit.quantize_(model, config)
    return model[0]


def served(head: nn.Module) -> PackedLogProbs:
    return PackedLogProbs(ChunkedLogProbFunction, lambda: head)


def targets_of(logits: Tensor) -> Tensor:
    """Every third the likeliest word, so that is_top1 has both values."""
    targets = torch.arange(TOKENS) * 7 % N
    targets[::3] = logits.argmax(-1)[::3]
    return targets


class Wanted:
    """All outputs, and gradients of hidden states, in float64, and the errors that they may have."""

    def __init__(self, hidden: Tensor, head: lowbit.QuantLinear, scale: float, factor: Tensor) -> None:
        spec = head.spec
        mapping = "asymmetric" if spec.asymmetric else "symmetric"
        decoded = testing.decode_weight(head.weight, N, K, spec.format, spec.group_size, mapping)
        weight = decoded.double() if isinstance(decoded, Tensor) else decoded.decode()
        logits = reference_linear.product(hidden, decoded, spec.x_format)
        magnitude = reference_linear.magnitude(hidden, decoded, spec.x_format)
        self.targets, self.u = targets_of(logits * scale), reference.U
        row = reference.linear_cross_entropy(logits, self.targets, scale=scale)
        of_loss, of_lse, of_s = reference.allowed_losses(row, logits, (K + 9) * self.u * magnitude, scale=scale)
        gradients, errors = reference.gradients(hidden, weight, self.targets, row, of_s, factor, scale=scale)
        one, of_one = reference.gradients(hidden, weight, self.targets, row, of_s, torch.ones(TOKENS), scale=scale)
        p, z = row.s.softmax(-1), row.s
        # x is what the product has: |x| <= the largest of its row, where it is rounded.
        x = hidden.double().abs().amax(-1, keepdim=True).expand_as(hidden) if spec.x_format != "float" else hidden.double().abs()
        of_dot = (x * (of_one.x + (K + 2) * self.u * one.x.abs())).sum(-1)
        doubled = reference.linear_cross_entropy(logits, self.targets, scale=2 * scale)
        of_doubled = reference.allowed_losses(doubled, logits, (K + 9) * self.u * magnitude, scale=2 * scale)[1]
        others = z.scatter(-1, self.targets[:, None], -torch.inf).amax(-1)
        gap = (z.gather(-1, self.targets[:, None])[:, 0] - others).abs()
        assert (gap > 2 * of_s.max()).all(), "rounding decides of no word whether it is the likeliest"
        self.outputs = {
            "log_probs": (-row.loss, of_loss),
            "entropy": (-(p * p.log()).sum(-1), of_loss + of_dot),
            "log_sum_sq_probs": (p.square().sum(-1).log(), of_doubled + 2 * of_lse + 4 * self.u * row.lse.abs()),
            "mean_logits": (z.mean(-1), of_s.mean(-1) + 2 * self.u * z.abs().mean(-1)),
        }
        self.top = z.argmax(-1) == self.targets
        self.gradient, self.of_gradient = gradients.x, errors.x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_outputs_and_gradients_are_within_budget_of_float64(name: str, dtype: torch.dtype) -> None:
    head, factor = head_of(CONFIGS[name]), torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) + 0.5
    for temperature, scale in ((1.0, 1.0), (0.7, 1.5)):
        hidden = torch.randn(TOKENS, K).to(dtype).requires_grad_()
        wanted = Wanted(hidden.detach(), head, scale / temperature, factor)
        got = served(head).apply(hidden, head.weight, None, wanted.targets, temperature, CHUNK, None, scale, ALL)
        named = dict(zip(ALL, got, strict=True))
        top = named.pop("is_top1")
        assert top.equal(wanted.top) and top.any() and not top.all()
        for output, (value, allowed) in wanted.outputs.items():
            assert named[output].dtype is torch.float32
            assert_within(named[output].detach(), value, allowed, f"{name} {output}")
        (gradient,) = torch.autograd.grad((named["log_probs"] * -factor).sum(), hidden)
        u = ROUNDOFF[str(dtype).removeprefix("torch.")]
        tiny = torch.finfo(dtype).smallest_normal
        allowed = wanted.of_gradient + (u + reference.U) * (wanted.gradient.abs() + wanted.of_gradient + tiny)
        assert gradient.dtype is dtype
        assert_within(gradient, wanted.gradient, allowed, f"{name} gradient")


def test_a_softcap_stands_before_the_temperature() -> None:
    head, hidden = head_of(CONFIGS["int8"]), torch.randn(TOKENS, K)
    logits = 3.0 * torch.tanh(hidden.double() @ head.dequantize().double().T * 1.5 / 3.0) / 0.7
    targets = targets_of(logits)
    given = targets, 0.7, CHUNK, 3.0, 1.5
    wanted = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    got, *none = served(head).apply(hidden, head.weight, None, *given, ("log_probs",))
    assert none == [None] * 4
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=(K + 40) * 3 * reference.U * 10)
    *_, entropy, _, _, _ = served(head).apply(hidden, head.weight, None, *given, ALL)  # by decoded rows
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int8 activations"])
def test_entropies_have_a_gradient(name: str) -> None:
    head, hidden = head_of(CONFIGS[name]), torch.randn(TOKENS, K, requires_grad=True)
    targets = torch.arange(TOKENS)
    got = served(head).apply(hidden, head.weight, None, targets, 0.7, CHUNK, None, 1.0, ("log_probs", "entropy"))
    (gradient,) = torch.autograd.grad((got[0] * 0.3 + got[1].square()).sum(), hidden)
    wide = hidden.detach().double()
    if name != "int8":
        wide = quantize_activations(hidden.detach(), head.spec.x_format, 0).decode()
    wide.requires_grad_()  # straight-through
    z = wide @ head.dequantize().double().T / 0.7
    p = z.log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    (p.gather(-1, targets[:, None]).sum() * 0.3 + entropy.square().sum()).backward()
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_a_bias_is_served_by_decoded_rows_with_its_gradient() -> None:
    head, hidden, targets = head_of(CONFIGS["nf4"], bias=True), torch.randn(TOKENS, K), torch.arange(TOKENS)
    given = targets, 1.0, CHUNK, None, 1.0, ALL

    def run(function: Any, weight: Tensor) -> list[Tensor]:
        outputs = function.apply(hidden, weight, head.bias, *given)
        return [*outputs, *torch.autograd.grad(outputs[0].sum(), head.bias)]

    got, wanted = run(served(head), head.weight), run(ChunkedLogProbFunction, head.dequantize())
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_no_logits_and_no_decoded_head_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = head_of(CONFIGS["int4"]), torch.randn(TOKENS, K, requires_grad=True)
    made: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            tensors = out if isinstance(out, tuple) else (out,)
            made.extend(t.numel() for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
            return out

    with Sizes():
        outputs = served(head).apply(hidden, head.weight, None, torch.arange(TOKENS), 1.0, CHUNK, None, 1.0, ALL[:2])
        outputs[0].sum().backward()
    assert made and max(made) <= TOKENS * K < min(TOKENS * N, N * K)


def test_no_row_and_equal_logits() -> None:
    head = head_of(CONFIGS["int8"])
    got = served(head).apply(torch.randn(0, K), head.weight, None, torch.arange(0), 1.0, CHUNK, None, 1.0, ALL)
    assert all(value.shape == (0,) for value in got)
    hidden = torch.zeros(TOKENS, K)  # all words are as likely
    got = served(head).apply(hidden, head.weight, None, torch.arange(TOKENS), 1.0, CHUNK, None, 1.0, ALL)
    assert not got[-1].any()
    torch.testing.assert_close(got[1], torch.full((TOKENS,), float(torch.tensor(N).log())))
