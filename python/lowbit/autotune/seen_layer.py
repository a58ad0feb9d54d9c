# SPDX-License-Identifier: Apache-2.0
"""Recording of the inputs of a model's layers: their shapes, the number of calls with each, and a few rows.

A hook on each layer records them; the model's results do not change. Layers that share their weights are treated as
one, and get the same format. What differs between kinds of layers is in seen_linear.py and seen_experts.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.spec import LinearSpec
from lowbit.quant.calibration import Calibration, inputs_of
from lowbit.quant.evaluation import without_encoder_fast_path
from lowbit.quant.kinds import LayerWeight, weights_of
from lowbit.quant.packing import Selected, pack_weight

SAMPLE_ROWS = 64
"""Max number of input rows that are kept per layer. The SQNR of 64 rows x n outputs varies by less than 0.2 dB, and 200
layers with k=4096 need 210 MB in float32."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The number of rows and the dtype of the activations in a call, and how many experts each row is given to."""

    m: int
    dtype: str
    picked: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.m} x {self.dtype}" + (f" to {self.picked} experts" if self.picked else "")


@dataclass(eq=False)
class SeenLayer(ABC):
    """Layers of one kind that share their weights, and their recorded inputs.

    Args:
        modules: the modules by qualified name.
        calls: the number of calls with each shape.
        sample: rows of the inputs, about SAMPLE_ROWS in total: tuples of tensors as `inputs` returns them.
        is_head: whether one of them is the output head of a language model.
        calibration: weights the errors of codes; None weights all equally.
    """

    modules: dict[str, nn.Module]
    calls: Counter[Shape] = field(default_factory=Counter)
    sample: list[tuple[Tensor, ...]] = field(default_factory=list)
    is_head: bool = False
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        return next(iter(self.modules))

    @property
    def module(self) -> nn.Module:
        return next(iter(self.modules.values()))

    @property
    def weights(self) -> dict[str, LayerWeight]:
        """The weights of the layer by key."""
        return {weight.key: weight for weight in weights_of(self.module)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the float weights."""
        return next(self.module._parameters[key].dtype for key in self.weights)

    @property
    def float_bytes(self) -> int:
        return float_bytes_of(self.module)

    def bytes(self, spec: LinearSpec) -> int:
        """Return the size of the weights in a format."""
        return sum(weight.bytes(spec) for weight in self.weights.values())

    def selected(self, weight: LayerWeight, spec: LinearSpec) -> list[Selected]:
        """Return one weight of the modules as `quantize_` selects it, once for each module."""
        return [Selected(name, module, weight, spec, kernel="") for name, module in self.modules.items()]

    def packed_weight(self, weight: LayerWeight, spec: LinearSpec) -> nn.Parameter:
        """Return one weight of the layer in a format. Its codes are those that `quantize_` would choose."""
        value = weight.matrix(self.module._parameters[weight.key])
        weighed = self.calibration is not None and spec.weighs_inputs
        inputs = inputs_of(self.selected(weight, spec), self.calibration) if weighed else None
        return pack_weight(value, spec, inputs)[0]

    @property
    @abstractmethod
    def described(self) -> str:
        """Everything about the layer that the time of a call depends on."""

    @abstractmethod
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """Return the inputs of a call, tensors of equally many rows, the activations first; None if the layer will
        raise an error."""

    @abstractmethod
    def arguments(self, shape: Shape) -> tuple[Tensor, ...]:
        """Return the arguments of a call of this shape, whose time is measured."""

    @abstractmethod
    def rows(self, spec: LinearSpec, shape: Shape) -> list[str]:
        """Return the kernel rows that can serve such a call, the default one first; an empty name if there is no
        choice."""

    @abstractmethod
    def pack(self, spec: LinearSpec) -> nn.Module:
        """Return a packed copy of the layer. The float layer does not change."""

    @abstractmethod
    def in_place_of(self, module: nn.Module, packed: nn.Module, spec: LinearSpec, row: str = "") -> nn.Module:
        """Return a packed layer that can replace one of the modules.

        Args:
            module: the module.
            packed: what `pack` returned.
            spec: the format of ``packed``.
            row: the preferred kernel row.
        """

    @abstractmethod
    def exact_output(self, *inputs: Tensor) -> Tensor:
        """Return the output of the float layer in float64."""

    def sampled(self) -> tuple[Tensor, ...]:
        """Return the recorded rows as the arguments of a call."""
        return tuple(torch.cat(parts) for parts in zip(*self.sample, strict=True))

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call."""
        inputs = self.inputs(args, kwargs)
        if inputs is None:
            return
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "autoquant: the model must run without torch.autocast, whose casts are not measured, got a call of "
                f"{self.name} inside it"
            )
        x = inputs[0]
        picked = inputs[1].shape[1] if len(inputs) > 1 else 0
        self.calls[Shape(len(x), str(x.dtype).removeprefix("torch."), picked)] += 1
        # A call adds at most half of the remaining rows, so that later calls, such as decoding after a prompt, are
        # sampled too. At least one row of each dtype is kept.
        left = SAMPLE_ROWS - sum(len(rows) for rows, *_ in self.sample)
        had = any(rows.dtype == x.dtype for rows, *_ in self.sample)
        take = min(len(x), max((left + 1) // 2, not had))
        if take > 0:
            rows = torch.linspace(0, len(x) - 1, take, dtype=torch.float32, device=x.device).long()
            self.sample.append(tuple(of[rows].clone() for of in inputs))

    def sampled_rows(self, shape: Shape) -> Tensor:
        """Return activations of this shape, the recorded rows one after another."""
        rows = torch.cat([rows for rows, *_ in self.sample if rows.dtype == shape.torch_dtype])
        return rows[torch.arange(shape.m, device=rows.device) % len(rows)]


def float_bytes_of(module: nn.Module) -> int:
    """Return the size of a layer's weights as they are now."""
    return sum(module._parameters[weight.key].nbytes for weight in weights_of(module))


def record(model: nn.Module, layers: list[SeenLayer], run: Callable[[], Any]) -> Any:
    """Call ``run()`` while recording the inputs of the layers, and return its result."""
    with noting(model, layers):
        return run()


@contextlib.contextmanager
def noting(model: nn.Module, layers: list[SeenLayer]) -> Iterator[None]:
    """Record the inputs of the layers within the block."""

    def hook(layer: SeenLayer) -> Callable[..., None]:
        return lambda module, args, kwargs: layer.note(args, kwargs)

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(without_encoder_fast_path(model))  # the fast path would not call the layers
        for layer in layers:
            for module in layer.modules.values():
                hooks.callback(module.register_forward_pre_hook(hook(layer), with_kwargs=True).remove)
        yield
