# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of optimum-quanto and of AMD's Quark beside decoders in float64."""

from __future__ import annotations

import json

import pytest
import torch
from tests.checkpoints.read_checkpoints import check_reads, damaged
from tests.checkpoints.test_awq_checkpoints import interleaved
from tests.tiny.float_codes import e2m1, float8_codes, power_scales
from tests.tiny.quantized_checkpoints import random_codes, random_scales, words, write

ROUNDED = 2.0**-10  # a group's scale and its zero point have 11 bits each
UP = "model.layers.1.mlp.up_proj"


def quanto(type, group=128):
    """quanto's layout: the codes of groups in parts along the first axis, w = scale * code - shift."""

    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        if type in ("qint8", "qfloat8"):
            scale = random_scales((n, 1), 8, generator)
            codes = random_codes((n, k), 8, generator).sub(128).to(torch.int8)
            codes = codes if type == "qint8" else float8_codes((n, k), generator)
            return {".weight._data": codes, ".weight._scale": scale}, codes.double() * scale.double()
        bits, rows = int(type[-1]), n * k // group
        codes, scale = random_codes((rows, group), bits, generator), random_scales((rows, 1), bits, generator)
        shift = scale * torch.rand((rows, 1), generator=generator) * 2**bits
        packed = sum(part << bits * i for i, part in enumerate(codes.chunk(8 // bits)))
        tensors = {"_data._data": packed.to(torch.uint8), "_scale": scale, "_shift": shift}
        weight = (scale.double() * codes - shift.double()).view(n, k)
        return {f".weight.{part}": tensor for part, tensor in tensors.items()}, weight

    return layer


def write_quanto(folder, type, form, activations="none"):
    """A folder as quanto writes it: nothing in config.json, and a map beside it."""
    meant = write(folder, {"quant_method": "quanto"}, form)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    names = [name for name, module in meant.named_modules() if isinstance(module, torch.nn.Linear)]
    told = {name: {"weights": type, "activations": activations} for name in names if name != "lm_head"}
    (folder / "quanto_qmap.json").write_text(json.dumps(told))
    return meant


@pytest.mark.parametrize(
    "type, group, spec",
    [
        ("qint2", 128, "int2 g128 asymmetric"),
        ("qint4", 128, "int4 g128 asymmetric"),
        ("qint4", 32, "int4 g32 asymmetric"),
        ("qint8", None, "int8 per-channel"),
        ("qfloat8", None, "fp8_e4m3 per-channel"),
    ],
)
def test_types_of_quanto(type, group, spec, tmp_path):
    meant = write_quanto(tmp_path / "model", type, quanto(type, group))
    model = check_reads(tmp_path / "model", meant, exact=group is None, bound=ROUNDED)
    assert model.model.layers[0].mlp.up_proj.spec.name == spec


def test_other_types_and_activations_of_quanto_are_refused(tmp_path):
    write_quanto(tmp_path / "model", "qfloat8_e5m2", quanto("qfloat8"))
    damaged(tmp_path / "model", None, "quanto_qmap.json: weights of .* must be one of qint2, .*got 'qfloat8_e5m2'")
    write_quanto(tmp_path / "other", "qint8", quanto("qint8"), activations="qint8")
    damaged(tmp_path / "other", None, r"activations of .* must be 'none', got 'qint8', a fixed scale; LowbitConfig\(")


def test_quanto_without_its_map(tmp_path):
    write(tmp_path / "model", {"quant_method": "quanto"}, quanto("qint8"))
    damaged(tmp_path / "model", None, "quanto_qmap.json must be there for checkpoints of quanto")


def quark(type, scheme, group=128, order=False, dtype=torch.float32):
    """Quark's layout: integers in groups are transposed, and fields of 4 bits are in words."""
    bits, signed = {"int4": (4, True), "uint4": (4, False), "int8": (8, True), "uint8": (8, False)}[type]
    low = 2 ** (bits - 1) if signed else 0

    def stored(codes):
        if bits == 8:
            return (codes - low).to(torch.int8 if signed else torch.uint8)
        fields = (codes - low & 15).view(-1, codes.shape[-1])
        packed = words(fields, 4) if order else interleaved(fields)
        return packed.view(*codes.shape[:-1], -1)

    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        shape = {"per_tensor": (1, 1), "per_channel": (n, 1), "per_group": (n, k // group)}[scheme]
        codes, scale = random_codes((n, k), bits, generator), random_scales(shape, bits, generator).to(dtype)
        zero = torch.randint(0, 2**bits, shape, generator=generator)
        wide = [part.repeat_interleave(k // shape[1], 1) for part in (scale.double(), zero)]
        weight = wide[0] * (codes - wide[1])
        if scheme == "per_group":
            parts = stored(codes.t()), scale.t(), stored(zero.t())
        elif scheme == "per_channel":
            parts = stored(codes), scale.view(n), stored(zero.view(n))
        else:
            parts = stored(codes), scale.view(()), (zero.view(()) - low).to(torch.int32)
        return dict(zip((".weight", ".weight_scale", ".weight_zero_point"), parts, strict=True)), weight

    return layer


def of_quark(type, scheme, group=None, order=False, inputs=None, **more):
    weight = {"dtype": type, "qscheme": scheme, "group_size": group, "ch_axis": -1, "is_dynamic": False}
    export = {"weight_format": "real_quantized", "pack_method": "order" if order else "reorder"}
    config = {"weight": weight | more, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": config, "export": export, "exclude": ["lm_head"]}


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    "type, scheme", [("uint4", "per_group"), ("int4", "per_group"), ("int4", "per_channel"), ("int4", "per_tensor")]
)
def test_four_bits_of_quark(type, scheme, order, tmp_path):
    told = of_quark(type, scheme, 128 if scheme == "per_group" else None, order)
    meant = write(tmp_path / "model", told, quark(type, scheme, order=order, dtype=torch.bfloat16))
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.group_size == (128 if scheme == "per_group" else 0)


@pytest.mark.parametrize("type", ["int8", "uint8"])
@pytest.mark.parametrize("scheme", ["per_group", "per_channel", "per_tensor"])
def test_eight_bits_of_quark(type, scheme, tmp_path):
    told = of_quark(type, scheme, 128 if scheme == "per_group" else None)
    meant = write(tmp_path / "model", told, quark(type, scheme))
    check_reads(tmp_path / "model", meant, exact=scheme != "per_group", bound=ROUNDED)


DYNAMIC = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel"])
def test_float8_of_quark(scheme, tmp_path):
    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        codes, scale = float8_codes((n, k), generator), random_scales((n, 1), 12, generator)
        scale = scale[:1] if scheme == "per_tensor" else scale
        kept = scale.view(()) if scheme == "per_tensor" else scale.view(n)
        return {".weight": codes, ".weight_scale": kept}, codes.double() * scale.double()

    meant = write(tmp_path / "model", of_quark("fp8_e4m3", scheme, inputs=DYNAMIC), layer)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp8_e4m3 per-channel float8-activations per row"


def test_fp4_of_quark(tmp_path):
    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        packed, levels = e2m1((n, k), generator)
        scale = power_scales((n, k // 32), generator)
        return {".weight": packed, ".weight_scale": scale}, levels * torch.exp2(scale.double() - 127).repeat_interleave(
            32, 1
        )

    told = of_quark("fp4", "per_group", 32, scale_format="e8m0")
    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, layer), exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp4_e2m1 g32"


def test_layers_by_pattern_of_quark(tmp_path):
    def layer(name, n, k, generator):
        form = quark("int8", "per_channel") if "down" in name else quark("uint4", "per_group", dtype=torch.float16)
        return form(name, n, k, generator)

    told = of_quark("uint4", "per_group", 128)
    told["layer_quant_config"] = {"*down_proj": of_quark("int8", "per_channel")["global_quant_config"]}
    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, layer), exact=True)
    assert model.model.layers[1].mlp.down_proj.spec.format == "int8"


BAD = {
    "dtype": (lambda t, s: s["global_quant_config"]["weight"].update(dtype="int3"), "must have a dtype of int4, uint4"),
    "export": (lambda t, s: s.pop("export"), "export of quark must have weight_format 'real_quantized'"),
    "classes": (lambda t, s: s.update(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config .* must be empty"),
    "fixed scale": (
        lambda t, s: s["global_quant_config"].update(input_tensors=DYNAMIC | {"is_dynamic": False}),
        r"input_tensors of .* must be dynamic, got a fixed scale; LowbitConfig\('checkpoint', activations='int8'\)",
    ),
    "another group": (
        lambda t, s: s["global_quant_config"]["weight"].update(group_size=64),
        r"weight_scale must be .*\[8, 256\], got float32 \[4, 256\]",
    ),
    "a missing tensor": (lambda t, s: t.pop(f"{UP}.weight"), f"{UP}.weight must be there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_and_change_nothing(case, tmp_path):
    change, message = BAD[case]
    write(tmp_path / "model", of_quark("uint4", "per_group", 128), quark("uint4", "per_group"))
    damaged(tmp_path / "model", change, message)
