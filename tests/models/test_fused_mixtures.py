# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse of mixtures of experts: which are one call, that they say the same, that whatever changes later counts."""

from __future__ import annotations

import copy
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, calls_of_layers, in_float, logits, prompt, transformers
from torch import Tensor, nn

import lowbit
from lowbit import _C
from lowbit.models.fused_mixture import FusedMixture
from lowbit.models.token_run import TokenRun

SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, **SMALL}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 8, "shared_expert_intermediate_size": 48, **SMALL}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "norm_topk_prob": True, **SMALL}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, **SMALL}),
    "mellum": ("Mellum", {"num_experts": 8, **SMALL}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 8, "residual_multiplier": 0.3, "attention_multiplier": 0.1, **SMALL}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "dots1": ("Dots1", {**GROUPED, "n_shared_experts": 1}),
    "exaone_moe": ("ExaoneMoe", {"num_experts": 8, **SMALL}),
    "solar_open": ("SolarOpen", {"n_routed_experts": 8, **SMALL}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "sliding_window": 6, "original_max_position_embeddings": 4, **SMALL}),
    "olmoe": ("Olmoe", {"num_experts": 8, **SMALL}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 8, **SMALL}),
    "deepseek_v2": ("DeepseekV2", {**GROUPED, **LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    "deepseek_v3": ("DeepseekV3", {**GROUPED, **LATENT, "n_shared_experts": 1}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1, "moe_norm_min": 0.3}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, **SMALL}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, **SMALL}),
    "laguna": ("Laguna", {"num_experts": 8, **SMALL}),
    "phimoe": ("Phimoe", {"num_local_experts": 8, **SMALL}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 8, "shared_intermediate_size": 48, **SMALL}),
    "afmoe": ("Afmoe", {"num_experts": 8, "num_dense_layers": 1, **SMALL}),
}  # fmt: skip
ONE_CALL = {
    "qwen2_moe", "qwen3_moe", "mixtral", "mellum", "granitemoe", "glm4_moe", "dots1", "exaone_moe", "solar_open", "gpt_oss",
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "granitemoeshared", "olmoe", "flex_olmo",
}  # fmt: skip
"""All layers of these are one call. Of others, only the mixture is, because their attention or the layer is not fused."""
LEFT = {
    "phimoe": "its router computes something else than route",  # sparsemixer
    "afmoe": "its router has no plain weight",  # it is a linear layer
}


def mixture(name: str, config: str = "int8", dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    kind, options = MIXTURES[name]
    model = in_float(kind, options, **more)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "router" in path or path.endswith(("gate.weight", "wg.weight")):
            nn.init.normal_(tensor, std=0.3)  # so that no two experts are close
        elif "experts" in path and tensor.dim() > 2:
            nn.init.normal_(tensor, std=0.2)
        elif "correction" in path:
            nn.init.normal_(tensor, std=0.1)
    model = model.to(dtype)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def mixtures(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedMixture)]


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_and_answers_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture(name)
    wanted, said = logits(model, prompt()), answer(model, prompt())
    report = lowbit.fuse(model)
    assert bool(mixtures(model)) == (name not in LEFT), report
    assert ("model" in report) == (name in ONE_CALL), report
    if name in LEFT:
        assert LEFT[name] in report.left.values(), report
    with calls_of_layers(monkeypatch) as counts:
        torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(answer(model, prompt(), max_new_tokens=12), said)
    if name in ONE_CALL:
        assert set(counts) == {2}  # layers
    assert lowbit.fuse(model) == []  # all that can be is


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_a_token_is_one_region(name: str) -> None:
    """Of the threads: all steps of all layers are computed by one team."""
    model, ids = mixture(name, "w4a8"), prompt(1, 5)
    lowbit.fuse(model)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        one = prompt(1, 1)
        for _ in range(2):
            before = _C.opened_regions()
            model.model(one, past_key_values=cache, use_cache=True)
            opened = _C.opened_regions() - before
    assert opened <= 1


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_tokens_of_generate_are_runs_of_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture(name)
    said = answer(model, prompt())
    lowbit.fuse(model)
    runs = []
    of = TokenRun.logits
    monkeypatch.setattr(TokenRun, "logits", lambda self, tokens: runs.append(of(self, tokens)) or runs[-1])
    assert torch.equal(answer(model, prompt()), said)
    assert len(runs) == 11 and None not in runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe"])
