# SPDX-License-Identifier: Apache-2.0
"""save: a packed model as a GGUF file that llama.cpp reads, where a type of block holds its codes exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from lowbit.checkpoints.gguf.file import GgufFile, GgufTensor
from lowbit.checkpoints.gguf.weights import StateReader
from lowbit.documents.whole_file import replaced_file
from lowbit.formats.spec import StoredWeight
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import is_packed, kind_of, layout_name, weight_named
from lowbit.quant.layout import numbers_of
from lowbit.tables.folding import first_five

_BLOCK = 32
_TYPES = {"int4": "Q4_0", "int5": "Q5_0", "int8": "Q8_0", "fp4_e2m1": "MXFP4"}
_ASYMMETRIC_TYPES = {"int4": "Q4_1", "int5": "Q5_1"}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save(model: nn.Module, path: str | Path, like: str | Path) -> None:
    """Write the weights of ``model`` into a GGUF file.

    Symmetric int4, int5 and int8 in groups of 32 become Q4_0, Q5_0 and Q8_0, MXFP4 weights MXFP4, and floats F32, F16
    or BF16, all of them exactly. Asymmetric int4 and int5 become Q4_1 and Q5_1, which `load_gguf` reads as the same
    codes, scales and zero points; their minimums are zero points times scales, rounded to float16. Rounding of
    activations is no part of a file.

    Args:
        model: a model of transformers.
        path: the file to write.
        like: a GGUF file of the same architecture and tokenizer, such as the one that the model was read from: its
            metadata and the names of its tensors are taken. A head that is tied there may be one of its own here.

    Raises:
        ValueError: no type holds the codes of a layer, or a parameter has no name in such a file; names it.
            Nothing is written.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("model.gguf")
        >>> lowbit.checkpoints.gguf.save(model, "copy.gguf", like="model.gguf")
    """
    source = GgufFile.open(like)
    reader = StateReader(source, model, "float")
    known = [tensor for tensor in source.tensors.values() if tensor.name in reader.names]
    tensors = {tensor.name: _encode(reader, tensor) for tensor in [*known, *_others(reader, known)]}
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
    """The parameters that the other file does not have, such as a head that was untied, by their names in a file."""
    held = set()
    for tensor in known:
        path, _, key = reader.names[tensor.name].rpartition(".")
        held |= {f"{other}.{key}" for other in reader.tied.get(path, (path,))}
    names = {parameter: name for name, parameter in reader.names.items()}
    missing = [parameter for parameter in reader.parameters if parameter not in held]
    if unnamed := [parameter for parameter in missing if parameter not in names]:
        raise ValueError(f"save: a file such as like must hold every parameter, has no name for {first_five(unnamed)}")
    others = []
    for parameter in missing:
        found = weight_named(reader.model, parameter)
        shape = tuple(reader.parameters[parameter].shape) if found is None else found[2].shape
        others.append(GgufTensor(names[parameter], "", shape))
    return others


def _encode(reader: StateReader, tensor: GgufTensor) -> tuple[np.ndarray, str]:
    """The bytes or floats of a tensor, and their type."""
    name = reader.names[tensor.name]
    value = reader.parameters[name].detach()
    found = weight_named(reader.model, name)
    if found is None:
        return _floats(reader, tensor, value, None)
    path, module, weight = found
    rows = reader.rows(tensor)
    if is_packed(module) and module.spec.is_float:
        value = kind_of(module).dequantize(module, weight, getattr(torch, module.spec.format))
    if not is_packed(module) or module.spec.is_float:
        return _floats(reader, tensor, weight.matrix(value), rows)
    try:
        blocks, type = _blocks(value, numbers_of(module._buffers[layout_name(weight.key)]))
    except ValueError as error:
        raise ValueError(f"save: no GGUF type holds {path}: {error}") from None
    return _in_order(blocks, rows).numpy(), type


def _floats(reader: StateReader, tensor: GgufTensor, value: Tensor, rows: Tensor | None) -> tuple[np.ndarray, str]:
    dtype = value.dtype if value.dim() > 1 else torch.float32  # norms and biases are float32 in every file
    if value.dim() == 1:  # transformers subtracts 1 from the norms of some architectures
        value = value.float() - torch.from_numpy(
            reader.processor.process(weights=np.zeros(tensor.shape, np.float32), name=tensor.name).weights
        )
    value = _in_order(value.to(dtype).contiguous(), rows)
    if dtype is torch.bfloat16:
        return value.view(torch.uint8).numpy(), "BF16"
    return value.numpy(), _FLOATS[dtype]


def _in_order(model_rows: Tensor, rows: Tensor | None) -> Tensor:
    """Rows as the file has them: row ``rows[i]`` of the file is row i of the model."""
    if rows is None:
        return model_rows
    file_rows = torch.empty_like(model_rows)
    file_rows[rows] = model_rows
    return file_rows


def _blocks(packed: Tensor, stored: StoredWeight) -> tuple[Tensor, str]:
    spec = stored.spec
    type = (_ASYMMETRIC_TYPES if spec.asymmetric else _TYPES).get(spec.format)
    if type is None or spec.group_size != _BLOCK:
        raise ValueError(f"{spec.name} is not int4, int5, symmetric int8 or MXFP4 in groups of {_BLOCK}")
    if stored.k % _BLOCK:
        raise ValueError(f"k must be a multiple of {_BLOCK}, got k={stored.k}")
    weight = CodedWeight.unpack(packed, stored)
    codes = weight.codes.view(stored.n, -1, _BLOCK)
    scale = _exponents(weight) if type == "MXFP4" else _halves(weight)
    if type == "Q8_0":
        return torch.cat([scale, codes ^ 128], dim=2).flatten(1), type
    low, high = (codes & 15).view(stored.n, -1, 2, 16).unbind(2)
    parts = [scale, low | high << 4]
    if spec.format == "int5":
        bits = (codes >> 4).view(stored.n, -1, 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.insert(1, bits.sum(3, dtype=torch.uint8))
    if spec.asymmetric:
        parts.insert(1, _minimums(weight))
    return torch.cat(parts, dim=2).flatten(1), type


def _halves(weight: CodedWeight) -> Tensor:
    halves = weight.scale.half()
    if not torch.equal(halves.float(), weight.scale):
        raise ValueError("its scales are no float16")
    return halves[:, :, None].view(torch.uint8)


def _minimums(weight: CodedWeight) -> Tensor:
    """float16 numbers that are read as the zero points: the nearest to their value, or its neighbours."""
    scale, zero = weight.scale, weight.zero
    nearest = (-scale * zero.float()).half()
    found, chosen = zero == 0, torch.where(zero == 0, 0, nearest)
    for step in (0, 1, -1):
        minimum = (nearest.view(torch.int16) + step).view(torch.float16)
        fits = ~found & ((-minimum.float() / scale).half() == zero)
        found, chosen = found | fits, torch.where(fits, minimum, chosen)
    if not found.all():
        raise ValueError(f"{int((~found).sum())} of its zero points times their scales are no float16")
    return chosen[:, :, None].view(torch.uint8)


def _exponents(weight: CodedWeight) -> Tensor:
    fraction, exponent = torch.frexp(weight.scale)
    if not ((fraction == 0.5) | (weight.scale == 0)).all():
        raise ValueError("its scales are no powers of two")
    return torch.where(weight.scale == 0, 0, exponent + 126).clamp(min=0).byte()[:, :, None]
