# SPDX-License-Identifier: Apache-2.0
"""QuantLinear, an nn.Linear with a packed weight, and the kind of linear layers.

The parameter ``weight`` is uint8 [panels, panel_bytes] and frozen; ``bias`` is unchanged; the buffer ``layout``
(int64[8]) describes the bytes of the weight (formats/spec.py). All three are plain tensors, so state dicts,
safetensors, export and FSDP2 (which shards whole panels) need no hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowbit import _C, devices
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.semi_sparse import fullest_four
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.ops.linear import LinearArgs, linear
from lowbit.ops.other_inputs import other_input
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import Kind, LayerWeight, become_float, become_packed, float_forward, register, twin_of
from lowbit.quant.layout import PackedModule, text_of
from lowbit.quant.linear_subclass import differs_from_linear, lost_with
from lowbit.quant.packing import check_finite, pack_weight

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""The class is recognized by its name and module, so that transformers need not be installed."""


class QuantLinear(PackedModule, nn.Linear):
    """A linear layer with a packed weight: ``y = x @ dequantize(weight).T + bias``.

    ``quantize_`` and ``from_linear`` create one from a float layer, ``pack`` from plain codes. The constructor returns
    a layer without values, to load a state dict into.

    Args:
        in_features, out_features, bias: as in nn.Linear.
        device: the device of the weight; "meta" allocates nothing (use ``load_state_dict(..., assign=True)`` then).
        dtype: the dtype of the bias.
        spec: how the weight is stored, and how activations are rounded.

    Example:
        >>> layer = lowbit.QuantLinear.from_linear(linear, lowbit.int8_weight_only().spec(torch.float32))
    """

    op_args: LinearArgs
    layout: Tensor
    row: str = ""
    """Name of the preferred kernel row; empty for the first row that can serve a call."""
    row_number: int = 0
    float_class: type[nn.Module] = nn.Linear
    """The class before packing, which ``dequantize_`` restores."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LinearSpec,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate the float weight
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        weight = torch.empty(spec.shape(out_features, in_features), dtype=torch.uint8, device=device)
        self._hold(nn.Parameter(weight, requires_grad=False), spec)

    def _hold(self, weight: nn.Parameter, spec: LinearSpec) -> None:
        self._parameters["weight"] = weight
        self.spec = spec
        self.op_args = spec.op_args(self.out_features, self.in_features)
        layout = torch.tensor(spec.layout(self.out_features, self.in_features), dtype=torch.int64, device=weight.device)
        self.register_buffer("layout", layout)

    def forward(self, x: Tensor) -> Tensor:
        # Direct dictionary lookups: nn.Module.__getattr__ would cost as much as the rest of a small call.
        inside = self.__dict__
        op_args = inside.get("op_args")
        if op_args is None:
            return float_forward(self, x)
        parameters = inside["_parameters"]
        try:
            return linear(x, parameters["weight"], op_args, parameters["bias"], row=inside.get("row_number", 0))
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            return other_input(self.forward, x, error)

    @property
    def stored(self) -> StoredWeight:
        """The format and size of the packed weight, for `lowbit.linear`."""
        return StoredWeight(self.spec, self.out_features, self.in_features, _C.LAYOUT)

    def prefer(self, row: str) -> None:
        """Prefer a kernel row for every call that it can serve; an empty name removes the preference.

        Copies and pickles of the layer keep the preference. The state dict does not, because it may be loaded on
        another machine.

        Raises:
            ValueError: the op linear has no kernel row of this name; the message lists its rows.
        """
        self.row_number = _C.row_number("linear", row) if row else 0
        self.row = row

    @classmethod
    def from_linear(cls, module: nn.Linear, spec: LinearSpec, *, name: str = "") -> QuantLinear:
        """Return a new layer with the packed weight of ``module``. ``module`` does not change, and the bias is shared.

        Args:
            module: a float layer.
            spec: how the weight is stored.
            name: the name of the layer, for error messages.

        Raises:
            ValueError: the weight contains inf or nan.
        """
        check_finite("from_linear", f"weight of {name}" if name else "weight", module.weight)
        packed, _ = pack_weight(module.weight, spec)
        return cls.from_packed(packed, module.out_features, module.in_features, spec, module.bias).train(
            module.training
        )

    @classmethod
    def from_packed(cls, weight: Tensor, n: int, k: int, spec: LinearSpec, bias: Tensor | None = None) -> QuantLinear:
        """Return a layer with a weight that is packed already.

        Args:
            weight: uint8 ``[panels, panel_bytes]``.
            n, k: rows and columns of the matrix.
            spec: how the weight is stored.
            bias: ``[n]`` or None.

        Raises:
            ValueError: dtype or shape of the weight do not fit spec, n and k.
        """
        if weight.dtype != torch.uint8 or tuple(weight.shape) != spec.shape(n, k):
            raise ValueError(
                f"from_packed: weight must be uint8 of shape {list(spec.shape(n, k))} for {spec.name} n={n} k={k}, "
                f"got {text_of(weight)}"
            )
        module = cls(k, n, bias=False, device="meta", spec=spec)
        if bias is not None:
            module.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        module._hold(weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False), spec)
        return module

    @classmethod
    def pack(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        spec: LinearSpec,
        bias: Tensor | None = None,
    ) -> QuantLinear:
        """Return a layer with a weight from plain codes: ``w = scale * (code - zero)``.

        In a lookup format (nf4, fp4, fp4_e2m1, fp8_e4m3) it is ``w = scale * level[code]``.

        Args:
            codes: uint8 ``[n, k]``.
            scale: float32 ``[n, groups]``.
            zero: float32 ``[n, groups]``; None for symmetric weights, whose zero is a constant (128 for int8, 8 for
                int4, and so on), and for lookup formats.
            spec: how the weight is stored.
            bias: ``[n]`` or None.

        Raises:
            ValueError: a shape or dtype does not fit, a code is out of range, or scale or zero are not finite after
                rounding for storage (scale: float32 per row times float16 per group; zero: float16).
        """
        _check_plain(codes, scale, zero, spec)
        return cls.from_packed(CodedWeight.of(codes, scale, zero, spec).pack(), *codes.shape, spec, bias)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(codes, scale, zero)``: uint8 ``[n, k]``, and two times float32 ``[n, groups]``.

        ``w = scale * (code - zero)``; in a lookup format ``w = scale * level[code]``, and zero is 0.

        Raises:
            ValueError: the format is a float format, which has no codes.
        """
        if self.spec.is_float:
            raise ValueError(f"unpack: the format must have codes, got {self.spec.format}")
        stored = StoredWeight(self.spec, self.out_features, self.in_features, _C.LAYOUT)
        weight = CodedWeight.unpack(self.weight.detach(), stored)
        return weight.codes, weight.scale, weight.zero_point

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the decoded weight ``[n, k]`` in ``dtype``."""
        args = self.spec.weight_args(self.out_features, self.in_features)
        return torch.ops.lowbit.dequantize(self._parameters["weight"], *args).to(dtype)

    def to_linear(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """Return a plain nn.Linear with the dequantized weight."""
        module = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=dtype)
        module.weight = nn.Parameter(self.dequantize(dtype))
        if self.bias is not None:
            module.bias = nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return module.train(self.training)

    def reset_parameters(self) -> None:
        raise RuntimeError("QuantLinear: a packed weight has no initial value; load a state dict or use quantize_")

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The packed weight. peft recognizes a layer by this name, and calls ``dequantize()`` (in DoRA and others)."""
        return self._parameters["weight"]

    def extra_repr(self) -> str:
        bias = self._parameters["bias"] is not None
        row = f", prefers {self.row}" if self.row else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.spec.name}{row}"


