# SPDX-License-Identifier: Apache-2.0
"""QuantEmbedding, an nn.Embedding with a packed weight, and the kind of embeddings.

The parameter ``weight`` is uint8 and frozen; the buffer ``layout`` (int64[8]) describes its bytes (formats/spec.py).
The weight is "row-major", so each table row is one row of the matrix, unless it is tied to a QuantLinear; then it is
in the layout of that layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.ops import registration
from lowbit.quant.kinds import Kind, LayerWeight, become_float, become_packed, float_forward, register, twin_of
from lowbit.quant.layout import PackedModule

registration.register()
_embedding = registration.function_of("embedding")
ROW_MAJOR = "row-major"


class QuantEmbedding(PackedModule, nn.Embedding):
    """An embedding table with a packed weight: ``y = dequantize(weight)[x]``.

    ``quantize_`` with a ``filter_fn`` that selects nn.Embedding creates such layers. The constructor returns a layer
    without values, to load a state dict into. The weight is frozen, so ``padding_idx``, ``scale_grad_by_freq`` and
    ``sparse``, which concern its gradient, have no effect.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in nn.Embedding.
        device: the device of the weight; "meta" allocates nothing (use ``load_state_dict(..., assign=True)`` then).
        dtype: the dtype of the result; ``model.to(dtype)`` changes it.
        spec: how the weight is stored.
        layout: the layout of the weight, "row-major" or that of the kernels.
    """

    layout: Tensor
    like: Tensor
    """An empty tensor with the dtype of the result."""
    float_class: type[nn.Embedding] = nn.Embedding
    """The class before packing. Gemma's class multiplies rows by ``embed_scale``."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LinearSpec,
        layout: str = ROW_MAJOR,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding.__init__ would allocate the float weight
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        shape = spec.shape(num_embeddings, embedding_dim, layout)
        weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
        self._hold(weight, spec, layout, dtype or torch.get_default_dtype())

    def _hold(self, weight: nn.Parameter, spec: LinearSpec, layout: str, dtype: torch.dtype) -> None:
        n, k = self.num_embeddings, self.embedding_dim
        self._parameters["weight"] = weight
        self.spec = spec
        self.op_args = *spec.weight_args(n, k), _C.LAYOUTS[layout]
        numbers = torch.tensor(spec.layout(n, k, layout), dtype=torch.int64, device=weight.device)
        self.register_buffer("layout", numbers)
        like = torch.empty(0, dtype=dtype, device="cpu" if weight.is_meta else weight.device)
        self.register_buffer("like", like, persistent=False)

    @property
    def layout_name(self) -> str:
        """The layout of the weight."""
        return [*_C.LAYOUTS][self.op_args[-1]]

    @property
    def factor(self) -> float | None:
        """The number that Gemma's embedding multiplies its rows by, rounded to their dtype; None for other classes."""
        if self.float_class is nn.Embedding:
            return None
        return torch.tensor(self.scalar_embed_scale, dtype=self.like.dtype, device="cpu").item()

    def forward(self, input: Tensor) -> Tensor:
        inside = self.__dict__
        op_args = inside.get("op_args")
        if op_args is None:
            return float_forward(self, input)
        rows = _embedding(inside["_parameters"]["weight"], input, inside["_buffers"]["like"], *op_args)
        if inside.get("float_class", nn.Embedding) is nn.Embedding:
            return rows
        # The number instead of the buffer: from_pretrained creates non-persistent buffers anew, and only fills those of
        # classes that it knows. new_full runs on the device; a copy from the host would abort a CUDA graph capture.
        return rows * rows.new_full((), inside["scalar_embed_scale"])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[num_embeddings, embedding_dim]`` as float."""
        weight = self._parameters["weight"]
        rows = torch.arange(self.num_embeddings, device=weight.device)
        return _embedding(weight, rows, rows.new_empty(0, dtype=dtype), *self.op_args)

    def reset_parameters(self) -> None:
        raise RuntimeError("QuantEmbedding: a packed weight has no initial value; load a state dict or use quantize_")

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self.spec.name}"


class _EmbeddingKind(Kind):
    name, float_name, packed_class = "embedding", "nn.Embedding", QuantEmbedding
    by_default = multiplies = False
    layout = ROW_MAJOR

    def has(self, cls: type[nn.Module]) -> bool:
        return issubclass(cls, nn.Embedding)

    def weights(self, module: Any) -> tuple[LayerWeight, ...]:
        return (LayerWeight("weight", module.num_embeddings, module.embedding_dim),)

    def refuses(self, module: Any) -> str:
        if not self.can_hold(module):
            return f"{type(module).__name__} is a subclass of nn.Embedding"
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} changes its weight in every call"
        return "" if module.weight.numel() else "its weight is empty"

    def can_hold(self, module: nn.Module) -> bool:
        return type(module) is nn.Embedding or is_scaled_embedding(module)

    def kernel(self, module: nn.Module, weight: LayerWeight, spec: LinearSpec, like: Tensor) -> str:
        device = devices.places.type_of_rows(like.device, "dequantize")
        rows = (row for row in _C.kernels("dequantize") if row["available"] and row["device"] == device)
        return next(row["name"] for row in rows if row["name"].startswith("dequantize_rows_"))

    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        """Replace the weight in place, as `Kind.hold` describes."""
        twin = twin_of(module, QuantEmbedding)
        if is_scaled_embedding(module) and module.embed_scale.is_meta:  # a non-persistent buffer, which no file holds
            twin.embed_scale = torch.tensor(module.scalar_embed_scale)
        twin._hold(packed, stored.spec, stored.layout, dtype or module.weight.dtype)
        become_packed(module, twin)

    def layout_of(self, module: Any) -> str:
        return module.layout_name

    def dtype_of(self, module: Any, others: torch.dtype) -> torch.dtype:
        return module.like.dtype

    def give_back(self, module: Any, weights: dict[str, nn.Parameter]) -> None:
        twin = twin_of(module, module.float_class)
        twin._parameters |= weights
        if is_scaled_embedding(twin):
            twin.embed_scale = torch.tensor(module.scalar_embed_scale, device=twin.weight.device)
        del twin._buffers["layout"], twin._buffers["like"], twin.spec, twin.op_args
        twin._non_persistent_buffers_set.discard("like")
        become_float(module, twin)


def is_scaled_embedding(module: nn.Module) -> bool:
    """Return whether this is Gemma's embedding in transformers, which multiplies its rows by a number."""
    home, name = type(module).__module__, type(module).__name__
    return home.startswith("transformers.models.gemma") and name.endswith("TextScaledWordEmbedding")


EMBEDDING = register(_EmbeddingKind())