def test_a_mixture_in_other_dtypes(name: str, config: str, dtype: torch.dtype) -> None:
    """The same experts for each token, and results within some roundings to the dtype; int8 activations that change to
    the next code count more."""
    model = mixture(name, config, dtype)
    block = next(module for module in model.modules() if any(isinstance(part, lowbit.QuantExperts) for part in module._modules.values()))
    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.no_grad():
        wanted = block(x).float()
        lowbit.fuse(model)
        assert isinstance(block, FusedMixture)
        got = block(x).float()
    assert block.facts["kept"].run is not None and got.dtype == torch.float32
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < (0.05 if config == "w4a8" else 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_and_biases_that_change_count(dtype: torch.dtype) -> None:
    model, other = (mixture("gpt_oss", dtype=dtype) for _ in range(2))
    lowbit.fuse(model)
    logits(model, prompt())
    with torch.no_grad():
        for each in (model, other):
            for layer in each.model.layers:
                layer.self_attn.sinks.add_(1.5)
                layer.mlp.experts.gate_up_proj_bias.mul_(-2.0)
                layer.mlp.router.bias.add_(torch.linspace(-1, 1, 8))
    wanted = logits(other, prompt()).float()
    assert (logits(model, prompt()).float() - wanted).norm() < (1e-4 if dtype is torch.float32 else 0.05) * wanted.norm()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "another number of experts a token": lambda block: setattr(block.gate, "top_k", 3),
    "weights that are not normalized": lambda block: setattr(block.gate, "norm_topk_prob", False),
    "another weight": lambda block: setattr(block.gate, "weight", nn.Parameter(block.gate.weight.detach().flip(0))),
    "a weight that changes in place": lambda block: block.gate.weight.data.mul_(-1),
    "the data of a weight": lambda block: setattr(block.gate.weight, "data", block.gate.weight.data.flip(0)),
    "another activation": lambda block: setattr(block.experts, "act_fn", nn.GELU()),
    "a hook on the router": lambda block: block.gate.register_forward_hook(lambda m, a, y: (y[0], y[1] * 0.5, y[2])),
    "a hook on the experts": lambda block: block.experts.register_forward_hook(lambda m, a, y: y * 2),
    "another router": lambda block: setattr(block, "gate", copy.deepcopy(block.gate).requires_grad_(False)),
    "a forward of its own": lambda block: setattr(block, "forward", lambda x: x * 0.5),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_later_counts(change: str) -> None:
    model, other = mixture("qwen3_moe"), mixture("qwen3_moe")
    lowbit.fuse(model)
    before = logits(model, prompt())
    for each in (model, other):
        CHANGES[change](each.model.layers[0].mlp)
    wanted = logits(other, prompt())
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(answer(model, prompt()), answer(other, prompt()))
    assert change == "another router" or not torch.allclose(before, wanted, rtol=1e-3, atol=1e-3)


def test_router_logits_that_transformers_records() -> None:
    model, other = mixture("qwen3_moe"), mixture("qwen3_moe")
    lowbit.fuse(model)
    logits(model, prompt())
    with torch.no_grad():
        for _ in range(2):
            got, wanted = (each(prompt(), output_router_logits=True).router_logits for each in (model, other))
            assert len(got) == len(wanted) == 2
            for one, its in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, its, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_copies_and_what_is_undone(name: str) -> None:
    model = mixture(name)
    lowbit.fuse(model)
    wanted, keys = logits(model, prompt()), model.state_dict().keys()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(mixtures(twin)) == 2 and torch.equal(logits(twin, prompt()), wanted)
        for part in mixtures(twin):
            (part.gate if name == "qwen2_moe" else part.router).weight.data.mul_(-1)
        assert not torch.allclose(logits(twin, prompt()), wanted, rtol=1e-2)
    assert torch.equal(logits(model, prompt()), wanted) and keys == mixture(name).state_dict().keys()
    lowbit.dequantize_(model)
    assert not mixtures(model)


def test_gradients_and_training_are_those_of_the_unfused_model() -> None:
    grads = []
    for fused in (False, True):
        model = mixture("qwen2_moe").train()
        if fused:
            lowbit.fuse(model)
        model(prompt(), labels=prompt()).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any("mlp.gate" in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@torch.no_grad()
def test_a_compiled_model_and_an_exported_one(tmp_path: pathlib.Path) -> None:
    """They have the ops of the unfused model, in one graph."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mixture("qwen3_moe")

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    model = Logits()
    lowbit.fuse(model.model)
    wanted = logits(model.model, prompt())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(prompt()), wanted, rtol=1e-4, atol=1e-4)
    torch.export.save(torch.export.export(model, (prompt(),)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(prompt()), wanted, rtol=1e-4, atol=1e-4)


def test_a_mixture_of_a_class_of_ones_own() -> None:
    """It is known by what it computes: this one negates the shared expert, and the other does not."""

    class Other(transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.view(-1, x.shape[-1])
            _, weights, index = self.gate(rows)
            shared = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
            return (self.experts(rows, index, weights) + self.sign * shared).view(x.shape)

    for sign in (1, -1):
        model = mixture("qwen2_moe")
        for layer in model.model.layers:
            layer.mlp.__class__, layer.mlp.sign = Other, sign
        wanted = logits(model, prompt())
        report = lowbit.fuse(model)
        assert len(mixtures(model)) == (2 if sign == 1 else 0)
        assert sign == 1 or report.left["model.layers.0.mlp"] == "it does not join router and experts as a mixture does"
        torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)


def test_what_stays_has_a_reason() -> None:
    model = mixture("qwen3_moe")
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.experts.act_fn = nn.Softsign()
    left = lowbit.fuse(model).left
    assert left["model.layers.0.mlp"] == "hooks on gate"
    assert left["model.layers.1.mlp"] == "its experts are no single call of the op experts"
