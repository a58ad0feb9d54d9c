# SPDX-License-Identifier: Apache-2.0
"""lowbit.export.onnx.export: the nodes and bytes that each format becomes, and, where onnxruntime is there, that
it computes lowbit's numbers within the budget of float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lowbit
from lowbit import _C
from lowbit.export.onnx import export
from lowbit.export.onnx.matrices import TableMatrix
from lowbit.formats.spec import LinearSpec
from lowbit.quant import QuantEmbedding, QuantLinear
from lowbit.testing import LinearCase, assert_within, decode_weight, format_cases, make_data, pack_weight

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

FORMATS = list(format_cases())
PARTS = 20
N, K = 24, 100  # K is no multiple of a group


class Several(nn.Module):
    """Layers of one input, so that one file has many formats."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


class Tied(nn.Module):
    """A table of words and an output head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 96), nn.Linear(96, 64, bias=False)
        self.head.weight = self.words.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.words(indices))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, indices: Tensor) -> Tensor:
        return self.model(input_ids=indices, use_cache=False).logits


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> list[Tensor]:
    """The outputs by onnxruntime, from the bytes of a file."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), options)
    names = [each.name for each in session.get_inputs()]
    outputs = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    return [torch.from_numpy(output) for output in outputs]


def ops(program: torch.onnx.ONNXProgram) -> Counter[str]:
    return Counter(node.op_type for node in program.model_proto.graph.node)


def node(program: torch.onnx.ONNXProgram, op: str) -> dict[str, int]:
    (found,) = [each for each in program.model_proto.graph.node if each.op_type == op]
    return {attribute.name: attribute.i for attribute in found.attribute}


def stored(program: torch.onnx.ONNXProgram) -> dict[str, int]:
    """Bytes of the initializers, by dtype."""
    sizes: Counter[str] = Counter()
    for each in program.model_proto.graph.initializer:
        sizes[onnx.TensorProto.DataType.Name(each.data_type)] += len(each.raw_data)
    return dict(sizes)


def layer_of(format: tuple[str, int, str, str], x: Tensor) -> tuple[QuantLinear, Tensor, Tensor]:
    """A layer with a bias, what it computes of x in float64, and the budget of each element."""
    name, group_size, mapping, x_format = format
    dtype, k = str(x.dtype).removeprefix("torch."), x.shape[-1]
    case = LinearCase(x[..., 0].numel(), N, k, dtype, name, group_size, mapping, x_format, bias="float32")
    data = make_data(case, x.flatten(0, -2))
    spec = LinearSpec(name, group_size, mapping == "asymmetric", x_format, mapping)
    layer = QuantLinear.from_packed(data.packed, N, k, spec, data.bias).eval()
    return layer, data.wanted.view(*x.shape[:-1], N), data.allowed.view(*x.shape[:-1], N)


