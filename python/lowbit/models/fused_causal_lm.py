# SPDX-License-Identifier: Apache-2.0
"""A language model of transformers that computes each token of ``generate`` by one run of a program."""

from __future__ import annotations

import inspect
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from lowbit.models.fused_decoder import FusedDecoder, probe_of_decoder, stand_ins
from lowbit.models.token_loop import Generation, serves
from lowbit.models.token_run import TokenProgram
from lowbit.quant.fused import Fused, probe_of
from lowbit.quant.fused_norm import FusedRMSNorm

_OF_TRANSFORMERS = (
    "_prefill", "_sample", "_update_model_kwargs_for_generation", "generate", "prepare_inputs_for_generation",
)  # fmt: skip
"""Methods that a model overrides if it generates with its own arguments."""


class FusedCausalLM(Fused):
    """A language model with a fused decoder. `lowbit.fuse` makes it in place. In ``generate``, greedy or sampling, one
    run of a program computes a token, from the embedding to the logits."""

    prefix = ""  # transformers writes the name of the class into config.json

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        parts = logits_processor, stopping_criteria
        if not serves(generation_config, input_ids, synced_gpus, model_kwargs):
            return GenerationMixin._sample(
                self, input_ids, *parts, generation_config, synced_gpus, streamer, **model_kwargs
            )
        return Generation(self, generation_config, *parts, streamer, model_kwargs).result(input_ids)


def has_fused_decoder(module: nn.Module) -> bool:
    """Whether the module can generate and has a fused decoder."""
    return isinstance(module, GenerationMixin) and _decoder_name(module) is not None


def _decoder_name(module: nn.Module) -> str | None:
    return next((name for name, child in module._modules.items() if isinstance(child, FusedDecoder)), None)


def fuse_causal_lm(module: Any) -> str:
    """Fuse ``module``, whose decoder is fused already, or return the reason why it stays unchanged.

    A probe call, in which each part returns a random tensor, shows how the model connects its parts.
    """
    for name in _OF_TRANSFORMERS:
        if getattr(type(module), name, None) is not getattr(GenerationMixin, name, ...):
            return f"it has a {name} of its own"
    if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
        return "this version of transformers generates in another way"
    decoder_name = _decoder_name(module)
    decoder = module._modules[decoder_name]
    norm = [name for name, child in decoder._modules.items() if isinstance(child, FusedRMSNorm)]
    embedding = _name_of(decoder, module.get_input_embeddings())
    head = _name_of(module, module.get_output_embeddings())
    if len(norm) != 1 or embedding is None or head is None:
        return "it is more than an embedding, layers, a norm and a head"
    facts = {"decoder": decoder_name, "embedding": embedding, "norm": norm[0], "head": head, "kept": TokenProgram()}
    if not _joins_as_the_program(module, facts):
        return "it does not join embedding, layers, norm and head as the program does"
    FusedCausalLM.take(module, facts)
    return ""


def _name_of(module: nn.Module, child: nn.Module | None) -> str | None:
    return next((name for name, each in module._modules.items() if each is child and child is not None), None)


@torch.no_grad()
def _joins_as_the_program(module: nn.Module, facts: dict[str, Any]) -> bool:
    """Whether the model passes the result of each part, the same tensor object, to the next, and returns the logits of
    the head."""
    decoder = module._modules[facts["decoder"]]
    layers = decoder.facts["layers"]
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = decoder._modules[facts["norm"]].weight.numel()
    *results, of_head = torch.randn(3 + len(layers), 1, 3, hidden, generator=generator, device="cpu")
    results.append(of_head[:, -1:])
    ids = torch.tensor([[3, 1, 2]], device="cpu")
    given: list[Tensor] = []

    def part(x: Tensor, *_: Any, **__: Any) -> Tensor:
        given.append(x)
        return results[len(given) - 1]

    plain = probe_of_decoder(
        decoder,
        layers=stand_ins(lambda _, x, **kwargs: part(x), layers),
        **{facts["embedding"]: part, facts["norm"]: part},
    )
    plain.__class__ = decoder.unfused
    probe = probe_of(module)
    probe._modules |= {facts["decoder"]: plain, facts["head"]: part}
    try:
        logits = probe(input_ids=ids, use_cache=True, logits_to_keep=1).logits
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError):  # it takes other arguments
        return False
    if len(given) != len(results) or not given[0].equal(ids) or not logits.equal(results[-1]):
        return False
    return all(map(is_, given[1:-1], results)) and given[-1].equal(results[-2][:, -1:])
