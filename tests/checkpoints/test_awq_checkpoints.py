# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AWQ beside a decoder that follows the definition of the layouts, in float64."""

from __future__ import annotations

import pytest
import torch
from tests.checkpoints.read_checkpoints import check_reads, damaged
from tests.tiny.quantized_checkpoints import random_codes, random_scales, words, write

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of 8, in each nibble of a word


def interleaved(codes):
    return words(codes.view(len(codes), -1, 8)[:, :, ORDER].flatten(1), 4)


def awq(version="gemm", group=128):
    def layer(name, n, k, generator):
        width = k if group == -1 else group
        groups = k // width
        codes, scales = random_codes((n, k), 4, generator), random_scales((n, groups), 4, generator).half()
        zeros = torch.randint(0, 16, (n, groups), generator=generator)
        weight = scales.double().repeat_interleave(width, 1) * (codes - zeros.repeat_interleave(width, 1))
        if version == "gemm":
            tensors = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t()), "scales": scales.t()}
        else:
            unit = 8 * {64: 2, 32: 4}.get(width, 1)
            missing = (0, -groups % unit)
            pad = torch.nn.functional.pad
            tensors = {
                "qweight": words(codes, 4),
                "qzeros": words(pad(zeros, missing), 4),
                "scales": pad(scales, missing),
            }
        return {f".{part}": tensor for part, tensor in tensors.items()}, weight

    return layer


def settings(version="gemm", group=128):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": version, "zero_point": True}


@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_codes_are_those_of_the_file(version, group, tmp_path):
    meant = write(tmp_path / "model", settings(version, group), awq(version, group))
    model = check_reads(tmp_path / "model", meant, exact=True)
    spec = model.model.layers[0].mlp.down_proj.spec
    assert (spec.format, spec.group_size, spec.asymmetric) == ("int4", max(group, 0), True)


def test_int8_activations_and_names_of_llm_awq(tmp_path):
    told = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "modules_to_not_convert": None}
    meant = write(tmp_path / "model", told, awq(group=64))
    model = check_reads(tmp_path / "model", meant, exact=True, activations="int8")
    assert model.model.layers[0].mlp.down_proj.spec.x_format == "int8_group"


def test_the_other_name_of_the_version(tmp_path):
    told = settings("gemv") | {"version": None, "format": "gemv"}
    check_reads(tmp_path / "model", write(tmp_path / "model", told, awq("gemv")), exact=True)


def test_layers_that_the_file_has_in_float_stay_float(tmp_path):
    def all_but_one(name, n, k, generator):
        return None if name.endswith("o_proj") or name == "lm_head" else awq()(name, n, k, generator)

    meant = write(tmp_path / "model", settings(), all_but_one)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert type(model.model.layers[1].self_attn.o_proj) is type(model.lm_head) is torch.nn.Linear


BAD = {
    "version": (lambda t, s: s.update(version="gemv_fast"), "version of awq must be one of 'gemm', 'gemv', got"),
    "llm-awq": (lambda t, s: s.update(backend="llm-awq"), "version of awq must be one of 'gemm', 'gemv', got 'llm-awq'"),
    "bits": (lambda t, s: s.update(bits=3), "bits of awq must be one of 4, got 3"),
    "group size": (lambda t, s: s.update(group_size=-2), "group_size of awq must be -1 or a positive"),
    "another group size": (lambda t, s: s.update(group_size=64), r"qzeros must be int32 \[4, 16\], got int32 \[2, 16\]"),
    "packing of the other version": (lambda t, s: s.update(version="gemv"), r"qweight must be int32 \[128, 32\], got"),
    "a missing tensor": (lambda t, s: t.pop("lm_head.qzeros"), "lm_head.qzeros must be there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_and_change_nothing(case, tmp_path):
    change, message = BAD[case]
    write(tmp_path / "model", settings(), awq())
    damaged(tmp_path / "model", change, message)
