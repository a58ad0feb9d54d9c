# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers' decoders in one call, where all of their pieces are fused: norms, attention, gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.integrations.decoder_pieces import FOUR_NORMS, HALVES, TWO_NORMS
from lowbit.integrations.fused_attention import FusedAttention
from lowbit.integrations.layer_weights import LayerWeights
from lowbit.integrations.lowbit_attention import lowbit_attention, softcap_program, weights_are_recorded
from lowbit.ops.decoder_layers import decoder_layers
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference, probe_of
from lowbit.quant.fused_norm import FusedRMSNorm
from lowbit.quant.gated_mlp import FusedGatedMLP

_OPTIONS = {"scaling", "softcap", "sliding_window"}  # of attention; the window is in the mask
_UNREAD = {"position_ids", "use_cache", "cache_position"}  # arguments that nothing inside a layer reads
_is_compiling = torch.compiler.is_compiling
_TOLERANCE = 1e-6  # of the largest value: sums of float32
_HIDDEN = (2, 3)  # batch and tokens of the probe


class FusedDecoderLayer(Fused):
    """A decoder layer as one call of the op; made in place by `lowbit.fuse`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = args or _is_compiling()
        y = None if own else in_one_call((self,), self.facts, hidden_states, **kwargs)
        return super().forward(hidden_states, *args, **kwargs) if y is None else y


def in_one_call(
    layers: Sequence[FusedDecoderLayer],
    facts: dict[str, Any],
    x: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> Tensor | None:
    """The result of layers whose ``facts["same"]`` are equal; None where this is a call for their own forward.
    ``facts``, of the layer or the model that always has these layers, keeps their weights."""
    length, attention = x.shape[1], layers[0].facts["attention"]
    if (
        not is_inference(x)
        or position_embeddings is None
        or position_embeddings[0].dim() != 3
        or (attention_mask is not None and attention_mask.dim() != 4)
        or any(name not in _UNREAD and value is not None for name, value in others.items())
        or not isinstance(attention, FusedAttention)
        or not _calls_lowbit_attention(attention)
        or not attention.can_write_to(past_key_values)
    ):
        return None
    of_layers = facts["kept"]
    if not of_layers.serves(x.dtype):
        of_layers = facts["kept"] = LayerWeights(layers, x.dtype)
    if not of_layers.fit or not (of_layers.merged or x.numel() == x.shape[-1]):
        return None
    grown, keys, values, starts = [], [], [], set()
    for layer in layers:
        attention = layer._modules["self_attn"]
        place = attention.place_in(past_key_values, x)
        if place is None:
            return None
        grown.append(place[0])
        keys.append(place[1])
        values.append(place[2])
        starts.add(place[3])
    if past_key_values is not None and len(set(map(id, grown))) < len(grown):  # the second writes behind the first
        return None
    start, causal = starts.pop(), attention_mask is None and length > 1
    if starts or (causal and start):
        return None
    same = layers[0].facts["same"]
    y = decoder_layers(
        x, *position_embeddings, keys, values, start, attention_mask, causal, same["scale"], same["score_mod"],
        of_layers.norms, same["eps"], same["offset"], of_layers.weights, of_layers.linears, same["activation"],
        of_layers.head_norms, same["heads_eps"], same["heads_offset"],
    )  # fmt: skip
    if past_key_values is not None:
        for layer in grown:
            layer.extend(length)
    return y


def _calls_lowbit_attention(attention: nn.Module) -> bool:
    function = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return function is lowbit_attention and not weights_are_recorded(attention)


def fuse_decoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose pieces were fused, or return why it stays as it is.

    A call in which each piece returns a tensor of its own shows how the layer joins its pieces.
    """
    problem = _problem(module)
    if problem:
        return problem
    names = FOUR_NORMS if FOUR_NORMS[-1] in module._modules else TWO_NORMS
    if not _joins_as_the_op(module, names):
        return "it does not join its pieces as decoder_layers does"
    FusedDecoderLayer.take(
        module,
        {
            "children": [(name, module._modules[name]) for name in (*HALVES, *names)],
            "attention": module.self_attn,
            "kept": LayerWeights(),
            "norms": names,
            "same": _same(module.self_attn, module.mlp, module._modules[names[0]]),
        },
    )
    return ""


