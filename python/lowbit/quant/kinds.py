# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers whose weights can be packed, each as a value: the layers that are of it, their weights and how
these lie, why a layer stays float, and how it becomes packed and float again.

A kind is added in one file, which makes the class of its packed modules and registers a `Kind` (quant_linear.py,
quant_embedding.py, quant_experts.py). Other files ask `kind_of` and `weights_of`, and neither for classes nor for
names of parameters.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight

_WEIGHT, _LAYOUT = "weight", "layout"
_Layer = TypeVar("_Layer", bound=nn.Module)
_COPIED = ("_parameters", "_buffers", "_non_persistent_buffers_set")


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """A weight of a layer, float or packed.

    Args:
        key: name of the parameter in its module.
        n, k: rows and columns of the matrix.
        bias: name of its bias in the module; None: it has none.
        experts: number of matrices of a weight ``[experts, n, k]``; None: it is one matrix.
        transposed: the float weight lies as ``[k, n]``.
        interleaved: rows of two matrices take turns in the float weight (those of a gate and those of its values); in
            the packed one the first matrix comes whole before the second.
        permutation: int64 ``[k]``, the columns of the float weight in the order of the packed ones; None: the same.
    """

    key: str
    n: int
    k: int
    bias: str | None = None
    experts: int | None = None
    transposed: bool = False
    interleaved: bool = False
    permutation: Tensor | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the packed matrix or matrices: ``(n, k)`` or ``(experts, n, k)``."""
        return (self.n, self.k) if self.experts is None else (self.experts, self.n, self.k)

    @property
    def float_shape(self) -> tuple[int, ...]:
        """Of the float parameter."""
        *front, n, k = self.shape
        return (*front, k, n) if self.transposed else (*front, n, k)

    def matrix(self, value: Tensor) -> Tensor:
        """Return the float parameter as it is packed, of `shape`; a view, unless rows or columns change places."""
        value = value.mT if self.transposed else value
        if self.interleaved:
            value = torch.cat([value[..., ::2, :], value[..., 1::2, :]], dim=-2)
        return value if self.permutation is None else value[..., self.permutation]

    def value(self, matrix: Tensor) -> Tensor:
        """Return the float parameter of a matrix of `shape`; the inverse of `matrix`."""
        if self.permutation is not None:
            matrix = matrix[..., self.permutation.argsort()]
        if self.interleaved:
            matrix = matrix.unflatten(-2, (2, self.n // 2)).transpose(-3, -2).flatten(-3, -2)
        return matrix.mT if self.transposed else matrix

    def bytes(self, spec: LinearSpec) -> int:
        """Bytes of the packed weight in the layout of the kernels."""
        return spec.bytes(self.n, self.k) * (self.experts or 1)

    def stored(self, spec: LinearSpec, layout: str = _C.LAYOUT) -> StoredWeight:
        """Return the description of the packed weight."""
        return StoredWeight(spec, self.n, self.k, layout, self.experts)


class Kind(ABC):
    """A kind of layer. Its packed modules are `PackedModule` (layout.py): uint8 parameters under the keys of the
    weights, their numbers in buffers of the names that `layout_name` gives, and ``spec``."""

    name: ClassVar[str]
    """In errors."""
    float_name: ClassVar[str]
    """Class of the float layer, in errors."""
    packed_class: ClassVar[type[nn.Module]]
    by_default: ClassVar[bool] = True
    """Whether ``quantize_`` takes such a layer without being asked."""
    multiplies: ClassVar[bool] = True
    """Whether the weight is multiplied by activations; else its rows are looked up, and no activation is rounded."""
    has_products: ClassVar[bool] = True
    """Whether ``calibrate`` keeps x x^T of the inputs of such a layer, which GPTQ needs."""
    layout: ClassVar[str] = _C.LAYOUT
    """Of a packed weight that no layer of another kind shares."""

    @abstractmethod
    def has(self, cls: type[nn.Module]) -> bool:
        """Whether layers of this class are of the kind: float, packed or in training."""

    def includes(self, module: nn.Module) -> bool:
        """Whether a layer of such a class is of the kind, where its class alone does not tell."""
        return True

    @abstractmethod
    def weights(self, module: nn.Module) -> tuple[LayerWeight, ...]:
        """Return the weights of a layer, float or packed."""

    def refuses(self, module: nn.Module) -> str:
        """Say why a float layer is not safe to take, or return an empty string."""
        return ""

    def serves_if_asked(self, module: nn.Module) -> bool:
        """Whether a filter may take a layer in spite of `refuses`."""
        return False

    def can_hold(self, module: nn.Module) -> bool:
        """Whether a float layer may get a packed weight of a file."""
        return True

    @abstractmethod
    def kernel(self, module: nn.Module, weight: LayerWeight, spec: LinearSpec, like: Tensor) -> str:
        """Name the kernel row that will serve a weight of a layer on the device of ``like``, with activations of its
        dtype."""

    @abstractmethod
    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        """Give a layer a packed weight, which is as ``stored`` says, in place of the float one ``key``; by the first it
        becomes a `packed_class`. ``dtype``: of rows that are looked up; None: that of the float weight."""

    def inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[LayerWeight, int, Tensor]]:
        """Yield what a call of a layer multiplies: a weight, the number of its matrix, and rows ``[..., k]``; nothing
        of a layer whose inputs no calibration counts."""
        return iter(())

    def spec_of(self, module: Any, weight: LayerWeight) -> LinearSpec:
        """Return how a packed weight of a layer is stored."""
        return module.spec

    def layout_of(self, module: Any) -> str:
        """Return the layout that the weights of a packed layer are in."""
        return _C.LAYOUT

    def dtype_of(self, module: Any, others: torch.dtype) -> torch.dtype:
        """Return the dtype that a packed layer has when it is float again; ``others``: of the model."""
        bias = module._parameters.get("bias")
        return others if bias is None else bias.dtype

    def dequantize(self, module: Any, weight: LayerWeight, dtype: torch.dtype) -> Tensor:
        """Return the float parameter of a packed weight."""
        return weight.value(module.dequantize(dtype))

    @abstractmethod
    def give_back(self, module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
        """Turn a packed layer into the float one with these weights, by their keys."""


KINDS: list[Kind] = []


def register(kind: Kind) -> Kind:
    """Add a kind; of a class that several have, the first counts."""
    KINDS.append(kind)
    _kind_of.cache_clear()
    return kind


@functools.cache
def _kind_of(cls: type[nn.Module]) -> Kind | None:
    return next((kind for kind in KINDS if kind.has(cls)), None)


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a layer, float, packed or in training; None of any other module."""
    kind = _kind_of(type(module))
    return kind if kind is not None and kind.includes(module) else None


