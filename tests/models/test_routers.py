# SPDX-License-Identifier: Apache-2.0
"""lowbit.route beside the routers of transformers: weights, experts and gradients of each one's own module with random
weights, and a list of all architectures, which says of those that differ how."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.reference.route import choices_of

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__file__).parent / "models"
TOKENS, HIDDEN, EXPERTS, K = 50, 24, 32, 4
CONFIG = {
    "hidden_size": HIDDEN,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), K),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 2.5),
    **{"norm_topk_prob": True, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    **{"use_expert_bias": True, "moe_norm_min": 0.3, "rms_norm_eps": 1e-6, "moe_router_logit_softcapping": 3.0},
    **{"expert_selection_fn": "sigmoid", "scoring_func": "sigmoid", "output_multiplier": 0.7, "n_shared_experts": 2},
    **{"zero_expert_num": 0, "router_bias": False},
}
CORRECTION = "e_score_correction_bias"
CHOICE = ["scoring", "correction", "groups", "groups_kept", "group_top", "zero_outside"]
CORRECTION_GIVEN = [
    "AfmoeTokenChoiceRouter",
    "HYV3TopKRouter",
    "Dots3NoteVisionTopKRouter",
    "MiniMaxM2TopKRouter",
    "Lfm2MoeTopKRouter",
]
"""Routers that are called with it."""


def softmax(router: Any, config: Any) -> dict[str, Any]:
    return {"normalize": getattr(router, "norm_topk_prob", True)}


def softmax_not_normalized(router: Any, config: Any) -> dict[str, Any]:
    return {}


def softmax_of_groups(router: Any, config: Any) -> dict[str, Any]:
    """DeepSeek V2: a group is as good as its best expert. Where group_limited_greedy counts other experts 0, they are
    behind all."""
    if config.topk_method == "greedy":
        return {"scale": config.routed_scaling_factor}
    return {"groups": config.n_group, "groups_kept": config.topk_group, "scale": config.routed_scaling_factor}


def softmax_of_pairs(router: Any, config: Any) -> dict[str, Any]:
    normalize = getattr(router, "norm_topk_prob", True)
    return {**of_pairs(config), "zero_outside": True, "normalize": normalize, "eps": 1e-20}


def of_pairs(config: Any) -> dict[str, Any]:
    scale = config.routed_scaling_factor
    return {"groups": config.n_group, "groups_kept": config.topk_group, "group_top": 2, "scale": scale}


def softmax_of_chosen(router: Any, config: Any) -> dict[str, Any]:
    return {"scoring": "softmax_of_chosen"}


def deepseek_v3(router: Any, config: Any) -> dict[str, Any]:
    normalize = {"normalize": config.norm_topk_prob, "eps": 1e-20}
    return {"scoring": "sigmoid", "correction": router.e_score_correction_bias, **of_pairs(config), **normalize}


def corrected(scale: str = "", eps: float = 0.0, scoring: str = "sigmoid") -> Callable[[Any, Any], dict[str, Any]]:
    """Scores and a correction, normalized; the scale by its name in the configuration."""

    def options(router: Any, config: Any) -> dict[str, Any]:
        factor = getattr(config, scale) if scale else 1.0
        given = {"scoring": scoring, "normalize": getattr(router, "norm_topk_prob", True), "eps": eps, "scale": factor}
        return given | {"correction": getattr(router, CORRECTION, None)}

    return options


def ernie(router: Any, config: Any) -> dict[str, Any]:
    correction = router.moe_statics.e_score_correction_bias[0]
    return {"correction": correction, "normalize": True, "least": config.moe_norm_min}


def cohere(router: Any, config: Any) -> dict[str, Any]:
    normalize = config.norm_topk_prob and config.expert_selection_fn == "sigmoid"
    return {"scoring": f"{config.expert_selection_fn}_of_chosen", "normalize": normalize}


def kolibri(router: Any, config: Any) -> dict[str, Any]:
    return {
        "scoring": "sigmoid_of_chosen",
        "correction": router.e_score_correction_bias,
        "normalize": config.norm_topk_prob,
    }


def lfm2(router: Any, config: Any) -> dict[str, Any]:
    normalize = {"normalize": config.norm_topk_prob, "eps": 1e-6}
    return {"scoring": "sigmoid", "scale": config.routed_scaling_factor, **normalize}


SAME: dict[Callable[[Any, Any], dict[str, Any]], str] = {
    softmax: "flex_olmo.FlexOlmoTopKRouter mellum.MellumTopKRouter olmoe.OlmoeTopKRouter qwen2_moe.Qwen2MoeTopKRouter "
    "qwen3_moe.Qwen3MoeTopKRouter qwen3_next.Qwen3NextTopKRouter qwen3_omni_moe.Qwen3OmniMoeThinkerTextTopKRouter "
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextTopKRouter qwen4_exp.Qwen4ExpTextTopKRouter "
    "qwen3_5_moe.Qwen3_5MoeTopKRouter qwen3_vl_moe.Qwen3VLMoeTextTopKRouter mixtral.MixtralTopKRouter "
    "minimax.MiniMaxTopKRouter hunyuan_v1_moe.HunYuanMoEV1Gate",
    softmax_not_normalized: "jamba.JambaTopKRouter",
    softmax_of_groups: "deepseek_v2.DeepseekV2TopkRouter deepseek_ocr2.DeepseekOcr2TextTopkRouter "
    "unlimited_ocr.UnlimitedOcrTextTopkRouter",
    softmax_of_pairs: "mistral4.Mistral4TopkRouter mistral_large4.MistralLarge4TextTopkRouter",
    softmax_of_chosen: "gpt_oss.GptOssTopKRouter granitemoe.GraniteMoeTopKRouter "
    "granitemoe_swa.GraniteMoeSWATopKRouter granitemoehybrid.GraniteMoeHybridTopKRouter "
    "granitemoeshared.GraniteMoeSharedTopKRouter aria.AriaTextTopKRouter",
    deepseek_v3: "deepseek_v3.DeepseekV3TopkRouter axk1.AXK1TopkRouter bailing_hybrid.BailingHybridTopkRouter "
    "deepseek_v32.DeepseekV32TopkRouter dots1.Dots1TopkRouter dots3_note.Dots3NoteTextTopkRouter "
    "exaone_moe.ExaoneMoeTopkRouter glm4_moe.Glm4MoeTopkRouter glm4_moe_lite.Glm4MoeLiteTopkRouter "
    "glm4v_moe.Glm4vMoeTextTopkRouter glm5_next.Glm5NextTextTopkRouter glm_moe_dsa.GlmMoeDsaTopkRouter "
    "hy_v4.HYV4TopkRouter kimi_linear.KimiLinearTopkRouter mimo_v2_flash.MiMoV2FlashTopkRouter "
    "nemotron_h.NemotronHTopkRouter solar_open.SolarOpenTopkRouter",
    lambda router, config: deepseek_v3(router, config) | {"scale": 1.0}: "beam.BeamTopKRouter",
    lambda router, config: deepseek_v3(router, config) | {"zero_outside": True}: "axk2.AXK2TopkRouter",
    corrected("route_scale", 1e-20): "afmoe.AfmoeTokenChoiceRouter",
    corrected("router_scaling_factor", 1e-20): "dots3_note.Dots3NoteVisionTopKRouter hy_v3.HYV3TopKRouter",
    corrected("routed_scaling_factor", 1e-20): "inkling2.Inkling2TopKRouter",
    corrected("routed_scaling_factor", 1e-15): "muse_spark.MuseSparkTopkRouter",
    corrected("routed_scaling_factor", 1e-20, "sqrt_softplus"): "deepseek_v4.DeepseekV4TopKRouter",
    corrected(): "flint.FlintTopKRouter laguna.LagunaTopKRouter minimax_m2.MiniMaxM2TopKRouter "
    "minimax_m3_vl.MiniMaxM3VLTopKRouter step3p7.Step3p7TopKRouter",
    ernie: "ernie4_5_moe.Ernie4_5_MoeTopKRouter ernie4_5_vl_moe.Ernie4_5_VLMoeMoeTopKRouter",
    cohere: "cohere2_moe.Cohere2MoeTopKRouter",
    kolibri: "kolibri1.Kolibri1TopKRouter",
    lfm2: "lfm2_moe.Lfm2MoeTopKRouter",
    lambda router, config: {"scoring": "softmax_of_chosen", "scale": 1 / K}:
    "openai_privacy_filter.OpenAIPrivacyFilterTopKRouter",
    lambda router, config: {"normalize": True, "expert_scale": router.per_expert_scale}:
    "gemma4.Gemma4TextRouter diffusion_gemma.DiffusionGemmaTextRouter",
    lambda router, config: {"correction": router.e_score_correction_bias, "scale": config.routed_scaling_factor}:
    "longcat_flash.LongcatFlashTopkRouter",
}  # fmt: skip
ROUTERS = [(name, options) for options, names in SAME.items() for name in names.split()]
WITH_STEPS = {"inkling", "zaya", "llama4"}
"""Chosen by `route`, with a step behind it: see the test."""
DIFFER = {
    "phimoe": "sparsemixer: two softmaxes, each over the logits within a distance of its largest",
    "dbrx": "the weights are divided by a p-norm; with p = 1 it is `normalize`",
    "jetmoe": "softmax_of_chosen, sorted by expert inside of the router",
    "switch_transformers": "the first of each token, as far as an expert has room for it",
    "nllb_moe": "two experts of each token, as far as they have room for it, one of them drawn",
    "doge": "keys that are pairs of keys",
}
"""No calls of `route`."""


def made(name: str, **changes: Any) -> tuple[nn.Module, SimpleNamespace]:
    """The router with random weights, which give probabilities far apart, and its configuration."""
    config = SimpleNamespace(**CONFIG | changes)
    if name.startswith("deepseek_v4"):
        config.scoring_func = "sqrtsoftplus"
    architecture, _, of = name.partition(".")
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    torch.manual_seed(len(name))
    router = getattr(module, of)(config)
    for key, tensor in [*router.named_parameters(), *router.named_buffers()]:
        nn.init.normal_(tensor.data, std=0.1 if CORRECTION in key else 0.4)
    if "per_expert_scale" in dict(router.named_parameters()):
        router.per_expert_scale.data.add_(1)
    return router.eval(), config


def called(router: nn.Module, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of the router; a correction that it is given is put into the options."""
    x = torch.randn(TOKENS, HIDDEN)
    if type(router).__name__ in CORRECTION_GIVEN:
        options["correction"] = torch.randn(EXPERTS) * 0.1
        return router(x[None] if type(router).__name__.startswith("Afmoe") else x, options["correction"])
    if hasattr(router, "per_expert_scale"):
        logits: list[Tensor] = []
        with router.proj.register_forward_hook(lambda module, arguments, result: logits.append(result)):
            _, weights, index = router(x)
        return logits[0], weights, index
    return router(x)


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], leaf: Tensor) -> None:
    """Experts of a token in any order; the gradient of the leaf through the weights too."""
    (our_weights, our_index), (weights, index) = ours, theirs
    our_order, order = our_index.argsort(-1), index.argsort(-1)
    assert our_index.gather(1, our_order).equal(index.gather(1, order))
    our_weights, weights = our_weights.gather(1, our_order), weights.gather(1, order)
    torch.testing.assert_close(our_weights, weights, rtol=2e-5, atol=1e-7)
    grad = torch.randn(weights.shape)
    (found,) = torch.autograd.grad(our_weights, leaf, grad, retain_graph=True)
    torch.testing.assert_close(
        found, torch.autograd.grad(weights, leaf, grad, retain_graph=True)[0], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("name, options_of", ROUTERS, ids=[name for name, _ in ROUTERS])
def test_experts_weights_and_gradients_are_those_of_the_router(name: str, options_of: Callable[..., Any]) -> None:
    changes = ({}, {"norm_topk_prob": False, "expert_selection_fn": "softmax", "topk_method": "greedy"})
    for change in changes:
        router, config = made(name, **change)
        options = options_of(router, config)
        logits, weights, index = called(router, options)
        assert_same(lowbit.route(logits, K, **options), (weights, index), logits)


def test_experts_outside_of_the_groups_count_0_where_corrections_are_negative() -> None:
    """A.X K2, whose other experts then are better than those of the groups; without groups it has none."""
    router, config = made("axk2.AXK2TopkRouter")
    router.e_score_correction_bias -= 2
    logits, weights, index = router(torch.randn(TOKENS, HIDDEN))
    options = deepseek_v3(router, config) | {"zero_outside": True}
    assert (logits.sigmoid() + router.e_score_correction_bias < 0).all()
    choices = choices_of(logits, **{name: value for name, value in options.items() if name in CHOICE})
    for chosen in (index, lowbit.route(logits, K, **options)[1]):  # any of those outside, which are equal
        assert (choices.gather(1, chosen) == 0).all()
    router.num_group = None
    logits, weights, index = router(torch.randn(TOKENS, HIDDEN))
    options = {name: value for name, value in options.items() if "group" not in name and name != "zero_outside"}
    assert_same(lowbit.route(logits, K, **options), (weights, index), logits)


def test_inkling_divides_by_the_sum_with_its_shared_experts() -> None:
    router, config = made("inkling.InklingTopkRouter")
    router.weight = nn.Parameter(torch.randn(EXPERTS + config.n_shared_experts, HIDDEN) * 0.4)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    _, weights, index, shared = router(x)
    logits = x @ router.weight.T
    scores, ours = lowbit.route(logits[:, :EXPERTS], K, scoring="sigmoid", correction=router.e_score_correction_bias)
    of_shared = logits[:, EXPERTS:].sigmoid()
    factor = config.route_scale * router.global_scale / (scores.sum(-1, keepdim=True) + of_shared.sum(-1, keepdim=True))
    assert_same((scores * factor, ours), (weights, index), x)
    torch.testing.assert_close(of_shared * factor, shared)


def test_llama4_has_its_scores_in_the_place_of_the_logits() -> None:
    router, _ = made("llama4.Llama4Router")
    scores, logits = router(torch.randn(TOKENS, HIDDEN))
    weights, index = lowbit.route(logits, K, scoring="sigmoid_of_chosen")
    torch.testing.assert_close(torch.zeros_like(scores).scatter(1, index, weights), scores)


def test_zaya_takes_the_weight_of_the_expert_that_skips() -> None:
    from transformers.models.zaya.modeling_zaya import ZayaRouter

    config = SimpleNamespace(**CONFIG, router_hidden_size=16)
    router = ZayaRouter(config, 0)
    for parameter in router.parameters():
        nn.init.normal_(parameter.data, std=0.4)
    router.balancing_biases[-1] = 0.02  # else it is never chosen
    logits, weights, index, _ = router(torch.randn(1, TOKENS, HIDDEN))
    ours, our_index = lowbit.route(logits, K, correction=router.balancing_biases)
    skips = our_index == EXPERTS
    assert skips.any()
    assert our_index.masked_fill(skips, 0).equal(index)
    torch.testing.assert_close(ours.masked_fill(skips, 0), weights)


def test_every_architecture_with_experts_is_here() -> None:
    """Of an installed transformers that has others, this says which."""
    here = {name.partition(".")[0] for name, _ in ROUTERS} | WITH_STEPS | set(DIFFER)
    there = {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE)
    }
    assert there <= here, f"not here: {sorted(there - here)}"
    assert all((MODELS / name).is_dir() for name in here)