def _same(attention: FusedAttention, mlp: FusedGatedMLP, norm: FusedRMSNorm) -> dict[str, Any]:
    """The numbers that layers of one call must have in common."""
    scale, softcap = (attention.facts["options"].get(name) for name in ("scaling", "softcap"))
    heads = attention.facts["norm"] or {"eps": 0.0, "offset": 0.0}
    return {
        "scale": attention.head_dim**-0.5 if scale is None else float(scale),
        "score_mod": () if softcap is None else softcap_program(float(softcap)),
        "eps": norm.facts["eps"],
        "offset": norm.facts["offset"],
        "activation": mlp.facts["activation"],
        "heads_eps": heads["eps"],
        "heads_offset": heads["offset"],
    }


def _problem(module: nn.Module) -> str:
    children = module._modules
    names = FOUR_NORMS if FOUR_NORMS[-1] in children else TWO_NORMS
    wanted = {"self_attn": FusedAttention, "mlp": FusedGatedMLP} | dict.fromkeys(names, FusedRMSNorm)
    for name, piece in wanted.items():
        if not isinstance(children.get(name), piece):
            return f"its {name} is not fused"
    if set(children) != set(wanted) or has_own_tensors(module):
        return f"it has {', '.join(sorted(set(children) - set(wanted))) or 'parameters of its own'}"
    if any(children[name].facts != children[names[0]].facts for name in names):
        return "its norms have different eps"
    if unknown := set(children["self_attn"].facts["options"]) - _OPTIONS:
        return f"its attention has the option {', '.join(sorted(unknown))}"
    hook = hooked(module, children)
    return f"hooks on {hook}" if hook else ""


@torch.no_grad()
def _joins_as_the_op(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether each piece is given what the op gives it, and the result is the op's."""
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = module._modules[names[0]].weight.numel()
    x, *given = torch.randn(1 + len(HALVES) + len(names), *_HIDDEN, hidden, generator=generator, device="cpu")
    results = dict(zip((*HALVES, *names), given, strict=True))
    got = _inputs_of_pieces(module, x, results)
    before, behind, *others = names
    attention, mlp = results["self_attn"], results["mlp"]
    if others:
        after_attention, after_mlp = results[behind], results[others[1]]
        wanted = {behind: attention, others[0]: x + after_attention, others[1]: mlp}
        second = others[0]
    else:
        after_attention, after_mlp, second = attention, mlp, behind
        wanted = {behind: x + attention}
    wanted |= {before: x, "self_attn": results[before], "mlp": results[second]}
    wanted["result"] = x + after_attention + after_mlp
    return got.keys() == wanted.keys() and all(
        got[name].shape == wanted[name].shape
        and bool((got[name] - wanted[name]).abs().max() <= _TOLERANCE * wanted[name].abs().max())
        for name in wanted
    )


def _inputs_of_pieces(module: nn.Module, x: Tensor, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """The input of each piece in a call with ``x`` in which it returns its entry of ``results``; with ``result``."""
    inputs: dict[str, Tensor] = {}

    def stand_in(name: str) -> nn.Module:
        def forward(*args: Tensor, **kwargs: Any) -> Any:
            inputs[name] = args[0] if args else kwargs["hidden_states"]
            return (results[name], None) if name == "self_attn" else results[name]

        piece = probe_of(module._modules[name])
        piece.forward = forward
        return piece

    probe = probe_of(module, **{name: stand_in(name) for name in results})
    try:
        result = probe(x, attention_mask=None, position_embeddings=(x, x), past_key_values=None)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # it takes other arguments
        return {}
    return inputs | {"result": result} if isinstance(result, Tensor) else {}
