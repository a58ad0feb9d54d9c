# SPDX-License-Identifier: Apache-2.0
"""Training with TRL end to end: packed documents that do not see each other, bases of several formats with LoRA and DoRA,
checkpointed activations and 8-bit states, beside the same weights as floats in TRL."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write
from torch import Tensor, nn
from trl_runs import dpo, grpo, lora, losses, packing, quantized, sft

import lowbit

CONFIGS = {
    "int4": lowbit.int4_weight_only(32),
    "nf4": lowbit.nf4_weight_only(64),
    "float8": lowbit.float8_weight_only(),
}


def base(name: str, folder: Path, attention: str = "lowbit") -> Any:
    if name == "gguf":
        file = write(folder / "llama.gguf", "llama", "Q4_0", embedding="Q8_0", words=True)
        return lowbit.load_gguf(file, activations="float", fuse=False)[0].train()
    model = quantized(CONFIGS[name])
    model.set_attn_implementation(attention)
    return model


def gradients_by_document(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """For each document, the gradient of its loss by the embeddings of all tokens, ``[tokens, hidden]``."""
    embeddings: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        embeddings.append(out.detach().requires_grad_())
        return embeddings[-1]

    table = model.get_input_embeddings()
    handle = table.register_forward_hook(keep)
    log_probs = model(**batch, fused_lm_head=True).log_probs[0]
    handle.remove()
    ends = batch["cu_seq_lens_q"].tolist()
    parts = [log_probs[first : last - 1].sum() for first, last in zip(ends, ends[1:], strict=False)]
    made = [torch.autograd.grad(part, embeddings[-1], retain_graph=True)[0][0] for part in parts]
    return made


@pytest.mark.parametrize("kind", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
@pytest.mark.parametrize("attention", ["lowbit", "sdpa"])
def test_documents_do_not_see_each_other(attention: str, kind: dict[str, Any], tmp_path: Path) -> None:
    """The gradient of a document's loss by the embeddings of another is 0, every bit of it."""
    run = sft(base("int4", tmp_path, attention), tmp_path, lora(), **kind)
    batch = next(iter(run.get_train_dataloader()))
    assert "attention_mask" not in batch
    ends = batch["cu_seq_lens_q"].tolist()
    documents = list(zip(ends, ends[1:], strict=False))
    assert len(documents) >= 4
    for (first, last), gradient in zip(documents, gradients_by_document(run.model, batch), strict=True):
        inside = torch.zeros(len(gradient), dtype=torch.bool)
        inside[first:last] = True
        assert not gradient[~inside].any()
        assert last - first < 2 or gradient[inside][:-1].any(-1).all()


def test_packed_documents_have_the_losses_that_they_have_alone(tmp_path: Path) -> None:
    run = sft(base("nf4", tmp_path), tmp_path, lora(), packing=True)
    batch = next(iter(run.get_train_dataloader()))
    model, ends = run.model.eval(), batch["cu_seq_lens_q"].tolist()
    with torch.no_grad():
        together = model(**batch, fused_lm_head=True).log_probs[0]
        for first, last in zip(ends, ends[1:], strict=False):
            ids = batch["input_ids"][:, first:last]
            alone = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0]
            torch.testing.assert_close(together[first : last - 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, "gguf"])
def test_losses_are_those_of_trl_on_the_same_weights_as_floats(name: str, tmp_path: Path) -> None:
    """Products differ by the order of float32 sums, k + 9 roundings of 2^-24 with k of up to 128 (1e-5), which the
    layers, their norms and 3 steps carry on; states of 8 bits round to other codes where that decides."""
    model = base(name, tmp_path)
    floats = copy.deepcopy(model)
    lowbit.dequantize_(floats)
    for parameter in floats.parameters():
        parameter.requires_grad_(False)
    options = dict(
        packing=True, gradient_checkpointing=True, optim="adamw_8bit", optim_args="min_8bit_size=1",
        adapters=lora(use_dora=name == "nf4"),
    )  # fmt: skip
    ours = losses(sft(model, tmp_path, **copy.deepcopy(options)))
    theirs = losses(sft(floats, tmp_path, **copy.deepcopy(options)))
    print(ours, theirs)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours == pytest.approx(theirs, rel=1e-3) and ours[-1] < ours[0]


@pytest.mark.parametrize("run", [packing, dpo])
def test_checkpointed_activations_change_no_bit(run: Callable[..., Any], tmp_path: Path) -> None:
    model = base("int4", tmp_path)
    got = [losses(run(copy.deepcopy(model), tmp_path, lora(), gradient_checkpointing=on)) for on in (True, False)]
    assert got[0] == got[1] and len(got[0]) == 3


def test_grpo_generates_with_the_program_of_a_fused_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.models import fused_causal_lm

    file = write(tmp_path / "llama.gguf", "llama", "Q4_0", embedding="Q8_0", words=True)
    model = lowbit.load_gguf(file)[0].train()
    made: list[Any] = []
    plain = fused_causal_lm.Generation.result
    monkeypatch.setattr(fused_causal_lm.Generation, "result", lambda self, *ids: made.append(1) or plain(self, *ids))
    got = losses(grpo(model, tmp_path, lora()))
    assert len(got) == 3 and all(torch.tensor(got).isfinite()) and made
