# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers whose weights can be packed.

A `Kind` knows which layers belong to it, what their weights are and how these are stored, why a layer must stay float,
and how a layer is packed and turned back. Each kind is defined in one file, with the class of its packed modules, and
registered (quant_linear.py, quant_embedding.py, quant_experts.py). Other files call `kind_of` and `weights_of`, and
depend neither on classes of layers nor on names of parameters.
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
from lowbit.ops.packed_weights import REPLACED

_WEIGHT, _LAYOUT = "weight", "layout"
_Layer = TypeVar("_Layer", bound=nn.Module)
_COPIED = ("_parameters", "_buffers", "_non_persistent_buffers_set")


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """A weight of a layer, float or packed.

    Args:
        key: name of the parameter in its module.
        n, k: rows and columns of the matrix.
        bias: name of the bias in the module, or None.
        experts: number of matrices in a weight ``[experts, n, k]``; None for a single matrix.
        transposed: whether the float weight is stored as ``[k, n]``.
        interleaved: whether rows of two matrices (gate and up) alternate in the float weight. In the packed weight all
            rows of the first matrix come before those of the second.
        permutation: int64 ``[k]``, the columns of the float weight in the order of the packed columns; None if both
            orders are the same.
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
        """The shape of the packed matrix or matrices: ``(n, k)`` or ``(experts, n, k)``."""
        return (self.n, self.k) if self.experts is None else (self.experts, self.n, self.k)

    @property
    def float_shape(self) -> tuple[int, ...]:
        """The shape of the float parameter."""
        *front, n, k = self.shape
        return (*front, k, n) if self.transposed else (*front, n, k)

    def matrix(self, value: Tensor) -> Tensor:
        """Return the float parameter in the order in which it is packed, of `shape`; a view, unless rows or columns are
        reordered."""
        value = value.mT if self.transposed else value
        if self.interleaved:
            value = torch.cat([value[..., ::2, :], value[..., 1::2, :]], dim=-2)
        return value if self.permutation is None else value[..., self.permutation]

    def value(self, matrix: Tensor) -> Tensor:
        """Return the float parameter for a matrix of `shape`; the inverse of `matrix`."""
        if self.permutation is not None:
            matrix = matrix[..., self.permutation.argsort()]
        if self.interleaved:
            matrix = matrix.unflatten(-2, (2, self.n // 2)).transpose(-3, -2).flatten(-3, -2)
        return matrix.mT if self.transposed else matrix

    def bytes(self, spec: LinearSpec) -> int:
        """Return the size in bytes of the packed weight in the layout of the kernels."""
        return spec.bytes(self.n, self.k) * (self.experts or 1)

    def stored(self, spec: LinearSpec, layout: str = _C.LAYOUT) -> StoredWeight:
        """Return the description of the packed weight."""
        return StoredWeight(spec, self.n, self.k, layout, self.experts)


class Kind(ABC):
    """Base class of a kind of layer.

    Its packed modules are `PackedModule` (layout.py). They have a uint8 parameter under the key of each weight, a
    buffer with the numbers that describe it, named by `layout_name`, and ``spec``.
    """

    name: ClassVar[str]
    """Name of the kind in error messages."""
    float_name: ClassVar[str]
    """Name of the float class in error messages."""
    packed_class: ClassVar[type[nn.Module]]
    by_default: ClassVar[bool] = True
    """Whether ``quantize_`` selects such a layer by default."""
    multiplies: ClassVar[bool] = True
    """Whether the weight is multiplied by activations. Otherwise rows are looked up, and x is not rounded."""
    tells_inputs_packed: ClassVar[bool] = True
    """Whether `inputs` of a packed layer are told too."""
    layout: ClassVar[str] = _C.LAYOUT
    """The layout of a packed weight that is not shared with a layer of another kind."""

    @abstractmethod
    def has(self, cls: type[nn.Module]) -> bool:
        """Return whether layers of this class, float, packed or in training, belong to this kind."""

    def includes(self, module: nn.Module) -> bool:
        """Return whether a layer of such a class belongs to this kind, if its class is not enough to tell."""
        return True

    @abstractmethod
    def weights(self, module: nn.Module) -> tuple[LayerWeight, ...]:
        """Return the weights of a layer, float or packed."""

    def refuses(self, module: nn.Module) -> str:
        """Return the reason why a float layer cannot safely be packed, or an empty string."""
        return ""

    def serves_if_asked(self, module: nn.Module) -> bool:
        """Return whether a ``filter_fn`` may select a layer in spite of `refuses`."""
        return False

    def can_hold(self, module: nn.Module) -> bool:
        """Return whether a packed weight from a file may be loaded into a float layer."""
        return True

    @abstractmethod
    def kernel(self, module: nn.Module, weight: LayerWeight, spec: LinearSpec, like: Tensor) -> str:
        """Return the name of the kernel row that will serve a weight for activations with the device and dtype of
        ``like``."""

    @abstractmethod
    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        """Replace a weight of a layer by a packed one; with its first packed weight the layer becomes a `packed_class`.

        Args:
            module: the layer.
            key: the name of the weight.
            packed: the packed weight.
            stored: its format, size and layout.
            dtype: the dtype of rows that are looked up; None is that of the float weight.
        """

    def inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[LayerWeight, int, Tensor, Tensor | None]]:
        """Yield the inputs of each product in a call of a layer: a weight, the index of its matrix, rows ``[..., k]``,
        and which of them it multiplies, or None for all. Rows of which some are picked are not changed later. A kind
        that does not support calibration yields nothing."""
        return iter(())

    def spec_of(self, module: Any, weight: LayerWeight) -> LinearSpec:
        """Return how a packed weight of a layer is stored."""
        return module.spec

    def layout_of(self, module: Any) -> str:
        """Return the layout that the weights of a packed layer are in."""
        return _C.LAYOUT

    def dtype_of(self, module: Any, others: torch.dtype) -> torch.dtype:
        """Return the dtype for the float weight of a packed layer that is dequantized.

        Args:
            module: the packed layer.
            others: the dtype of the model's other weights.
        """
        bias = module._parameters.get("bias")
        return others if bias is None else bias.dtype

    def dequantize(self, module: Any, weight: LayerWeight, dtype: torch.dtype) -> Tensor:
        """Return the float parameter of a packed weight."""
        return weight.value(module.dequantize(dtype))

    @abstractmethod
    def give_back(self, module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
        """Turn a packed layer back into its float class, with these weights by key."""


KINDS: list[Kind] = []


def register(kind: Kind) -> Kind:
    """Register a kind and return it. If several kinds have the same class of layers, the first one counts."""
    KINDS.append(kind)
    _kind_of.cache_clear()
    return kind


@functools.cache
def _kind_of(cls: type[nn.Module]) -> Kind | None:
    return next((kind for kind in KINDS if kind.has(cls)), None)


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a layer that is float, packed or in training, or None for any other module."""
    kind = _kind_of(type(module))
    return kind if kind is not None and kind.includes(module) else None


