# SPDX-License-Identifier: Apache-2.0
"""config_of is the way back from str(config); text is read, never evaluated."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lowbit
from lowbit.formats import FORMATS, LinearSpec, MappingType, PerGroup, PerRow
from lowbit.formats.text import config_of

MADE = [
    lowbit.int4_weight_only(group_size=32),
    lowbit.int4_weight_only(None, mapping_type=MappingType.ASYMMETRIC),
    lowbit.Int8WeightOnlyConfig(granularity=PerGroup(64)),
    lowbit.int8_weight_only(128, mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR),
    lowbit.int8_dynamic_activation_int8_weight(64),
    lowbit.int8_dynamic_activation_int8_weight(64, act_mapping_type=MappingType.ASYMMETRIC),
    lowbit.Int8DynamicActivationInt4WeightConfig(64, act_granularity=PerRow()),
    lowbit.float_weight(torch.bfloat16),
]


@pytest.mark.parametrize("config", [*MADE, *(cls() for cls in FORMATS)], ids=str)
def test_the_text_of_a_configuration_reads_back_as_it(config):
    assert config_of(str(config)) == config
    assert config_of(config) is config
    spec = config.spec(torch.bfloat16)
    assert config_of(spec).spec(torch.float16) == config_of(dataclasses.asdict(spec)).spec(torch.float32) == spec


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("int4_weight_only", lowbit.int4_weight_only()),
        ("lowbit.int4_weight_only(32)", lowbit.int4_weight_only(32)),
        ("Int4WeightOnlyConfig(group_size=64)", lowbit.int4_weight_only(64)),
        ("int8_dynamic_activation_int8_weight(32)", lowbit.int8_dynamic_activation_int8_weight(32)),
        ("int8_dynamic_activation_int8_weight(group_size=32)", lowbit.int8_dynamic_activation_int8_weight(32)),
        ({"format": "int4_weight_only", "group_size": 32}, lowbit.int4_weight_only(32)),
        ({"format": "float_weight", "dtype": "torch.float16"}, lowbit.float_weight(torch.float16)),
        ({"format": "int8_weight_only", "granularity": "PerGroup(32)"}, lowbit.Int8WeightOnlyConfig(granularity=PerGroup(32))),
    ],
    ids=str,
)
def test_other_ways_to_say_it(given, wanted):
    assert config_of(given) == wanted


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ("int5_weight_only", ValueError, "must begin with one of float_weight"),
        ("int4_weight_only(group_size=31)", ValueError, "group_size must be 32, 64"),
        ("int4_weight_only(groupsize=32)", ValueError, "unexpected keyword argument 'groupsize'"),
        ("int4_weight_only(", ValueError, "config must be a call such as"),
        ("__import__('os').system('true')", ValueError, "must begin with one of"),
        ("int4_weight_only(group_size=__import__('os'))", ValueError, "must be a literal"),
        ("int8_weight_only(granularity=PerGroup(size=3))", ValueError, "unexpected keyword"),
        ("int4_weight_only(**{})", ValueError, "must write out its arguments"),
        ({"group_size": 32}, ValueError, '"format" must be one of'),
        ({"format": "int8_weight_only", "granularity": "PerGroup("}, ValueError, "config must be a call such as"),
        (LinearSpec("int4", 31), ValueError, "no configuration has the spec"),
        (32, TypeError, "must be a configuration, its text"),
        (lowbit.int4_weight_only, TypeError, "got Int4WeightOnlyConfig"),
    ],
    ids=lambda given: getattr(given, "__name__", None) or str(given),  # no address: names are the same in every process
)
def test_what_is_no_configuration_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        config_of(given)
