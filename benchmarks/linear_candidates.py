# SPDX-License-Identifier: Apache-2.0
"""The candidates of bench_linear: lowbit's formats, torch, and the peers that can be imported.

A candidate makes a module-like call from a float32 weight [n, k]. Everybody gets the activations that its
fast path wants:
torch's bf16 and int4pack/int8pack kernels take bf16, the others the dtype of the run.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cpu_peers import Ops
from ggml_linear import GgmlLinear, Library
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit import _C

BASELINE = "torch fp32"
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to do the linear.

    Args:
        name: as printed.
        make: float weight [n, k] -> (layer, bytes of the weight that one call reads).
        dtype: of its activations; None is the dtype of the run.
        ours: whether it is lowbit's.
        copies: whether deepcopy copies its weight (bitsandbytes shares it; at tens of ms a call, cold or not
            is the same).
    """

    name: str
    make: Callable[[Tensor], tuple[Layer, int]]
    dtype: torch.dtype | None = None
    ours: bool = False
    copies: bool = True


def copy_layer(layer: Layer) -> Layer | None:
    """Copy a layer with its weight; None where its kind cannot be copied."""
    try:
        return copy.deepcopy(layer)
    except Exception:  # a peer's own class: what it raises is not ours to know
        return None


class _Function(nn.Module):
    """A torch function with its weight: nn.Module so that deepcopy copies the tensors."""

    def __init__(self, function: Callable[..., Tensor], *tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        self.count = len(tensors)
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"tensor{index}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(self._buffers[f"tensor{index}"] for index in range(self.count)))


def float_linear(weight: Tensor) -> nn.Linear:
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def _ours(config: lowbit.formats.base.FormatConfig) -> Callable[[Tensor], tuple[Layer, int]]:
    def make(weight: Tensor) -> tuple[Layer, int]:
        layer = float_linear(weight)
        lowbit.quantize_(layer, config)
        return layer, layer.weight.nbytes

    return make


OURS = {
    "int8 weight-only": lowbit.int8_weight_only(),
    "int4 weight-only g32": lowbit.int4_weight_only(group_size=32),
    "int4 weight-only g128": lowbit.int4_weight_only(group_size=128),
    "int3 weight-only g64": lowbit.intx_weight_only(torch.int3, 64),
    "int6 weight-only": lowbit.intx_weight_only(torch.int6),
    "nf4 weight-only g64": lowbit.nf4_weight_only(group_size=64),
    "fp8 weight-only": lowbit.float8_weight_only(),
    "W4A8 g32": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "W8A8": lowbit.int8_dynamic_activation_int8_weight(),
    "W8A8 2:4": lowbit.int8_dynamic_activation_int8_semi_sparse_weight(),
    "int8 weight-only 2:4": lowbit.semi_sparse_weight(),
    "dense bf16": lowbit.float_weight(torch.bfloat16),
    "dense f16": lowbit.float_weight(torch.float16),
    "dense f32": lowbit.float_weight(torch.float32),
}


def _torch_float(dtype: torch.dtype) -> Callable[[Tensor], tuple[Layer, int]]:
    def make(weight: Tensor) -> tuple[Layer, int]:
        weight = weight.to(dtype, copy=True)
        return _Function(functional.linear, weight), weight.nbytes

    return make


def _torch_int8pack(weight: Tensor) -> tuple[Layer, int]:
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    return _Function(torch._weight_int8pack_mm, codes, scale.bfloat16()), codes.nbytes


def _torch_int4pack(weight: Tensor) -> tuple[Layer, int]:
    group, (n, k) = 128, weight.shape
    groups = weight.reshape(n, k // group, group)
    scale = groups.abs().amax(2) / 7
    codes = ((groups / scale[:, :, None]).round().clamp(-8, 7) + 8).reshape(n, k).to(torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale_and_zero = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().bfloat16()
    return _Function(
        lambda x, w, s: torch._weight_int4pack_mm_for_cpu(x, w, group, s), packed, scale_and_zero
    ), n * k // 2


def _torch_dynamic(weight: Tensor) -> tuple[Layer, int]:
    layer = float_linear(weight)
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return torch.ao.nn.quantized.dynamic.Linear.from_float(layer), weight.numel()


def _torchao(config_name: str) -> Callable[[Tensor], tuple[Layer, int]]:
    def make(weight: Tensor) -> tuple[Layer, int]:
        from torchao import quantization

        layer = float_linear(weight)
        quantization.quantize_(layer, getattr(quantization, config_name)())
        return layer, weight.numel()

    return make


def _bitsandbytes(bits: int) -> Callable[[Tensor], tuple[Layer, int]]:
    def make(weight: Tensor) -> tuple[Layer, int]:
        from bitsandbytes import nn as bnb

        n, k = weight.shape
        if bits == 4:
            layer = bnb.Linear4bit(k, n, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        else:
            layer = bnb.Linear8bitLt(k, n, bias=False, has_fp16_weights=False)
        layer.load_state_dict({"weight": weight})
        return layer.to("cpu"), weight.numel() * bits // 8

    return make


def _ggml(library: Library, type_name: str, weight: Tensor) -> tuple[Layer, int]:
    packed = library.pack(type_name, weight)
    return GgmlLinear(library, type_name, packed, weight.shape[1]), packed.nbytes


def _on_onednn(weight: Tensor) -> tuple[Layer, int]:
    """Our layer of float32, served by the row of oneDNN (docs/ops/onednn.md)."""
    if reason := _C.onednn.facts()["reason"]:
        raise RuntimeError(reason)
    layer, weight_bytes = _ours(lowbit.float_weight(torch.float32))(weight)
    layer.prefer("linear_float32_onednn")
    layer(torch.zeros(1, weight.shape[1]))
    if (ran := _C.last_kernel("linear")) != "linear_float32_onednn":
        raise RuntimeError(f"linear_float32_onednn does not fit, {ran} ran")
    return layer, weight_bytes


PEERS = (
    Candidate("dense f32, row of oneDNN", _on_onednn, torch.float32),
    Candidate("torch bf16", _torch_float(torch.bfloat16), torch.bfloat16),
    Candidate("torch f16", _torch_float(torch.float16), torch.float16),
    Candidate("torch int8pack (bf16)", _torch_int8pack, torch.bfloat16),
    Candidate("torch int4pack g128 (bf16)", _torch_int4pack, torch.bfloat16),
    Candidate("torch dynamic quantized", _torch_dynamic, torch.float32),
    Candidate("torchao int8 weight-only", _torchao("Int8WeightOnlyConfig")),
    Candidate("torchao int8 dynamic", _torchao("Int8DynamicActivationInt8WeightConfig")),
    Candidate("torchao float8 weight-only", _torchao("Float8WeightOnlyConfig")),
    Candidate("bitsandbytes nf4", _bitsandbytes(4), copies=False),
    Candidate("bitsandbytes int8", _bitsandbytes(8), copies=False),
)


def int4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of int8 [n, k] and scales [k / 32, n] in bfloat16, as zentorch takes groups of 32."""
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int8)
    return codes.flatten(1), scale.T.contiguous().bfloat16()


def of_zentorch(ops: Ops | None) -> list[Candidate]:
    """zentorch's layers; it takes activations of bfloat16 alone."""
    if ops is None:
        return []

    def w8a8(weight: Tensor) -> tuple[Layer, int]:
        scale = weight.abs().amax(1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        return _Function(ops.zentorch_dynamic_qlinear, codes, scale.bfloat16()), codes.nbytes

    def w4a8(weight: Tensor) -> tuple[Layer, int]:
        codes, scale = int4_codes(weight)
        packed = ops.zentorch_woq_repack_weight(codes).view(torch.int8)
        return _Function(ops.zentorch_dynamic_qlinear, packed, scale), packed.nbytes

    def int4(weight: Tensor) -> tuple[Layer, int]:
        codes, scale = int4_codes(weight)
        packed = ops.zentorch_woq_repack_weight(codes).T
        return _Function(lambda x, w, s: ops.zentorch_woq_linear(x, w, s, None), packed, scale), packed.nbytes

    def bfloat16(weight: Tensor) -> tuple[Layer, int]:
        weight = weight.bfloat16()
        return _Function(ops.zentorch_linear_unary, weight), weight.nbytes

    made = {"W8A8": w8a8, "W4A8 g32": w4a8, "int4 weight-only g32": int4, "dense bf16": bfloat16}
    return [Candidate(f"zentorch {name}", make, torch.bfloat16) for name, make in made.items()]


def candidates(
    only: str | None, peers: bool, libraries: Sequence[Library], zentorch: Ops | None = None
) -> list[Candidate]:
    """All candidates, the baseline first; ``only`` keeps those whose name contains one of its comma-separated parts."""
    ours = [Candidate(name, _ours(config), ours=True) for name, config in OURS.items()]
    ggml = [
        Candidate(f"{library.name} {type_name}", functools.partial(_ggml, library, type_name), torch.float32)
        for library in libraries
        for type_name in library.types
    ]
    peers = peers and not any(library.keeps_tiles for library in libraries)
    rest = [*ours, *(PEERS if peers else ()), *of_zentorch(zentorch), *ggml]
    if only:
        parts = [part.strip().lower() for part in only.split(",")]
        rest = [item for item in rest if any(part in item.name.lower() for part in parts)]
    return [Candidate(BASELINE, _torch_float(torch.float32), torch.float32), *rest]


def build(candidate: Candidate, weight: Tensor) -> tuple[Layer, int] | str:
    """Make the layer, or say why this machine cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return candidate.make(weight)
        except Exception as error:  # an absent or broken peer is a line of the report, not the end of the run
            if candidate.ours or candidate.name == BASELINE:
                raise
            return f"{type(error).__name__}: {error}".splitlines()[0]
