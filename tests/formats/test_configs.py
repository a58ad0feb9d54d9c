# SPDX-License-Identifier: Apache-2.0
"""Configurations: torchao's names and defaults, and errors that say what was wanted and what was given."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from dataclasses import dataclass

import pytest
import torch

import lowbit
from lowbit.formats import FORMATS, LinearSpec, MappingType, PerGroup, PerRow

DYNAMIC_INT8, DYNAMIC_INT4 = lowbit.int8_dynamic_activation_int8_weight, lowbit.int8_dynamic_activation_int4_weight
GROUPED = [lowbit.int8_weight_only, lowbit.int4_weight_only, DYNAMIC_INT8, DYNAMIC_INT4]


def spec(config) -> LinearSpec:
    return config.spec(torch.float32)


@pytest.mark.parametrize("cls", FORMATS)
def test_every_configuration_is_frozen_hashable_and_made_by_its_lower_case_function(cls):
    config = cls()
    assert getattr(lowbit, cls.function)() == config
    assert hash(config) == hash(cls())
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert str(config).startswith(cls.function + "(")
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        config.group_size = 64
    assert not hasattr(config, "__dict__")


def test_a_short_name_is_the_class_or_takes_a_group_size_for_a_granularity() -> None:
    translated = {"int8_dynamic_activation_int8_weight", "intx_weight_only", "int8_dynamic_activation_intx_weight", "float8_weight_only"}
    assert lowbit.block_sparse_weight is lowbit.BlockSparseWeightConfig
    for cls in FORMATS:
        short = getattr(lowbit, cls.function)
        assert (short is cls) == (cls.function not in translated)
    for name in translated:
        grouped = getattr(lowbit, name)(group_size=64)
        assert "PerGroup(group_size=64)" in str(grouped) and spec(grouped).group_size == 64


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (lowbit.int8_weight_only(), LinearSpec("int8", 0)),
        (lowbit.int4_weight_only(), LinearSpec("int4", 128)),
        (lowbit.int8_dynamic_activation_int8_weight(), LinearSpec("int8", 0, x_format="int8_row")),
        (lowbit.int8_dynamic_activation_int4_weight(), LinearSpec("int4", 32, x_format="int8_group")),
        (lowbit.float_weight(), LinearSpec("float32")),
        (lowbit.float_weight(torch.bfloat16), LinearSpec("bfloat16")),
    ],
)
def test_defaults(config, wanted):
    assert spec(config) == wanted


def test_float_weight_keeps_the_dtype_of_each_weight():
    assert lowbit.float_weight().spec(torch.float16).format == "float16"
    assert lowbit.float_weight(torch.bfloat16).spec(torch.float16).format == "bfloat16"


@pytest.mark.parametrize("make", GROUPED)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
def test_every_group_size_is_taken(make, group_size):
    assert spec(make(group_size=group_size)).group_size == (group_size or 0)


@pytest.mark.parametrize("make", GROUPED)
@pytest.mark.parametrize("group_size", [48, 0, -1, 16, 512, 32.0, True, "32"])
def test_a_bad_group_size_names_function_argument_wanted_and_got(make, group_size):
    text = rf"{make().function}: group_size must be 32, 64, 128, 256 or None \(per channel\), got group_size={group_size!r}$"
    with pytest.raises(ValueError, match=text):
        make(group_size=group_size)


@pytest.mark.parametrize("make", GROUPED)
@pytest.mark.parametrize("mapping", list(MappingType))
def test_every_weight_mapping_is_taken(make, mapping):
    made = spec(make(mapping_type=mapping))
    assert made.mapping == mapping.value
    assert made.asymmetric == (mapping is MappingType.ASYMMETRIC)


class TorchaoMappingType(enum.Enum):
    SYMMETRIC = enum.auto()
    ASYMMETRIC = enum.auto()


@pytest.mark.parametrize("mapping", [TorchaoMappingType.ASYMMETRIC, "asymmetric", "ASYMMETRIC", MappingType.ASYMMETRIC])
def test_a_mapping_is_known_by_its_name_whoever_made_the_enum(mapping):
    assert spec(lowbit.int4_weight_only(mapping_type=mapping)).asymmetric


@pytest.mark.parametrize("make", GROUPED)
def test_an_unknown_mapping_is_refused(make):
    with pytest.raises(ValueError, match=rf"{make().function}: mapping_type must be one of .*got mapping_type='hqq'"):
        make(mapping_type="hqq")


@pytest.mark.parametrize(
    ("config", "x_format"),
    [
        (DYNAMIC_INT8(), "int8_row"),
        (DYNAMIC_INT8(64), "int8_group"),
        (DYNAMIC_INT8(act_mapping_type=MappingType.ASYMMETRIC), "int8_row_asymmetric"),
        (DYNAMIC_INT8(64, act_mapping_type=MappingType.ASYMMETRIC), "int8_row_asymmetric"),
        (lowbit.Int8DynamicActivationInt8WeightConfig(granularity=PerGroup(128)), "int8_group"),
        (lowbit.Int8DynamicActivationInt8WeightConfig(granularity=(PerRow(), PerGroup(128))), "int8_row"),
        (DYNAMIC_INT4(128), "int8_group"),
        (DYNAMIC_INT4(None), "int8_row"),
        (DYNAMIC_INT4(act_mapping_type=MappingType.ASYMMETRIC), "int8_row_asymmetric"),
        (lowbit.Int8DynamicActivationInt4WeightConfig(act_granularity=PerRow()), "int8_row"),
    ],
    ids=str,
)
def test_how_activations_are_taken(config, x_format):
    assert spec(config).x_format == x_format


def test_int8_granularity_is_another_way_to_give_the_group_size():
    assert spec(lowbit.Int8WeightOnlyConfig(granularity=PerGroup(64))) == spec(lowbit.int8_weight_only(64))
    with pytest.raises(
        ValueError, match=r"int8_weight_only: group_size and granularity must agree, got group_size=32 .*64"
    ):
        lowbit.Int8WeightOnlyConfig(group_size=32, granularity=PerGroup(64))


def test_torchaos_granularity_classes_are_understood_and_others_refused():
    @dataclass(frozen=True)
    class PerTensor:
        pass

    torchaos = dataclass(frozen=True)(type("PerGroup", (), {"__annotations__": {"group_size": int}}))
    assert spec(lowbit.Int8WeightOnlyConfig(granularity=torchaos(64))).group_size == 64
    with pytest.raises(
        ValueError, match=r"int8_weight_only: granularity must be PerRow\(\) or PerGroup\(n\), got .*PerTensor"
    ):
        lowbit.Int8WeightOnlyConfig(granularity=PerTensor())


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        *((cls, {"version": 1}) for cls in (lowbit.Int8WeightOnlyConfig, lowbit.Int4WeightOnlyConfig, lowbit.Int8DynamicActivationInt8WeightConfig)),
        (lowbit.Int4WeightOnlyConfig, {"int4_packing_format": "tile_packed_to_4d"}),
        (lowbit.Int4WeightOnlyConfig, {"int4_choose_qparams_algorithm": "awq"}),
        (lowbit.Int4WeightOnlyConfig, {"int4_tile_packed_ntile": 4}),
        (lowbit.Int8DynamicActivationInt8WeightConfig, {"weight_only_decode": True}),
        (lowbit.Int8DynamicActivationInt8WeightConfig, {"reduce_range": True}),
    ],
)
def test_an_option_of_torchao_that_cannot_be_honoured_is_never_ignored(cls, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"{cls.function}: {name} must be .*, got {name}={value!r}"):
        cls(**option)


@pytest.mark.parametrize("make", GROUPED)
def test_scales_are_searched_for_in_4_bits_unless_nothing_may_clip(make):
    four = "int4" in make().function
    assert spec(make()).scale == spec(make(mapping_type="asymmetric")).scale == ("search" if four else "absmax")
    assert spec(make(mapping_type="symmetric_no_clipping_err")).scale == "absmax"
    assert spec(make(scale="absmax")).scale == "absmax" and spec(make(scale="search")).scale == "search"


def test_set_inductor_config_is_accepted_because_both_values_mean_the_same_here():
    for cls in FORMATS:
        if "set_inductor_config" not in cls.__dataclass_fields__:  # not one of torchao's
            continue
        assert spec(cls(set_inductor_config=False)) == spec(cls())


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"act_mapping_type": "symmetric_no_clipping_err"}, "act_mapping_type must be one of"),
        ({"granularity": PerGroup(64), "act_mapping_type": "asymmetric"}, "asymmetric activations must be per row"),
        ({"granularity": (PerGroup(32), PerGroup(64))}, "groups of activations must be those of the weight, got 32 and 64"),
        ({"granularity": (PerGroup(32), PerRow())}, "groups of activations must be those of the weight, got 32 and per channel"),
        ({"granularity": (PerRow(),)}, "granularity must be one granularity, or a pair"),
    ],  # fmt: skip
)
def test_activations_that_no_kernel_takes_are_refused(option, text):
    with pytest.raises(ValueError, match=f"int8_dynamic_activation_int8_weight: {text}"):
        lowbit.Int8DynamicActivationInt8WeightConfig(**option)


def test_float_weight_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"float_weight: dtype must be .*, got dtype=torch.float64"):
        lowbit.float_weight(torch.float64)
