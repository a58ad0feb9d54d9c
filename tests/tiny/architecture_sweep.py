# SPDX-License-Identifier: Apache-2.0
"""All models of the installed transformers of some kinds, made tiny: what lowbit makes of each. Run as a program it
writes docs/architectures.md; `test_architectures.py` does the same to each model of the page again."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from one_call import one_call, one_call_of_encoder
from tiny_architectures import tiny_config, tiny_model
from tiny_inputs import TEXT, Inputs, inputs
from tiny_settings import BESIDE_SDPA, SETTINGS, UNMADE
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lowbit

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BOUND = 1e-3
TITLE = f"""# Architectures

The models of transformers {transformers.__version__}, made tiny with random float32 weights:

- **attention**: the result with `attn_implementation="lowbit"` beside that of eager attention, with padding, and the
  greedy answer where the model gives one ("without an answer": transformers needs more for it than a tiny model has). A
  model that has one attention of its own computes with it. Of SeamlessM4T v2 and Grounding DINO torch's attention is
  beside, because transformers' eager one adds their boolean masks to the scores.
- **quantized**: the result with int8 weights beside that of the decoded weights; *with experts* where those of a
  mixture are packed too, *experts float* where they are not ([experts](experts.md)).
- **saved**: the result of the quantized model when it was saved and loaded.
- **one call**: whether [fuse](ops/fuse.md) puts all layers of the quantized model into one call (and in `generate` a
  whole token), with the same greedy answer; of an encoder, with the same result of a padded batch, of which it computes
  the real tokens alone; or the reason why not, of the first module that it leaves. Architectures
  with recurrent states are in a [table of their own](ops/linear_attention.md#in-transformers).

**yes** is within {BOUND:g} of its size. A model of several kinds of input that is tried with *text alone* gets no image or
sound, because its own processor has to make those. `tests/models/test_architectures.py` holds each line;
`python tests/tiny/architecture_sweep.py` writes the page.
"""
HEAD = "\n## {}\n\n| model | attention | quantized | saved |{}\n|---|---|---|---|{}\n"
FUSED = "Causal language models"
ENCODERS = "Encoders of text"
"""The kinds that have a column for `fuse`."""

KINDS = {
    "Causal language models": ("CAUSAL_LM",),
    "Sequence-to-sequence models": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "Encoders of text": ("MASKED_LM",),
    "Speech": ("SPEECH_SEQ_2_SEQ", "CTC"),
    "Images": ("IMAGE_CLASSIFICATION",),
    "Images and text": ("IMAGE_TEXT_TO_TEXT",),
    "Other base models": ("",),
}
"""The kinds of the page, with the tables of transformers that list their models."""


class LeftOut(Exception):
    """A model that cannot be made or run without lowbit."""


@dataclass
class Tried:
    model: nn.Module
    given: Inputs
    answers: bool = False
    implementation: str = "eager"
    """The attention that was asked for; parts of a model may have it where the whole has one of its own."""


@functools.cache
def classes() -> dict[str, dict[str, str]]:
    """The class by kind and `model_type`; a class that several kinds have is of the first, but that a causal language
    model, which is tried with text alone, may also be one of images and text."""
    kinds: dict[str, dict[str, str]] = {}
    there = set(dir(transformers))  # hasattr would import each model
    for kind, tables in KINDS.items():
        found: dict[str, str] = {}
        for table in tables:
            names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES")
            found |= {name: cls if isinstance(cls, str) else cls[0] for name, cls in names.items() if name not in found}
        earlier = {cls for names in list(kinds.values())[1:] for cls in names.values()}
        if kind == "Other base models":
            found = {name: cls for name, cls in found.items() if not any(name in names for names in kinds.values())}
        kinds[kind] = {name: cls for name, cls in sorted(found.items()) if cls not in earlier and cls in there}
    return kinds


def line(kind: str, name: str) -> str:
    """The line of the page."""
    try:
        tried = made(kind, name)
    except LeftOut as reason:
        return f"| {name} | {reason} | | |" + " |" * (kind in (FUSED, ENCODERS))
    steps: tuple[Callable[[Tried], str], ...] = (attention, quantized, saved)
    of_fuse = f" {fused(kind, name)} |" if kind in (FUSED, ENCODERS) else ""
    if kind != FUSED and not tried.given.keys() - TEXT and takes_more(tried.model):
        name += " (text alone)"
    told = " | ".join(step(tried) for step in steps)
    if "off by" in told and rounding(kind, name.split()[0]) > BOUND / 4:
        return f"| {name} | not tried: its own rounding in float32 is too large to tell | | |{of_fuse}"
    return f"| {name} | {told} |{of_fuse}"


def fused(kind: str, name: str) -> str:
    """Say whether the layers become one call."""
    torch.manual_seed(0)
    model = tiny(classes()[kind][name], name)
    if kind == FUSED and not model.can_generate():
        return "no"
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are made of ones, biases of zeros
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    try:
        lowbit.quantize_(model, lowbit.int8_weight_only())
        return one_call(model) if kind == FUSED else one_call_of_encoder(model)
    except Exception:  # of any architecture
        return "not tried: transformers raises an error for a prompt of text alone"


def takes_more(model: nn.Module) -> bool:
    return bool({"pixel_values", "input_features", "input_values"} & inspect.signature(model.forward).parameters.keys())


def tiny(cls: str, name: str) -> nn.Module:
    try:
        config = getattr(transformers, cls).config_class
        config = tiny_config(config if isinstance(config, type) else CONFIG_MAPPING[name], **SETTINGS.get(cls, {}))
        model = tiny_model(cls, config)
        model.set_attn_implementation("sdpa" if name in BESIDE_SDPA else "eager")
    except ImportError as error:
        raise LeftOut(f"not tried: {str(error).split(' library')[0].split()[-1]} is not installed") from None
    except Exception:  # of any architecture, another one in another order of imports
        raise LeftOut("not tried: transformers raises an error where it is made tiny") from None
    return model


def made(kind: str, name: str) -> Tried:
    if name in UNMADE:
        raise LeftOut(f"not tried: {UNMADE[name]}")
    model = tiny(classes()[kind][name], name)
    try:
        given = inputs(model, text_alone=kind == FUSED)
    except Exception:  # of any architecture
        raise LeftOut("not tried: no inputs that it takes are made here") from None
    tried = Tried(model, given)
    if not result(tried).isfinite().all() or not result(tried).any():
        raise LeftOut("not tried: its result is 0, or not finite")
    try:
        tried.answers = model.can_generate() and isinstance(answer(tried), Tensor)
    except Exception:  # of any architecture
        tried.answers = False
    return tried


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@torch.no_grad()
def result(tried: Tried) -> Tensor:
    """The logits, or what the model gives instead, of tokens that are seen."""
    torch.manual_seed(0)
    output = tried.model(**tried.given)
    values = output if isinstance(output, dict) else dict(enumerate(output))
    found = _tensors([values.get("logits"), values.get("last_hidden_state"), *values.values()])
    first = next(one for one in found if one.is_floating_point())
    seen = tried.given.get("attention_mask")
    return first[seen.bool()] if seen is not None and first.shape[:2] == seen.shape else first


def answer(tried: Tried) -> Tensor:
    torch.manual_seed(0)
    prompt = {name: value for name, value in tried.given.items() if name != "decoder_input_ids"}
    return tried.model.generate(**prompt)


def rounding(kind: str, name: str) -> float:
    """The error of the float model in float32, where a choice of the model (the best queries, an expert) may turn."""
    tried = made(kind, name)
    precise = {name: value.double() if value.is_floating_point() else value for name, value in tried.given.items()}
    wanted = result(Tried(copy.deepcopy(tried.model).double(), precise))
    return float((result(tried) - wanted).norm() / wanted.norm())


def verdict(got: Tensor, wanted: Tensor) -> str:
    error = float((got - wanted).norm() / wanted.norm())
    return "yes" if error < BOUND else f"**off by {error:.1e}**"


def attention(tried: Tried) -> str:
    model, wanted = tried.model, result(tried)
    said = answer(tried) if tried.answers else None
    try:
        model.set_attn_implementation("lowbit")
    except ValueError as error:
        return f"refused by transformers: {type(error).__name__}"
    tried.implementation = "lowbit"
    told = verdict(result(tried), wanted)
    if told == "yes" and model.config._attn_implementation != "lowbit":
        return "has one attention of its own"
    if said is not None and not torch.equal(answer(tried), said):
        return "**another answer**"
    return told + ", without an answer" * (said is None and model.can_generate())


def quantized(tried: Tried) -> str:
    try:
        report = lowbit.quantize_(tried.model, lowbit.int8_weight_only())
    except (ValueError, NotImplementedError) as error:
        return f"refused: {str(error).splitlines()[0][:80]}".replace("|", "")
    if not any(row.format for row in report.rows):
        return "linear layers too small to pack" if report.rows else "no linear layers"
    got, decoded = result(tried), copy.deepcopy(tried.model)
    lowbit.dequantize_(decoded)
    return verdict(got, result(Tried(decoded, tried.given))) + experts(tried.model, report)


def experts(model: nn.Module, report: lowbit.QuantizationReport) -> str:
    """Say whether weights of several experts are packed."""
    packed = any(isinstance(module, lowbit.QuantExperts) for module in model.modules())
    skipped = any(len(row.shape) == 3 for row in report.skipped)
    left = any("Expert" in weight.kind for weight in report.left)
    return ", with experts" * packed + ", experts float" * ((skipped or left) and not packed)


def saved(tried: Tried) -> str:
    model = tried.model
    if not any(isinstance(module, lowbit.QuantLinear) for module in model.modules()):
        return ""
    wanted = result(tried)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            loaded = type(model).from_pretrained(folder).eval()
        except RuntimeError:
            return "**not loaded**"
    loaded.set_attn_implementation(tried.implementation)
    return verdict(result(Tried(loaded, tried.given)), wanted)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    text = TITLE
    for kind, names in classes().items():
        text += HEAD.format(kind, *((" one call |", "---|") if kind in (FUSED, ENCODERS) else ("", "")))
        for name in names:
            if sys.argv[1:] and name not in sys.argv[1:] and kind not in sys.argv[1:]:
                continue
            try:
                one = line(kind, name)
            except Exception as error:
                one = f"| {name} | **{type(error).__name__}: {str(error)[:150]}** | | |"
            print(one, flush=True)
            text += one + "\n"
    if not sys.argv[1:]:
        PAGE.write_text(text)
