# SPDX-License-Identifier: Apache-2.0
"""quantize_to_file: quantize a GGUF file or a transformers folder and write a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lowbit.checkpoints.gguf.saving import save
from lowbit.formats.base import FormatConfig
from lowbit.formats.text import config_of
from lowbit.huggingface.load_gguf import load_model
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.huggingface.quantizer import LowbitQuantizer
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.output_head import INT8
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport


def quantize_to_file(
    model: str | Path,
    out: str | Path,
    config: Any,
    *,
    like: str | Path | None = None,
    modules_to_not_convert: list[str] | None = None,
    head: Any = INT8,
    calibration: Any = None,
) -> QuantizationReport:
    """Quantize a model and write it as a GGUF file, which llama.cpp and `load_gguf` read. The whole float model is in
    memory.

    Args:
        model: a GGUF file, whose weights are dequantized first, or a folder with a causal language model.
        out: the file to write.
        config: a configuration whose codes a GGUF type can hold (`save`), or its text.
        like: a GGUF file of the same architecture and tokenizer; by default ``model``, if it is one.
        modules_to_not_convert: names of layers that stay float, as in `lowbit.LowbitConfig`.
        head: the argument of `lowbit.LowbitConfig`.
        calibration: the argument of `quantize_`, such as "self".

    Returns:
        A `QuantizationReport`.

    Raises:
        ValueError: there is no ``like``, or no GGUF type holds the codes. Nothing is written.
    """
    is_file = Path(model).suffix == ".gguf"
    like = model if like is None and is_file else like
    if like is None:
        raise ValueError(
            "quantize: like must be a GGUF file of the same architecture and tokenizer where model is a folder, got "
            f"None for {str(model)!r}"
        )
    if is_file:
        network = load_model(model, activations="float", fuse=False)
        dequantize_(network)
    else:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    report = quantize_layers(network, config_of(config), modules_to_not_convert or [], head, calibration)
    save(network, out, like)
    return report


def quantize_layers(
    model: nn.Module, config: FormatConfig, keep: list[str], head: Any = INT8, calibration: Any = None
) -> QuantizationReport:
    """Quantize the layers that `LowbitConfig` would pack in this model."""
    quantizer = LowbitQuantizer(LowbitConfig(config, keep, head=head, calibration=calibration), pre_quantized=False)
    left = {row.layer: row for row in quantizer.select(model)}
    layers = quantizer.selection.layers
    report = quantize_(model, config, lambda _, name: name in layers, head=head, calibration=calibration)
    report.rows = [left.get(row.layer, row) for row in report.rows]  # adds the reasons
    return report
