# SPDX-License-Identifier: Apache-2.0
"""quantize_to_file: a GGUF file, or a folder of transformers, quantized anew and written as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lowbit.formats.text import config_of
from lowbit.integrations.gguf.loading import load_model
from lowbit.integrations.gguf.saving import save
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.linear_layers import is_linear
from lowbit.quant.output_head import INT8
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport


def quantize_to_file(
    model: str | Path,
    out: str | Path,
    config: Any,
    *,
    like: str | Path | None = None,
    keep: list[str] | None = None,
    head: Any = INT8,
) -> QuantizationReport:
    """Quantize a model and write it as a GGUF file, which llama.cpp and `load_gguf` read; the float model is in memory.

    Args:
        model: a GGUF file, whose weights are dequantized before, or a folder with a causal language model.
        out: the file to write.
        config: a configuration whose codes a type of GGUF holds (`save`), or its text.
        like: a GGUF file of the same architecture and tokenizer; default: ``model``, if it is one.
        keep: names of layers that stay float, or parts of names.
        head: of `quantize_`.

    Raises:
        ValueError: there is no ``like``, or no type holds the codes. Nothing is written.
    """
    is_file = Path(model).suffix == ".gguf"
    like = model if like is None and is_file else like
    if like is None:
        raise ValueError(
            f"quantize: a folder needs like, a GGUF file of the same architecture and tokenizer, got {str(model)!r}"
        )
    if is_file:
        network = load_model(model, activations="float", fuse=False)
        dequantize_(network)
    else:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = keep or []
    chosen = None if not names else lambda module, name: is_linear(module) and not any(part in name for part in names)
    report = quantize_(network, config_of(config), chosen, head=head)
    save(network, out, like)
    return report
