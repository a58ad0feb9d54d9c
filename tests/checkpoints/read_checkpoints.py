# SPDX-License-Identifier: Apache-2.0
"""Checks of a checkpoint of another method: its weights by both ways of reading it, its logits, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny.quantized_checkpoints import prompt
from tests.tiny.tiny_models import transformers

import lowbit
from lowbit.quant.kinds import is_packed, named_weights, weights_of

EXACT = 2.0**-21  # products of a scale and a code are rounded to float32
VENDORS = ("optimum", "gptqmodel", "auto_gptq", "awq", "compressed_tensors", "auto_round", "hqq", "quark", "fbgemm_gpu")


def read(folder: Path, activations: str | None = None, **options) -> torch.nn.Module:
    config = lowbit.LowbitConfig("checkpoint", activations=activations)
    options = {"dtype": torch.float32} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def decoded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the packed layers in float64, by the names of the model."""
    return {key: layer_weight(module, weight) for key, _, module, weight in named_weights(model) if is_packed(module)}


def layer_weight(module, weight) -> torch.Tensor:
    from lowbit.quant.kinds import kind_of

    return kind_of(module).dequantize(module, weight, torch.float32).double()


def check_reads(
    folder: Path, meant: torch.nn.Module, *, exact: bool = False, bound: float = 0.0, activations: str | None = None
) -> torch.nn.Module:
    """Read the checkpoint by from_pretrained and by load, and compare both with the model that it means; return the
    first."""
    before = {name for name in VENDORS if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        for name in VENDORS:
            if name not in before:
                patch.setitem(sys.modules, name, None)  # an import raises
        model = read(folder, activations=activations)
    found, floats = decoded(model), dict(meant.named_parameters())
    assert found, "nothing is packed"
    for key, value in found.items():
        want, limit = floats[key], EXACT if exact else bound
        error = (value - want).abs()
        assert (error <= limit * largest(want)).all(), (key, float((error / largest(want)).max()))
    other = transformers.AutoModelForCausalLM.from_config(meant.config, dtype=torch.float32)
    names = lowbit.load(other, folder)
    assert {name for name, module in model.named_modules() if is_packed(module)} == set(names)
    again = decoded(other)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[key], found[key]) for key in found)
    with torch.no_grad():
        want, got = meant(prompt()).logits, model(prompt()).logits.double()
    rounded = any(weights_of(m) and m.spec.x_format != "float" for m in model.modules() if is_packed(m))
    limit = 0.1 if rounded else 1e-4 if exact else 20 * bound
    assert (got - want).norm() <= limit * want.norm(), (float((got - want).norm() / want.norm()), limit)
    entry = model.config.quantization_config
    assert entry.quant_method == "lowbit" and not entry.checkpoint
    return model


def largest(weight: torch.Tensor) -> torch.Tensor:
    """What an error is compared with: |w|, or for a zero among codes and zero points, a part of the row's largest."""
    return weight.abs().amax(-1, keepdim=True)


def damaged(folder: Path, change, message: str, *, load: bool = True) -> None:
    """Check that a checkpoint with this change of its tensors and settings is refused by name, and no layer changes."""
    file, config = folder / "model.safetensors", folder / "config.json"
    if change is not None:
        tensors, told = load_file(file), json.loads(config.read_text())
        change(tensors, told["quantization_config"])
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
        config.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=message):
        read(folder)
    if load:
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            lowbit.load(model, folder)
        after = model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert not any(is_packed(module) for module in model.modules())
