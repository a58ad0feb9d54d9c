# SPDX-License-Identifier: Apache-2.0
"""State dicts name the layout of each packed weight, and load in any of them; those of before, which named none, too."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import _C
from lowbit.formats import LinearSpec
from lowbit.formats.spec import StoredWeight
from lowbit.quant import QuantLinear, quantize_, repack
from lowbit.quant.layout import repack_weight


@pytest.fixture(params=_C.LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def of_version_1(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict as it was saved when there was one layout: seven numbers, without the last."""
    state = dict(state)
    for key in [key for key in state if key.endswith("layout")]:
        state[key] = torch.cat([torch.tensor([1]), state[key][1:-1]])
    return state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def through_file(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, path)
        return safetensors.load_file(path)
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def test_repacking_a_state_dict_changes_the_packed_weights_alone_and_comes_back(config, model, layout):
    model.append(nn.Embedding(4, 3))
    quantize_(model, config)
    state = model.state_dict()
    there = repack(state, layout)
    assert there["0.layout"][-1] == _C.LAYOUTS[layout] and there["0.bias"] is state["0.bias"]
    assert there["3.weight"] is state["3.weight"]
    assert tuple(there["0.weight"].shape) == model[0].spec.shape(33, 100, layout)
    assert same(repack(there, _C.LAYOUT), state)
    assert same(repack(of_version_1(state), layout), there)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("assign", [False, True])
def test_every_layout_loads_from_a_file(config, model, x, layout, suffix, assign, tmp_path):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.normal_()
    quantize_(model, config)
    quantize_(other, config)
    state = through_file(repack(model.state_dict(), layout), tmp_path / f"model{suffix}")
    before = {key: value.clone() for key, value in state.items()}
    other.load_state_dict(state, assign=assign)
    assert same(other.state_dict(), model.state_dict()) and torch.equal(other(x), model(x))
    assert same(state, before), "the state dict belongs to the user"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_turns_a_float_model_into_what_a_file_of_any_layout_holds(config, model, x, layout, device, tmp_path):
    fresh = copy.deepcopy(model).to(device)
    quantize_(model, config)
    torch.save(repack(model.state_dict(), layout), tmp_path / "model.pt")
    assert lowbit.load(fresh, tmp_path / "model.pt") == ["0", "2.0", "2.2"]
    assert same(fresh.state_dict(), model.state_dict()) and torch.equal(fresh(x), model(x))
    assert not fresh[0].weight.requires_grad


def test_a_state_dict_without_a_layout_id_still_loads(config, model, x):
    fresh, meta = copy.deepcopy(model), copy.deepcopy(model).to("meta")
    quantize_(model, config)
    old = of_version_1(model.state_dict())
    lowbit.load(fresh, old)
    quantize_(meta, config)
    meta.load_state_dict(old, assign=True)
    assert same(fresh.state_dict(), model.state_dict()) and same(meta.state_dict(), model.state_dict())
    assert meta[0].weight.data_ptr() == old["0.weight"].data_ptr() and torch.equal(meta(x), model(x))


def test_a_single_layer_and_a_part_of_a_state_dict_load_in_any_layout(config, model, layout):
    other = copy.deepcopy(model)
    quantize_(model, config)
    quantize_(other, config)
    wanted = other.state_dict()
    other[0].load_state_dict(repack(model[0].state_dict(), layout))
    rest = {key: value for key, value in repack(model.state_dict(), layout).items() if not key.startswith("0.")}
    assert other.load_state_dict(rest, strict=False).missing_keys == ["0.weight", "0.bias", "0.layout"]
    assert same(other.state_dict(), wanted)


def test_layers_that_shared_a_weight_share_it_again(layout, tied):
    model, x = tied(), torch.randn(2, 50)
    quantize_(model, lowbit.int4_weight_only(32))
    fresh = tied()
    lowbit.load(fresh, repack(model.state_dict(), layout))
    assert fresh[0].weight is fresh[1].weight and torch.equal(fresh(x), model(x))


