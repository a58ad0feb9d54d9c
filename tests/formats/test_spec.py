# SPDX-License-Identifier: Apache-2.0
"""LinearSpec: its words, its numbers, and the bytes that it promises."""

from __future__ import annotations

import pickle

import pytest
import torch

from lowbit import _C
from lowbit.formats import FORMATS, LinearSpec
from lowbit.formats.spec import LAYOUT_FIELDS, LAYOUT_VERSION, StoredWeight

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
    assert len({spec.name for spec in SPECS}) == len(set(SPECS))  # intx of 8 bits is int8


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_op_args_are_the_numbers_of_the_extension(spec):
    n, k, format, group_size, asymmetric, x_format = spec.op_args(48, 100)
    assert (n, k, group_size, asymmetric) == (48, 100, spec.group_size, spec.asymmetric)
    assert format == _C.FORMATS[spec.format] and x_format == _C.X_FORMATS[spec.x_format]
    assert spec.mapping in _C.MAPPINGS


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 63), (16, 64), (17, 65), (130, 257)])
def test_bytes_are_whole_panels(spec, n, k):
    k += -k % 4 if spec.format == "int8_semi_sparse" else 0
    panels, panel_bytes = spec.shape(n, k)
    assert panels == -(-n // 16) and panel_bytes % 64 == 0
    assert spec.bytes(n, k) == panels * panel_bytes


@pytest.mark.parametrize("layout", _C.LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_numbers_of_a_stored_weight_can_be_read_back(spec, layout):
    numbers = spec.layout(48, 100, layout)
    assert len(numbers) == len(LAYOUT_FIELDS) - 1 and all(type(number) is int for number in numbers)
    stored = StoredWeight.read(numbers)
    assert (stored.n, stored.k, stored.layout, stored.spec.name) == (48, 100, layout, spec.name)
    assert stored.spec.layout(48, 100, layout) == numbers and stored.shape == spec.shape(48, 100, layout)
    assert str(stored) == f"{spec.name} of n=48 k=100" + (" in row-major" if layout == "row-major" else "")


@pytest.mark.parametrize("layout", _C.LAYOUTS)
def test_the_numbers_of_several_matrices_are_of_version_3_and_can_be_read_back(layout):
    spec = LinearSpec("int4", 32)
    held = StoredWeight(spec, 48, 100, layout, experts=5)
    assert len(held.numbers) == len(LAYOUT_FIELDS) and held.numbers[0] == LAYOUT_VERSION == 3
    assert held.numbers[1:-1] == spec.layout(48, 100, layout)[1:]
    stored = StoredWeight.read(held.numbers)
    assert stored == held and stored.shape == (5, *spec.shape(48, 100, layout))
    assert str(stored).startswith("int4 g32 of 5 matrices of n=48 k=100")
    assert stored.is_as(held.in_layout("row-major")) and not stored.is_as(StoredWeight(spec, 48, 100, layout))


def test_version_1_had_no_layout_and_was_in_panels():
    *numbers, _ = LinearSpec("int4", 32).layout(48, 100)
    stored = StoredWeight.read([1, *numbers[1:]])
    assert stored.layout == "x86-panel-16x64" and stored.spec == LinearSpec("int4", 32)


def test_numbers_of_later_versions_are_refused_by_name(subtests):
    version, format, *rest, layout = SPECS[0].layout(48, 100)
    later = LAYOUT_VERSION + 1
    for numbers, text in (
        ((later, format, *rest, layout, 7), rf"layout version {later}, known are 1 to {LAYOUT_VERSION}"),
        ((LAYOUT_VERSION, format, *rest, layout), "a layout of 8 numbers"),
        ((version, format, *rest, layout, 7), "a layout of 9 numbers"),
        ((0, format, *rest, layout), "layout version 0, known are"),
        ((version, format, *rest, 17), "layout 17, known are 0 x86-panel-16x64, 1 row-major"),
        ((version, format, *rest), "a layout of 7 numbers"),
        ((1, format, *rest, layout), "a layout of 8 numbers"),
        ((), "a layout of 0 numbers"),
        ((version, 99, *rest, layout), "format 99 with x_format 0"),
    ):
        with subtests.test(numbers=numbers), pytest.raises(ValueError, match=text):
            StoredWeight.read(numbers)


def test_a_spec_is_immutable_and_pickles():
    spec = SPECS[-1]
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.format = "int8"