def _check_plain(codes: Tensor, scale: Tensor, zero: Tensor | None, spec: LinearSpec) -> None:
    """Raise ValueError unless codes, scale and zero can form a weight with this spec."""
    if spec.is_float:
        raise ValueError(f"pack: the format must have codes, got {spec.format}")
    if (zero is not None) != spec.asymmetric:
        raise ValueError(f"pack: zero must be {'given' if spec.asymmetric else 'None'} for {spec.name}")
    n, k = codes.shape
    parts = (
        ("codes", codes, torch.uint8, [n, k]),
        ("scale", scale, torch.float32, [n, spec.groups(k)]),
        ("zero", zero, torch.float32, [n, spec.groups(k)]),
    )
    for name, tensor, dtype, shape in parts:
        if tensor is not None and (tensor.dtype != dtype or list(tensor.shape) != shape):
            raise ValueError(f"pack: {name} must be {str(dtype).removeprefix('torch.')} {shape}, got {text_of(tensor)}")
    highest = _C.FORMAT_FACTS[spec.format]["code_max"]
    if codes.numel() and not codes.is_meta and codes.max() > highest:
        raise ValueError(f"pack: codes must be 0..{highest}, got {codes.max()}")
    spec.shape(n, k)  # raises if the format does not allow this k
    if spec.format == SEMI_SPARSE and not codes.is_meta and (full := fullest_four(codes, 128)):
        row, column, count = full
        raise ValueError(f"pack: codes must be 2:4, got {count} of [{row}, {column}:{column + 4}] that are not 128")
    if spec.format == "fp8_e4m3" and not codes.is_meta and ((codes & 127) == 127).any():
        raise ValueError("pack: codes must be finite, got nan (127 or 255)")
    stored = (scale, None if zero is None else zero.half())
    for (name, *_), tensor in zip(parts[1:], stored, strict=True):
        if tensor is not None and not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"pack: {name} must be finite, got inf or nan")


