# SPDX-License-Identifier: Apache-2.0
"""Method, the base class of the quantization methods whose checkpoints lowbit reads, and what their readers share: the
tensors of a layer, and codes that become a packed weight without being decoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import bit_stream, pack_stream, split_scale
from lowbit.quant.kinds import LayerWeight
from lowbit.quant.layout import text_of
from lowbit.quant.safetensors_file import SafetensorsFile

CONFIG = "quantization_config of config.json"
_LARGEST_GROUP = 256


@dataclass(frozen=True, slots=True)
class LayerCodes:
    """A packed weight in the layout of the kernels, and the order in which it reads its inputs (None: as they come)."""

    packed: Tensor
    spec: LinearSpec
    permutation: Tensor | None = None


class LayerTensors:
    """The tensors of a checkpoint that make one weight.

    Args:
        name: the name of the weight in the checkpoint.
        weight: the weight in the model.
        places: file and name of each tensor, by the suffix that says what it is.
    """

    def __init__(self, name: str, weight: LayerWeight, places: Mapping[str, tuple[SafetensorsFile, str]]) -> None:
        self.name, self.weight, self._places = name, weight, places
        self.n, self.k = weight.n, weight.k

    def __contains__(self, part: str) -> bool:
        return part in self._places

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it.

        Raises:
            ValueError: the checkpoint does not have the tensor.
        """
        self._check_there(part)
        file, key = self._places[part]
        return file.entries[key].shape

    def read(self, part: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype) -> Tensor:
        """Return a tensor, after checking that it has one of these dtypes and this shape (None: any).

        Raises:
            ValueError: it is missing, truncated, or has another dtype or shape. The message has the file, the tensor,
                what was found and what was wanted.
        """
        self._check_there(part)
        file, key = self._places[part]
        tensor = file.read(key)
        if tensor.dtype not in dtypes or (shape is not None and tuple(tensor.shape) != shape):
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(part, f"{names} {'' if shape is None else list(shape)}".rstrip(), text_of(tensor))
        return tensor

    def scales(self, part: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return scales, floats that are finite; powers of two in e8m0 as float32.

        Raises:
            ValueError: as `read`, or one is inf or nan.
        """
        tensor = self.read(part, shape, torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
        tensor = tensor.float() if tensor.dtype is torch.float8_e8m0fnu else tensor
        if not tensor.isfinite().all():
            raise self.error(part, "finite", "inf or nan")
        return tensor

    def error(self, part: str, wanted: str, got: str) -> ValueError:
        """Return the error for a tensor that is not as wanted."""
        file, key = self._places[part]
        return ValueError(f"{file.path}: {key} must be {wanted}, got {got}")

    def _check_there(self, part: str) -> None:
        if part not in self._places:
            file, key = next(iter(self._places.values()))
            wanted = self._name(part)
            raise ValueError(f"{file.path}: {wanted} must be there, as {key} is, and is missing")

    def _name(self, part: str) -> str:
        suffix, (_, key) = next(iter(self._places.items()))
        return key.removesuffix(suffix) + part


class Method(ABC):
    """A quantization method, by its entry in a config.json.

    Args:
        settings: the entry.
        activations: "int8" rounds the activations of integer weights on the fly, "float" none; None rounds as the
            method does.

    Raises:
        ValueError: a setting is unknown, or lowbit has no format for it. The message names it.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Suffixes of the tensors that make a weight."""
    marks: ClassVar[tuple[str, ...]]
    """Those suffixes of which a quantized weight has one, and a float weight none."""
    of_weight: ClassVar[str] = ".weight"
    """What the name of a weight in a float checkpoint has in place of such a suffix."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that are not read."""

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        self.settings, self.activations = settings, activations

    @abstractmethod
    def read(self, layer: LayerTensors) -> LayerCodes:
        """Return the packed weight of a layer.

        Raises:
            ValueError: a tensor is missing, or not as the method has it.
        """

    def setting(self, name: str, default: Any, *choices: Any) -> Any:
        """Return a setting that must be one of ``choices``."""
        value = self.settings.get(name, default)
        if value not in choices:
            told = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{CONFIG}: {name} of {self.name} must be one of {told}, got {value!r}")
        return value

    def codes(
        self,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        format: str,
        group: int,
        layer: LayerTensors,
        *,
        meant: str = "float",
        permutation: Tensor | None = None,
    ) -> LayerCodes:
        """Return the packed weight ``scale * (code - zero)``, or ``scale * level[code]`` in a lookup format.

        A scale that is float16 keeps every bit, as does one per row. Others keep 11 bits, as a float16 fraction of a
        power of two per row.

        Args:
            codes: uint8 ``[n, k]``, or a stream of bits ``[n, ceil(k * bits / 8)]``, the lowest first.
            scale: ``[n, groups]`` of float16, bfloat16 or float32.
            zero: ``[n, groups]``, integers or floats; None is the middle code.
            format: the weight format.
            group: the number of weights along k that share a scale; k or more: one scale per row.
            layer: the layer, for its size.
            meant: how the method rounds activations.
            permutation: the inputs of the columns.
        """
        n, k, facts = layer.n, layer.k, _C.FORMAT_FACTS[format]
        if zero is not None and zero.shape != scale.shape:
            raise ValueError(
                f"{layer.name}: zero points must be {list(scale.shape)}, as scales are, got {list(zero.shape)}"
            )
        if zero is not None and bool((zero == facts["zero"]).all()):
            zero = None
        size, repeats = _groups(k, group, facts["smallest_group"], layer)
        if repeats > 1:
            parts = (None if part is None else part.repeat_interleave(repeats, 1) for part in (scale, zero))
            scale, zero = (None if part is None else part[:, : -(-k // size)] for part in parts)
        spec = self.spec(format, size, zero is not None, meant)
        if size and scale.dtype is torch.float16:
            parts = torch.ones(n, dtype=torch.float32), scale
        else:
            parts = split_scale(scale.float(), size)
        stream = bit_stream(codes, facts["bits"]) if codes.shape[1] == k else codes
        half = None if zero is None else zero.to(torch.float16)
        if half is not None and not half.isfinite().all():
            raise ValueError(f"{layer.name}: zero points must be within float16, got inf or nan")
        return LayerCodes(pack_stream(stream, *parts, half, StoredWeight(spec, n, k, _C.LAYOUT)), spec, permutation)

    def spec(self, format: str, group_size: int, asymmetric: bool, meant: str) -> LinearSpec:
        """Return the spec with activations as they were asked for, or as the method means them."""
        x_format = {None: meant, "float": "float", "int8": "int8_group" if group_size else "int8_row"}[self.activations]
        if x_format not in _C.FORMAT_FACTS[format]["x_formats"]:
            raise ValueError(
                f"LowbitConfig: activations must be 'float' or None for {self.name} with weights in {format}, got "
                f"{self.activations!r}"
            )
        return LinearSpec(format, group_size, asymmetric, x_format, "asymmetric" if asymmetric else "symmetric")


def _groups(k: int, width: int, smallest: int, layer: LayerTensors) -> tuple[int, int]:
    """Return the group size in lowbit for groups of this width (0: a scale per row), and how many there are in each."""
    if width >= k:
        return 0, 1
    size = math.gcd(width, _LARGEST_GROUP)
    if size < smallest:
        raise ValueError(
            f"{layer.name}: {smallest} or more neighbours of a row must share a scale, got groups of {width}"
        )
    return size, width // size


def inputs_by_group(layer: LayerTensors, part: str, group: int) -> Tensor | None:
    """Return the inputs sorted by the group that a tensor gives each, int64 ``[k]``, or None if they are already sorted
    or there is no such tensor.

    Raises:
        ValueError: a group has more or fewer inputs than ``group``.
    """
    if part not in layer:
        return None
    of_input = layer.read(part, (layer.k,), torch.int32).long()
    in_order = torch.arange(layer.k) // group
    if torch.equal(of_input, in_order):
        return None
    permutation = of_input.argsort(stable=True)
    if not torch.equal(of_input[permutation], in_order):
        counts = of_input.unique(return_counts=True)[1]
        raise layer.error(
            part,
            f"each of 0..{int(in_order[-1])} for {group} inputs",
            f"groups {int(of_input.min())} to {int(of_input.max())} of {int(counts.max())} inputs at most",
        )
    return permutation


def float8_codes(layer: LayerTensors, part: str) -> Tensor:
    """Return the codes of a weight in float8_e4m3fn, uint8 ``[n, k]``.

    Raises:
        ValueError: as `LayerTensors.read`, or one is nan.
    """
    codes = layer.read(part, (layer.n, layer.k), torch.float8_e4m3fn).view(torch.uint8)
    if ((codes & 127) == 127).any():
        raise layer.error(part, "finite", "nan (127 or 255)")
    return codes


def scale_of_blocks(layer: LayerTensors, part: str, rows: int, columns: int) -> Tensor:
    """Return scales of blocks as scales of groups of ``columns``, ``[n, groups]``. One scale may be that of all blocks,
    without dimensions."""
    shape = -(-layer.n // rows), -(-layer.k // columns)
    scale = layer.scales(part)
    if scale.numel() == 1 and shape == (1, 1):
        scale = scale.reshape(1, 1)
    if tuple(scale.shape) != shape:
        raise layer.error(part, f"{list(shape)} for blocks of {rows} x {columns}", text_of(scale))
    return scale.repeat_interleave(min(rows, layer.n), 0)[: layer.n].contiguous()
