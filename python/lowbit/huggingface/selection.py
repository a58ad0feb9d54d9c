# SPDX-License-Identifier: Apache-2.0
"""Select the layers of a transformers model that a LowbitConfig packs, each with its configuration.

Linear layers with a tied weight stay float, unless the embedding that shares it is selected: then all layers that share
the weight are packed, and share the packed one.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.quantizers.quantizers_utils import should_convert_module

from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.formats.base import FormatConfig
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.quant.kinds import (
    KINDS,
    LayerWeight,
    is_packed_by_default,
    kind_of,
    layout_of_all,
    weight_named,
    weights_of,
)
from lowbit.quant.output_head import head_layers
from lowbit.quant.packing import Selected
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.quant.report import ReportRow
from lowbit.quant.select import check_module, reason_to_skip

_NAMED = "named by modules_to_not_convert"


class Selection:
    """The layers of ``model`` to pack, and those that stay float.

    Args:
        keep, keep_embeddings: names and patterns of linear layers and of embeddings that stay float.

    Raises:
        ValueError: plan names a module that is no layer or cannot be packed, or gives tied layers two configurations.
    """

    def __init__(self, model: nn.Module, settings: LowbitConfig, keep: list[str], keep_embeddings: list[str]) -> None:
        self.layers: dict[str, FormatConfig] = {}  # layers to pack, by the names of their modules
        self.left: list[ReportRow] = []  # those that stay float
        self._model, self._settings, self._plan = model, settings, dict(settings.plan)
        self.tied = tied_modules(model)
        self._read = weights_that_are_read(model)
        self._take_head(keep_embeddings)
        self._take_embeddings(keep_embeddings)
        self._take_others(keep)
        if self._plan:
            names = ", ".join(self._plan)
            raise ValueError(f"LowbitConfig: plan must name linear layers and embeddings of the model, got {names}")

    def shared_with(self, name: str) -> tuple[str, ...]:
        """The names of all layers that have this one's weight, its own too."""
        return self.tied.get(name, (name,))

    def find(self, parameter: str) -> tuple[str, nn.Module, LayerWeight] | None:
        """The layer and the weight that a parameter of this name is, if it is to be packed."""
        found = weight_named(self._model, parameter)
        return found if found is not None and found[0] in self.layers else None

    def layout(self, name: str) -> str:
        """The layout of the packed weight of a layer and those that share it."""
        return layout_of_all(map(self._model.get_submodule, self.shared_with(name)))

    def selected(self, parameter: str, like: Tensor) -> Selected:
        """The weight of this name, to be packed for activations like ``like``."""
        name, module, weight = self.find(parameter)
        return Selected.of(name, module, weight, self.layers[name].spec(like.dtype), like)

    def _take_head(self, keep: list[str]) -> None:
        """Give the output head and layers tied to it the configuration of heads, where they have no other; those that
        cannot be packed stay as they are."""
        heads = set(map(id, head_layers(self._model)))
        names = {name for name, module in self._model.named_modules() if id(module) in heads}
        shared = tuple(sorted({other for name in names for other in self.shared_with(name)}))
        asked = self._settings.embeddings is not None and any(name in self.tied for name in names)
        if self._settings.head is None or not names or asked or any(name in self._plan for name in shared):
            return
        if not self._reason(shared, keep):
            self._take(shared, self._settings.head)

    def _take(self, shared: tuple[str, ...], config: FormatConfig) -> None:
        """Note layers that share a weight, to be packed as ``config`` says."""
        for name in shared:
            check_module(name, self._model.get_submodule(name), None, KINDS)
            self.layers[name] = config

    def _take_embeddings(self, keep: list[str]) -> None:
        for name, module in self._model.named_modules():
            if kind_of(module) is not EMBEDDING or name in self.layers:
                continue
            shared = self.shared_with(name)
            planned = {other: self._plan[other] for other in shared if other in self._plan}
            tables = [other for other in planned if kind_of(self._model.get_submodule(other)) is EMBEDDING]
            if self._settings.embeddings is None and not tables:
                continue
            if len({str(config) for config in planned.values()}) > 1:
                told = ", ".join(f"{other}: {config}" for other, config in planned.items())
                raise ValueError(f"LowbitConfig: plan must give layers that share a weight one format, got {told}")
            for other in planned:
                del self._plan[other]
            config = next(iter(planned.values()), self._settings.embeddings)
            reason = f"{', '.join(planned)} is to stay float"
            if config:
                reason = self._reason(shared, [] if planned else keep)
            if reason and planned and config:
                raise ValueError(
                    f"LowbitConfig: plan names {', '.join(planned)}, which cannot be quantized: {reason}; give it None "
                    "in the plan"
                )
            if reason or not config:
                self.left.append(ReportRow.skipped(name, module, reason))
                continue
            self._take(shared, config)

    def _reason(self, shared: tuple[str, ...], keep: list[str]) -> str:
        """Why an embedding and the layers that share its weight stay float, or an empty string."""
        first = self._model.get_submodule(shared[0])
        for other in shared:
            module = self._model.get_submodule(other)
            reason = reason_to_skip(module) or self._read.get(id(module), "")
            shapes = {weight.float_shape for one in (module, first) for weight in weights_of(one)}
            if len(shapes) > 1 or any(weight.transposed for weight in weights_of(module)):
                reason = "its weight has another shape"
            elif not should_convert_module(other, keep):
                reason = _NAMED
            if reason:
                return reason if len(shared) == 1 else f"{other}, which has the same weight: {reason}"
        return ""

    def _take_others(self, keep: list[str]) -> None:
        for name, module in self._model.named_modules():
            if not is_packed_by_default(module) or name in self.layers:
                continue
            planned = name in self._plan
            config = self._plan.pop(name, self._settings.config)
            reason = reason_to_skip(module) or self._read.get(id(module), "")
            if name in self.tied:
                reason = "its weight is tied"
            if config is not None and planned and reason:
                raise ValueError(
                    f"LowbitConfig: plan names {name}, which cannot be quantized: {reason}; give it None in the plan"
                )
            if config is None:
                reason = reason or "no format is named for it"
            elif not planned and not should_convert_module(name, keep):
                reason = reason or _NAMED
            if not reason and config is not None:
                check_module(name, module, None, KINDS)
                self.layers[name] = config
            else:
                self.left.append(ReportRow.skipped(name, module, reason))
