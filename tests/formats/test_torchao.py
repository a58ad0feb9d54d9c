# SPDX-License-Identifier: Apache-2.0
"""A change of the import: torchao's objects are read, and a name that is not here says what to take."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats import LinearSpec
from lowbit.formats.torchao import INSTEAD, from_torchao


@pytest.mark.parametrize("granularity", [None, lowbit.PerRow(), lowbit.PerRow(dim=-1), lowbit.PerAxis(0), lowbit.PerToken()])
def test_every_way_to_say_per_row(granularity):
    assert lowbit.Int8WeightOnlyConfig(granularity=granularity).spec(torch.float32) == LinearSpec("int8")
    dynamic = lowbit.Int8DynamicActivationInt8WeightConfig(granularity=granularity)
    assert dynamic.spec(torch.float32) == LinearSpec("int8", x_format="int8_row")


@pytest.mark.parametrize("granularity", [lowbit.PerAxis(1), lowbit.PerRow(dim=0), "PerRow", 64])
def test_another_axis_is_refused(granularity):
    with pytest.raises(
        ValueError, match=r"int8_weight_only: granularity must be PerRow\(\) or PerGroup\(n\), got granularity="
    ):
        lowbit.Int8WeightOnlyConfig(granularity=granularity)


def test_torchaos_default_of_the_algorithm_is_ours_and_hqq_is_a_field_of_its_own():
    assert lowbit.Int4WeightOnlyConfig().int4_choose_qparams_algorithm == "tinygemm"
    assert lowbit.Int4WeightOnlyConfig(int4_choose_qparams_algorithm="tinygemm") == lowbit.int4_weight_only()
    hqq = lowbit.Int4WeightOnlyConfig(int4_choose_qparams_algorithm="hqq")
    assert spec_of(hqq) == spec_of(lowbit.int4_weight_only(algorithm=lowbit.HQQ()))
    with pytest.raises(ValueError, match=r"int4_weight_only: algorithm must be HQQ\(\) or None with .*='hqq', got GPTQ\("):
        lowbit.Int4WeightOnlyConfig(int4_choose_qparams_algorithm="hqq", algorithm=lowbit.GPTQ())


def spec_of(config: lowbit.formats.FormatConfig) -> LinearSpec:
    return config.spec(torch.float32)


def test_device_is_the_fourth_argument_as_in_torchao():
    model = nn.Sequential(nn.Linear(32, 32))
    lowbit.quantize_(model, lowbit.int8_weight_only(), None, "cpu")
    assert isinstance(model[0], lowbit.QuantLinear)


@pytest.mark.parametrize("name", INSTEAD)
def test_a_name_that_is_not_here_says_what_to_take_instead(name):
    with pytest.raises(AttributeError, match=f"module 'lowbit' has no attribute '{name}'; use .+"):
        getattr(lowbit, name)
    assert not hasattr(lowbit, name) and name not in dir(lowbit)


def test_an_unknown_name_is_refused_as_python_refuses_it():
    with pytest.raises(AttributeError, match="^module 'lowbit' has no attribute 'nonsense'$"):
        getattr(lowbit, "nonsense")  # noqa: B009
    with pytest.raises(AttributeError, match="has no attribute 'quantise_'; the nearest (is|are) quantize_"):
        getattr(lowbit, "quantise_")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'lowbit'"):
        from lowbit import nonsense  # noqa: F401


def test_what_is_told_to_use_exists(subtests):
    for name, text in INSTEAD.items():
        with subtests.test(name):
            words = [word.strip("`,;:()") for word in text.replace("(", " ").split()]
            known = (*dir(lowbit), "docs/recipes/add_a_format", "torch")
            assert any(word.removeprefix("lowbit.").split(".")[0] in known for word in words), name
            assert not hasattr(lowbit, name)


def test_an_optimizer_that_lowbit_has_is_what_to_use_instead_of_torchaos():
    for name in lowbit.optim.__all__:
        assert name == "AdamW" or INSTEAD[name] == f"lowbit.optim.{name}"


def test_every_public_name_of_torchao_is_here_or_says_what_to_take(subtests):
    torchao = pytest.importorskip("torchao.quantization")
    names = [*torchao.__all__, *importlib.import_module("torchao.optim").__all__]
    for name in names:
        with subtests.test(name):
            if name.startswith("_") or hasattr(lowbit, name):
                continue
            assert name in INSTEAD, name


def test_torchaos_own_objects_are_read(subtests):
    ao = pytest.importorskip("torchao.quantization")
    group, symmetric, asymmetric = ao.PerGroup, ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC
    intx, dynamic_intx, dynamic_int8 = ao.IntxWeightOnlyConfig, ao.Int8DynamicActivationIntxWeightConfig, ao.Int8DynamicActivationInt8WeightConfig
    cases = [
        (ao.Int8WeightOnlyConfig(), LinearSpec("int8")),
        (ao.Int8WeightOnlyConfig(granularity=group(64)), LinearSpec("int8", 64)),
        (ao.Int4WeightOnlyConfig(), LinearSpec("int4", 128, scale="absmax")),
        (ao.Int4WeightOnlyConfig(group_size=32), LinearSpec("int4", 32, scale="absmax")),
        (dynamic_int8(), LinearSpec("int8", x_format="int8_row")),
        (dynamic_int8(granularity=[ao.PerRow(), ao.PerRow()]), LinearSpec("int8", x_format="int8_row")),
        (intx(torch.int4, group(32)), LinearSpec("int4", 32, scale="absmax")),
        (intx(torch.int8), LinearSpec("int8")),
        (intx(torch.int3, group(64)), LinearSpec("int3", 64, scale="absmax")),
        (intx(torch.int4, group(64), asymmetric), LinearSpec("int4", 64, True, mapping="asymmetric", scale="absmax")),
        (dynamic_intx(torch.int6, act_mapping_type=symmetric), LinearSpec("int6", 32, x_format="int8_group", scale="absmax")),
        (dynamic_intx(torch.int4, group(32)), LinearSpec("int4", 32, x_format="int8_row_asymmetric", scale="absmax")),
        (dynamic_intx(torch.int4, group(32), act_mapping_type=symmetric), LinearSpec("int4", 32, x_format="int8_group", scale="absmax")),
        (dynamic_intx(torch.int8, ao.PerAxis(0), act_mapping_type=symmetric), LinearSpec("int8", x_format="int8_row")),
    ]  # fmt: skip
    for config, wanted in cases:
        with subtests.test(str(config)):
            assert spec_of(from_torchao(config)) == wanted, config
            model = nn.Sequential(nn.Linear(64, 32))
            report = lowbit.quantize_(model, config)
            assert report.rows[0].format == model[0].spec.name == wanted.name


def test_what_torchaos_object_asks_for_and_is_not_here_is_refused_with_what_to_take(subtests):
    ao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 32))
    for config, kind, text in [
        (ao.Float8DynamicActivationInt4WeightConfig(), TypeError,
         "got torchao's Float8DynamicActivationInt4WeightConfig; use int8_dynamic_activation_int4_weight"),
        (ao.FqnToConfig({"0": ao.Int8WeightOnlyConfig()}), TypeError, "FqnToConfig; use quantize_ once per format"),
        (ao.IntxWeightOnlyConfig(torch.int1), ValueError,
         "IntxWeightOnlyConfig: weight_dtype must be torch.int2 to torch.int8, got weight_dtype=torch.int1"),
        (ao.Int4WeightOnlyConfig(int4_packing_format="preshuffled"), ValueError, "int4_packing_format must be 'plain'"),
        (ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()), ValueError, r"must be PerRow\(\) or PerGroup\(n\), got .*less precise"),
    ]:  # fmt: skip
        with subtests.test(text), pytest.raises(kind, match=text):
            lowbit.quantize_(model, config)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("filter_fn", "text"),
    [
        (["0"], "filter_fn must be a function of .module, qualified name., True selects; got list"),
        ("0", "got str"),
        (lambda module: True, r"got one of \(module\)"),
        (lambda a, b, c: True, r"got one of \(a, b, c\)"),
        (lambda module, name: "0" in name or not name, "got the model itself: Sequential; it is asked about every module"),
    ],
)
def test_a_filter_that_cannot_work_is_refused(filter_fn, text):
    with pytest.raises(TypeError, match=text):
        lowbit.quantize_(nn.Sequential(nn.Linear(32, 32)), lowbit.int8_weight_only(), filter_fn)
