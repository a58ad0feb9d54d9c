# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers, attention and low-memory optimizers for PyTorch on the CPU, in eager mode, with no compiler
on your machine.

Example:
    >>> import torch, lowbit
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    >>> report = lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))

Public names are loaded at first use (the table below): `import torch` imports this package by its autoload entry point,
and must stay quick. Importing registers the ops `torch.ops.lowbit.*`.
"""

from __future__ import annotations

import dis
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _torch = None  # `import lowbit._C` works; every public name raises an error that names torch

from lowbit import _C
from lowbit._C import version as __version__

_C.look_in(sys.path)  # pip puts NVIDIA's libraries and oneDNN there; nothing is opened here

if TYPE_CHECKING:
    from lowbit import attention, backends, devices, optim, recorder, training
    from lowbit.attention.block_mask import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
    from lowbit.attention.flex import AuxOutput, AuxRequest, flex_attention
    from lowbit.attention.kv_cache import QuantizedKVCache
    from lowbit.attention.sdpa import scaled_dot_product_attention
    from lowbit.autotune import Plan, autoquant
    from lowbit.compile.blocks import compile_blocks
    from lowbit.compile.c_shims import c_shim_options
    from lowbit.compile.options import compile_options
    from lowbit.devices.warmup import warmup
    from lowbit.diagnostics.compare import Comparison, compare_checkpoints
    from lowbit.diagnostics.explain import explain
    from lowbit.diagnostics.info import info
    from lowbit.diagnostics.kernels import force_kernel, kernels
    from lowbit.formats import (
        GPTQ,
        HQQ,
        BlockSparseWeightConfig,
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        FloatWeightConfig,
        FP4WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt4WeightConfig,
        Int8DynamicActivationInt8SemiSparseWeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        NF4WeightOnlyConfig,
        PerAxis,
        PerGroup,
        PerRow,
        PerToken,
        SemiSparseWeightConfig,
        block_sparse_weight,
        float8_dynamic_activation_float8_weight,
        float8_weight_only,
        float_weight,
        fp4_weight_only,
        int4_weight_only,
        int8_dynamic_activation_int4_weight,
        int8_dynamic_activation_int8_semi_sparse_weight,
        int8_dynamic_activation_int8_weight,
        int8_dynamic_activation_intx_weight,
        int8_weight_only,
        intx_weight_only,
        nf4_weight_only,
        semi_sparse_weight,
    )
    from lowbit.integrations.fuse import fuse
    from lowbit.integrations.gguf import load_gguf
    from lowbit.integrations.lowbit_config import LowbitConfig
    from lowbit.integrations.quantize_checkpoint import quantize_checkpoint
    from lowbit.integrations.rotate import rotate_
    from lowbit.integrations.smooth import smooth_
    from lowbit.integrations.trainer_optimizer import trainer_optimizer
    from lowbit.ops.route import route
    from lowbit.ops.sample import sample
    from lowbit.quant import (
        BlockSparseLinear,
        Calibration,
        QuantEmbedding,
        QuantExperts,
        QuantizationReport,
        QuantLinear,
        calibrate,
        dequantize_,
        fuse_gated_mlps,
        load,
        quantize_,
        sparsify_,
    )
    from lowbit.quant.functional import experts, gather_linear, linear
    from lowbit.recorder.profile import profile

_HOME = {
    name: module
    for module, names in {
        "lowbit.autotune": "autoquant Plan",
        "lowbit.quant": (
            "quantize_ sparsify_ calibrate Calibration dequantize_ fuse_gated_mlps load QuantLinear QuantEmbedding "
            "QuantExperts BlockSparseLinear QuantizationReport"
        ),
        "lowbit.integrations.fuse": "fuse",
        "lowbit.integrations.rotate": "rotate_",
        "lowbit.integrations.smooth": "smooth_",
        "lowbit.attention.kv_cache": "QuantizedKVCache",
        "lowbit.formats": (
            "GPTQ HQQ MappingType PerAxis PerGroup PerRow PerToken "
            "Int4WeightOnlyConfig Int8WeightOnlyConfig IntxWeightOnlyConfig Float8WeightOnlyConfig FloatWeightConfig "
            "NF4WeightOnlyConfig FP4WeightOnlyConfig Int8DynamicActivationInt4WeightConfig "
            "Int8DynamicActivationInt8WeightConfig Int8DynamicActivationIntxWeightConfig "
            "Float8DynamicActivationFloat8WeightConfig SemiSparseWeightConfig "
            "Int8DynamicActivationInt8SemiSparseWeightConfig semi_sparse_weight BlockSparseWeightConfig "
            "block_sparse_weight "
            "int8_dynamic_activation_int8_semi_sparse_weight "
            "int4_weight_only int8_weight_only intx_weight_only float8_weight_only float_weight nf4_weight_only "
            "fp4_weight_only int8_dynamic_activation_int4_weight int8_dynamic_activation_int8_weight "
            "int8_dynamic_activation_intx_weight float8_dynamic_activation_float8_weight"
        ),
        "lowbit.quant.functional": "experts gather_linear linear",
        "lowbit.ops.route": "route",
        "lowbit.ops.sample": "sample",
        "lowbit.attention.sdpa": "scaled_dot_product_attention",
        "lowbit.attention.flex": "flex_attention AuxRequest AuxOutput",
        "lowbit.attention.block_mask": "BlockMask create_block_mask create_mask and_masks or_masks noop_mask",
        "lowbit.diagnostics.kernels": "kernels force_kernel",
        "lowbit.diagnostics.compare": "Comparison compare_checkpoints",
        "lowbit.diagnostics.explain": "explain",
        "lowbit.diagnostics.info": "info",
        "lowbit.recorder.profile": "profile",
        "lowbit.integrations.gguf": "load_gguf",
        "lowbit.integrations.lowbit_config": "LowbitConfig",
        "lowbit.integrations.quantize_checkpoint": "quantize_checkpoint",
        "lowbit.integrations.trainer_optimizer": "trainer_optimizer",
        "lowbit.compile.blocks": "compile_blocks",
        "lowbit.compile.c_shims": "c_shim_options",
        "lowbit.compile.options": "compile_options",
        "lowbit.devices.warmup": "warmup",
    }.items()
    for name in names.split()
}
_MODULES = (
    "attention", "autotune", "backends", "devices", "formats", "integrations", "optim", "quant", "recorder", "testing",
    "training",
)  # fmt: skip
__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "BlockSparseLinear",
    "BlockSparseWeightConfig",
    "Calibration",
    "Comparison",
    "FP4WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FloatWeightConfig",
    "GPTQ",
    "HQQ",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8SemiSparseWeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "LowbitConfig",
    "MappingType",
    "NF4WeightOnlyConfig",
    "PerAxis",
    "PerGroup",
    "PerRow",
    "PerToken",
    "Plan",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantizationReport",
    "QuantizedKVCache",
    "SemiSparseWeightConfig",
    "__version__",
    "and_masks",
    "attention",
    "autoquant",
    "backends",
    "block_sparse_weight",
    "c_shim_options",
    "calibrate",
    "compare_checkpoints",
    "compile_blocks",
    "compile_options",
    "create_block_mask",
    "create_mask",
    "dequantize_",
    "devices",
    "experts",
    "explain",
    "flex_attention",
    "float8_dynamic_activation_float8_weight",
    "float8_weight_only",
    "float_weight",
    "force_kernel",
    "fp4_weight_only",
    "fuse",
    "fuse_gated_mlps",
    "gather_linear",
    "info",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_dynamic_activation_intx_weight",
    "int8_weight_only",
    "intx_weight_only",
    "kernels",
    "linear",
    "load",
    "load_gguf",
    "nf4_weight_only",
    "noop_mask",
    "optim",
    "or_masks",
    "profile",
    "quantize_",
    "quantize_checkpoint",
    "recorder",
    "rotate_",
    "route",
    "sample",
    "scaled_dot_product_attention",
    "semi_sparse_weight",
    "smooth_",
    "sparsify_",
    "trainer_optimizer",
    "training",
    "warmup",
]

if _torch is not None:
    from lowbit.integrations.when_imported import join_when_imported
    from lowbit.ops.registration import register

    register()
    join_when_imported()
    del register, join_when_imported
    if _C.recorder.state()["on"]:
        from lowbit.recorder import join_ranks

        join_ranks()
        del join_ranks
    if os.environ.get("LOWBIT_SIM") == "1":
        from lowbit.devices import simulated

        simulated.enable()


def __getattr__(name: str) -> Any:
    if _torch is None and (name in _MODULES or name in _HOME):
        raise ImportError(f'lowbit.{name} needs PyTorch, which is not installed: pip install "lowbit[torch]"')
    if name in _MODULES:
        return importlib.import_module(f"lowbit.{name}")
    if name not in _HOME:
        instead = _instead(name)
        caller = sys._getframe(1)  # `from lowbit import name` would replace the text of an AttributeError with its own
        if instead and caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]:
            raise ImportError(f"cannot import name {name!r} from 'lowbit'{instead}", name="lowbit")
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}{instead}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _instead(name: str) -> str:
    """The error's advice for a name of torchao or bitsandbytes that is not here."""
    if name.startswith("_") or _torch is None:  # asked for by inspect, pickle and others
        return ""
    from lowbit.formats.torchao import INSTEAD

    return f"; use {INSTEAD[name]}" if name in INSTEAD else ""


def __dir__() -> list[str]:
    return sorted(__all__)