def weights_of(module: nn.Module) -> tuple[LayerWeight, ...]:
    """Return the weights of a layer that are packed or can be; none of any other module."""
    kind = kind_of(module)
    return () if kind is None else kind.weights(module)


def packed_weights(module: nn.Module) -> tuple[LayerWeight, ...]:
    """Return the weights of a layer that are packed: all, but for a moment of one that has several."""
    held = module._parameters
    return tuple(weight for weight in weights_of(module) if is_packed_value(held[weight.key]))


def is_packed_value(value: Tensor) -> bool:
    """Whether the parameter of a layer's weight is a packed one."""
    return value.dtype == torch.uint8


def is_packed(module: nn.Module) -> bool:
    """Whether the layer holds packed weights."""
    kind = _kind_of(type(module))
    return kind is not None and isinstance(module, kind.packed_class)


def is_packed_by_default(module: nn.Module) -> bool:
    """Whether ``quantize_`` and `LowbitConfig` take a layer of its kind without being asked."""
    kind = kind_of(module)
    return kind is not None and kind.by_default


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return (n, k) of a layer of one weight: the features that come out and go in, of a table its rows
    and their length."""
    (weight,) = weights_of(module)
    return weight.n, weight.k


def matrix_of(module: nn.Module) -> Tensor:
    """Return the float weight ``[n, k]`` of a layer of one weight; a view."""
    (weight,) = weights_of(module)
    return weight.matrix(module._parameters[weight.key])


def layout_of_all(modules: Iterable[nn.Module]) -> str:
    """Return the layout of a packed weight that these layers share: that of their kinds, or where they differ that of
    the kernels."""
    kinds = {kind_of(module) for module in modules}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return _C.LAYOUT if kind is None else kind.layout


def weight_named(model: nn.Module, name: str) -> tuple[str, nn.Module, LayerWeight] | None:
    """Return the name of the layer, the layer and the weight that a parameter of this name is; None: it is another
    parameter, or there is none."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return next(((path, module, weight) for weight in weights_of(module) if weight.key == key), None)


