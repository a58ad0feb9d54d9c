# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one row: attention of each by itself, beside transformers' with its mask [1, 1, L, L]."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    sdpa_mask,
)

import lowbit  # noqa: E402
from lowbit.models.document_mask import DocumentMask, document_mask  # noqa: E402

LENGTHS = (37, 1, 90, 22)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "window": ("MistralForCausalLM", {"sliding_window": 40}),
    "window and softcap": ("Gemma2ForCausalLM", {"sliding_window": 24, "attn_logit_softcapping": 2.0}),
    "window and sinks": ("GptOssForCausalLM", {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "two kinds of layers": ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
}


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def model_of(kind: str, attention: str) -> Any:
    name, more = MODELS[kind]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**SIZES, **more)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return model_class(config).train()


def config_of(attention: str = "lowbit", **more: Any) -> Any:
    config = transformers.LlamaConfig(**SIZES, **more)
    config._attn_implementation = attention
    return config


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients_are_those_of_the_dense_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentMask, "read", lambda self: pytest.fail("the elements of the mask were made"))
    ours = model_of(kind, "lowbit")
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    ids = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "position_ids": positions(*LENGTHS), "use_cache": False}
    logits, wanted = ours(**given).logits, theirs(**given).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (wanted * weights).sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-6, name


def test_a_document_has_no_gradient_by_another() -> None:
    model = model_of("window", "lowbit")
    x = torch.randn(1, sum(LENGTHS), 32, requires_grad=True)
    out = model.model(inputs_embeds=x, position_ids=positions(*LENGTHS), use_cache=False).last_hidden_state
    start = 0
    for length in LENGTHS:
        inside = torch.zeros(sum(LENGTHS), dtype=torch.bool)
        inside[start : start + length] = True
        (grad,) = torch.autograd.grad(out[0, inside].square().sum(), x, retain_graph=True)
        assert not grad[0, ~inside].any() and grad[0, inside].any(-1).all()
        start += length


def test_checkpointed_layers_and_evaluation() -> None:
    model = model_of("window", "lowbit")
    ids = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "position_ids": positions(*LENGTHS), "labels": ids, "use_cache": False}
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(**given).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
    with torch.no_grad():
        loss = model.eval()(**given).loss
        dense = copy.deepcopy(model)
        dense.set_attn_implementation("sdpa")
        torch.testing.assert_close(loss, dense(**given).loss, rtol=1e-5, atol=1e-6)


def test_a_fused_model_reads_the_mask() -> None:
    model = model_of("llama", "lowbit").eval()
    ids = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "position_ids": positions(*LENGTHS), "use_cache": False}
    with torch.no_grad():
        wanted = model(**given).logits
        lowbit.quantize_(model, lowbit.float_weight(torch.float32))
        lowbit.fuse(model)
        torch.testing.assert_close(model(**given).logits, wanted, rtol=1e-4, atol=1e-5)


def mask(attention: str, lengths: tuple[int, ...], make: Any = create_causal_mask, **more: Any) -> Any:
    x = torch.zeros(1, sum(lengths), 32)
    given = {"attention_mask": None, "past_key_values": None, "position_ids": positions(*lengths)} | more
    return make(config_of(attention, attention_chunk_size=8), given.pop("inputs_embeds", x), **given)


def test_whatever_reads_the_mask_gets_the_one_of_transformers() -> None:
    wanted = mask("sdpa", LENGTHS)
    for read in (lambda m: m & True, lambda m: m[:, :, 5:80, :99], lambda m: torch.where(m, 0.0, 1.0), torch.logical_not):
        made = mask("lowbit", LENGTHS)
        assert type(made) is DocumentMask and made.lengths == list(LENGTHS)
        assert (made.shape, made.dtype, made.device, made.dim()) == (wanted.shape, wanted.dtype, wanted.device, 4)
        assert made.made is None
        assert torch.equal(read(made), read(wanted))
    assert torch.equal(torch.ops.aten.bitwise_not(mask("lowbit", LENGTHS)), ~wanted)  # past Python


def test_other_masks_are_as_they_were() -> None:
    two = {"inputs_embeds": torch.zeros(2, sum(LENGTHS), 32)}
    always = lambda b, h, q, k: q >= 0 * k  # noqa: E731
    for lengths, more in {
        LENGTHS: two,  # a batch of 2
        (3,) * 40: {},  # a call for each document would not pay
        (40, 40): {"make": create_chunked_causal_mask},
        (41, 40): {"or_mask_function": always},
        (42, 40): {"and_mask_function": always},
        (43, 40): {"attention_mask": torch.ones(1, 83, dtype=torch.long)},
    }.items():
        ours, theirs = mask("lowbit", lengths, **more), mask("sdpa", lengths, **more)
        assert type(ours) is not DocumentMask
        assert ours is theirs is None or torch.equal(ours, theirs)
    for function in (causal_mask_function, bidirectional_mask_function, None, len):
        assert document_mask(sdpa_mask, {"batch_size": 1, "q_length": 9, "mask_function": function}) is None