def test_a_tied_table_and_head_stay_one_weight_where_a_state_dict_is_assigned(layout):
    model = nn.ModuleDict({"table": nn.Embedding(40, 50), "head": nn.Linear(50, 40, bias=False)})
    model["head"].weight = model["table"].weight
    quantize_(model, lowbit.int8_weight_only(), lambda module, name: bool(name))
    state, wanted = repack(model.state_dict(), layout), model["head"](model["table"](torch.arange(9)))
    before = dict(state)
    model.load_state_dict(state, assign=True)
    assert model["table"].weight.data_ptr() == model["head"].weight.data_ptr()
    assert torch.equal(model["head"](model["table"](torch.arange(9))), wanted)
    assert all(state[key] is before[key] for key in before), "the state dict belongs to the user"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_of_repacked_tied_weights_is_no_larger_than_the_model(layout, tied, suffix, tmp_path):
    model = tied()
    quantize_(model, lowbit.int8_weight_only())
    state = repack(model.state_dict(), layout)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    if suffix == ".pt":
        torch.save(state, tmp_path / "model.pt")
    else:
        del state["1.weight"]  # as safetensors stores it
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "model.safetensors")
    fresh = tied()
    lowbit.load(fresh, tmp_path / f"model{suffix}")
    assert fresh[0].weight is fresh[1].weight and same(fresh.state_dict(), model.state_dict())


def test_a_state_dict_that_names_a_tied_weight_once_is_repacked(layout, tied):
    model = tied()
    quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    del state["1.weight"]  # as safetensors stores it
    state["other.layout"] = other = torch.arange(3)
    there = repack(state, layout)
    assert there.pop("other.layout") is other
    fresh = tied()
    lowbit.load(fresh, there)
    assert fresh[0].weight is fresh[1].weight and same(fresh.state_dict(), model.state_dict())


def test_repacking_tells_parts_of_one_tensor_apart(layout):
    spec = LinearSpec("int4", 32)
    both = torch.stack([QuantLinear.from_linear(nn.Linear(64, 32), spec).weight for _ in range(2)])
    numbers = torch.tensor(spec.layout(32, 64))
    state = {f"{i}.weight": both[i] for i in range(2)} | {f"{i}.layout": numbers for i in range(2)}
    wanted = [repack_weight(weight, StoredWeight(spec, 32, 64, _C.LAYOUT), layout) for weight in both]
    result = repack(state, layout)
    assert all(torch.equal(result[f"{i}.weight"], wanted[i]) for i in range(2))


def test_meta_weights_are_repacked_as_shapes(layout):
    with torch.device("meta"):
        model = nn.Linear(100, 33)
    quantize_(model, lowbit.int4_weight_only(32))
    numbers = torch.tensor(model.spec.layout(33, 100))
    state = repack({"weight": model.weight, "layout": numbers}, layout)
    assert state["weight"].is_meta and tuple(state["weight"].shape) == model.spec.shape(33, 100, layout)


