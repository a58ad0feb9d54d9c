# SPDX-License-Identifier: Apache-2.0
"""The quantization methods of other packages whose checkpoints lowbit reads, by the ``quant_method`` of a config.json.

Each has a file with the layout of its tensors and a `Method` that reads them. reader.py applies it to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit.checkpoints.methods.auto_round import AutoRoundMethod
from lowbit.checkpoints.methods.awq import AWQMethod
from lowbit.checkpoints.methods.bitnet import BitNetMethod
from lowbit.checkpoints.methods.compressed_tensors import CompressedTensorsMethod
from lowbit.checkpoints.methods.fp8 import FbgemmFP8Method, FP8Method
from lowbit.checkpoints.methods.gptq import GPTQMethod
from lowbit.checkpoints.methods.hqq import HQQMethod
from lowbit.checkpoints.methods.method import CONFIG, Method
from lowbit.checkpoints.methods.modelopt import ModelOptMethod
from lowbit.checkpoints.methods.mxfp4 import MXFP4Method
from lowbit.checkpoints.methods.quanto import QuantoMethod
from lowbit.checkpoints.methods.quark import QuarkMethod

_CLASSES: tuple[type[Method], ...] = (
    GPTQMethod,
    AWQMethod,
    AutoRoundMethod,
    CompressedTensorsMethod,
    FP8Method,
    FbgemmFP8Method,
    HQQMethod,
    MXFP4Method,
    ModelOptMethod,
    BitNetMethod,
    QuantoMethod,
    QuarkMethod,
)
METHODS = {cls.name: cls for cls in _CLASSES}
"""The methods that are read."""
REFUSED = {
    "aqlm": "sums of vectors from learned codebooks, which the package aqlm decodes",
    "vptq": "vectors of learned codebooks, which the package vptq decodes",
    "spqr": "codes with scales that are codes too and sparse outliers, which the package spqr_quant decodes",
    "higgs": "vectors of a grid behind a Hadamard rotation, which the package flute-kernel decodes on GPUs",
    "paroquant": "codes behind rotations of pairs of inputs, for which lowbit has no kernel",
    "bitsandbytes": "read by lowbit.load(model, lowbit.from_bitsandbytes(state)), or by transformers itself",
    "lowbit": "packed by lowbit already, and from_pretrained reads them without LowbitConfig",
    "torchao": "read by lowbit.load(model, lowbit.from_torchao(folder))",
}
"""What the weights of other methods are."""


def method_of(settings: Mapping[str, Any], activations: str | None) -> Method:
    """Return the method that an entry ``quantization_config`` names.

    Raises:
        ValueError: it names none, one that lowbit does not read, or a setting that lowbit has no format for.
    """
    name = settings.get("quant_method")
    if name in REFUSED:
        raise ValueError(f"{CONFIG}: quant_method {name!r} is not read: its weights are {REFUSED[name]}")
    if name not in METHODS:
        raise ValueError(f"{CONFIG}: quant_method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name](settings, activations)
