# SPDX-License-Identifier: Apache-2.0
"""save: write a packed model as a GGUF file that llama.cpp reads, using block types that hold its codes exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from lowbit.checkpoints.gguf.blocks import order_of_groups
from lowbit.checkpoints.gguf.file import GgufFile, GgufTensor
from lowbit.checkpoints.gguf.further_layers import is_of_further_layer
from lowbit.checkpoints.gguf.weights import StateReader
from lowbit.documents.whole_file import replaced_file
from lowbit.formats.spec import StoredWeight
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import is_packed, kind_of, layout_name, weight_named
from lowbit.quant.layout import numbers_of
from lowbit.quant.permuted_linear import PermutedLinear
from lowbit.tables.folding import first_five

_BLOCK = 32
_TYPES = {"int4": "Q4_0", "int5": "Q5_0", "int8": "Q8_0", "fp4_e2m1": "MXFP4"}
_ASYMMETRIC_TYPES = {"int4": "Q4_1", "int5": "Q5_1"}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save(model: nn.Module, path: str | Path, like: str | Path) -> None:
    """Write the weights of ``model`` to a GGUF file.

    Symmetric int4, int5 and int8 in groups of 32 become Q4_0, Q5_0 and Q8_0, MXFP4 weights become MXFP4, and floats
    F32, F16 or BF16. All of these are exact, but for scales below 2^-14: float16 has fewer bits there, and they are
    rounded, by at most 2^-25. Asymmetric int4 and int5 become Q4_1 and Q5_1: their minimum is zero point times scale,
    rounded to float16, and `load_gguf` reads the same codes, scales and zero points back. The file does not store
    whether activations are rounded.

    Args:
        model: a transformers model.
        path: the file to write.
        like: a GGUF file of the same architecture and tokenizer, such as the one that the model was loaded from. It
            provides the metadata and the names of the tensors. If its head is tied to the embedding, the model's may
            still be separate.

    Raises:
        ValueError: no block type holds the codes of a layer, or a parameter has no name in GGUF. The message names it,
            and nothing is written.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("model.gguf")
        >>> lowbit.checkpoints.gguf.save(model, "copy.gguf", like="model.gguf")
    """
    source = GgufFile.open(like)
    if further := [name for name in source.tensors if is_of_further_layer(source, name)]:
        raise ValueError(f"save: like must have no layers that predict further tokens, got {first_five(further)}")
    reader = StateReader(source, model, "float")
    known = [tensor for tensor in source.tensors.values() if tensor.name in reader.names]
    tensors = {tensor.name: _of_all(reader, tensor) for tensor in [*known, *_others(reader, known)]}
    for name in reader.of_configuration:
        if name in source.tensors:
            tensors[name] = np.frombuffer(source.tensors[name].data, np.float32), "F32"
    with replaced_file(path) as place:
        _write(place, source, tensors)


def _write(path: Path, source: GgufFile, tensors: Mapping[str, tuple[np.ndarray, str]]) -> None:
    """Write the tensors with the metadata of another file."""
    writer = gguf.GGUFWriter(path, source.architecture)
    for field in gguf.GGUFReader(source.paths[0]).fields.values():
        if not field.name.startswith(("GGUF.", "split.")) and field.name != "general.architecture":
            kind, *sub = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub[-1] if sub else None)
    for name, (values, type) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _others(reader: StateReader, known: list[GgufTensor]) -> list[GgufTensor]:
    """Return the parameters that the other file does not have, such as a head that was untied, with their names in
    GGUF."""
    held = set()
    for tensor in known:
        for name in reader.names[tensor.name]:
            path, _, key = name.rpartition(".")
            held |= {f"{other}.{key}" for other in reader.tied.get(path, (path,))}
    missing = [parameter for parameter in reader.parameters if parameter not in held]
    if unnamed := [parameter for parameter in missing if parameter not in reader.tensors_of]:
        raise ValueError(
            f"save: like must name a tensor for every parameter of the model, got none for {first_five(unnamed)}"
        )
    others = []
    for parameter in missing:
        found, names = weight_named(reader.model, parameter), reader.tensors_of[parameter]
        shape = [*reader.parameters[parameter].shape] if found is None else [*found[2].shape]
        shape[-2 if found else -1] //= len(names)
        others += [GgufTensor(name, "", tuple(shape)) for name in names]
    return others


def _of_all(reader: StateReader, tensor: GgufTensor) -> tuple[np.ndarray, str]:
    """Return the bytes or floats of a tensor, and their type. Those of several parameters are put in its rows."""
    names = reader.names[tensor.name]
    if (places := reader.divided(tensor)) is None:
        return _encode(reader, tensor, names[0])
    parts, types = zip(*(_encode(reader, tensor, name) for name in names), strict=True)
    if len(set(types)) > 1:
        told = ", ".join(f"{type} of {name}" for name, type in zip(names, types, strict=True))
        raise ValueError(f"save: {tensor.name} holds one type, got {told}")
    rows = np.empty((tensor.shape[0], *parts[0].shape[1:]), parts[0].dtype)
    for part, place in zip(parts, places, strict=True):
        rows[place.numpy()] = part
    return rows, types[0]


def _encode(reader: StateReader, tensor: GgufTensor, name: str) -> tuple[np.ndarray, str]:
    """Return the bytes or floats of one parameter of a tensor, and their type."""
    value = reader.parameters[name].detach()
    found = weight_named(reader.model, name)
    if found is None:
        return _never_packed(reader, tensor, name), "F32"
    path, module, weight = found
    if isinstance(module, PermutedLinear):
        raise ValueError(
            f"save: no GGUF type holds {path}: it reads its inputs in another order (act order of GPTQ), and a block "
            "has neighbours"
        )
    is_divided = reader.divided(tensor) is not None
    shape = tuple(weight.shape) if is_divided else tensor.shape
    rows = None if is_divided else reader.rows(tensor, name)
    columns, kind = reader.columns(tensor), kind_of(module)
    spec = kind.spec_of(module, weight) if is_packed(module) else None
    if (joined := reader.joined(name)) is not None:
        # float32 represents codes of any format exactly.
        dtype = value.dtype if spec is None else getattr(torch, spec.format) if spec.is_float else torch.float32
        matrix = value if spec is None else kind.dequantize(module, weight, dtype)
        parts = joined.split(reader.model.config, matrix)
        return _floats(parts[reader.tensors_of[name].index(tensor.name)].contiguous())
    if spec is not None and spec.is_float:
        value = kind.dequantize(module, weight, getattr(torch, spec.format))
    if spec is None or spec.is_float:
        matrix = _part(reader, tensor, name, weight.matrix(value)).contiguous()
        matrix = matrix.float() if len(shape) == 1 else matrix
        matrix = matrix if columns is None else matrix[:, columns.argsort()]
        return _floats(_in_order(matrix, rows).view(shape))
    try:
        blocks, type = _blocks_of_all(value, numbers_of(module._buffers[layout_name(weight.key)]))
        if columns is not None:
            groups = order_of_groups(columns, _BLOCK).argsort()
            blocks = blocks.view(len(blocks), len(groups), -1)[:, groups].flatten(1)
    except ValueError as error:
        raise ValueError(f"save: no GGUF type holds {path}: {error}") from None
    blocks = _in_order(_part(reader, tensor, name, blocks), rows)
    return blocks.reshape(*shape[:-1], -1).numpy(), type


def _floats(values: Tensor) -> tuple[np.ndarray, str]:
    of_numpy = values.view(torch.uint8) if values.dtype is torch.bfloat16 else values
    return of_numpy.numpy(), _FLOATS[values.dtype]


def _part(reader: StateReader, tensor: GgufTensor, name: str, matrix: Tensor) -> Tensor:
    """Return the rows of a matrix, or of each of several, that a tensor holds."""
    names = reader.tensors_of[name]
    return matrix.chunk(len(names), dim=-2)[names.index(tensor.name)]


def _never_packed(reader: StateReader, tensor: GgufTensor, name: str) -> np.ndarray:
    """Return a norm, a bias or the weight of a router; these are float32 in every file."""
    value = reader.parameters[name].detach()
    if len(names := reader.tensors_of[name]) > 1:
        axis = reader.axis(name)
        value = value.unflatten(-1, (-1, len(names)) if axis == -1 else (len(names), -1))
        value = value.select(axis, names.index(tensor.name))
    if restore := getattr(reader.processor, "restore", None):
        return np.ascontiguousarray(restore(value.float().numpy(), tensor.name), np.float32)
    # transformers subtracts 1 from the norms of some architectures.
    shift = reader.processor.process(weights=np.zeros(tensor.shape, np.float32), name=tensor.name).weights
    return (value.float() - torch.from_numpy(shift)).contiguous().numpy()


def _in_order(model_rows: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows in the order of the file: row ``rows[i]`` of the file is row i of the model."""
    if rows is None:
        return model_rows
    file_rows = torch.empty_like(model_rows)
    file_rows[rows] = model_rows
    return file_rows


