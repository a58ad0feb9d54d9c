# SPDX-License-Identifier: Apache-2.0
"""All causal language models of the installed transformers, made tiny: what lowbit makes of each. Run as a program it
writes docs/architectures.md; `test_architectures.py` does the same to each model of the page again."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tiny_architectures import tiny_config, tiny_model
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lowbit

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BOUND = 1e-3
TITLE = f"""# Architectures

Every causal language model of transformers {transformers.__version__}, made tiny with random float32 weights: its logits and its greedy
answer with `attn_implementation="lowbit"` beside those with eager attention, with padding on the left; its logits with
int8 weights beside those of the decoded weights; and its logits when it was saved and loaded. **yes**: within {BOUND:g} of
their size. `tests/integrations/test_architectures.py` holds each line;
`python tests/integrations/architecture_sweep.py` writes the page.

| model | attention | quantized | saved |
|---|---|---|---|
"""


class LeftOut(Exception):
    """A model that cannot be made or run without lowbit."""


def names() -> dict[str, str]:
    """The class by `model_type`."""
    found = {name: cls if isinstance(cls, str) else cls[0] for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return {name: cls for name, cls in sorted(found.items()) if hasattr(transformers, cls)}


def line(name: str) -> str:
    """The line of the page."""
    try:
        model = made(name)
    except LeftOut as reason:
        return f"| {name} | {reason} | | |"
    steps: tuple[Callable[[nn.Module], str], ...] = (attention, quantized, saved)
    return f"| {name} | {' | '.join(step(model) for step in steps)} |"


def made(name: str) -> nn.Module:
    cls = names()[name]
    try:
        kind = getattr(transformers, cls).config_class
        model = tiny_model(cls, tiny_config(kind if isinstance(kind, type) else CONFIG_MAPPING[name]))
        model.set_attn_implementation("eager")
        if not logits(model).isfinite().all():
            raise LeftOut("not tried: its logits are not finite")
    except LeftOut:
        raise
    except Exception as error:  # of any architecture
        raise LeftOut(f"not tried: {type(error).__name__} of transformers where it is made tiny") from None
    return model


TOKENS = torch.arange(2, 26).view(2, 12)
SEEN = torch.ones(2, 12, dtype=torch.long)
SEEN[0, :3] = 0


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(TOKENS, attention_mask=SEEN).logits[SEEN.bool()]


def answer(model: nn.Module) -> Tensor:
    return model.generate(TOKENS, attention_mask=SEEN, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)


def verdict(got: Tensor, wanted: Tensor) -> str:
    error = float((got - wanted).norm() / wanted.norm())
    return "yes" if error < BOUND else f"**off by {error:.1e}**"


def attention(model: nn.Module) -> str:
    wanted, said = logits(model), answer(model)
    try:
        model.set_attn_implementation("lowbit")
    except ValueError as error:
        return f"refused by transformers: {type(error).__name__}"
    if model.config._attn_implementation != "lowbit":
        return "has one attention of its own"
    told = verdict(logits(model), wanted)
    return told if torch.equal(answer(model), said) else "**another answer**"


def quantized(model: nn.Module) -> str:
    try:
        report = lowbit.quantize_(model, lowbit.int8_weight_only())
    except (ValueError, NotImplementedError) as error:
        return f"refused: {str(error).splitlines()[0][:80]}".replace("|", "")
    if not any(row.format for row in report.rows):
        return "no linear layers"
    got, decoded = logits(model), copy.deepcopy(model)
    lowbit.dequantize_(decoded)
    return verdict(got, logits(decoded))


def saved(model: nn.Module) -> str:
    if not any(isinstance(module, lowbit.QuantLinear) for module in model.modules()):
        return ""
    wanted, attention = logits(model), model.config._attn_implementation
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            loaded = type(model).from_pretrained(folder).eval()
        except RuntimeError:
            return "**not loaded**"
    loaded.set_attn_implementation(attention)
    return verdict(logits(loaded), wanted)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    lines = []
    for each in sys.argv[1:] or names():
        try:
            lines.append(line(each))
        except Exception as error:
            lines.append(f"| {each} | **{type(error).__name__}: {str(error)[:150]}** | | |")
        print(lines[-1], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(TITLE + "\n".join(lines) + "\n")
