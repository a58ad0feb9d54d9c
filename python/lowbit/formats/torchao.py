# SPDX-License-Identifier: Apache-2.0
"""Conversion of torchao's configuration objects into lowbit's, and replacements for names that lowbit does not have."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from lowbit.formats.base import FormatConfig, PerAxis, PerGroup, granularity_of, mapping_of, require
from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.float8 import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig
from lowbit.formats.int4 import Int4WeightOnlyConfig, Int8DynamicActivationInt4WeightConfig
from lowbit.formats.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    int8_dynamic_activation_int8_weight,
)
from lowbit.formats.intx import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, int_format_of

_SAME_NAME = (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
)

_FLOAT8 = "float8_weight_only() or float8_dynamic_activation_float8_weight()"
_INTX = "intx_weight_only(torch.int3, group_size)"
_BY_NAME = "quantize_ once per format, each with a filter_fn(module, name)"
_PRIMITIVE = "QuantLinear.pack() and .unpack(), which take and give plain codes, scales and zero points"
_TENSOR = "QuantLinear, a module: the packed weight is a plain uint8 tensor"

_OPTIMIZERS = (
    "AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8", "Lion8bit", "SGD8bit", "Muon", "Muon8bit",
    "CPUOffloadOptimizer", "ChainedOptimizer", "split_for_muon",
)  # fmt: skip

INSTEAD = {
    "AOPerModuleConfig": _BY_NAME,
    "FqnToConfig": _BY_NAME,
    "ModuleFqnToConfig": _BY_NAME,
    "fqn_matches_fqn_config": _BY_NAME,
    "AffineQuantizedMinMaxObserver": "MappingType and quantize_, which reads the range of each weight itself",
    "AffineQuantizedObserverBase": "MappingType and quantize_, which reads the range of each weight itself",
    "Float8DynamicActivationInt4WeightConfig": "int8_dynamic_activation_int4_weight(): int8 activations, not float8",
    "Float8MMConfig": f"{_FLOAT8}, whose sums are float32",
    "Float8StaticActivationFloat8WeightConfig": f"{_FLOAT8}: its activation scales need no data",
    "Float8Tensor": _TENSOR,
    "Granularity": "PerRow() or PerGroup(n)",
    "Int4PlainInt32Tensor": _TENSOR,
    "Int4PreshuffledTensor": _TENSOR,
    "Int4Tensor": _TENSOR,
    "Int4TilePackedTo4dTensor": _TENSOR,
    "Int4WeightOnlyQuantizer": "quantize_(model, int4_weight_only())",
    "Int8DynActInt4WeightLinear": "QuantLinear",
    "Int8DynActInt4WeightQuantizer": "quantize_(model, int8_dynamic_activation_int4_weight())",
    "Int8StaticActivationInt8WeightConfig": "int8_dynamic_activation_int8_weight(): its activation scales need no data",
    "Int8Tensor": _TENSOR,
    "IntxOpaqueTensor": _TENSOR,
    "IntxUnpackedToInt8Tensor": _TENSOR,
    "Linear4bit": "quantize_(model, nf4_weight_only()), which makes QuantLinear",
    "Linear8bitLt": "quantize_(model, int8_weight_only()), which makes QuantLinear",
    "NF4Tensor": "nf4_weight_only()",
    "SemiSparseActivationLinear": "lowbit.training.SemiSparseActivationLinear",
    "SemiSparseLinear": "lowbit.training.SemiSparseLinear",
    "apply_fake_sparsity": "sparsify_(model, semi_sparse_weight())",
    "swap_linear_with_semi_sparse_linear": "lowbit.training.swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear": "lowbit.training.swap_semi_sparse_linear_with_linear",
    "PerBlock": "PerGroup(n): one scale per n neighbours along k",
    "PerTensor": "PerRow(): one scale for a whole tensor is less precise and no faster",
    "QATConfig": "lowbit.training.QATConfig",
    "BitNetTrainingConfig": "lowbit.training.BitNetTrainingConfig",
    "Int8MixedPrecisionTrainingConfig": "lowbit.training.Int8MixedPrecisionTrainingConfig",
    "Int8WeightOnlyQuantizedTrainingConfig": "lowbit.training.Int8WeightOnlyQuantizedTrainingConfig",
    "bitnet_training": "lowbit.training.BitNetTrainingConfig",
    "int8_mixed_precision_training": "lowbit.training.Int8MixedPrecisionTrainingConfig",
    "int8_weight_only_quantized_training": "lowbit.training.Int8WeightOnlyQuantizedTrainingConfig",
    "FakeQuantizedEmbedding": "lowbit.training.FakeQuantizedEmbedding",
    "FakeQuantizedLinear": "lowbit.training.FakeQuantizedLinear",
    "IntxFakeQuantizeConfig": "lowbit.training.QATConfig of a configuration such as intx_weight_only()",
    "TorchAODType": f"{_INTX}: torch's own dtypes",
    "UIntXWeightOnlyConfig": f"{_INTX}, asymmetric by mapping_type",
    "EmbeddingQuantizer": "quantize_ with a filter_fn that selects nn.Embedding, which makes QuantEmbedding",
    "Embedding4bit": "quantize_ with a filter_fn that selects nn.Embedding, which makes QuantEmbedding",
    "Embedding8bit": "quantize_ with a filter_fn that selects nn.Embedding, which makes QuantEmbedding",
    "ZeroPointDomain": "MappingType: zero points are integers, present when it is ASYMMETRIC",
    "choose_qparams_affine": _PRIMITIVE,
    "choose_qparams_affine_with_min_max": _PRIMITIVE,
    "compute_error": "the error dB in the report of quantize_",
    "dequantize": "dequantize_(model), or QuantLinear.dequantize()",
    "dequantize_affine": _PRIMITIVE,
    "int4_dynamic_activation_int4_weight": "int8_dynamic_activation_int4_weight()",
    "int_scaled_matmul": "linear(), whose int8 product is exact",
    "intx_quantization_aware_training": "lowbit.training.QATConfig",
    "quantize": "quantize_(model, config), in place",
    "quantize_affine": _PRIMITIVE,
    "register_quantize_module_handler": "docs/recipes/add_a_format.md",
    "safe_int_mm": "linear(), whose int8 product is exact",
    "swap_conv2d_1x1_to_linear": "torch.nn.Linear in the model's own code: convolutions stay float",
    "to_nf4": "quantize_(model, nf4_weight_only())",
    "uintx_weight_only": f"{_INTX}, asymmetric by mapping_type",
} | {name: f"lowbit.optim.{name}" for name in _OPTIMIZERS}
"""What to use in lowbit instead of a name of torchao or bitsandbytes."""


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module of lowbit lacks; for a name of torchao, it suggests the replacement."""
    instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}")