def _blocks_of_all(packed: Tensor, stored: StoredWeight) -> tuple[Tensor, str]:
    """Return the blocks of a matrix ``[n, bytes]`` or of several ``[experts, n, bytes]``, and their type."""
    if stored.experts is None:
        return _blocks(packed, stored)
    parts = [_blocks(matrix, replace(stored, experts=None)) for matrix in packed]
    return torch.stack([blocks for blocks, _ in parts]), parts[0][1]


def _blocks(packed: Tensor, stored: StoredWeight) -> tuple[Tensor, str]:
    spec = stored.spec
    type = (_ASYMMETRIC_TYPES if spec.asymmetric else _TYPES).get(spec.format)
    if type is None or spec.group_size != _BLOCK:
        raise ValueError(
            f"the format must be int4, int5, symmetric int8 or MXFP4 in groups of {_BLOCK}, got {spec.name}"
        )
    if stored.k % _BLOCK:
        raise ValueError(f"k must be a multiple of {_BLOCK}, got k={stored.k}")
    weight = CodedWeight.unpack(packed, stored)
    codes = weight.codes.view(stored.n, -1, _BLOCK)
    if type == "MXFP4":
        scale = _exponents(weight)
    else:
        halves = _halves(weight)
        scale = halves[:, :, None].view(torch.uint8)
    if type == "Q8_0":
        return torch.cat([scale, codes ^ 128], dim=2).flatten(1), type
    low, high = (codes & 15).view(stored.n, -1, 2, 16).unbind(2)
    parts = [scale, low | high << 4]
    if spec.format == "int5":
        bits = (codes >> 4).view(stored.n, -1, 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.insert(1, bits.sum(3, dtype=torch.uint8))
    if spec.asymmetric:
        parts.insert(1, _minimums(halves.float(), weight.zero))
    return torch.cat(parts, dim=2).flatten(1), type


def _halves(weight: CodedWeight) -> Tensor:
    """Return the scales as float16. Of groups whose scale is subnormal there, the quantizer's has more bits."""
    halves = weight.scale.half()
    if not ((halves == weight.scale) | (weight.scale.abs() < 2.0**-14)).all():
        raise ValueError("scales must be float16 numbers, got others")
    return halves


def _minimums(scale: Tensor, zero: Tensor) -> Tensor:
    """Return float16 minimums that are read back as the same zero points: the rounded products, or a neighbour of
    each."""
    nearest = (-scale * zero.float()).half()
    found, chosen = zero == 0, torch.where(zero == 0, 0, nearest)
    for step in (0, 1, -1):
        minimum = (nearest.view(torch.int16) + step).view(torch.float16)
        fits = ~found & ((-minimum.float() / scale).half() == zero)
        found, chosen = found | fits, torch.where(fits, minimum, chosen)
    if not found.all():
        raise ValueError(
            f"zero points times their scales must be float16 numbers, got {int((~found).sum())} that are not"
        )
    return chosen[:, :, None].view(torch.uint8)


def _exponents(weight: CodedWeight) -> Tensor:
    fraction, exponent = torch.frexp(weight.scale)
    if not ((fraction == 0.5) | (weight.scale == 0)).all():
        raise ValueError("scales must be powers of two, got others")
    return torch.where(weight.scale == 0, 0, exponent + 126).clamp(min=0).byte()[:, :, None]