@pytest.mark.parametrize("k", [K, 128])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_format_is_within_the_budget(part: int, k: int) -> None:
    x = torch.randn(6, k)
    x[1] *= 1e6
    x[2] = 0
    x[3, 5], x[4, k // 2] = torch.nan, torch.inf  # a row of rounded activations is then not finite at all
    formats = FORMATS[part::PARTS]
    layers, wanted, allowed = zip(*(layer_of(format, x) for format in formats), strict=True)
    program = export(Several(*layers).eval(), (x,))
    for results in zip(formats, run(program, x), wanted, allowed, strict=True):
        assert_within(*results[1:], str(results[0]))


def test_float16_activations_are_widened_and_rounded_once() -> None:
    x = torch.randn(5, K, dtype=torch.float16)
    formats = [format for format in FORMATS if format[1] in (0, 64)][::7]
    layers, wanted, allowed = zip(*(layer_of(format, x) for format in formats), strict=True)
    for results in zip(formats, run(export(Several(*layers).eval(), (x,)), x), wanted, allowed, strict=True):
        assert_within(*results[1:], str(results[0]))


def test_batch_and_length_are_dynamic() -> None:
    formats = [
        ("int4", 32, "symmetric", "int8_group"),
        ("int8", 0, "asymmetric", "int8_row_asymmetric"),
        ("fp8_e4m3", 0, "symmetric", "float8_row"),
        ("nf4", 64, "symmetric", "float"),
    ]
    x = torch.randn(5, 7, K)
    layers, wanted, allowed = zip(*(layer_of(format, x) for format in formats), strict=True)
    shapes = {"x": {0: "batch", 1: "length"}}
    program = export(Several(*layers).eval(), (torch.randn(2, 3, K),), dynamic_shapes=shapes)
    (given,) = program.model_proto.graph.input
    assert [each.dim_param or each.dim_value for each in given.type.tensor_type.shape.dim] == ["batch", "length", K]
    for results in zip(formats, run(program, x), wanted, allowed, strict=True):
        assert_within(*results[1:], str(results[0]))


@pytest.mark.parametrize("part", range(8))
def test_rows_of_every_format_are_those_of_the_weight(part: int) -> None:
    formats = [format for format in FORMATS if format[3] == "float"][part::8]
    layers, weights = [], []
    for name, group_size, mapping, _ in formats:
        spec = LinearSpec(name, group_size, mapping == "asymmetric", mapping=mapping)
        packed = pack_weight(torch.randn(19, 72), name, group_size, mapping)
        layers.append(QuantEmbedding(19, 72, spec=spec, layout=_C.LAYOUT))
        layers[-1].weight.data.copy_(packed)
        weight = decode_weight(packed, 19, 72, name, group_size, mapping)
        weights.append(weight.double() if isinstance(weight, Tensor) else weight.decode())
    shapes = {"x": {0: "batch", 1: "length"}}
    program = export(Several(*layers).eval(), (torch.zeros(2, 3, dtype=torch.long),), dynamic_shapes=shapes)
    indices = torch.randint(0, 19, (3, 5))
    for format, rows, weight in zip(formats, run(program, indices), weights, strict=True):
        wanted = weight[indices]
        assert_within(rows, wanted, 3 * 2.0**-24 * wanted.abs(), str(format))  # scale, and its product with a step


# Of a weight of 48 x 128, in bytes: codes, scales in float32 and a bias; b stands for the bytes of one bit per weight.
b, BIAS = 48 * 128 // 8, 4 * 48
AFFINE = lowbit.MappingType.ASYMMETRIC
GRAPHS = [
    (lowbit.int4_weight_only(32), "MatMulNBits", {"bits": 4, "block_size": 32, "accuracy_level": 1}, {"UINT8": 4 * b, "FLOAT": 48 * 4 * 4}),
    (lowbit.int4_weight_only(32, mapping_type=AFFINE), "MatMulNBits", {"bits": 4}, {"UINT8": 4 * b + 48 * 2, "FLOAT": 48 * 4 * 4}),
    (lowbit.int4_weight_only(32, algorithm=lowbit.HQQ()), "MatMulNBits", {"bits": 4}, {"UINT8": 4 * b, "FLOAT": 2 * 48 * 4 * 4}),
    (lowbit.int8_dynamic_activation_int4_weight(64), "MatMulNBits", {"block_size": 64, "accuracy_level": 4}, {"UINT8": 4 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.int8_dynamic_activation_int4_weight(32, act_mapping_type=AFFINE), "MatMulNBits", {"accuracy_level": 1}, {"UINT8": 4 * b, "FLOAT": 48 * 4 * 4}),
    (lowbit.int8_weight_only(), "MatMulNBits", {"bits": 8, "block_size": 128}, {"UINT8": 8 * b, "FLOAT": 48 * 4}),
    (lowbit.intx_weight_only(torch.int2, 64), "MatMulNBits", {"bits": 2}, {"UINT8": 2 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.intx_weight_only(torch.int3, 64), "MatMulNBits", {"bits": 4}, {"UINT8": 4 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.int8_dynamic_activation_int8_weight(), "MatMulInteger", {}, {"UINT8": 8 * b + 1, "FLOAT": 48 * 4}),
    (lowbit.nf4_weight_only(64), "MatMulBnb4", {"quant_type": 1, "block_size": 64}, {"UINT8": 4 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.fp4_weight_only(64), "MatMulBnb4", {"quant_type": 0}, {"UINT8": 4 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.float8_weight_only(64), "DequantizeLinear", {"axis": 1, "block_size": 64}, {"FLOAT8E4M3FN": 8 * b, "FLOAT": 48 * 2 * 4}),
    (lowbit.float8_dynamic_activation_float8_weight(), "DequantizeLinear", {"axis": 0}, {"FLOAT8E4M3FN": 8 * b, "FLOAT": 48 * 4}),
]  # fmt: skip


@pytest.mark.parametrize("config, op, attributes, sizes", GRAPHS, ids=[str(case[0]) for case in GRAPHS])
def test_a_format_is_its_op_and_its_bytes_alone(
    config: Any, op: str, attributes: dict[str, int], sizes: dict[str, int]
) -> None:
    model = nn.Sequential(nn.Linear(128, 48)).eval()
    lowbit.quantize_(model, config)
    program = export(model, (torch.randn(3, 128),), opset_version=21)
    assert attributes.items() <= node(program, op).items()
    found = stored(program)
    assert found.pop("INT64", 0) < 200  # shapes
    scalars = found["FLOAT"] - sizes["FLOAT"] - BIAS
    assert found | {"FLOAT": found["FLOAT"] - scalars - BIAS} == sizes and 0 <= scalars <= 64


def test_a_shared_weight_is_stored_once() -> None:
    model = Tied().eval()
    lowbit.quantize_(model, lowbit.int4_weight_only(32), filter_fn=lambda module, name: module is not model, head=None)
    assert model.words.weight is model.head.weight
    indices = torch.randint(0, 64, (2, 5))
    program = export(model, (indices,))
    assert stored(program)["UINT8"] == 64 * 96 // 2
    (y,) = run(program, indices)
    x = model.words(indices).detach()
    # Both are off by the budget of linear; x itself by 3 roundings.
    allowed = (96 + 8 + 3) * 2.0**-23 * (x.double().abs() @ model.head.dequantize().double().abs().T)
    assert_within(y, model(indices).detach().double(), allowed)


@pytest.mark.parametrize("opset", [21, 23])
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "bias"])
def test_attention_is_that_of_torch(how: str, opset: int) -> None:
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 8)
    mask = {"mask": torch.rand(2, 1, 5, 7) > 0.5, "bias": torch.randn(5, 7)}.get(how)
    if how == "mask":
        mask[0, 0, 1] = False  # such a row is 0
    tensors = (q, k, v) if mask is None else (q, k, v, mask)

    def attention(*tensors: Tensor) -> Tensor:
        return lowbit.scaled_dot_product_attention(*tensors, is_causal=how == "causal", enable_gqa=True)

    shapes = None if mask is not None else (({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},) * 3,)
    program = export(Calls(attention).eval(), tensors, dynamic_shapes=shapes, opset_version=opset)
    assert ("Attention" in ops(program)) == (opset == 23 and mask is None)
    if mask is None:
        tensors = torch.randn(3, 4, 9, 16), torch.randn(3, 2, 11, 16), torch.randn(3, 2, 11, 8)
    (y,) = run(program, *tensors)
    wanted = attention(*(each.double() if each.is_floating_point() else each for each in tensors))
    assert_within(y, wanted, 1e-5 * wanted.abs().max().expand_as(wanted))


def test_a_language_model_has_the_logits_of_lowbit() -> None:
    """Fused pieces, a rotary embedding, masks: all but the packed layers and attention is torch's exporter's."""
    tiny_models = pytest.importorskip("tiny_models")
    cls, config = tiny_models.MODELS["tied"]
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    model = cls._from_config(config, attn_implementation="lowbit").eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    assert lowbit.fuse(model)
    classes = {name: type(module) for name, module in model.named_modules()}
    program = export(
        Logits(model).eval(), (torch.arange(14).view(2, 7),), dynamic_shapes={"indices": {0: "batch", 1: "length"}}
    )
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert ops(program)["MatMulNBits"] == 7 + 1
    indices = torch.arange(33).view(3, 11)
    (y,) = run(program, indices)
    with torch.no_grad():
        wanted = model(indices, use_cache=False).logits
    assert (y - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_rows_of_gemma_are_multiplied_by_their_factor() -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    words = gemma.Gemma3TextScaledWordEmbedding(64, 96, 0, embed_scale=9.797959)
    model = nn.Sequential(words).eval()
    lowbit.quantize_(model, lowbit.int4_weight_only(32), filter_fn=lambda module, name: module is words)
    indices = torch.randint(0, 64, (2, 5))
    program = export(model, (indices,))
    wanted = model[0].dequantize()[indices].double() * torch.tensor(9.797959).double()
    assert_within(run(program, indices)[0], wanted, 8 * 2.0**-24 * wanted.abs())  # 4 roundings each


def test_hooks_of_a_layer_are_exported() -> None:
    model = nn.Sequential(nn.Linear(K, N)).eval()
    lowbit.quantize_(model, lowbit.int4_weight_only(32))
    model[0].register_forward_hook(lambda module, args, y: y.neg())
    assert ops(export(model, (torch.randn(3, K),)))["Neg"] == 1


def test_an_op_that_onnx_does_not_have_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    q = torch.randn(1, 2, 8, 16)
    model = nn.Sequential(Calls(lambda q: lowbit.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + i))).eval()
    with pytest.raises(NotImplementedError, match="export: 0 calls lowbit.attention_forward.default with a score_mod"):
        export(model, (q,), file)
    layer = QuantLinear.from_linear(nn.Linear(32, 16), LinearSpec("int8"))
    product = Calls(lambda x: lowbit.linear(x, layer.weight, layer.stored))
    with pytest.raises(
        NotImplementedError, match="export: the model calls lowbit.linear.default, which ONNX does not have"
    ):
        export(product.eval(), (torch.randn(2, 32),), file)
    assert not file.exists()


def test_export_of_torch_names_ours(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(K, N)).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    with pytest.raises(Exception, match=r"lowbit\.export\.onnx\.export\(model, args\) exports quantized models"):
        torch.onnx.export(model, (torch.randn(3, K),), tmp_path / "model.onnx")


def test_a_layer_that_onnx_has_no_form_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, x = tmp_path / "model.onnx", torch.randn(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    lowbit.quantize_(model[1:], lowbit.nf4_weight_only())
    monkeypatch.setattr(TableMatrix, "TYPES", {})  # every format has a form
    with pytest.raises(ValueError, match="export: 1 must have a format that ONNX has a form for, got nf4"):
        export(model, (x,), file)
    with pytest.raises(ValueError, match="export: 1 must have its weight in memory, got the meta device"):
        export(model.to("meta"), (x,), file)
    with pytest.raises(TypeError, match="export: model must be a torch.nn.Module, got function"):
        export(run, (x,), file)
    assert not file.exists()


@pytest.mark.parametrize("name", ["Int8MixedPrecisionTrainingConfig", "Int8WeightOnlyQuantizedTrainingConfig"])
def test_a_layer_in_training_is_named(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    lowbit.quantize_(model, getattr(lowbit.training, name)())
    with pytest.raises(ValueError, match=r"export: 0 must not be in training, got .*; end it with lowbit.training\."):
        export(model, (torch.randn(2, 64),))


@pytest.mark.parametrize("opset", [20, 24, "21"])
def test_another_opset_is_refused(opset: Any) -> None:
    with pytest.raises(ValueError, match=f"export: opset_version must be 21 to 23, got {opset!r}"):
        export(nn.Linear(4, 4), (torch.randn(1, 4),), opset_version=opset)


def test_training_mode_is_told() -> None:
    with pytest.warns(UserWarning, match=r"export: the model is in training mode; call model.eval\(\) before"):
        export(nn.Linear(4, 4), (torch.randn(1, 4),))


def test_what_is_exported_is_the_weight_that_is_there_now(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(K, N)).eval()
    x, files = torch.randn(3, K), [tmp_path / "first.onnx", tmp_path / "second.onnx"]
    lowbit.quantize_(model, lowbit.int8_weight_only())
    export(model, (x,), files[0], external_data=False)
    model[0].weight.data.copy_(QuantLinear.from_linear(nn.Linear(K, N), model[0].spec).weight)
    export(model, (x,), files[1], external_data=False)
    codes = [
        {each.name: each.raw_data for each in onnx.load(file).graph.initializer}["0.matrix.codes"] for file in files
    ]
    assert codes[0] != codes[1]


def test_nothing_of_onnx_is_imported_before_it_is_asked_for(python: Callable[..., str]) -> None:
    code = (
        "import sys, lowbit, lowbit.export.onnx; print([name for name in sys.modules if name.startswith('onnx')])"
    )
    assert python(code).strip() == "[]"
