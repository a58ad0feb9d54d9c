# SPDX-License-Identifier: Apache-2.0
"""LinearSpec: its words, its numbers, and the bytes that it promises."""

from __future__ import annotations

import pickle

import pytest
import torch

from lowbit import _C
from lowbit.formats import FORMATS, LinearSpec
from lowbit.formats.spec import LAYOUT_FIELDS, describe_layout

SPECS = [cls().spec(torch.float32) for cls in FORMATS] + [
    LinearSpec("int4", 64, True, "int8_row_asymmetric", "asymmetric"),
    LinearSpec("int8", 0, True, "float", "asymmetric"),
]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (LinearSpec("int4", 32, x_format="int8_group"), "int4 g32 int8-activations"),
        (LinearSpec("int8"), "int8 per-channel"),
        (LinearSpec("int4", 128, asymmetric=True), "int4 g128 asymmetric"),
        (LinearSpec("int8", x_format="int8_row"), "int8 per-channel int8-activations per row"),
        (LinearSpec("bfloat16"), "bfloat16"),
    ],
)
def test_names_are_short_and_say_everything(spec, name):
    assert spec.name == name


def test_names_of_all_specs_differ():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_op_args_are_the_numbers_of_the_extension(spec):
    n, k, format, group_size, asymmetric, x_format = spec.op_args(48, 100)
    assert (n, k, group_size, asymmetric) == (48, 100, spec.group_size, spec.asymmetric)
    assert format == _C.FORMATS[spec.format] and x_format == _C.X_FORMATS[spec.x_format]
    assert spec.mapping in _C.MAPPINGS


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 63), (16, 64), (17, 65), (130, 257)])
def test_bytes_are_whole_panels(spec, n, k):
    panels, panel_bytes = spec.shape(n, k)
    assert panels == -(-n // 16) and panel_bytes % 64 == 0
    assert spec.bytes(n, k) == panels * panel_bytes


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_layout_can_be_read_back_in_words(spec):
    layout = spec.layout(48, 100)
    assert len(layout) == len(LAYOUT_FIELDS) and all(type(number) is int for number in layout)
    assert describe_layout(layout) == f"{spec.name} of n=48 k=100"


def test_foreign_layouts_are_described_not_decoded():
    layout = SPECS[0].layout(48, 100)
    assert describe_layout((layout[0] + 1, *layout[1:])) == f"layout version {layout[0] + 1}"
    assert describe_layout(layout[:3]) == "a layout of 3 numbers"
    assert describe_layout((layout[0], 99, *layout[2:])) == "format 99 with x_format 0"


def test_a_spec_is_immutable_and_pickles():
    spec = SPECS[-1]
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.format = "int8"