def from_torchao(config: Any) -> Any:
    """Convert a configuration of torchao into lowbit's; return anything else unchanged.

    Scales follow from the range of each group, as in torchao.

    Raises:
        TypeError: lowbit has no such configuration; the message names a replacement.
        ValueError: a field has a value that lowbit does not support.
    """
    if isinstance(config, type) or not is_dataclass(config) or not type(config).__module__.startswith("torchao."):
        return config
    name = type(config).__name__
    for cls in _SAME_NAME:
        if cls.__name__ == name:
            return _same_fields(config, cls)
    if name == "BlockSparseWeightConfig":
        return BlockSparseWeightConfig(config.blocksize)
    if name == "Int8DynamicActivationIntxWeightConfig":
        return _dynamic_intx(config)
    if name == "IntxWeightOnlyConfig":
        return _intx(config)
    instead = INSTEAD.get(name, "a configuration such as int8_weight_only()")
    raise TypeError(
        f"quantize_: config must be a configuration such as lowbit.int8_weight_only(), "
        f"got torchao's {name}; use {instead}"
    )


def _same_fields(config: Any, cls: type[FormatConfig]) -> FormatConfig:
    ours = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    for field in fields(config):
        if field.name not in ours:
            require(cls.function, field.name, getattr(config, field.name), field.default, "the only one")
    given = {field.name: getattr(config, field.name) for field in fields(config) if field.name in ours}
    algorithm = given.get("int4_choose_qparams_algorithm")
    hqq = getattr(algorithm, "value", algorithm) == "hqq"
    if "scale" in ours:
        given["scale"] = None if hqq else "absmax"
    return cls(**given)


def _dynamic_intx(config: Any) -> FormatConfig:
    bits, group_size = _bits_and_group("Int8DynamicActivationIntxWeightConfig", config, "weight_granularity")
    mapping = mapping_of("quantize_", "weight_mapping_type", config.weight_mapping_type)
    if bits not in (4, 8):
        return Int8DynamicActivationIntxWeightConfig(
            config.weight_dtype, PerGroup(group_size) if group_size else PerAxis(0), mapping,
            _ours(config.act_mapping_type), scale="absmax",
        )  # fmt: skip
    if bits == 4:
        return Int8DynamicActivationInt4WeightConfig(
            group_size, mapping_type=mapping, act_mapping_type=_ours(config.act_mapping_type), scale="absmax"
        )
    return int8_dynamic_activation_int8_weight(
        group_size, act_mapping_type=_ours(config.act_mapping_type), mapping_type=mapping, scale="absmax"
    )


def _intx(config: Any) -> FormatConfig:
    bits, group_size = _bits_and_group("IntxWeightOnlyConfig", config, "granularity")
    mapping = mapping_of("quantize_", "mapping_type", config.mapping_type)
    if bits not in (4, 8):
        granularity = PerGroup(group_size) if group_size else PerAxis(0)
        return IntxWeightOnlyConfig(config.weight_dtype, granularity, mapping, scale="absmax")
    cls = Int4WeightOnlyConfig if bits == 4 else Int8WeightOnlyConfig
    return cls(group_size, mapping_type=mapping, scale="absmax")


def _bits_and_group(name: str, config: Any, granularity: str) -> tuple[int, int | None]:
    bits = int(int_format_of(f"quantize_: {name}", config.weight_dtype).removeprefix("int"))
    algorithm = getattr(config, "intx_choose_qparams_algorithm", "affine")
    require(
        "quantize_",
        "intx_choose_qparams_algorithm",
        getattr(algorithm, "value", algorithm),
        "affine",
        "algorithm=lowbit.HQQ() of lowbit's own configurations is its asymmetric one",
    )
    return bits, granularity_of("quantize_", granularity, getattr(config, granularity)) or None


def _ours(mapping: Any) -> Any:
    return mapping_of("quantize_", "act_mapping_type", mapping)
