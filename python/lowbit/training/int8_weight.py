# SPDX-License-Identifier: Apache-2.0
"""A weight that consists of int8 codes and one scale per row, and that optimizers update as if it were float.

    weight[i, j] = codes[i, j] * scale[i],   codes -127..127 in int8 [n, k], scale float32 [n]

In-place ops change the decoded values, which are then rounded stochastically: up with a probability equal to the
fraction that is cut off. So even updates smaller than the distance of two codes have an effect on average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A tensor subclass of int8 codes and scales that behaves like a float tensor ``[n, k]``.

    In-place ops round stochastically, with torch's generator; all other ops return plain float tensors. A row that
    contains inf or nan becomes nan.

    Raises:
        NotImplementedError: an op would return a view, or writes to several such tensors at once (``foreach`` and
            ``fused`` in torch's optimizers).
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Int8Weight:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def from_float(cls, weight: Tensor) -> Int8Weight:
        """Round a weight ``[n, k]`` to the nearest codes, with scales from the ranges of its rows."""
        return cls(*_rounded(weight.detach(), torch.round), weight.dtype)

    @property
    def nbytes(self) -> int:
        """The size of codes and scales in bytes; torch would count float values."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """Return the decoded values, computed in float32 and rounded once to the dtype."""
        return self.values().to(self.dtype)

    def values(self) -> Tensor:
        """Return the decoded values in float32."""
        return self.codes * self.scale.unsqueeze(1)

    def store(self, values: Tensor) -> None:
        """Replace codes and scales by those of ``values`` ``[n, k]``, rounded stochastically."""
        codes, scale = _rounded(values, lambda x: (x + torch.rand_like(x)).floor())
        self.codes.copy_(codes)
        self.scale.copy_(scale)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, *_: Any) -> Int8Weight:
        return Int8Weight(parts["codes"], parts["scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # results of ops are plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in (_aten.detach.default, _aten.clone.default):
            return cls(func(first.codes), func(first.scale), first.dtype)
        dtype = kwargs.get("dtype") or getattr(first, "dtype", None)
        if func is _aten._to_copy.default and dtype.is_floating_point:
            parts = (part.to(device=kwargs.get("device"), copy=True) for part in (first.codes, first.scale))
            return cls(*parts, dtype)
        if func in (_aten.zeros_like.default, _aten.empty_like.default):  # the state of an optimizer
            plain = first.scale.new_empty(()).to(first.dtype).expand(first.shape)
            return func(plain, **{**kwargs, "memory_format": torch.contiguous_format})
        if func is _aten.copy_.default and isinstance(first, cls) and isinstance(args[1], cls):
            first.codes.copy_(args[1].codes)
            first.scale.copy_(args[1].scale)
            return first
        written = _written(func, args, kwargs)
        others = [value for value in pytree.tree_leaves(written) if isinstance(value, cls) and value is not first]
        if others or _returns_view(func):
            raise NotImplementedError(
                f"{func}: an int8 weight must be read as weight.dequantize(), and written by itself, got a view of it "
                "or several at once; pass foreach=False and fused=False to the optimizer"
            )
        plain, named = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        if not (written and isinstance(first, cls)):
            return func(*plain, **named)
        first.store(func(first.values(), *plain[1:], **named))  # in float32; bfloat16 would lose small changes
        return first


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    aliases = {argument.name: argument.alias_info for argument in arguments}
    return [value for name, value in given.items() if aliases[name] is not None and aliases[name].is_write]


def _returns_view(func: Any) -> bool:
    infos = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _rounded(weight: Tensor, rounding: Any) -> tuple[Tensor, Tensor]:
    """Return codes ``[n, k]`` and scales ``[n]``; subnormal scales become 0."""
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale < torch.finfo(scale.dtype).tiny, 0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    usable = torch.where(scale > 0, scale, 1).unsqueeze(1)
    codes = rounding(weight / usable).clamp(-127, 127).nan_to_num(0)
    return codes.to(torch.int8), scale
