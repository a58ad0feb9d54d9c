# SPDX-License-Identifier: Apache-2.0
"""The selection of layers of a transformers model that a LowbitConfig packs, each with its configuration.

Linear layers with a tied weight stay float, unless the embedding that shares it is selected. Then all layers that share
the weight are packed and share the packed weight.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.quantizers.quantizers_utils import should_convert_module

from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.formats.base import FormatConfig
from lowbit.formats.nearest import nearest
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
from lowbit.quant.select import check_module, gates_of_experts, reason_of_size, reason_to_skip

_NAMED = "named by modules_to_not_convert"
_FLOAT32 = "the model keeps it in float32"


class Selection:
    """The layers of ``model`` to pack, and those that stay float.

    Args:
        model: the model.
        settings: the configuration.
        keep: names and patterns of modules that the model itself keeps in float32.

    Raises:
        ValueError: ``plan`` names a module that is not a layer or cannot be packed, or gives tied layers two
            configurations; or ``modules_to_not_convert`` has a name that matches no layer.
    """

    def __init__(self, model: nn.Module, settings: LowbitConfig, keep: list[str]) -> None:
        self.layers: dict[str, FormatConfig] = {}  # layers to pack, by the names of their modules
        self.left: list[ReportRow] = []  # layers that stay float
        self._model, self._settings, self._plan = model, settings, dict(settings.plan)
        self.tied = tied_modules(model)
        self._read, self._gates = weights_that_are_read(model), gates_of_experts(model)
        self._keep = keep
        self._check_names()
        self._take_head()
        self._take_embeddings()
        self._take_others()
        if self._plan:
            names = ", ".join(self._plan)
            near = "".join(nearest(name, self._names()) for name in self._plan)
            raise ValueError(
                f"LowbitConfig: plan must name linear layers and embeddings of the model, got {names}{near}"
            )

    def _names(self) -> list[str]:
        """Return the names of all layers that can be packed."""
        return [name for name, module in self._model.named_modules() if kind_of(module) is not None]

    def _check_names(self) -> None:
        names = self._names()
        for pattern in self._settings.modules_to_not_convert or ():
            if all(should_convert_module(name, [pattern]) for name in names):
                raise ValueError(
                    "LowbitConfig: modules_to_not_convert must match linear layers or embeddings of the model (their "
                    f"names, beginnings or ends of names, or patterns), got {pattern!r}{nearest(pattern, _parts(names))}"
                )

    def shared_with(self, name: str) -> tuple[str, ...]:
        """Return the names of all layers that share this one's weight, including its own."""
        return self.tied.get(name, (name,))

    def find(self, parameter: str) -> tuple[str, nn.Module, LayerWeight] | None:
        """Return the layer and weight of this parameter, or None if it is not to be packed."""
        found = weight_named(self._model, parameter)
        return found if found is not None and found[0] in self.layers else None

    def layout(self, name: str) -> str:
        """Return the layout of the packed weight of a layer and those that share it."""
        return layout_of_all(map(self._model.get_submodule, self.shared_with(name)))

    def selected(self, parameter: str, like: Tensor) -> Selected:
        """Return the weight of this name, to be packed for activations like ``like``."""
        name, module, weight = self.find(parameter)
        return Selected.of(name, module, weight, self.layers[name].spec(like.dtype), like)

    def _take_head(self) -> None:
        """Give the output head, and layers tied to it, the configuration of heads if they have no other. If they cannot
        be packed, nothing changes."""
        heads = set(map(id, head_layers(self._model)))
        names = {name for name, module in self._model.named_modules() if id(module) in heads}
        shared = tuple(sorted({other for name in names for other in self.shared_with(name)}))
        asked = self._settings.embeddings is not None and any(name in self.tied for name in names)
        if self._settings.head is None or not names or asked or any(name in self._plan for name in shared):
            return
        if not self._reason(shared):
            self._take(shared, self._settings.head)

    def _take(self, shared: tuple[str, ...], config: FormatConfig) -> None:
        """Select layers that share a weight, to be packed with ``config``."""
        for name in shared:
            check_module(name, self._model.get_submodule(name), None, KINDS)
            self.layers[name] = config

    def _take_embeddings(self) -> None:
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
                reason = self._reason(shared, planned=bool(planned))
            if reason and planned and config:
                raise ValueError(
                    f"LowbitConfig: plan names {', '.join(planned)}, which cannot be quantized: {reason}; give it None "
                    "in the plan"
                )
            if reason or not config:
                self.left.append(ReportRow.skipped(name, module, reason))
                continue
            self._take(shared, config)

    def _reason(self, shared: tuple[str, ...], *, planned: bool = False) -> str:
        """Return why an embedding and the layers that share its weight stay float, or an empty string."""
        first = self._model.get_submodule(shared[0])
        for other in shared:
            module = self._model.get_submodule(other)
            reason = reason_to_skip(module) or self._read.get(id(module), "")
            shapes = {weight.float_shape for one in (module, first) for weight in weights_of(one)}
            if len(shapes) > 1 or any(weight.transposed for weight in weights_of(module)):
                reason = "its weight has another shape"
            elif not planned:
                reason = reason or self._reason_by_name(other)
            if reason:
                return reason if len(shared) == 1 else f"{other}, which has the same weight: {reason}"
        return ""

    def _reason_by_name(self, name: str) -> str:
        """Return why a layer stays float that ``plan`` does not name, or an empty string."""
        if not should_convert_module(name, self._settings.modules_to_not_convert or []):
            return _NAMED
        return "" if should_convert_module(name, self._keep) else _FLOAT32

    def _take_others(self) -> None:
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
            elif not planned:
                reason = reason or self._reason_by_name(name)
                if id(module) not in self._gates:
                    reason = reason or reason_of_size(module, config)
            if not reason and config is not None:
                check_module(name, module, None, KINDS)
                self.layers[name] = config
            else:
                self.left.append(ReportRow.skipped(name, module, reason))


def _parts(names: list[str]) -> set[str]:
    """Return the beginnings and ends of names of modules."""
    words = [name.split(".") for name in names]
    return {".".join(part) for word in words for i in range(len(word)) for part in (word[: i + 1], word[i:])}