def weights_of(module: nn.Module) -> tuple[LayerWeight, ...]:
    """Return the weights of a layer that are or can be packed; an empty tuple for any other module."""
    kind = kind_of(module)
    return () if kind is None else kind.weights(module)


def packed_weights(module: nn.Module) -> tuple[LayerWeight, ...]:
    """Return the weights of a layer that are packed. These are all weights, except while a layer with several weights
    is being packed."""
    held = module._parameters
    return tuple(weight for weight in weights_of(module) if is_packed_value(held[weight.key]))


def is_packed_value(value: Tensor) -> bool:
    """Return whether the parameter of a layer's weight is packed."""
    return value.dtype == torch.uint8


def is_packed(module: nn.Module) -> bool:
    """Return whether the layer holds packed weights."""
    kind = _kind_of(type(module))
    return kind is not None and isinstance(module, kind.packed_class)


def is_packed_by_default(module: nn.Module) -> bool:
    """Return whether ``quantize_`` and `LowbitConfig` select layers of this kind by default."""
    kind = kind_of(module)
    return kind is not None and kind.by_default


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return (n, k) of a layer with one weight: its output and input features, or the size of an embedding table."""
    (weight,) = weights_of(module)
    return weight.n, weight.k


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """Return ``(n, k)`` of a layer, or ``(experts, n, k)`` of the first weight of a module of experts."""
    return weights_of(module)[0].shape


def matrix_of(module: nn.Module) -> Tensor:
    """Return the float weight ``[n, k]`` of a layer with one weight, as a view."""
    (weight,) = weights_of(module)
    return weight.matrix(module._parameters[weight.key])


def layout_of_all(modules: Iterable[nn.Module]) -> str:
    """Return the layout of a packed weight that these layers share: that of their kind, or that of the kernels if the
    kinds differ."""
    kinds = {kind_of(module) for module in modules}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return _C.LAYOUT if kind is None else kind.layout


def stored_weight(module: nn.Module) -> Tensor:
    """Return the weight of a layer that has one, as it is stored: packed, if it is, whatever ``module.weight`` says."""
    (weight,) = weights_of(module)
    value = module._parameters.get(weight.key)
    return getattr(module, weight.key) if value is None else value


def weight_named(model: nn.Module, name: str) -> tuple[str, nn.Module, LayerWeight] | None:
    """Return the layer's name, the layer and the weight for a parameter of this name, or None if no weight that can be
    packed has this name."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return next(((path, module, weight) for weight in weights_of(module) if weight.key == key), None)


