# SPDX-License-Identifier: Apache-2.0
"""Which language models of the installed transformers have their layers in one call, and why the others do not. Run as
a program it prints a line for each model named, or for all."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit.models.fused_cross_decoder import FusedCrossDecoder
from lowbit.models.fused_decoder import FusedDecoder
from lowbit.models.fused_encoder import FusedEncoder
from lowbit.ops.run_program import KeptProgram
from lowbit.quant.fused import FusedModules

CONFIG = lowbit.int8_dynamic_activation_int4_weight(group_size=32)
BOUND = 2e-2
"""Of the logits of a fused model, relative to the largest: an int8 activation may round to the next code."""


def one_call(model: nn.Module) -> str:
    """Return "yes" if fuse puts the layers of this quantized float32 model into one call, "a token too" if a token of
    generate is one, or the reason why not. The fused model's logits and greedy answer are compared."""
    model.set_attn_implementation("lowbit")
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(3))
    wanted, said = logits(model, ids), answer(model, ids)
    report = lowbit.fuse(model)
    error = float((logits(model, ids) - wanted).abs().max() / wanted.abs().max())
    if error > BOUND:
        return f"**off by {error:.1e}**"
    if not torch.equal(answer(model, ids), said):
        return "**another answer**"
    if any(isinstance(module, FusedDecoder) for module in model.modules()):
        if not runs(model, ids):
            return "fused, but its layers are still called one by one"
        return "yes" if "(model)" in report else f"yes, a token not: {report.left.get('(model)', 'it is a part of another model')}"
    if any(isinstance(module, FusedEncoder) for module in model.modules()):
        return "as an encoder, which it is without is_decoder=True"
    if any(isinstance(module, FusedCrossDecoder) for module in model.modules()):
        return "with the result of an encoder"
    return reason(report)


def one_call_of_encoder(model: nn.Module) -> str:
    """Return "yes" if fuse puts the layers of this quantized float32 encoder into one call of the real tokens, or the
    reason why not. The fused model's results are compared, of a batch with padding."""
    model.set_attn_implementation("lowbit")
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(3))
    given = {"input_ids": ids, "attention_mask": (torch.arange(9) < torch.tensor([[9], [5]])).long()}
    wanted = encoded(model, given)
    report = lowbit.fuse(model)
    shapes, call = [], KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        shapes.append(inputs[0].shape[:2])
        return call(self, states, inputs, starts)

    KeptProgram.__call__ = counted
    try:
        got = encoded(model, given)
    finally:
        KeptProgram.__call__ = call
    error = float((got - wanted).abs().max() / wanted.abs().max())
    if error > BOUND:
        return f"**off by {error:.1e}**"
    if not any(isinstance(module, FusedEncoder) for module in model.modules()):
        return reason(report)
    return "yes" if shapes == [(1, 14)] else "fused, but its layers are still called one by one"


@torch.no_grad()
def encoded(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the results of the real tokens."""
    result = model(**given)
    return result[0][given["attention_mask"].bool()]


def runs(model: nn.Module, ids: Tensor) -> bool:
    """Whether a step of the model is one call of all layers."""
    calls, call = [], KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, *others: Any) -> Tensor:
        calls.append(len(states))
        return call(self, states, *others)

    KeptProgram.__call__ = counted
    try:
        logits(model, ids)
    finally:
        KeptProgram.__call__ = call
    layers = next(len(module.layers) for module in model.modules() if isinstance(module, FusedDecoder))
    return len(calls) == 1 and calls[0] >= layers  # a layer has one state or two


def reason(report: FusedModules) -> str:
    """Return the first reason of the smallest module that was left."""
    left = {name: why for name, why in report.left.items() if name != "(model)"}
    return next(iter(left.values()), "it has no layers, attention or norms that fuse knows")


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=True).logits


def answer(model: nn.Module, ids: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)


if __name__ == "__main__":
    from architecture_sweep import classes, tiny

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told: dict[str, str] = {}
    for name, cls in classes()["Causal language models"].items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            model = tiny(cls, name)
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms are made of ones, biases of zeros
                    nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
            model = copy.deepcopy(model).eval()
            lowbit.quantize_(model, CONFIG)
            told[name] = one_call(model)
        except Exception as error:  # of any architecture
            told[name] = f"{type(error).__name__}: {str(error)[:150]}"
        print(f"{name}: {told[name]}", flush=True)
    print(sum(line.startswith("yes") for line in told.values()), "of", len(told))
