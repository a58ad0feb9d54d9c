# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file as the state dict of a model of transformers, each weight packed as it is read.

Names, and the changes that llama.cpp's converter made to weights, are those of transformers' own tables. The order of a
packed weight's rows is found by asking the same table for the numbers of the rows.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lowbit.checkpoints.gguf.architectures import ARCHITECTURES
from lowbit.checkpoints.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, pack_blocks
from lowbit.checkpoints.gguf.file import GgufFile, GgufTensor
from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import layout_name, layout_of_all, weight_named
from lowbit.quant.packing import pack_weight
from lowbit.tables.folding import first_five

ACTIVATIONS = {"int8": "int8_group", "float": "float"}
_PANEL = 16
"""Rows that every layout holds behind one another: steps of as many are packed as the whole is."""
_AT_A_TIME = 1 << 20  # weights


class StateReader:
    """Reads the state dict of ``model`` out of a file.

    Args:
        model: a model on the meta device, made from the configuration in the file.
        activations: "int8" rounds those of layers whose codes are integers, "float" none.

    Raises:
        ValueError: a tensor has no place in the model, or a type or a shape that its layer does not take, a parameter
            of the model is not in the file, or transformers does not say where the tensors of this architecture belong.
    """

    def __init__(self, file: GgufFile, model: nn.Module, activations: str) -> None:
        self.file, self.model, self.activations = file, model, activations
        config = model.config.get_text_config()
        self.processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
        try:
            self.names = get_gguf_hf_weights_map(_Names(model), self.processor)
        except NotImplementedError as error:
            raise ValueError(f"gguf: transformers cannot name the tensors of {file.architecture}: {error}") from error
        self.of_configuration = ARCHITECTURES[file.architecture].rope_tensors
        self.tied = tied_modules(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def read(self) -> dict[str, Tensor]:
        """Return packed weights with the numbers beside them, and all other parameters as floats."""
        state: dict[str, Tensor] = {}
        unread = []
        for tensor in self.file.tensors.values():
            name = self.names.get(tensor.name)
            if name not in self.parameters:
                if tensor.name not in self.of_configuration:
                    unread.append(tensor.name)
                continue
            try:
                state |= self._read(tensor, name)
            except ValueError as error:
                raise ValueError(f"gguf: tensor {tensor.name} ({tensor.type}) cannot be {name}: {error}") from None
        self.file.check_unchanged()
        of = type(self.model).__name__
        if missing := sorted(self.parameters.keys() - state.keys()):
            raise ValueError(f"gguf: the file must hold every parameter of {of}, misses {first_five(missing)}")
        if unread:
            raise ValueError(f"gguf: every tensor must have a place in {of} of transformers, got {first_five(unread)}")
        return state

    def _read(self, tensor: GgufTensor, name: str) -> dict[str, Tensor]:
        path, _, key = name.rpartition(".")
        shared = self.tied.get(path, (path,))
        names = [f"{other}.{key}" for other in shared]
        found = weight_named(self.model, name)
        if found is None and tensor.type not in FLOAT_TYPES:
            got = type(self.model.get_submodule(path)).__name__
            raise ValueError(f"packed weights belong to linear layers and embeddings, got a {got}")
        if found is None:
            return dict.fromkeys(names, self._floats(tensor, tuple(self.parameters[name].shape)))
        weight = found[2]
        if tensor.shape != weight.shape:
            raise ValueError(f"the shape must be {list(weight.shape)}, got {list(tensor.shape)}")
        layout = layout_of_all(map(self.model.get_submodule, shared))
        packed, spec = self._packed(tensor, self.rows(tensor), layout)
        numbers = weight.stored(spec, layout).numbers
        state = dict.fromkeys(names, packed)
        return state | {layout_name(other): torch.tensor(numbers, dtype=torch.int64) for other in names}

    def _packed(self, tensor: GgufTensor, rows: Tensor | None, layout: str) -> tuple[Tensor, LinearSpec]:
        """The packed weight, made a few rows at a time: an unpacked block type takes several times its bytes, and a
        table of words may be half of the file."""
        (n, k), spec = tensor.shape, self._spec(tensor)
        moved = None if rows is None else torch.frombuffer(tensor.data, dtype=torch.uint8).view(n, -1)
        packed = torch.empty(spec.shape(n, k, layout), dtype=torch.uint8, device="cpu")
        step = max(_PANEL, _AT_A_TIME // k // _PANEL * _PANEL)
        at = 0
        for begin in range(0, n, step):
            if moved is None:
                read = tensor.rows(begin, min(begin + step, n))
                of_step = torch.frombuffer(read, dtype=torch.uint8).view(-1, tensor.nbytes // n)
            else:
                of_step = moved[rows[begin : begin + step]]
            part = _pack(of_step, tensor.type, spec, layout)
            packed[at : at + len(part)] = part
            at += len(part)
        return packed, spec

    def _spec(self, tensor: GgufTensor) -> LinearSpec:
        if tensor.type in FLOAT_TYPES:
            return LinearSpec(str(FLOAT_TYPES[tensor.type]).removeprefix("torch."))
        if tensor.type not in BLOCK_TYPES:
            raise ValueError(f"the type must be one of {', '.join([*FLOAT_TYPES, *BLOCK_TYPES])}")
        return BLOCK_TYPES[tensor.type].spec(ACTIVATIONS[self.activations])

    def rows(self, tensor: GgufTensor) -> Tensor | None:
        """The row of the file that stands at each row of the model; None where all stay where they are."""
        numbers = np.broadcast_to(np.arange(tensor.shape[0], dtype=np.int32)[:, None], tensor.shape)
        moved = self.processor.process(weights=numbers, name=tensor.name).weights
        if moved is numbers or np.array_equal(moved.T, numbers):  # turned for a Conv1D, of which we hold the matrix
            return None
        rows = moved[:, 0]
        if moved.shape != numbers.shape or not (moved == rows[:, None]).all():
            raise ValueError(f"{type(self.processor).__name__} of transformers moves more than whole rows")
        return torch.from_numpy(rows.astype(np.int64))

    def _floats(self, tensor: GgufTensor, shape: tuple[int, ...]) -> Tensor:
        values = torch.frombuffer(tensor.data, dtype=FLOAT_TYPES[tensor.type]).view(tensor.shape).float()
        made = torch.from_numpy(self.processor.process(weights=values.numpy(), name=tensor.name).weights)
        if tuple(made.shape) != shape:
            raise ValueError(f"the shape must be {list(shape)}, got {list(made.shape)}")
        return made.to(self.model.dtype)


def _pack(rows: Tensor, type: str, spec: LinearSpec, layout: str) -> Tensor:
    """The packed weight of rows of a tensor of this type, ``[n, bytes]``."""
    if type in FLOAT_TYPES:
        return pack_weight(rows.view(FLOAT_TYPES[type]), spec, layout=layout)[0].data
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type]][1]
    return pack_blocks(rows.view(len(rows), -1, size), BLOCK_TYPES[type], layout=layout)


class _Names:
    """A model as the table of names sees it. The table asks every module inside too, and is made anew for each (16 s
    for 30 layers): here there are only the model and its base, whose names some files use."""

    def __init__(self, model: nn.Module, has_base: bool = True) -> None:
        self.config, self.state_dict = model.config, model.state_dict
        prefix = getattr(model, "base_model_prefix", "")
        base = getattr(model, prefix, None) if has_base and prefix else None
        self.children = [] if base is None else [(prefix, _Names(base, has_base=False))]

    def named_children(self) -> list[tuple[str, _Names]]:
        return self.children
