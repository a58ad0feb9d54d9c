# SPDX-License-Identifier: Apache-2.0
"""fuse_loss: the loss and gradients of transformers' models without logits, which are made where they are read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import MODELS, transformers
from torch import Tensor, nn

import lowbit
from lowbit.models import fused_loss
from lowbit.models.fused_loss import DeferredLogits
from lowbit.testing import ROUNDOFF

CONFIGS = {
    "int4": lowbit.int4_weight_only(32),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(32),
    "float": None,
}
IDS = torch.arange(24).view(2, 12) * 7 % 97
LABELS = IDS.clone()
LABELS[0, :5] = -100


def model_of(config: Any, name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    cls, settings = MODELS[name]
    torch.manual_seed(0)
    model = cls(copy.deepcopy(settings)).to(dtype).train()
    if config is not None:
        lowbit.quantize_(model, config)
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: DeferredLogits) -> Tensor:
        raise AssertionError("logits were read")

    monkeypatch.setattr(DeferredLogits, "read", read)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_the_logits(
    name: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget: a loss has the errors of two logits, k + 9 roundings of sum |x| |w| in float32; torch rounds logits to
    the dtype of the model. Gradients differ by the same, relatively, and by their roundings to that dtype, one for each
    product of the two layers that they pass."""
    model = model_of(CONFIGS[name], dtype=dtype)
    plain = model(IDS, labels=LABELS, **options)
    wanted = gradients(model, plain.loss)
    largest = float(plain.logits.abs().max())
    fused = lowbit.fuse_loss(model)
    assert fused is model and lowbit.fuse_loss(model) is model
    no_logits(monkeypatch)
    out = model(IDS, labels=LABELS, **options)
    u = ROUNDOFF[str(dtype).removeprefix("torch.")]
    items = 1 if not options else (LABELS[:, 1:] != -100).sum() / 7
    assert abs(out.loss - plain.loss) <= items * (2 * u * largest + 2 * 73 * 2.0**-24 * 8 * largest)
    got = gradients(model, out.loss)
    assert got.keys() == wanted.keys() and ("lm_head.weight" in got) == (name == "float")
    for key, value in wanted.items():
        assert (got[key] - value).norm() <= 32 * u * value.norm() + 1e-5 * value.norm(), key


def test_shifted_labels_tied_tables_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["int4"], "tied")
    shifted = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
    wanted = model(IDS, labels=LABELS).loss
    with torch.autocast("cpu", torch.bfloat16):
        of_autocast = model(IDS, labels=LABELS).loss
    lowbit.fuse_loss(model)
    no_logits(monkeypatch)
    got = model(IDS, labels=LABELS, shift_labels=shifted).loss
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(IDS, labels=LABELS)
    torch.testing.assert_close(out.loss, of_autocast, rtol=4 * ROUNDOFF["bfloat16"], atol=0)
    assert out.logits.float().dtype is torch.float32 and out.logits.dtype is torch.bfloat16  # as accelerate casts


def test_logits_that_are_read_are_those_of_the_head_with_their_gradient() -> None:
    model = model_of(CONFIGS["w4a8"])
    plain = model(IDS)
    wanted = gradients(model, plain.logits.square().sum())
    lowbit.fuse_loss(model)
    out = model(IDS, labels=LABELS)
    assert type(out.logits) is DeferredLogits and out.logits.shape == plain.logits.shape and out.logits.ndim == 3
    with torch.no_grad():
        best = out.logits.argmax(-1)  # a metric, before the loss of logits
    assert best.equal(plain.logits.argmax(-1)) and type(out.logits[0]) is Tensor
    assert torch.equal(out.logits, plain.logits)
    got = gradients(model, out.logits.square().sum())
    assert all(got[name].equal(wanted[name]) for name in wanted)
    with torch.no_grad():
        assert type(model(IDS, labels=LABELS).logits) is Tensor


def test_a_model_that_caps_its_logits_keeps_its_loss() -> None:
    torch.manual_seed(0)
    given = MODELS["llama"][1].to_dict() | {"head_dim": 16, "final_logit_softcapping": 3.0}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "final_logit_softcapping")  # fmt: skip
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{name: given[name] for name in names})).train()
    lowbit.quantize_(model, CONFIGS["int4"])
    plain = model(IDS, labels=LABELS)
    wanted = gradients(model, plain.loss)
    out = lowbit.fuse_loss(model)(IDS, labels=LABELS)
    assert out.loss.equal(plain.loss) and type(out.logits) is Tensor
    got = gradients(model, out.loss)
    assert all(got[name].equal(wanted[name]) for name in wanted)


def test_copies_have_their_own_head_and_other_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowbit.fuse_loss(model_of(CONFIGS["int4"]))
    other, twin = model_of(CONFIGS["int4"]), copy.deepcopy(model)
    assert twin.lm_head.forward.__self__ is twin.lm_head
    no_logits(monkeypatch)
    assert twin(IDS, labels=LABELS).loss.equal(model(IDS, labels=LABELS).loss)
    assert type(other(IDS, labels=LABELS).logits) is Tensor
    assert transformers.loss.loss_utils.LOSS_MAPPING["ForCausalLM"] is fused_loss.ForCausalLMLoss


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="fuse_loss: model must be a language model of transformers .*, got Linear"):
        lowbit.fuse_loss(nn.Linear(2, 2))
    model = model_of(CONFIGS["int4"])
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="the loss of the model must be ForCausalLMLoss, got <lambda>"):
        lowbit.fuse_loss(model)
    prepared = model_of(lowbit.training.QATConfig(lowbit.int4_weight_only(32)))
    with pytest.raises(ValueError, match="the output head must be an nn.Linear or QuantLinear with its own forward"):
        lowbit.fuse_loss(prepared)
    assert "forward" not in vars(prepared.lm_head)