NOT_FOUND = ("afmoe", "muse_spark", "laguna", "gemma4", "diffusion_gemma")
"""Those that take another shape, cap their logits or have a norm in front."""


@pytest.mark.parametrize("change", [{}, {"norm_topk_prob": False, "expert_selection_fn": "softmax", "topk_method": "greedy"}], ids=["", "changed"])
@pytest.mark.parametrize("name", [name for name, _ in ROUTERS])
@torch.no_grad()
def test_fuse_finds_what_a_router_computes(name: str, change: dict[str, Any]) -> None:
    from lowbit.models.routers import Router, router_of, tensors_of, weights_and_index

    block = nn.Module()
    block.gate, _ = made(name, **change)
    given = []
    if type(block.gate).__name__ in CORRECTION_GIVEN:
        block.correction = nn.Buffer(torch.randn(EXPERTS) * 0.1)
        given = ["correction"]
    found = router_of(block, "gate", EXPERTS, HIDDEN, given)
    if name.startswith(NOT_FOUND):
        assert found == "its router computes something else than route"
        return
    assert isinstance(found, Router), found
    tensors = {path: entries[key].flatten() for path, (entries, key) in tensors_of(block, "gate").items()}
    x = torch.randn(TOKENS, HIDDEN)
    weights, index = weights_and_index(block.gate(x, *(tensors[path] for path in given)))
    bias = None if found.bias is None else tensors[found.bias]
    logits = nn.functional.linear(x, tensors[found.weight].view(EXPERTS, HIDDEN), bias)
    ours, our_index = lowbit.route(logits, **found.options(tensors))
    our_order, order = our_index.argsort(-1), index.argsort(-1)
    assert our_index.gather(1, our_order).equal(index.gather(1, order))
    torch.testing.assert_close(ours.gather(1, our_order), weights.gather(1, order).float(), rtol=1e-4, atol=1e-7)
    if name.startswith("axk2") and not change:
        assert found.zero_outside