class _LinearKind(Kind):
    """nn.Linear, and transformers' Conv1D (in GPT-2 and its relatives), whose weight is stored as [k, n]."""

    name, float_name, packed_class = "linear layer", "nn.Linear", QuantLinear

    def has(self, cls: type[nn.Module]) -> bool:
        return issubclass(cls, nn.Linear) or _is_conv1d(cls)

    def weights(self, module: Any) -> tuple[LayerWeight, ...]:
        is_float = _is_conv1d(type(module))
        n, k = (module.nf, module.nx) if is_float else (module.out_features, module.in_features)
        turned = is_float or _is_conv1d(getattr(module, "float_class", nn.Linear))
        return (LayerWeight("weight", n, k, "bias", transposed=turned),)

    def refuses(self, module: Any) -> str:
        return self._cannot_pack(module) or ("" if _is_plain(type(module)) else lost_with(type(module)))

    def serves_if_asked(self, module: Any) -> bool:
        """Return whether methods of its own are the only reason why the layer stays float."""
        return not _is_plain(type(module)) and bool(lost_with(type(module))) and not self._cannot_pack(module)

    def _cannot_pack(self, module: Any) -> str:
        """Return the reason why a packed layer would not compute what this float layer does, or an empty string."""
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight directly"
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance"
        if not isinstance(module._parameters.get("weight"), nn.Parameter):
            return "its weight is computed from other parameters (weight_norm, pruning)"
        (weight,) = self.weights(module)
        if not weight.n or not weight.k:
            return "its weight is empty"
        return "" if _is_plain(type(module)) else differs_from_linear(module)

    def kernel(self, module: nn.Module, weight: LayerWeight, spec: LinearSpec, like: Tensor) -> str:
        """Return the name of the kernel row; two names if one token is served by another row than many."""
        dtype = str(like.dtype).removeprefix("torch.")
        device = devices.places.type_of_rows(like.device, "linear")
        one, many = (_C.select_linear(m, *spec.op_args(weight.n, weight.k), dtype, device) for m in (1, 64))
        return one if one == many else f"{one} (m=1), {many}"

    def inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[LayerWeight, int, Tensor, Tensor | None]]:
        (weight,) = self.weights(module)
        x = args[0] if args else next(iter(kwargs.values()))
        if x.dim() and x.shape[-1] == weight.k:  # otherwise the layer itself raises an error
            yield weight, 0, x, None

    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        """Replace the weight in place. Only the class of the object changes, as with FSDP2, so hooks, references and
        names stay valid."""
        twin = twin_of(module, QuantLinear)
        twin.out_features, twin.in_features = stored.n, stored.k
        twin._hold(packed, stored.spec)
        become_packed(module, twin)

    def give_back(self, module: Any, weights: dict[str, nn.Parameter]) -> None:
        """Turn a layer back into its former class. The weight is stored as that class expects it."""
        twin = twin_of(module, module.float_class)
        twin._parameters |= weights
        del twin._buffers["layout"]
        twin._buffers.pop("permutation", None)
        of_linear = () if isinstance(twin, nn.Linear) else ("out_features", "in_features")
        for name in ("spec", "op_args", "row", "row_number", *of_linear):
            twin.__dict__.pop(name, None)
        become_float(module, twin)


def _is_plain(cls: type) -> bool:
    return cls is nn.Linear or _is_conv1d(cls)


def _is_conv1d(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == _CONV1D


LINEAR = register(_LinearKind())