def named_weights(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, LayerWeight]]:
    """Yield name of the parameter, name of the layer, layer and weight, under every name that a layer has."""
    for path, module in model.named_modules(remove_duplicate=False):
        for weight in weights_of(module):
            yield (f"{path}.{weight.key}" if path else weight.key), path, module, weight


def layout_name(name: str) -> str:
    """Return the name of the numbers beside a packed weight: ``a.layout`` beside ``a.weight``,
    ``a.up_layout`` beside ``a.up``."""
    if name == _WEIGHT or name.endswith(f".{_WEIGHT}"):
        return name.removesuffix(_WEIGHT) + _LAYOUT
    return f"{name}_{_LAYOUT}"


def weight_name(name: str) -> str | None:
    """Return the name of the packed weight that numbers of this name are beside; None: it is no such name."""
    if name == _LAYOUT or name.endswith(f".{_LAYOUT}"):
        return name.removesuffix(_LAYOUT) + _WEIGHT
    return name.removesuffix(f"_{_LAYOUT}") if name.endswith(f"_{_LAYOUT}") else None


def weight_in(layer: str) -> str:
    """Return the name of the weight of a layer of one weight, in a state dict."""
    return f"{layer}.{_WEIGHT}" if layer else _WEIGHT


def layer_with(name: str) -> str | None:
    """Return the name of the layer whose one weight has this name in a state dict; None: it is another name."""
    layer, _, key = name.rpartition(".")
    return layer if key == _WEIGHT else None


def is_trained(module: nn.Module) -> bool:
    """Whether `lowbit.training` made this layer: its class says with ``trained_as`` how."""
    return hasattr(type(module), "trained_as")


def is_fake_quantized(module: nn.Module) -> bool:
    """Whether `lowbit.training` prepared this layer to be trained with rounded weights."""
    return is_trained(module) and hasattr(type(module), "fake_quantized_weight")


# A layer becomes packed, or float again, while other threads may call it. It is its class and its dictionary, which two
# assignments replace. Between them a packed class meets the dictionary of a float layer, never the other way round; the
# forward of a packed class reads ``__dict__`` once, and leaves such a call to the float class (`float_forward`). So a
# call sees the float layer or the packed one as a whole.


def twin_of(module: nn.Module, cls: type[_Layer]) -> _Layer:
    """Return an object of ``cls`` with the state of ``module``, whose parameters and buffers may be replaced without
    that ``module`` sees it."""
    twin = cls.__new__(cls)
    twin.__dict__ = module.__dict__ | {name: module.__dict__[name].copy() for name in _COPIED}
    return twin


def become_packed(module: nn.Module, twin: nn.Module) -> None:
    """Turn a float layer into the packed one that ``twin``, made of it, is; or give a packed one another weight."""
    if not isinstance(module, type(twin)):
        module.float_class = twin.float_class = type(module)
        module.__class__ = type(twin)
    module.__dict__ = twin.__dict__


def become_float(module: nn.Module, twin: nn.Module) -> None:
    """Turn a packed layer into the float one that ``twin``, made of it, is."""
    module.__dict__ = twin.__dict__
    module.__class__ = type(twin)
    module.__dict__.pop("float_class", None)


def float_forward(module: nn.Module, x: Tensor) -> Any:
    """The result of a layer that is called while it becomes packed or float."""
    cls = module.__dict__.get("float_class") or type(module)
    return cls.forward(module, x)
