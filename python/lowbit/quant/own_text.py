# SPDX-License-Identifier: Apache-2.0
"""own_text: inputs that a language model makes by itself, for a calibration without data."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.algorithms import GPTQ
from lowbit.formats.int8 import Int8DynamicActivationInt8WeightConfig
from lowbit.quant.evaluation import evaluating
from lowbit.quant.kinds import KINDS, is_packed
from lowbit.quant.packing import by_weight, pack_group, pack_weight
from lowbit.quant.select import select

SELF = "self"
TEXTS, TOKENS, BATCH = 16, 192, 4
FASTER: list[Callable[[nn.Module], None]] = []
"""Functions that make the copy of a model that writes faster; huggingface/quantizer.py adds one that fuses it."""
_NEEDS_DATA = "needs data: give calibration=batches, an iterable of its inputs"


def is_own_text(calibration: Any) -> bool:
    """Return whether a calibration is asked for on text of the model's own, by the word "self"."""
    return isinstance(calibration, str) and calibration == SELF


def own_text(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return 16 texts of 192 tokens, in batches of 4, as keyword arguments of the model.

    A model that generates text writes them, sampled at temperature 1 from random words of its vocabulary. (From the
    token that begins a text, SmolLM2-135M writes text that makes symmetric weights worse: perplexity 53.2, not 52.1.)
    An encoder is given random words. The texts are the same in each call: they are drawn with a generator of their own.

    Args:
        model: a model of transformers that takes ``input_ids``.

    Raises:
        ValueError: the model takes other inputs, has an encoder and a decoder, or keeps no cache; its weights are on
            the meta device; or its logits are not finite.
    """
    words, length = _vocabulary(model)
    generator = torch.Generator("cpu").manual_seed(0)
    if _writes(model):
        first = torch.randint(words, (TEXTS, 1), generator=generator, device="cpu")
        ids = _written(model, first, length, generator)
    else:
        ids = torch.randint(words, (TEXTS, length), generator=generator, device="cpu")
    device = model.get_input_embeddings().weight.device
    return [{"input_ids": part.to(device)} for part in ids.split(BATCH)]


def writer_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model with weights and activations of 8 bits, which writes several times as fast on a CPU.

    Float parameters and buffers are those of the model. A model that has packed layers already, or that is on another
    device, is returned as it is.

    Raises:
        ValueError: what `own_text` raises.
    """
    _vocabulary(model)
    elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    if elsewhere or any(is_packed(module) for module in model.modules()):
        return model
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    selected, _ = select(copied, Int8DynamicActivationInt8WeightConfig(), None, None, False, kinds=KINDS)
    for group in by_weight(selected):
        weight, spec = group[0].weight.matrix(group[0].value), group[0].spec
        make = functools.partial(pack_weight, weight, spec, None)
        pack_group(group, make, 0)
    if _writes(copied):
        for make_faster in FASTER:
            make_faster(copied)
    return copied


def body_of(model: nn.Module, layers: Iterable[str]) -> nn.Module:
    """Return the part of a language model that contains these layers: all of it, or what comes before the head, whose
    logits of a whole text take more memory than everything else."""
    body = getattr(model, "base_model", None)
    inside = {id(module) for module in body.modules()} if isinstance(body, nn.Module) else set()
    return body if all(id(model.get_submodule(name)) in inside for name in layers) else model


def told_of_own_text(model: nn.Module) -> str:
    """Return what `own_text` makes for this model, in words."""
    by = "that the model wrote by itself" if _writes(model) else "drawn at random from its vocabulary"
    return f"{TEXTS} x {_vocabulary(model)[1]} tokens {by}"


def gptq_of_own_text(model: nn.Module) -> GPTQ:
    """Return GPTQ with the damping that suits what `own_text` makes for this model.

    The products of random words are far from those of text, so they count half beside their diagonal. Cosine of
    all-MiniLM-L6-v2's sentences to float32, W4A8 g32: 0.9732 with the default damping, 0.9783 with 1, 0.9733 by search.
    """
    return GPTQ() if _writes(model) else GPTQ(damping=1.0)


def _vocabulary(model: nn.Module) -> tuple[int, int]:
    """Return the number of words, and the number of tokens of a text."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or "input_ids" not in inspect.signature(model.forward).parameters:
        takes = getattr(model, "main_input_name", "input_ids")
        told = f"takes {takes}" if takes != "input_ids" else "is no model of transformers that takes input_ids"
        raise ValueError(f"calibration='self': {name} {told}, and {_NEEDS_DATA}")
    other = [
        part for part in getattr(config, "sub_configs", {}) if part != "text_config" and getattr(config, part, None)
    ]
    if getattr(config, "is_encoder_decoder", False) or other:
        has = f"has parts that text does not reach ({', '.join(other)})" if other else "has an encoder and a decoder"
        raise ValueError(f"calibration='self': {name} {has}, and {_NEEDS_DATA}")
    table = model.get_input_embeddings()
    if table.weight.is_meta:
        raise ValueError(f"calibration='self': the weights of {name} must be loaded, got the meta device")
    limit = getattr(config, "max_position_embeddings", None) or TOKENS
    # RoBERTa's positions begin behind that of the padding.
    return len(table.weight), min(TOKENS, limit - 1 - (getattr(config, "pad_token_id", None) == 1))


def _writes(model: nn.Module) -> bool:
    """Return whether this is a language model that generates text."""
    return bool(hasattr(model, "can_generate") and model.can_generate())


@torch.no_grad()
def _written(model: nn.Module, first: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return texts int64 ``[texts, length]`` that begin with the tokens ``first [texts, 1]``."""
    device = model.get_input_embeddings().weight.device
    ids = first.repeat(1, length)
    cache: Any = None
    with evaluating(model):
        model = writer_of(model)
        for at in _progress(range(1, length)):
            out = model(input_ids=ids[:, at - 1 : at].to(device), past_key_values=cache, use_cache=True)
            cache = getattr(out, "past_key_values", None)
            if cache is None:
                raise ValueError(
                    f"calibration='self': {type(model).__name__} returns no past_key_values, and {_NEEDS_DATA}"
                )
            sums = out.logits[:, -1].float().cpu().softmax(-1).cumsum(-1, dtype=torch.float64)
            if not sums[:, -1].isfinite().all():
                raise ValueError(f"calibration='self': logits of {type(model).__name__} must be finite, got inf or nan")
            ids[:, at] = _drawn(sums, generator)
    return ids


def _drawn(sums: Tensor, generator: torch.Generator) -> Tensor:
    """Return one word for each text, int64 ``[texts]``, given the sums float64 ``[texts, words]`` of the odds up to each
    word. torch.multinomial draws a number for every word, which takes as long as a layer of the model."""
    at = torch.rand(len(sums), 1, dtype=torch.float64, generator=generator, device="cpu") * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)


def _progress(steps: Iterable[int]) -> Iterable[int]:
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        return steps
    return tqdm(steps, desc=f"the model writes {TEXTS} texts", unit="token", delay=2.0)
