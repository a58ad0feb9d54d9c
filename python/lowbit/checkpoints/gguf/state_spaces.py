# SPDX-License-Identifier: Apache-2.0
"""mamba, mamba2 and the hybrids of Mamba-2 and attention: granitehybrid, falcon-h1, nemotron_h and nemotron_h_moe.

llama.cpp's converter writes ``ssm_a`` as -exp(A_log), takes a dimension from the convolution, and of Mamba-2 it gives
``ssm_a`` and ``ssm_d`` a second dimension and ``ssm_norm`` a row for each group. Layers without heads of keys have no
attention. Granite's and Nemotron's rows of q and k are in the order of Llama's files, though neither rotates them.
Falcon-H1's factors are multiplied into the weights, so that the model of a file has none.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, LlamaTensorProcessor, TensorProcessor

from lowbit.checkpoints.gguf.architectures import ROOT_MEAN_SQUARE, Architecture, has
from lowbit.checkpoints.gguf.attention_keys import attends, heads_of_all_layers, heads_that_do_not_rotate
from lowbit.checkpoints.gguf.expert_keys import SIGMOID, ExpertKeys
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.further_layers import without_further_layers
from lowbit.checkpoints.gguf.metadata import Metadata

_A, _D, _CONV, _NORM = "ssm_a", "ssm_d", "ssm_conv1d.weight", "ssm_norm.weight"
_ENDS = ".weight", ".bias"
_WIDTH, _LAYERS = "hidden_size", "num_hidden_layers"


class MambaTensors(TensorProcessor):
    """Undoes the converter's changes to a Mamba-1 mixer, and makes them again."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    """The shape in the file of a vector of the model, by the end of its name."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> GGUFTensor:
        """Return the values of the model for those of the file."""
        of = _in_layer(name)
        if of == _A:
            weights = np.log(-weights)
        if of == _CONV:
            weights = weights[:, None]
        return GGUFTensor(weights.reshape(-1) if of in self.shapes else weights, name, {})

    def restore(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the values of the file for those of the model."""
        of = _in_layer(name)
        if of == _A:
            values = -np.exp(values)
        if of == _CONV:
            values = values[:, 0]
        return values.reshape(self.shapes[of]) if of in self.shapes else values


class Mamba2Tensors(MambaTensors):
    """The same of a Mamba-2 mixer, which has one decay for each head."""

    groups: ClassVar[str] = "mamba_n_groups"
    """The attribute for the number of groups."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {_A: (-1, 1), _D: (-1, 1), _NORM: (self.config[self.groups], -1)}


class HybridTensors(Mamba2Tensors, LlamaTensorProcessor):
    """The same with the rows of q and k in the order of Llama's files."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> GGUFTensor:
        return super().process(LlamaTensorProcessor.process(self, weights, name).weights, name)

    def restore(self, values: np.ndarray, name: str) -> np.ndarray:
        rows = LlamaTensorProcessor.process(self, np.arange(len(values)), name).weights
        return super().restore(values[np.argsort(rows)], name)


class _Groups(HybridTensors):
    groups = "n_groups"


class _GroupsOfMamba2(Mamba2Tensors):
    groups = "n_groups"


def is_falcon_mamba(file: GgufFile) -> bool:
    """Return whether a mamba file has norms of the step, B and C."""
    return bool(file.value("mamba.ssm.dt_b_c_rms", False))


def _in_layer(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("blk.") else name


def _no_heads(keys: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Check the keys of attention and MLPs, which the model does not have."""
    keys.count("context_length")  # marked as read: a state has no length
    for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        keys.only(key, 0, reason="every layer is a state space")
    return {}


def _expansion(keys: Metadata, known: dict[str, Any]) -> int:
    """Return how many times the width of the model its mixers have."""
    if (inner := keys.count("ssm.inner_size")) % known[_WIDTH]:
        keys.refuse("ssm.inner_size", f"a multiple of the embedding_length {known[_WIDTH]}", inner)
    return inner // known[_WIDTH]


def _mamba2_sizes(keys: Metadata) -> tuple[int, int, int]:
    """Return the numbers of heads, of columns of a head, and of groups of heads."""
    heads, groups = keys.count("ssm.time_step_rank"), keys.count("ssm.group_count")
    if heads % groups:
        keys.refuse("ssm.group_count", f"a divisor of the {heads} heads", groups)
    if (inner := keys.count("ssm.inner_size")) % heads:
        keys.refuse("ssm.inner_size", f"a multiple of the {heads} heads", inner)
    return heads, inner // heads, groups


def _mixer_with_prefix(keys: Metadata) -> dict[str, Any]:
    """Return the attributes of the mixers of Granite and Falcon-H1."""
    heads, size, groups = _mamba2_sizes(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": groups,
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_conv_bias": has(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(keys, "ssm_in.bias"),
    }


def _mamba(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    keys.flag("ssm.dt_b_c_rms", False)  # marked as read: it chose the architecture
    return {
        "expand": _expansion(keys, known),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "state_size": keys.count("ssm.state_size"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "use_conv_bias": has(keys, "ssm_conv1d.bias"),
        "use_bias": has(keys, "ssm_in.bias"),
    }


def _mamba2(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    heads, size, groups = _mamba2_sizes(keys)
    return {
        "expand": _expansion(keys, known),
        "num_heads": heads,
        "head_dim": size,
        "n_groups": groups,
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "state_size": keys.count("ssm.state_size"),
        "use_conv_bias": has(keys, "ssm_conv1d.bias"),
        "use_bias": has(keys, "ssm_in.bias"),
    }


def _granite(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    keys.only("rope.scaling.finetuned", False, reason="Bamba, whose attention rotates, is another model")
    return _mixer_with_prefix(keys) | {
        "mamba_expand": _expansion(keys, known),
        "layer_types": _layer_types(keys),
        "position_embedding_type": "nope",
        "attention_bias": has(keys, "attn_q.bias"),
        "attention_multiplier": keys.positive_or_none("attention.scale") or known["head_dim"] ** -0.5,
        "embedding_multiplier": keys.positive_or_none("embedding_scale") or 1.0,
        "residual_multiplier": keys.positive_or_none("residual_scale") or 1.0,
        "logits_scaling": keys.positive_or_none("logit_scale") or 1.0,
    }


def _granite_without_experts(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    rows, shared = known["intermediate_size"], "expert_shared_feed_forward_length"
    keys.only(shared, 0, rows, reason="as many as feed_forward_length, where the model has no experts")
    none = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": rows}
    return none | _granite(keys, known)


def _layer_types(keys: Metadata) -> list[str]:
    return ["full_attention" if attention else "linear_attention" for attention in attends(keys)]


def _falcon_h1(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return _mixer_with_prefix(keys) | {
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "mamba_rms_norm": has(keys, _NORM),
        "mamba_norm_before_gate": False,
        "projectors_bias": has(keys, "ssm_out.bias"),
        "attention_bias": has(keys, "attn_q.bias"),
        "mlp_bias": has(keys, "ffn_up.bias"),
    }


def _nemotron_h(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    keys.value("attention.layer_norm_epsilon", None)  # marked as read: all norms are root mean squares
    own = slice(without_further_layers(keys, known)["num_hidden_layers"])
    rows, has_experts = keys.by_layer("feed_forward_length")[own], bool(keys.value("expert_count", 0))
    given = set(rows) - {0}
    if len(given) > 1:
        keys.refuse("feed_forward_length", "for each layer 0 or a number that is the same for all others", rows)
    types = []
    for layer, (attention, inner) in enumerate(zip(attends(keys)[own], rows, strict=True)):
        if attention and inner:
            keys.refuse("feed_forward_length", f"0 in layer {layer}, which has attention", rows)
        of_mlp = "moe" if has_experts else "mlp"
        types.append("full_attention" if attention else of_mlp if inner else "linear_attention")
    heads, size, groups = _mamba2_sizes(keys)
    if not has_experts:
        for key in ("expert_group_count", "expert_group_used_count"):
            keys.only(key, 0, 1, reason="the model has no experts")
    return {
        "layers_block_type": types,
        "intermediate_size": given.pop() if given else 1,
        "mlp_bias": has(keys, "ffn_up.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": groups,
        "ssm_state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "use_conv_bias": has(keys, "ssm_conv1d.bias"),
        "use_bias": has(keys, "ssm_in.bias"),
    }


def _nemotron_h_moe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    latent = keys.count("moe_latent_size") if keys.value("moe_latent_size", 0) else None
    return _nemotron_h(keys, known) | {"moe_latent_size": latent, "num_nextn_predict_layers": 0}


def _mixer(name: str) -> dict[str, str]:
    """Return the parameters of a Mamba-2 mixer of this name."""
    names = {_A: f"{name}.A_log", _D: f"{name}.D", "ssm_dt.bias": f"{name}.dt_bias", _NORM: f"{name}.norm.weight"}
    for of, to in (("ssm_in", "in_proj"), ("ssm_conv1d", "conv1d"), ("ssm_out", "out_proj")):
        names |= {f"{of}{end}": f"{name}.{to}{end}" for end in _ENDS}
    return names


def _attention(name: str) -> dict[str, str]:
    projections = ("q", "k", "v", "o")
    to = dict(zip(projections, ("attn_q", "attn_k", "attn_v", "attn_output"), strict=True))
    return {f"{to[of]}{end}": f"{name}.{of}_proj{end}" for of in projections for end in _ENDS}


def _outside(base: str, embedding: str, norm: str) -> dict[str, str]:
    return {
        "token_embd.weight": f"{base}.{embedding}{_ENDS[0]}",
        "output_norm.weight": f"{base}.{norm}{_ENDS[0]}",
        "output.weight": "lm_head.weight",
    }


_MAMBA = dict(
    epsilon=(ROOT_MEAN_SQUARE, "layer_norm_epsilon"),
    sizes=("", _WIDTH, _LAYERS, "", ""),
    heads=_no_heads,
    reads_weights=True,
    outside=_outside("backbone", "embeddings", "norm_f"),
)
_OF_MAMBA1 = {f"ssm_dt{end}": f"mixer.dt_proj{end}" for end in _ENDS}
_OF_MAMBA1 |= {"attn_norm.weight": "norm.weight", "ssm_x.weight": "mixer.x_proj.weight"}
MAMBA, FALCON_MAMBA = (
    Architecture(model_type=name, more=_mamba, tensors=MambaTensors, names=_mixer("mixer") | _OF_MAMBA1, **_MAMBA)
    for name in ("mamba", "falcon_mamba")
)
MAMBA2 = Architecture(
    model_type="mamba2",
    more=_mamba2,
    tensors=_GroupsOfMamba2,
    names={"attn_norm.weight": "norm.weight"} | _mixer("mixer"),
    **_MAMBA,
)
_GRANITE = dict(
    model_type="granitemoehybrid",
    epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"),
    heads=heads_that_do_not_rotate,
    tensors=HybridTensors,
)
_IN_GRANITE = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **_mixer("mamba"),
    **_attention("self_attn"),
}
_GATE_AND_UP, _DOWN = "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"
GRANITE = Architecture(
    more=_granite_without_experts,
    names=_IN_GRANITE | {"ffn_down.weight": _DOWN},
    stacked={_GATE_AND_UP: ("ffn_gate.weight", "ffn_up.weight")},
    **_GRANITE,
)
GRANITE_MOE = Architecture(
    more=_granite,
    experts=ExpertKeys(
        count="num_local_experts",
        inner="intermediate_size",
        norm_by_default=True,
        shared_inner="shared_intermediate_size",
    ),
    names=_IN_GRANITE | {"ffn_down_shexp.weight": _DOWN, "ffn_gate_inp.weight": "block_sparse_moe.router.weight"},
    stacked={_GATE_AND_UP: ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
    **_GRANITE,
)
FALCON_H1 = Architecture(
    model_type="falcon_h1",
    epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"),
    heads=heads_of_all_layers,
    more=_falcon_h1,
    tensors=Mamba2Tensors,
    names={
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm": "pre_ff_layernorm.weight",  # the only norm without an end in its name
        **{f"ffn_{of}{end}": f"feed_forward.{of}_proj{end}" for of in ("gate", "up", "down") for end in _ENDS},
        **_mixer("mamba"),
        **_attention("self_attn"),
    },
    outside=_outside("model", "embed_tokens", "final_layernorm"),
)
_NEMOTRON_H = dict(
    model_type="nemotron_h",
    epsilon=(ROOT_MEAN_SQUARE, "layer_norm_epsilon"),
    sizes=("max_position_embeddings", _WIDTH, _LAYERS, "", "num_attention_heads"),
    heads=heads_that_do_not_rotate,
    tensors=_Groups,
    outside=_outside("model", "embeddings", "norm_f"),
)
_IN_NEMOTRON_H = {"attn_norm.weight": "norm.weight", **_mixer("mixer"), **_attention("mixer")}
_IN_NEMOTRON_H |= {f"ffn_{of}{end}": f"mixer.{of}_proj{end}" for of in ("up", "down") for end in _ENDS}
NEMOTRON_H = Architecture(more=_nemotron_h, names=_IN_NEMOTRON_H, **_NEMOTRON_H)
NEMOTRON_H_MOE = Architecture(
    more=_nemotron_h_moe,
    experts=ExpertKeys(
        count="n_routed_experts",
        inner="moe_intermediate_size",
        scores=SIGMOID,
        norm="norm_topk_prob",
        norm_by_default=True,
        scale="routed_scaling_factor",
        shared_inner="moe_shared_expert_intermediate_size",
        shared_count="n_shared_experts",
        groups="n_group",
        used_groups="topk_group",
    ),
    names=_IN_NEMOTRON_H
    | {f"ffn_{of}_shexp.weight": f"mixer.shared_experts.{of}_proj.weight" for of in ("up", "down")}
    | {
        "ffn_gate_inp.weight": "mixer.gate.weight",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
        "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
    },
    **_NEMOTRON_H,
)
