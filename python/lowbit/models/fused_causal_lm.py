# SPDX-License-Identifier: Apache-2.0
"""A transformers language model that computes each token of ``generate`` by one run of a program."""

from __future__ import annotations

import inspect
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from lowbit.models.croppable_cache import is_croppable
from lowbit.models.fused_decoder import FusedDecoder, hidden_of, probe_of_stack, stand_ins
from lowbit.models.fused_layer import as_returned
from lowbit.models.layer_program import NORMS
from lowbit.models.steps import KeptPrograms
from lowbit.models.token_loop import Generation, serves
from lowbit.models.token_run import MULTIPLIERS, numbers_of
from lowbit.quant.fused import Fused, probe_of, with_children

_PREPARES = "prepare_inputs_for_generation"
_OF_TRANSFORMERS = (
    "_prefill", "_sample", "_update_model_kwargs_for_generation", "generate", _PREPARES,
)  # fmt: skip
"""Methods that a model overrides if it passes arguments of its own in ``generate``."""
_DROPPED = {"logits_to_keep": {"config", "num_logits_to_keep"}, "attention_mask": set()}
"""What models drop of what their tokens get in ``generate``, and the names that they read for it."""


class FusedCausalLM(Fused):
    """A language model with a fused decoder, made in place by `lowbit.fuse`. In ``generate``, greedy or sampling, one
    run of a program computes each token, from the embedding to the logits."""

    prefix = ""  # unchanged, because transformers writes the name of the class into config.json

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' ``generate``, which refuses assisted decoding if a model has recurrent states, with a copy
        of the model that does not say so if the cache can be cropped."""
        if is_croppable(kwargs.get("past_key_values")) and self._is_stateful:
            twin = with_children(self)
            twin.__dict__["_is_stateful"] = False
            return super(FusedCausalLM, twin).generate(*args, **kwargs)
        return super().generate(*args, **kwargs)

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
    """Fuse ``module``, whose decoder is already fused, or return the reason why it stays unchanged.

    A probe call, in which each submodule returns a random tensor, shows how the model connects them.
    """
    for name in _OF_TRANSFORMERS:
        own = getattr(type(module), name, None)
        if own is not getattr(GenerationMixin, name, ...) and not (name == _PREPARES and _drops_only(own)):
            return f"it has a {name} of its own"
    if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
        return "this version of transformers generates in another way"
    decoder_name = _decoder_name(module)
    decoder = module._modules[decoder_name]
    norm = [name for name, child in decoder._modules.items() if isinstance(child, NORMS)]
    embedding = _name_of(decoder, module.get_input_embeddings())
    head = _name_of(module, module.get_output_embeddings())
    if len(norm) != 1 or embedding is None or head is None:
        return "it is more than an embedding, layers, a norm and a head"
    facts = {"decoder": decoder_name, "embedding": embedding, "norm": norm[0], "head": head, "kept": KeptPrograms()}
    found = _how_it_joins(module, facts)
    if found is None:
        return "it does not join embedding, layers, norm and head as the program does"
    FusedCausalLM.take(module, facts | found)
    return ""


def _drops_only(method: Any) -> bool:
    """Whether a ``prepare_inputs_for_generation`` is that of transformers but for the number of tokens that have logits
    (Falcon-H1, Nemotron-H, Bamba), or for the mask of a token behind others (Mamba, which no step reads): its code reads
    no other name and has no other constant."""
    code = getattr(method, "__code__", None)
    if code is None or not {"super", _PREPARES} <= {*code.co_names}:
        return False
    names, said = {*code.co_names} - {"super", _PREPARES}, {*code.co_consts} - {None}
    said -= {each for each in said if isinstance(each, tuple)}  # the names of arguments
    return any(names <= read and said == {dropped} for dropped, read in _DROPPED.items())


def _name_of(module: nn.Module, child: nn.Module | None) -> str | None:
    return next((name for name, each in module._modules.items() if each is child and child is not None), None)


@torch.no_grad()
def _how_it_joins(module: nn.Module, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the model does to the result of its embedding and to that of its head (`MULTIPLIERS`), or None if it
    does not pass the output of each submodule in between, as the same tensor object, to the next."""
    decoder = module._modules[facts["decoder"]]
    layers = decoder.facts["layers"]
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = hidden_of(layers)
    *results, of_head = torch.randn(3 + len(layers), 1, 3, hidden, generator=generator, device="cpu")
    results.append(of_head[:, -1:])
    ids = torch.tensor([[3, 1, 2]], device="cpu")
    given: list[Tensor] = []

    def part(x: Tensor, *_: Any, **__: Any) -> Tensor:
        given.append(x)
        return results[len(given) - 1]

    plain = probe_of_stack(
        decoder,
        layers=stand_ins(lambda layer, x, *args, **kwargs: as_returned(part(x), layer.facts["joins"].behind), layers),
        **{facts["embedding"]: part, facts["norm"]: part},
    )
    plain.__class__ = decoder.unfused
    probe = probe_of(module)
    (head,) = stand_ins(lambda _, x: part(x), [probe._modules[facts["head"]]])  # Mamba reads the dtype of its weight
    probe._modules |= {facts["decoder"]: plain, facts["head"]: head}
    try:
        logits = probe(input_ids=ids, use_cache=True, logits_to_keep=1).logits
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError):  # another signature
        return None
    if len(given) != len(results) or not given[0].equal(ids):
        return None
    if not all(map(is_, given[2:-1], results[1:])) or not given[-1].equal(results[-2][:, -1:].to(given[-1].dtype)):
        return None
    numbers = numbers_of(module)
    of_embedding = _multiplier(given[1], results[0], numbers)
    of_logits = _multiplier(logits, results[-1], numbers)
    if of_embedding is None or of_logits is None:
        return None
    return {"numbers": numbers, "of_embedding": of_embedding, "of_logits": of_logits}


def _multiplier(y: Tensor, x: Tensor, numbers: list[float]) -> tuple[str, float] | None:
    """Return which entry of `MULTIPLIERS` makes y of x, and its number."""
    kinds = ((name, number) for number in [1.0, *numbers] for name in MULTIPLIERS)
    return next((kind for kind in kinds if y.equal(MULTIPLIERS[kind[0]](x, kind[1]))), None)
