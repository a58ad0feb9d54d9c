# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of another quantization method as packed weights of a model, one weight at a time."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit import _C
from lowbit.checkpoints.merged_weights import MergedWeight, merged_weights
from lowbit.checkpoints.methods import method_of
from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors
from lowbit.checkpoints.methods.settings import settings_of
from lowbit.checkpoints.names import model_names
from lowbit.quant.kinds import LayerWeight, kind_of, layout_name, weight_named
from lowbit.quant.permuted_linear import PERMUTATION
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.safetensors_file import SafetensorsFile, safetensors_files
from lowbit.tables.folding import first_five

_PANEL = 16  # rows of a packed weight that are contiguous
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I16", "I32")
"""Dtypes of tensors that mean nothing without others."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of a model that a checkpoint has as codes.

    Args:
        key: its name in the checkpoint; if it is made of several there, that in the model.
        name: its name in the model.
        nbytes: the size of its tensors in the checkpoint.
        read: returns the packed weight, its layout numbers and its permutation by the model's names, or raises
            ValueError for a tensor that is missing, truncated or not as the method has it.
    """

    key: str
    name: str
    nbytes: int
    read: Callable[[], dict[str, Tensor]]


class CheckpointReader:
    """A reader of the packed weights of ``model`` from a checkpoint that another package quantized.

    Args:
        model: the float model, whose weights are not read.
        files: safetensors files of the checkpoint.
        settings: the entry ``quantization_config`` of its config.json.
        activations: see `Method`.

    Raises:
        ValueError: lowbit does not read the method, no tensor is of a quantized weight, or such a weight has no place
            in the model.
    """

    def __init__(
        self, model: nn.Module, files: list[Path], settings: dict[str, Any], activations: str | None = None
    ) -> None:
        self.model, self.method = model, method_of(settings, activations)
        self.homes = {key: file for file in map(SafetensorsFile, files) for key in file.entries}
        self.tensors: dict[str, dict[str, str]] = defaultdict(dict)
        """The names of the tensors of each quantized weight, by suffix."""
        for key in self.homes:
            for part in self.method.parts:
                base = key.removesuffix(part)
                if base != key and any(f"{base}{mark}" in self.homes for mark in self.method.marks):
                    self.tensors[f"{base}{self.method.of_weight}"][part] = key
        if not self.tensors:
            raise ValueError(
                f"{CONFIG}: a checkpoint of {self.method.name} must have tensors *{' or *'.join(self.method.marks)}, "
                f"got {first_five(sorted(self.homes))}"
            )
        of_transformers = isinstance(model, PreTrainedModel)
        names = model_names(model, self.tensors) if of_transformers else dict.fromkeys(self.tensors)
        self.merged = merged_weights(model, [key for key in names if names[key] is None]) if of_transformers else {}
        """The weights that transformers makes of several, by the names of the model."""
        apart = {key for weight in self.merged.values() for key in weight.sources}
        self.single = {key: name or key for key, name in names.items() if key not in apart}
        """The name in the model of each other weight."""
        self._check_places()
        self._check_floats()

    @property
    def read_keys(self) -> set[str]:
        """The names of all tensors that make quantized weights, or that the method ignores."""
        ignored = self.method.ignored
        found = {key for tensors in self.tensors.values() for key in tensors.values()}
        return found | {key for key in self.homes if ignored and key.endswith(ignored)}

    def packed(self) -> dict[str, Tensor]:
        """Return the packed weights, their layout numbers and permutations, by the model's names.

        Raises:
            ValueError: a tensor is missing, truncated or not as the method has it; the message names file and tensor.
        """
        state: dict[str, Tensor] = {}
        for weight in self.weights():
            state |= weight.read()
        return state

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yield the quantized weights without reading them."""
        for key, name in self.single.items():
            nbytes = self._nbytes(self.tensors[key])
            yield QuantizedWeight(key, name, nbytes, functools.partial(_on_cpu, self._single, key, name))
        for name, merged in self.merged.items():
            nbytes = sum(self._nbytes(self.tensors[source]) for source in merged.sources)
            yield QuantizedWeight(name, name, nbytes, functools.partial(_on_cpu, self._merged, name, merged))

    def _nbytes(self, tensors: Mapping[str, str]) -> int:
        return sum(self.homes[key].entries[key].nbytes for key in tensors.values())

    def floats(self) -> dict[str, Tensor]:
        """Return all other tensors of the checkpoint, by the names there."""
        read = self.read_keys
        return {key: file.read(key) for key, file in self.homes.items() if key not in read}

    def _codes(self, key: str, weight: LayerWeight) -> LayerCodes:
        places = {part: (self.homes[name], name) for part, name in self.tensors[key].items()}
        with _C.OnCallerIfCrowded():  # small ops of torch
            return self.method.read(LayerTensors(key, weight, places))

    def _check_places(self) -> None:
        """Raise ValueError if a quantized weight is not one of the model."""
        for key, name in [*self.single.items(), *((name, name) for name in self.merged)]:
            if weight_named(self.model, name) is None:
                file = self.homes.get(next(iter(self.tensors.get(key, {"": ""}).values())))
                raise ValueError(
                    f"{'' if file is None else file.path}: the quantized weight {key} must be that of a linear layer "
                    f"of {type(self.model).__name__}, which has no {name}"
                )

    def _check_floats(self) -> None:
        """Raise ValueError if a tensor that would be a float parameter of the model has codes."""
        read, homes = self.read_keys, self.homes
        left = [key for key, file in homes.items() if key not in read and file.entries[key].dtype in _CODES]
        names = model_names(self.model, left) if left and isinstance(self.model, PreTrainedModel) else {}
        for key in left:
            try:
                parameter = self.model.get_parameter(names.get(key) or key)
            except AttributeError:
                continue
            if parameter.is_floating_point():
                raise ValueError(
                    f"{homes[key].path}: {key} must be floats, or codes with the tensors of {self.method.name} beside "
                    f"them, got {homes[key].entries[key].dtype} without"
                )

    def _single(self, key: str, name: str) -> dict[str, Tensor]:
        path, module, weight = weight_named(self.model, name)
        codes = self._codes(key, weight)
        return _entries(path, module, weight, codes.packed, codes)

    def _merged(self, name: str, merged: MergedWeight) -> dict[str, Tensor]:
        """Return the entries of a weight that transformers makes of several: their panels, in the order in which its
        converter puts the rows."""
        path, module, weight = weight_named(self.model, name)
        order, rows = _order_of_sources(merged, weight)
        one, parts = LayerWeight(weight.key, rows, weight.k), []
        first: LayerCodes | None = None
        for sources in order:
            codes = [self._codes(merged.sources[source], one) for source in sources]
            for source, code in zip(sources, codes, strict=True):
                first = first or code
                if code.spec != first.spec or code.permutation is not None or rows % _PANEL:
                    got = "an order of inputs of its own" if code.permutation is not None else code.spec.name
                    raise ValueError(
                        f"{merged.sources[source]}: the weights that {name} is made of must have one format and "
                        f"multiples of {_PANEL} rows, got {got} beside {first.spec.name} with {rows} rows"
                    )
            parts.append(torch.cat([code.packed for code in codes]))
        packed = parts[0] if weight.experts is None else torch.stack(parts)
        return _entries(path, module, weight, packed, first)


def _on_cpu(read: Callable[..., dict[str, Tensor]], *args: Any) -> dict[str, Tensor]:
    with torch.device("cpu"):  # from_pretrained has the meta device as default
        return read(*args)


def _entries(path: str, module: nn.Module, weight: LayerWeight, packed: Tensor, codes: LayerCodes) -> dict[str, Tensor]:
    """Return the entries of a packed weight in a state dict."""
    name = f"{path}.{weight.key}" if path else weight.key
    spec = codes.spec if kind_of(module).multiplies else replace(codes.spec, x_format="float")
    state = {name: packed, layout_name(name): torch.tensor(weight.stored(spec).numbers, dtype=torch.int64)}
    if codes.permutation is not None:
        if kind_of(module) is not LINEAR:
            raise ValueError(f"{name}: inputs must be in their order for {type(module).__name__}, got act order")
        state[f"{path}.{PERMUTATION}" if path else PERMUTATION] = codes.permutation
    return state


def _order_of_sources(merged: MergedWeight, weight: LayerWeight) -> tuple[list[list[int]], int]:
    """Return for each matrix of a merged weight the positions of the sources that make its rows, and the number of rows
    of each source. It is found by passing row numbers through the converter.

    Raises:
        ValueError: the converter does more than to put whole sources below each other.
    """
    count, matrices = len(merged.sources), weight.experts or 1
    rows = weight.n * matrices // count if count else 0
    numbers = {key: torch.arange(i * rows, (i + 1) * rows)[:, None] for i, key in enumerate(merged.sources)}
    made = weight.matrix(merged.value(numbers.__getitem__)).reshape(matrices, -1)
    starts = made[:, :: max(rows, 1)]
    if made.numel() != count * rows or not torch.equal(
        made, (starts[:, :, None] + torch.arange(rows)).reshape(matrices, -1)
    ):
        raise ValueError(
            f"{merged.name}: transformers must put {count} quantized weights below each other, and does otherwise"
        )
    return (starts // rows).tolist(), rows


def read_folder(model: nn.Module, folder: Path) -> dict[str, Tensor] | None:
    """Return the state dict of a folder whose config.json names another package's quantization method, with packed
    weights; None for any other folder."""
    settings = settings_of(folder) if folder.is_dir() else None
    if settings is None or settings.get("quant_method") == "lowbit":
        return None
    reader = CheckpointReader(model, safetensors_files(folder), settings)
    return reader.packed() | reader.floats()
