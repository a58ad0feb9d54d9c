# SPDX-License-Identifier: Apache-2.0
"""Layers whose packed weight is larger than the float one stay float, unless they are asked for."""

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats.base import FormatConfig
from lowbit.quant import QuantLinear

CONFIGS = [lowbit.int8_weight_only(), lowbit.int4_weight_only(32), lowbit.int8_dynamic_activation_int4_weight(32)]


def made(rows: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, rows)).to(dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_decide(config: FormatConfig, dtype: torch.dtype) -> None:
    for rows in range(1, 18):
        model = made(rows, dtype)
        before, after = rows * 256 * dtype.itemsize, config.spec(dtype).bytes(rows, 256)
        after = after if rows <= 8 else 0  # half of a panel and more
        report = lowbit.quantize_(model, config)
        assert isinstance(model[1], QuantLinear) == (after <= before), rows
        assert report.model_bytes_after < report.model_bytes_before
        if after > before:
            (skipped,) = report.skipped
            assert skipped.layer == "1" and skipped.bytes_after == before
            assert skipped.note.startswith("packing would not make it smaller or faster: ")
            assert "kB instead of" in skipped.note


def test_columns_that_are_padded_are_no_reason() -> None:
    model = nn.Sequential(nn.Linear(33, 65)).to(torch.bfloat16)
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    assert len(report.quantized) == 1 and report.bytes_after > report.bytes_before


def test_a_filter_takes_it_and_strict_names_it() -> None:
    model = made(1)
    lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, _: isinstance(module, nn.Linear))
    assert isinstance(model[1], QuantLinear)
    with pytest.raises(ValueError, match=r"strict=True .*: 1: packing would not .*: 4.22 kB instead of 1.02 kB"):
        lowbit.quantize_(made(1), lowbit.int8_weight_only(), strict=True)


def test_float_formats_and_products_in_training_do_not_pad_for_bytes() -> None:
    model = made(1)
    assert len(lowbit.quantize_(model, lowbit.float_weight()).quantized) == 2
    model = made(1)
    lowbit.quantize_(model, lowbit.training.Int8MixedPrecisionTrainingConfig())
    assert all(layer.trained_as == "int8 products" for layer in model)


def test_qat_leaves_float_what_will_not_be_packed() -> None:
    model = made(1)
    report = lowbit.quantize_(model, lowbit.training.QATConfig(lowbit.int8_weight_only()))
    assert [row.layer for row in report.skipped] == ["1"] and type(model[1]) is nn.Linear


def test_from_pretrained_and_a_checkpoint_leave_it_too(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=1,
        dtype="bfloat16",
    )  # fmt: skip
    cls = transformers.BertForSequenceClassification
    model = cls(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    small = {"modules_to_not_convert": []}
    loaded = cls.from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig("int8_weight_only", **small))
    reports = [
        loaded.hf_quantizer.report,
        lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", "int8_weight_only", **small),
        lowbit.quantize_(model, lowbit.int8_weight_only()),
    ]
    for report in reports:
        assert {row.layer: row.note.partition(":")[0] for row in report.skipped} == {
            "classifier": "packing would not make it smaller or faster"
        }
    planned = lowbit.LowbitConfig("int8_weight_only", plan={"classifier": "int8_weight_only"})
    loaded = cls.from_pretrained(tmp_path / "float", quantization_config=planned)
    assert isinstance(loaded.classifier, QuantLinear)
    loaded.save_pretrained(tmp_path / "again")
    again = cls.from_pretrained(tmp_path / "again")
    assert isinstance(again.classifier, QuantLinear) and isinstance(again.bert.pooler.dense, QuantLinear)
    lowbit.quantize_(again, lowbit.int8_weight_only(32), lambda module, name: name.endswith("nothing"))
    assert again.config.quantization_config.plan == {"classifier": lowbit.int8_weight_only()}
