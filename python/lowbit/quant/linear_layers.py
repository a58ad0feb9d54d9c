# SPDX-License-Identifier: Apache-2.0
"""Layers that quantize_ takes: nn.Linear, and the Conv1D of transformers (GPT-2 and its relatives), whose weight lies
as [k, n]; nn.Embedding where it is asked for.

Conv1D is known by the name and home of its class, so that transformers need not be there.
"""

from __future__ import annotations

from torch import Tensor, nn

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the Conv1D of transformers itself, no subclass of it."""
    return is_conv1d_class(type(module))


def is_conv1d_class(cls: type[nn.Module]) -> bool:
    """Whether this is the class Conv1D of transformers."""
    return (cls.__module__, cls.__name__) == _CONV1D


def is_linear(module: nn.Module) -> bool:
    """Whether the layer multiplies by a matrix: a linear layer, or a Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_embedding(module: nn.Module) -> bool:
    """Whether the layer looks rows of its weight up."""
    return isinstance(module, nn.Embedding)


def is_scaled_embedding(module: nn.Module) -> bool:
    """Whether this is a table of Gemma in transformers, which multiplies its rows by one number."""
    home, name = type(module).__module__, type(module).__name__
    return home.startswith("transformers.models.gemma") and name.endswith("TextScaledWordEmbedding")


def is_trained(module: nn.Module) -> bool:
    """Whether `lowbit.training` made this layer: its class says with ``trained_as`` how."""
    return hasattr(type(module), "trained_as")


def is_fake_quantized(module: nn.Module) -> bool:
    """Whether `lowbit.training` prepared this layer to be trained with rounded weights."""
    return is_trained(module) and hasattr(type(module), "fake_quantized_weight")


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return (n, k): the features that come out and go in, of an embedding its rows and their length."""
    if is_embedding(module):
        return module.num_embeddings, module.embedding_dim
    return (module.nf, module.nx) if is_conv1d(module) else (module.out_features, module.in_features)


def matrix_of(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of the layer as ``[n, k]``; a view."""
    return weight.T if is_conv1d(module) else weight