def named_weights(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, LayerWeight]]:
    """Yield parameter name, layer name, layer and weight; a shared layer is yielded under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for weight in weights_of(module):
            yield (f"{path}.{weight.key}" if path else weight.key), path, module, weight


def layout_name(name: str) -> str:
    """Return the name of the tensor that describes a packed weight: ``a.layout`` for ``a.weight``, ``a.up_layout`` for
    ``a.up``."""
    if name == _WEIGHT or name.endswith(f".{_WEIGHT}"):
        return name.removesuffix(_WEIGHT) + _LAYOUT
    return f"{name}_{_LAYOUT}"


def weight_name(name: str) -> str | None:
    """Return the name of the packed weight that a tensor of this name describes, or None for any other name."""
    if name == _LAYOUT or name.endswith(f".{_LAYOUT}"):
        return name.removesuffix(_LAYOUT) + _WEIGHT
    return name.removesuffix(f"_{_LAYOUT}") if name.endswith(f"_{_LAYOUT}") else None


def weight_in(layer: str) -> str:
    """Return the name in a state dict of the weight of a layer with one weight."""
    return f"{layer}.{_WEIGHT}" if layer else _WEIGHT


def layer_with(name: str) -> str | None:
    """Return the name of the layer whose only weight has this name in a state dict, or None for any other name."""
    layer, _, key = name.rpartition(".")
    return layer if key == _WEIGHT else None


def is_trained(module: nn.Module) -> bool:
    """Return whether `lowbit.training` created this layer; such classes have an attribute ``trained_as``."""
    return hasattr(type(module), "trained_as")


def is_fake_quantized(module: nn.Module) -> bool:
    """Return whether `lowbit.training` prepared this layer for training with rounded weights."""
    return is_trained(module) and hasattr(type(module), "fake_quantized_weight")


# Other threads may call a layer while it is packed or dequantized. A layer consists of its class and its dictionary,
# which are replaced by two assignments. Between the two, a packed class may have the dictionary of a float layer, but
# never the other way round. The forward of a packed class reads ``__dict__`` once, and delegates such a call to the
# float class (`float_forward`). So every call sees either the float layer or the packed layer as a whole.


def twin_of(module: nn.Module, cls: type[_Layer]) -> _Layer:
    """Return an object of ``cls`` with the state of ``module``. Replacing its parameters and buffers does not affect
    ``module``."""
    twin = cls.__new__(cls)
    twin.__dict__ = module.__dict__ | {name: module.__dict__[name].copy() for name in _COPIED}
    return twin


def become_packed(module: nn.Module, twin: nn.Module) -> None:
    """Turn a layer into the packed layer ``twin``, which was made from it by `twin_of`. If the layer is packed already,
    this replaces its weight."""
    for key, value in module._parameters.items():
        packed = twin._parameters.get(key)
        if value is not None and value.is_floating_point() and packed is not None and not packed.is_floating_point():
            REPLACED[id(value)] = value
    if not isinstance(module, type(twin)):
        module.float_class = twin.float_class = type(module)
        module.__class__ = type(twin)
    module.__dict__ = twin.__dict__


def become_float(module: nn.Module, twin: nn.Module) -> None:
    """Turn a packed layer into the float layer ``twin``, which was made from it by `twin_of`."""
    module.__dict__ = twin.__dict__
    module.__class__ = type(twin)
    module.__dict__.pop("float_class", None)


def float_forward(module: nn.Module, x: Tensor) -> Any:
    """Return the result of a layer that is called while it is being packed or dequantized."""
    cls = module.__dict__.get("float_class") or type(module)
    return cls.forward(module, x)
