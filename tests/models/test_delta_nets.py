# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse of gated delta nets: Qwen3-Next, Qwen3.5, OLMo-hybrid and Kimi-Linear say what they said before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, logits, prompt, transformers
from hybrids import BUDGET, close, padded, same_gradients
from torch import Tensor, nn

import lowbit
from lowbit.models import fused_delta_net
from lowbit.models.fused_delta_net import FusedDeltaNet
from lowbit.quant.quant_linear import QuantLinear

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
HEADS = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48)
LATENT = dict(
    kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, num_key_value_heads=4, n_group=1, topk_group=1,
    linear_num_heads=4, linear_head_dim=16, layer_types=[*3 * ["linear_attention"], "full_attention"],
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**HEADS, **EXPERTS}),
    "qwen3_5": ("Qwen3_5Text", HEADS),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**HEADS, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {**HEADS, "linear_allow_neg_eigval": True, "num_key_value_heads": 4}),
    "kimi_linear": ("KimiLinear", LATENT),
}


def made(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | options | more)
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    model = cls._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    return model.to(dtype)


def nets(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedDeltaNet)]


def fused(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    report = lowbit.fuse(other)
    assert nets(other), report
    return other


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_answers_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    lengths = []
    rule = fused_delta_net.gated_delta_rule

    def counted(q: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        lengths.append(q.shape[1])
        return rule(q, *given, **named)

    monkeypatch.setattr(fused_delta_net, "gated_delta_rule", counted)
    of_tokens = seen.bool()
    close(logits(other, ids, attention_mask=seen)[of_tokens], logits(model, ids, attention_mask=seen)[of_tokens])
    close(logits(other, ids, use_cache=False), logits(model, ids, use_cache=False))
    assert torch.equal(answer(other, ids, attention_mask=seen), answer(model, ids, attention_mask=seen))
    assert lengths[: 3 * len(nets(other))] == 3 * len(nets(other)) * [
        11
    ]  # logits, logits, and the prompt of the answer
    assert set(lengths[3 * len(nets(other)) :]) == {1}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_that_of_transformers(name: str) -> None:
    """States have the layout and dtype that they had, so that either model goes on from the other's cache."""
    model = made(name)
    other, ids = fused(model), prompt(2, 12)
    caches = []
    for first, second in ((model, other), (other, model)):
        begun = first(ids[:, :7], use_cache=True).past_key_values
        second(ids[:, 7:11], past_key_values=begun)
        close(second(ids[:, 11:], past_key_values=begun).logits[:, -1], logits(model, ids)[:, -1])
        caches.append(begun)
    for one, two in zip(*(cache.layers for cache in caches), strict=True):
        for states in ("conv_states", "recurrent_states"):
            for mine, theirs in zip(getattr(one, states, {}).values(), getattr(two, states, {}).values(), strict=True):
                assert mine.dtype == theirs.dtype
                close(mine, theirs)


def test_bfloat16_rounds_no_more_than_transformers_does() -> None:
    wide, ids = made("qwen3_5"), prompt(2, 20)
    narrow = copy.deepcopy(wide).bfloat16()
    wanted, theirs, ours = (logits(model, ids).float() for model in (wide, narrow, fused(narrow)))
    assert (ours - wanted).norm() <= 1.2 * (theirs - wanted).norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("config", CONFIGS)
def test_packed_models_say_the_same(name: str, config: str) -> None:
    model = made(name)
    lowbit.quantize_(model, CONFIGS[config])
    other, ids = fused(model), prompt()
    # An int8 activation that is on the edge may round to the next code.
    close(logits(other, ids), logits(model, ids), 2e-2 if config == "w4a8" else BUDGET)
    assert torch.equal(answer(other, ids), answer(model, ids))


def test_packed_projections_of_one_input_are_one_product() -> None:
    """b and a of 16 heads fill a panel, and join; those of 4 heads stay float and are called beside."""
    for heads, joined in ((16, 4), (4, 2)):
        model = made("qwen3_5", linear_num_value_heads=heads)
        lowbit.quantize_(model, CONFIGS["w4a8"])
        other = fused(model)
        logits(other, prompt())
        net = nets(other)[0]
        packed = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a][:joined]
        assert all(type(layer) is QuantLinear for layer in packed)
        assert net.facts["merged"].op_args[0] == sum(layer.out_features for layer in packed)
        begin = packed[0].weight.data_ptr()
        assert [layer.weight.data_ptr() - begin for layer in packed[:2]] == [0, packed[0].weight.nbytes]


def test_the_lowbit_attention_and_its_cache_serve_the_other_layers() -> None:
    model = made("qwen3_5")
    other, (ids, seen) = fused(model), padded()
    other.set_attn_implementation("lowbit")
    assert torch.equal(answer(other, ids, attention_mask=seen), answer(model, ids, attention_mask=seen))
    beams = {"num_beams": 3, "attention_mask": seen}
    assert torch.equal(answer(other, ids, **beams), answer(model, ids, **beams))


@torch.no_grad()
def test_packed_sequences_are_kept_apart() -> None:
    """transformers refuses them on a CPU."""
    net = nets(fused(made("qwen3_5")))[0]
    x, ends = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 5, 6, 12])
    y = net(x, cu_seq_lens_q=ends)
    close(y, torch.cat([net(x[:, i:j]) for i, j in zip(ends, ends[1:], strict=False)], dim=1))
    with pytest.raises(ValueError, match="packed sequences .* without a cache"):
        net(x, cache_params=transformers.DynamicCache(config=made("qwen3_5").config), cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        net(x, seq_idx=torch.zeros(1, 12, dtype=torch.int32))


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_gradients_and_training_run_on_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    same_gradients(model, fused(model), monkeypatch, fused_delta_net, "gated_delta_rule")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a projection": lambda net: net.in_proj_z.register_forward_hook(lambda module, args, y: 2 * y),
    "an attribute": lambda net: setattr(net, "layer_norm_epsilon", 0.5),
    "A_log": lambda net: net.A_log.data.mul_(0.5),
    "eps of the norm": lambda net: setattr(net.norm, "variance_epsilon", 0.5),
    "another convolution": lambda net: net.conv1d.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_later_change_counts(change: Callable[[Any], Any]) -> None:
    model = made("qwen3_5")
    other = fused(model)
    for each in (model, other):
        change(each.model.layers[0].linear_attn)
    close(logits(other, prompt()), logits(model, prompt()))


def test_modules_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    results = fused_delta_net.results_of
    monkeypatch.setattr(
        fused_delta_net, "results_of", lambda probe, hidden: tried.append(probe) or results(probe, hidden)
    )
    model = made("olmo_hybrid")
    model.model.layers[1].linear_attn.allow_neg_eigval = False
    other, ids = fused(model), prompt()
    assert [net.facts["beta"] for net in nets(other)] == [2.0, 1.0, 2.0]
    assert len(tried) == 5  # the module, beta and 2 beta; the module and beta; nothing
    close(logits(other, ids), logits(model, ids))


def test_what_is_no_gated_delta_net_is_left_with_the_reason() -> None:
    model = made("qwen3_5")

    class Other(type(model.model.layers[0].linear_attn)):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.01 * super().forward(*args, **kwargs)

    model.model.layers[0].linear_attn.__class__ = Other
    model.model.layers[1].linear_attn.in_proj_a.register_forward_hook(lambda *_: None)
    report = lowbit.fuse(model)
    assert report.left["model.layers.0.linear_attn"] == "its results are not those of gated_delta_rule"
    assert report.left["model.layers.1.linear_attn"] == "hooks on in_proj_a"
    assert "model.layers.2.linear_attn" in report
