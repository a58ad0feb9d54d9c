# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file that hold each parameter of a transformers model.

Most parameters are one tensor, named by transformers' own tables. Experts are not: where the model has one weight with
the rows of gate and up, a file has two tensors, ``ffn_gate_exps [E, I, H]`` and ``ffn_up_exps [E, I, H]``, or sometimes
one, ``ffn_gate_up_exps [E, 2 I, H]``. Nor are the matrices of `JoinedTensors`. A `DividedTensor` holds several
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from lowbit.checkpoints.gguf.architectures import Architecture
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.quant.kinds import weights_of

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)")
_MERGED = "ffn_gate_up_exps"


def tensor_names(
    file: GgufFile, model: nn.Module, architecture: Architecture, processor: TensorProcessor
) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors of each parameter and buffer. The rows of several tensors follow each other,
    except in `JoinedTensors`.

    Raises:
        ValueError: transformers has no names for the tensors of this architecture.
    """
    try:
        named = get_gguf_hf_weights_map(_Names(model), processor, model_type=file.architecture)
    except NotImplementedError as error:
        raise ValueError(f"gguf: transformers cannot name the tensors of {file.architecture}: {error}") from error
    names = {parameter: (tensor,) for tensor, parameter in (named | dict(architecture.outside)).items()}
    for path, _ in model.named_modules():
        if found := _LAYER.fullmatch(path):
            of_layer = {f"{path}.{of}": (f"blk.{found[1]}.{name}",) for name, of in architecture.names.items()}
            for of, tensors in architecture.stacked.items():
                of_layer[f"{path}.{of}"] = tuple(f"blk.{found[1]}.{name}" for name in tensors)
            for name, divided in architecture.divided.items():
                if (tensor := f"blk.{found[1]}.{name}") in file.tensors:
                    of_layer |= {f"{path}.{of}": (tensor,) for of in divided.parameters}
            for of, joined in architecture.joined.items():
                tensors = tuple(f"blk.{found[1]}.{name}" for name in joined.tensors)
                if file.tensors.keys() & set(tensors):
                    of_layer[f"{path}.{of}"] = tensors
            names |= of_layer
    return names | dict(_experts(model, file.tensors))


def _experts(model: nn.Module, tensors: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the parameters of experts and the names of their tensors."""
    for path, module in model.named_modules():
        weights = [weight for weight in weights_of(module) if weight.experts is not None]
        layer = _LAYER.match(path)
        if len(weights) != 2 or layer is None:
            continue
        first, down = weights
        block = f"blk.{layer[1]}"
        gated = ("ffn_gate_exps", "ffn_up_exps") if first.n == 2 * down.k else ("ffn_up_exps",)
        merged = f"{block}.{_MERGED}.weight" in tensors
        for weight, names in ((first, (_MERGED,) if merged else gated), (down, ("ffn_down_exps",))):
            yield f"{path}.{weight.key}", tuple(f"{block}.{name}.weight" for name in names)
            if weight.bias is not None:
                yield f"{path}.{weight.bias}", tuple(f"{block}.{name}.bias" for name in names)


class _Names:
    """The model as transformers' table of names sees it.

    The table visits every submodule and is rebuilt for each, which is slow. This object has only the model and its base
    model, whose names some files use.
    """

    def __init__(self, model: nn.Module, has_base: bool = True) -> None:
        self.config, self.state_dict = model.config, model.state_dict
        prefix = getattr(model, "base_model_prefix", "")
        base = getattr(model, prefix, None) if has_base and prefix else None
        self.children = [] if base is None else [(prefix, _Names(base, has_base=False))]

    def named_children(self) -> list[tuple[str, _Names]]:
        return self.children
