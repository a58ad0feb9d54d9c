# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file as the state dict of a transformers model. Each weight is packed as it is read.

transformers' own tables provide the names and the changes that llama.cpp's converter made to weights. The row order of
a packed weight is found by passing row numbers through the same table.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from lowbit import _C
from lowbit.checkpoints.gguf.architectures import Architecture
from lowbit.checkpoints.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, pack_blocks
from lowbit.checkpoints.gguf.file import GgufFile, GgufTensor
from lowbit.checkpoints.gguf.further_layers import is_of_further_layer
from lowbit.checkpoints.gguf.joined_tensors import JoinedTensors
from lowbit.checkpoints.gguf.mixtures import architecture_of
from lowbit.checkpoints.gguf.tensor_names import tensor_names
from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.kinds import LayerWeight, layout_name, layout_of_all, weight_named, weights_of
from lowbit.quant.packing import pack_weight
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.tables.folding import first_five

ACTIVATIONS = {"int8": "int8_group", "float": "float"}
_PANEL = 16
"""The number of rows that are contiguous in every layout. A weight is packed in multiples of it, with the same result
as in one call."""
_AT_A_TIME = 1 << 20  # weights


class StateReader:
    """A reader of the state dict of ``model`` from a GGUF file.

    Args:
        file: the file.
        model: a model on the meta device, created from the configuration in the file.
        activations: "int8" rounds the activations of layers with packed weights, "float" those of none.

    Raises:
        ValueError: a tensor has no counterpart in the model, or a type or shape that its layer does not support; a
            parameter of the model is not in the file; or transformers has no names for the tensors of this
            architecture.
    """

    def __init__(self, file: GgufFile, model: nn.Module, activations: str) -> None:
        self.file, self.model, self.activations = file, model, activations
        architecture = architecture_of(file)
        self.processor = processor_of(file.architecture, architecture, model.config)
        self.of_configuration = architecture.rope_tensors
        self.tied = tied_modules(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        names = tensor_names(file, model, architecture, self.processor)
        stored = model.state_dict(keep_vars=True)
        self.buffers = {name: stored[name] for name in names.keys() & stored.keys() - self.parameters.keys()}
        self.parameters |= self.buffers
        self.tensors_of = {name: tensors for name, tensors in names.items() if name in self.parameters}
        """The names of the tensors of each parameter, in the order of their rows."""
        self.names: dict[str, tuple[str, ...]] = {}
        """The parameters of each tensor; there are several if it is a `DividedTensor`."""
        for name, tensors in self.tensors_of.items():
            for tensor in tensors:
                self.names[tensor] = (*self.names.get(tensor, ()), name)
        self._divided = architecture.divided
        self._read_by_others = weights_that_are_read(model) if architecture.reads_weights else {}
        self._joined = {joined.tensors: joined for joined in architecture.joined.values()}

    def read(self) -> dict[str, Tensor]:
        """Return packed weights with their layout numbers, and all other parameters as floats."""
        state: dict[str, Tensor] = {}
        unread = []
        for tensor in self.file.tensors.values():
            if tensor.name not in self.names:
                if tensor.name not in self.of_configuration and not is_of_further_layer(self.file, tensor.name):
                    unread.append(tensor.name)
                continue
            for name in self.names[tensor.name]:
                if name not in state:  # else another tensor of this parameter came before
                    state |= self._read_for(name, tensor)
        self.file.check_unchanged()
        of = type(self.model).__name__
        if missing := sorted(self.parameters.keys() - state.keys()):
            raise ValueError(f"gguf: the file must hold every parameter of {of}, got none for {first_five(missing)}")
        if unread:
            raise ValueError(
                f"gguf: every tensor must belong to a parameter of {of} of transformers, got {first_five(unread)}"
            )
        return state

    def _read_for(self, name: str, tensor: GgufTensor) -> dict[str, Tensor]:
        """Return the entries of a parameter, of which this is the first tensor in the file."""
        tensors = [self.file.tensors.get(part) for part in self.tensors_of[name]]
        try:
            if None in tensors:
                lacking = self.tensors_of[name][tensors.index(None)]
                raise ValueError(f"the file must hold {lacking} too, got none")
            return self._read(tensors, name)
        except ValueError as error:
            raise ValueError(f"gguf: tensor {tensor.name} ({tensor.type}) cannot be {name}: {error}") from None

    def _read(self, tensors: list[GgufTensor], name: str) -> dict[str, Tensor]:
        path, _, key = name.rpartition(".")
        shared = self.tied.get(path, (path,))
        names = [f"{other}.{key}" for other in shared]
        found = weight_named(self.model, name)
        if found is None and any(tensor.type not in FLOAT_TYPES for tensor in tensors):
            got = type(self.model.get_submodule(path)).__name__
            raise ValueError(f"packed weights belong to linear layers, experts and embeddings, got a {got}")
        if found is None or id(found[1]) in self._read_by_others:
            return dict.fromkeys(names, self._floats(tensors, name))
        weight = found[2]
        layout = layout_of_all(map(self.model.get_submodule, shared))
        if (joined := self.joined(name)) is not None:
            packed, spec = self._pack_joined(tensors, joined, weight, layout)
            return _state(names, packed, weight.stored(spec, layout))
        *front, n, k = weight.shape
        divided = self.divided(tensors[0])
        for tensor in tensors:
            wanted = (*front, n // len(tensors), k) if divided is None else (sum(map(len, divided)), k)
            if tensor.shape != wanted and (1, *tensor.shape) != wanted:  # a matrix of one row may be a vector
                raise ValueError(f"the shape of {tensor.name} must be {list(wanted)}, got {list(tensor.shape)}")
            if tensor.type != tensors[0].type:
                raise ValueError(f"{tensor.name} must have the same type, got {tensor.type}")
        packed, spec = self._packed(tensors, weight.shape, layout, self.rows(tensors[0], name))
        return _state(names, packed, weight.stored(spec, layout))

    def joined(self, name: str) -> JoinedTensors | None:
        """Return how the tensors of a parameter are joined, or None if their rows follow each other."""
        return self._joined.get(tuple(tensor.split(".", 2)[-1] for tensor in self.tensors_of[name]))

    def _pack_joined(
        self, tensors: list[GgufTensor], joined: JoinedTensors, weight: LayerWeight, layout: str
    ) -> tuple[Tensor, LinearSpec]:
        """Return the float matrix of tensors whose rows are not its rows; float16 if the file has blocks."""
        for tensor, wanted in zip(tensors, joined.shapes(self.model.config, weight.n, weight.k), strict=True):
            if tensor.shape != wanted:
                raise ValueError(f"the shape of {tensor.name} must be {list(wanted)}, got {list(tensor.shape)}")
        dtypes = {FLOAT_TYPES.get(tensor.type, torch.float16) for tensor in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        matrix = joined.join(self.model.config, [values_of(tensor) for tensor in tensors]).to(dtype)
        if not matrix.isfinite().all():
            raise ValueError(f"the values must be finite as {dtype}, got inf or nan")
        spec = LinearSpec(str(dtype).removeprefix("torch."))
        return pack_weight(matrix, spec, layout=layout)[0].data, spec

    def _packed(
        self, tensors: list[GgufTensor], shape: tuple[int, ...], layout: str, rows: Tensor | None
    ) -> tuple[Tensor, LinearSpec]:
        """Return the packed weight. It is packed a few rows at a time, because unpacked blocks take several times as
        many bytes, and an embedding may be half of the file."""
        (*front, n, k), type = shape, tensors[0].type
        spec, columns = self._spec(tensors[0]), self.columns(tensors[0])
        moved = None if rows is None else _bytes_of(tensors[0].data, tensors[0].shape[0])
        packed = torch.empty(*front, *spec.shape(n, k, layout), dtype=torch.uint8, device="cpu")
        step = max(_PANEL, _AT_A_TIME // k // _PANEL * _PANEL)
        for matrix, to in enumerate(packed if front else [packed]):
            at = 0
            for begin in range(0, n, step):
                end = min(begin + step, n)
                of_step = _rows(tensors, matrix, n, begin, end) if moved is None else moved[rows[begin:end]]
                with _C.OnCallerIfCrowded():  # dozens of small ops of torch
                    part = _pack(of_step, type, spec, layout, columns)
                    to[at : at + len(part)] = part
                at += len(part)
        return packed, spec

    def _spec(self, tensor: GgufTensor) -> LinearSpec:
        if tensor.type in FLOAT_TYPES:
            return LinearSpec(str(FLOAT_TYPES[tensor.type]).removeprefix("torch."))
        if tensor.type not in BLOCK_TYPES:
            raise ValueError(f"the type must be one of {', '.join([*FLOAT_TYPES, *BLOCK_TYPES])}")
        return BLOCK_TYPES[tensor.type].spec(ACTIVATIONS[self.activations])

    def rows(self, tensor: GgufTensor, name: str) -> Tensor | None:
        """Return the row of the file for each row of the parameter, or None if the order is the same, as in experts
        and vectors."""
        if (divided := self.divided(tensor)) is not None:
            return divided[self.names[tensor.name].index(name)]
        return row_order(self.processor, tensor.name, tensor.shape)

    def divided(self, tensor: GgufTensor) -> tuple[Tensor, ...] | None:
        """Return the rows of the file for each parameter of a tensor, or None if it belongs to one alone."""
        found = self._divided.get(tensor.name.split(".", 2)[-1])
        return None if found is None else tuple(map(torch.from_numpy, found.rows(self.model.config)))

    def columns(self, tensor: GgufTensor) -> Tensor | None:
        """Return the column of the file for each column of the model, or None if the order is the same."""
        return column_order(self.processor, tensor.name)

    def _floats(self, tensors: list[GgufTensor], name: str) -> Tensor:
        """Return the values of a parameter that is never packed. Those of several tensors, the biases of gate and up,
        follow each other or alternate, as the rows of their weight do."""
        shape, parts = tuple(self.parameters[name].shape), []
        for tensor in tensors:
            values = values_of(tensor).numpy()
            parts.append(torch.from_numpy(self.processor.process(weights=values, name=tensor.name).weights))
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"{tensors[1].name} must have shape {list(parts[0].shape)}, got {list(parts[1].shape)}")
        made = parts[0] if len(parts) == 1 else torch.stack(parts, self.axis(name)).flatten(-2)
        if tuple(made.shape) != shape:
            raise ValueError(f"the shape must be {list(shape)}, got {list(made.shape)}")
        return made.to(self.parameters[name].dtype if name in self.buffers else self.model.dtype)

    def axis(self, name: str) -> int:
        """Return the axis along which the biases ``[E, I]`` of gate and up are stacked."""
        path, _, key = name.rpartition(".")
        weights = weights_of(self.model.get_submodule(path))
        return -1 if any(weight.interleaved for weight in weights if weight.bias == key) else -2


def _state(names: list[str], packed: Tensor, stored: StoredWeight) -> dict[str, Tensor]:
    numbers = torch.tensor(stored.numbers, dtype=torch.int64)
    return dict.fromkeys(names, packed) | {layout_name(name): numbers.clone() for name in names}


def values_of(tensor: GgufTensor) -> Tensor:
    """Return the values of a tensor of any supported type, as float32."""
    if tensor.type in FLOAT_TYPES:
        return torch.frombuffer(tensor.data, dtype=FLOAT_TYPES[tensor.type]).view(tensor.shape).float()
    if tensor.type not in BLOCK_TYPES:
        raise ValueError(f"the type must be one of {', '.join([*FLOAT_TYPES, *BLOCK_TYPES])}")
    type = GGMLQuantizationType[tensor.type]
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(
        -1, tensor.shape[-1] // GGML_QUANT_SIZES[type][0] * GGML_QUANT_SIZES[type][1]
    )
    return torch.from_numpy(dequantize(blocks, type)).view(tensor.shape)


def processor_of(name: str, architecture: Architecture, config: PreTrainedConfig) -> TensorProcessor:
    """Return transformers' object that undoes the changes of llama.cpp's converter to the weights of an architecture."""
    undoes = architecture.tensors
    if undoes is None:
        undoes = TENSOR_PROCESSORS.get(name) if architecture.experts is None else None
    return (undoes or TensorProcessor)(config=config.get_text_config().to_dict())


def row_order(processor: TensorProcessor, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return the row of the file for each row of the model in a tensor, or None if the order is the same."""
    if len(shape) != 2:
        return None
    numbers = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    moved = processor.process(weights=numbers, name=name).weights
    if moved is numbers or np.array_equal(moved.T, numbers):  # the transpose for a Conv1D is ignored
        return None
    rows = moved[:, 0]
    if moved.shape != numbers.shape or not (moved == rows[:, None]).all():
        raise ValueError(f"{type(processor).__name__} of transformers moves more than whole rows")
    return torch.from_numpy(rows.astype(np.int64))


def column_order(processor: TensorProcessor, name: str) -> Tensor | None:
    """Return the column of the file for each column of the model in a tensor, or None if the order is the same."""
    columns = getattr(processor, "columns", lambda name: None)(name)
    return None if columns is None else torch.from_numpy(columns)


def _pack(rows: Tensor, type: str, spec: LinearSpec, layout: str, columns: Tensor | None) -> Tensor:
    """Return the packed weight of rows of a tensor of this type, ``[n, bytes]``."""
    if type in FLOAT_TYPES:
        values = rows.view(FLOAT_TYPES[type])
        return pack_weight(values if columns is None else values[:, columns], spec, layout=layout)[0].data
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type]][1]
    return pack_blocks(rows.view(len(rows), -1, size), BLOCK_TYPES[type], layout, columns)


def _bytes_of(data: bytearray, rows: int) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).view(rows, -1)


def _rows(tensors: list[GgufTensor], matrix: int, n: int, begin: int, end: int) -> Tensor:
    """Return the bytes of rows ``begin`` to ``end`` of a matrix of n rows, of which each tensor has as many."""
    each, parts = n // len(tensors), []
    for number, tensor in enumerate(tensors):
        first, last = max(begin - number * each, 0), min(end - number * each, each)
        if first < last:
            parts.append(_bytes_of(tensor.rows(matrix * each + first, matrix * each + last), last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
