# SPDX-License-Identifier: Apache-2.0
"""distillation_loss: the divergence of whole logits and its gradients, and training by it beside training on labels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")

import lowbit  # noqa: E402
from lowbit.training import QATConfig, distillation_loss  # noqa: E402

WORDS = 96


def language_model(name: str = "Llama", seed: int = 0, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
            "attn_implementation": "sdpa", "tie_word_embeddings": False,
        }
        | more
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # probabilities that differ
    return model.eval()


def tokens(rows: int = 3, length: int = 20, seed: int = 1) -> Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def exactly(model: Any, teacher: Any, counted: Tensor, **inputs: Any) -> Tensor:
    """The mean divergence in float64, with all logits in memory."""
    with torch.no_grad():
        target = teacher(**inputs).logits.double()[counted].log_softmax(-1)
    return (target.exp() * (target - model(**inputs).logits.double()[counted].log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("prepared", [False, True])
def test_it_is_the_divergence_of_whole_logits(rows: int, prepared: bool) -> None:
    teacher, model = language_model(seed=0), language_model(seed=1)
    if prepared:
        lowbit.quantize_(model, QATConfig(lowbit.int4_weight_only(32)), head=lowbit.int8_weight_only(32))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(torch.arange(20) < 5, -100)
    everything = torch.ones(3, 20, dtype=torch.bool)
    answers = functional.pad(labels[:, 1:] != -100, (0, 1))
    for given, counted in (
        ({}, everything),
        ({"attention_mask": mask}, mask.bool()),
        ({"labels": labels}, answers),
    ):
        model.zero_grad()
        loss = distillation_loss(model, teacher, rows=rows, input_ids=ids, **given)
        loss.backward()
        ours = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        wanted = exactly(model, teacher, counted, input_ids=ids, attention_mask=given.get("attention_mask"))
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-7)
        for name, p in model.named_parameters():
            assert (ours[name] - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, name
    assert all(p.grad is None for p in teacher.parameters())


def test_a_model_does_not_diverge_from_itself() -> None:
    model = language_model()
    assert abs(distillation_loss(model, model, input_ids=tokens())) < 1e-6


def test_over_a_packed_base_adapters_are_trained() -> None:
    peft = pytest.importorskip("peft")
    teacher, model = language_model(), language_model()
    lowbit.quantize_(model, lowbit.intx_weight_only(torch.int2, 32))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    loss = distillation_loss(model, teacher, input_ids=tokens())
    loss.backward()
    assert loss > 0.01 and all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def _noted(calls: list[int], layer: nn.Module, head: nn.Module, x: Tensor) -> None:
    if layer is head:
        calls.append(x.shape[-2])


@pytest.mark.parametrize("form", ["packed", "prepared"])
def test_of_linear_heads_no_head_is_called_with_more_than_a_token(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is rounded in training is called; of one that is packed or float, the weight is read."""
    teacher, model, calls = language_model(seed=0), language_model(seed=1), []
    config = lowbit.int8_weight_only(32)
    lowbit.quantize_(model, config if form == "packed" else QATConfig(config), head=config)
    kind = type(model.lm_head)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: _noted(calls, self, model.lm_head, x) or forward(self, x))
    exact = exactly(model, teacher, torch.ones(3, 20, dtype=torch.bool), input_ids=tokens())
    calls.clear()
    torch.testing.assert_close(distillation_loss(model, teacher, input_ids=tokens()).double(), exact, rtol=1e-5, atol=1e-7)
    assert (max(calls) == 1) is (form == "packed")


def written_by(teacher: Any, rows: int, length: int) -> Tensor:
    torch.manual_seed(5)
    begin = torch.randint(1, WORDS, (rows, 1))
    return teacher.generate(begin, max_new_tokens=length - 1, do_sample=True, eos_token_id=None, pad_token_id=0)


def trained(teacher: Any, ids: Tensor, distilled: bool, steps: int) -> tuple[nn.Module, list[float]]:
    config, losses = lowbit.intx_weight_only(torch.int2, 32), []
    model = copy.deepcopy(teacher).train()
    lowbit.quantize_(model, QATConfig(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = ids[step % 4 :: 4]
        loss = distillation_loss(model, teacher, input_ids=batch) if distilled else model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    lowbit.quantize_(model, QATConfig(config, step="convert"))
    return model.eval(), losses


def test_training_by_it_ends_nearer_to_the_teacher_than_training_on_labels() -> None:
    teacher = language_model(num_hidden_layers=1)
    ids, others = written_by(teacher, 32, 24), written_by(teacher, 16, 24)
    distances = {}
    for distilled in (True, False):
        model, losses = trained(teacher, ids, distilled, 60)
        with torch.no_grad():
            distances[distilled] = float(distillation_loss(model, teacher, input_ids=others))
        if distilled:
            assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    assert distances[True] < 0.7 * distances[False], distances


def test_bad_input_is_refused_by_name() -> None:
    teacher, model, ids = language_model(), language_model(), tokens()
    for given, message in {
        "train": "teacher must be in eval mode",
        "rows": "rows must be positive, got 0",
        "words": "teacher must have the vocabulary of the model, 96 words, got 80",
        "none": "a token must count",
        "labels": r"labels must be \[3, 20\], got \[3, 19\]",
    }.items():
        other = {"words": lambda: language_model(vocab_size=80), "train": lambda: language_model().train()}
        more = {
            "rows": {"rows": 0}, "none": {"labels": torch.full_like(ids, -100)}, "labels": {"labels": ids[:, 1:]},
        }.get(given, {})  # fmt: skip
        with pytest.raises(ValueError, match=f"distillation_loss: {message}"):
            distillation_loss(model, other.get(given, lambda: teacher)(), input_ids=ids % 80, **more)
    with pytest.raises(TypeError, match="model must be a language model of transformers.* got Linear"):
        distillation_loss(nn.Linear(2, 2), teacher, input_ids=ids)
    capped = language_model("Gemma2", final_logit_softcapping=3.0, attn_implementation="eager")
    with pytest.raises(ValueError, match="teacher must return the logits of its output head as they are; Gemma2ForCausalLM"):
        distillation_loss(model, capped, input_ids=ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in capped.modules())
