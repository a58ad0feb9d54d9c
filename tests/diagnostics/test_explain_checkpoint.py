# SPDX-License-Identifier: Apache-2.0
"""explain of a folder names the line that loads a checkpoint, or why lowbit does not read it."""

from __future__ import annotations

import json

import pytest

import lowbit

pytest.importorskip("transformers")


def folder(tmp_path, entry):
    told = {"model_type": "llama"} | ({} if entry is None else {"quantization_config": entry})
    (tmp_path / "config.json").write_text(json.dumps(told))
    return tmp_path


@pytest.mark.parametrize(
    "entry, line",
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            ', quantization_config=lowbit.LowbitConfig("checkpoint"))',
        ),
        (None, ', quantization_config=lowbit.LowbitConfig("int4_weight_only"))'),
        ({"quant_method": "lowbit"}, ")"),
    ],
)
def test_the_line_that_loads_it(entry, line, tmp_path):
    told = lowbit.explain(folder(tmp_path, entry))
    assert told.line == f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}{line}"
    assert told.line in repr(told) and told.refusal is None
    assert told.method == (entry or {}).get("quant_method")


@pytest.mark.parametrize(
    "entry, refusal",
    [
        ({"quant_method": "aqlm"}, "'aqlm' is not read"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, r"LowbitConfig('checkpoint', activations='float')"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "got 'marlin'"),
    ],
)
def test_why_it_is_refused(entry, refusal, tmp_path):
    told = lowbit.explain(str(folder(tmp_path, entry)))
    assert refusal in repr(told) and told.line is None


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder with a config.json"):
        lowbit.explain(tmp_path)