def test_a_row_major_weight_of_another_shape_is_refused_before_anything_is_copied(model, x):
    quantize_(model, lowbit.int8_weight_only())
    state, wanted = repack(model.state_dict()), model(x)
    state["2.2.weight"] = state["2.2.weight"][:3]
    with pytest.raises(ValueError, match=r"2\.2\.weight must be packed as int8 per-channel .*: shape \[9, 96\], got uint8 \[3, 96\]"):
        model.load_state_dict(state)
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_that_is_not_contiguous_is_loaded(config, layout, assign):
    """Rows that are one row expanded, or a transposed copy, as programs make them that look at no strides."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Embedding(32, 64))
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    quantize_(model, config, lambda module, name: bool(name))
    x, rows = torch.randn(3, 64), torch.arange(32)
    wanted = model[0](x), model[1](rows)
    state = repack(model.state_dict(), layout)
    state["0.weight"] = state["0.weight"][:1].expand(len(state["0.weight"]), -1)
    state["1.weight"] = state["1.weight"].T.contiguous().T
    model.load_state_dict(state, assign=assign)
    assert torch.equal(model[0](x), wanted[0]) and torch.equal(model[1](rows), wanted[1])


def test_a_layout_or_a_version_that_is_not_here_is_named(model):
    quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    with pytest.raises(ValueError, match="repack: layout must be one of x86-panel-16x64, row-major, got layout='marlin'"):
        repack(state, "marlin")
    numbers = state["0.layout"].clone()
    numbers[-1] = 5
    with pytest.raises(ValueError, match="repack: 0.weight must be a packed weight, got layout 5, known are 0 x86-panel-16x64, 1 row-major"):
        repack(state | {"0.layout": numbers})


PLAIN = LinearSpec("int4", 32, True, "float", "asymmetric")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codes": torch.full((3, 40), 16, dtype=torch.uint8)}, r"codes must be 0\.\.15, got 16"),
        ({"codes": torch.zeros(3, 40)}, r"codes must be uint8 \[3, 40\], got float32 \[3, 40\]"),
        ({"scale": torch.ones(3, 1)}, r"scale must be float32 \[3, 2\], got float32 \[3, 1\]"),
        ({"scale": torch.full((3, 2), torch.inf)}, "scale must be finite, got inf or nan"),
        ({"zero": torch.full((3, 2), 1e6)}, "zero must be finite, got inf or nan"),
        ({"zero": None}, "zero must be given for int4 g32 asymmetric"),
        ({"spec": LinearSpec("int4", 32)}, "zero must be None for int4 g32"),
        ({"spec": LinearSpec("bfloat16")}, "the format must have codes, got bfloat16"),
    ],
)
def test_pack_says_what_it_wanted(changes, text):
    given = {"codes": torch.zeros(3, 40, dtype=torch.uint8), "scale": torch.ones(3, 2), "zero": torch.zeros(3, 2), "spec": PLAIN}
    with pytest.raises(ValueError, match=f"pack: {text}"):
        QuantLinear.pack(**given | changes)


@pytest.mark.parametrize("spec", [
    LinearSpec("int8", 32), LinearSpec("int8", 32, True, mapping="asymmetric"), LinearSpec("int4", 32, scale="absmax"),
    LinearSpec("int4", 32), LinearSpec("int4", 32, True, mapping="asymmetric"), LinearSpec("int3", 32, True, mapping="asymmetric"),
    LinearSpec("int2", 32), LinearSpec("nf4", 32), LinearSpec("fp8_e4m3", 32), LinearSpec("int8"), LinearSpec("int4", 0, True, mapping="asymmetric"),
], ids=lambda spec: spec.name + spec.scale)  # fmt: skip
def test_unpacked_parts_pack_to_the_same_scales(spec):
    """Of groups from 2^-26 to 1 of the largest in a column, whose part of the scale may have been rounded up to 2."""
    torch.manual_seed(0)
    n, groups = 400, 8
    sizes = 2.0 ** torch.linspace(-26, 0, groups) * (1 + torch.rand(n, groups))
    sizes[:, -1] = 1 - 2.0 ** -torch.arange(n).remainder(24)  # the last group's largest weight: scales up to a power of two
    weight = torch.rand(n, groups, 32).mul(2).sub(1)
    weight /= weight.abs().amax(2, keepdim=True)
    facts = _C.FORMAT_FACTS[spec.format]
    whole = facts["code_max"] / 2 if facts["kind"] == "integer" else facts["code_max"]
    linear = nn.Linear(groups * 32, n, bias=False)
    linear.weight.data = (weight * (sizes * whole)[:, :, None]).flatten(1)
    layer = QuantLinear.from_linear(linear, spec)
    codes, scale, zero = layer.unpack()
    again = QuantLinear.pack(codes, scale, zero if spec.asymmetric else None, spec)
    for one, other in zip(again.unpack(), (codes, scale, zero), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(again.dequantize(), layer.dequantize())


def test_pack_takes_scales_of_either_sign():
    codes, scale = torch.randint(0, 16, (5, 70), dtype=torch.uint8), -torch.rand(5, 3) - 0.5
    layer = QuantLinear.pack(codes, scale, None, LinearSpec("int4", 32))
    spread = scale.repeat_interleave(32, dim=1)[:, :70]
    torch.testing.assert_close(layer.dequantize(), spread * (codes.float() - 8), rtol=2.0**-10, atol=0)
