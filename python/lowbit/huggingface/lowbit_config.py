# SPDX-License-Identifier: Apache-2.0
"""LowbitConfig: the argument of transformers' ``from_pretrained``, and its entry in a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "lowbit.LowbitConfig needs transformers 5 or later, which is not installed: pip install transformers"
    ) from error
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.text import config_of
from lowbit.quant.output_head import INT8, head_config

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"lowbit.LowbitConfig needs transformers 5 or later, got {transformers.__version__}: older ones load "
        "weights in another way"
    )

METHOD = "lowbit"
STORED = "stored"
"""In place of a configuration in the entry of a checkpoint: a format that no configuration makes."""
VERSION = 1
"""The version of the entry ``quantization_config`` in a config.json; packed weights have a version of their own."""


class LowbitConfig(QuantizationConfigMixin):
    """Say to ``from_pretrained`` in which format each linear layer is stored, and each embedding if asked.

    Args:
        config: the configuration of all layers that ``plan`` does not name: a configuration, its text such as
            ``"int4_weight_only(group_size=32)"``, or a dict (``{"format": "int4_weight_only", "group_size": 32}``).
            None leaves them float. "gguf" takes the codes of the file that ``from_pretrained(..., gguf_file=...)``
            names as they are; it stands alone. "stored", also in ``plan`` and for ``head``, stands in the config.json
            of a model whose layers are packed in a way that no configuration makes (block-sparse, MXFP4).
        modules_to_not_convert: names or patterns, as transformers has them, of modules that stay float. None: the last
            module, and an output head without a ``head``. Layers whose weight is tied to another stay float, but for
            ``embeddings`` and ``head``.
        plan: configurations of single layers by their qualified names, None for one that stays float; it stands above
            ``modules_to_not_convert``. It may name embeddings.
        embeddings: configuration of every nn.Embedding that ``plan`` does not name; None leaves them float. Output
            heads that are tied to one are packed with it, and share its weight.
        head: the configuration of the output head of a language model, and of the embedding that is tied to it, where
            neither ``plan`` nor ``modules_to_not_convert`` names them: "int8" gives it 8 bits where ``config`` has
            fewer. None: it has no configuration of its own. Or a configuration.
        activations: the activations for "gguf": "int8" rounds the inputs of layers on the fly, as llama.cpp does,
            "float" leaves them.
        fuse: fuse the loaded model, as `lowbit.fuse` does.
        version: the version of this entry in a config.json; 1.

    Raises:
        TypeError, ValueError: no format is named, a configuration is none, one is with GPTQ, which needs inputs of the
            model, or the version or a field is not known here.
    """

    def __init__(
        self,
        config: Any = None,
        modules_to_not_convert: list[str] | None = None,
        *,
        plan: Mapping[str, Any] | None = None,
        embeddings: Any = None,
        head: Any = INT8,
        activations: str = "int8",
        fuse: bool = False,
        version: int = VERSION,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if version != VERSION:
            raise ValueError(
                f"LowbitConfig: version must be {VERSION}, got version={version!r}: a later lowbit wrote it"
            )
        if unknown or quant_method != METHOD:
            names = ", ".join(unknown) or f"quant_method={quant_method!r}"
            raise ValueError(
                "LowbitConfig: fields must be config, modules_to_not_convert, plan, embeddings, head, activations, "
                f"fuse, version; got {names}"
            )
        if config is None and embeddings is None and not plan:
            raise ValueError("LowbitConfig: config must name a format where there is no plan or embeddings, got None")
        self.gguf = isinstance(config, str) and config == "gguf"
        if self.gguf and (modules_to_not_convert or plan or embeddings is not None):
            raise ValueError(
                "LowbitConfig: modules_to_not_convert, plan and embeddings must not be given with 'gguf': the file has "
                "the formats"
            )
        if activations not in ("int8", "float"):
            raise ValueError(f"LowbitConfig: activations must be 'int8' or 'float', got {activations!r}")
        self.activations, self.fuse = activations, bool(fuse)
        self.quant_method = METHOD
        self.config: FormatConfig | str | None = None if self.gguf else _format(config)
        self.embeddings: FormatConfig | None = None if embeddings is None else config_of(embeddings)
        self.modules_to_not_convert = modules_to_not_convert
        self.plan: dict[str, FormatConfig | str | None] = {name: _format(layer) for name, layer in (plan or {}).items()}
        self.head = STORED if head == STORED else self._head(head)
        named = {"config": self.config, "embeddings": self.embeddings, "head": self.head}
        for name, layer in {**named, **self.plan}.items():
            if isinstance(layer, FormatConfig) and isinstance(layer.spec(torch.float32).algorithm, GPTQ):
                raise ValueError(
                    f"LowbitConfig: {name} must be quantized without inputs of the model, which GPTQ needs, got "
                    f"{layer}; load the float model and call lowbit.quantize_(model, config, calibration=...), or take "
                    "lowbit.HQQ()"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a config.json: plain text and lists."""
        told = {
            "quant_method": METHOD,
            "version": VERSION,
            "config": "gguf" if self.gguf else None if self.config is None else str(self.config),
            "modules_to_not_convert": self.modules_to_not_convert,
            "plan": {name: None if layer is None else str(layer) for name, layer in self.plan.items()},
        }
        # Only where they are asked for: a lowbit that does not know them reads the others.
        told |= {} if self.embeddings is None else {"embeddings": str(self.embeddings)}
        is_default = self.head == self._head(INT8)
        told |= {} if is_default else {"head": self.head and str(self.head)}
        told |= {"fuse": True} if self.fuse else {}
        return told | ({"activations": self.activations} if self.gguf else {})

    def _head(self, head: Any) -> FormatConfig | None:
        return head_config("LowbitConfig", head, None if self.config == STORED else self.config)

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field of the entry: transformers asks the one of ``from_pretrained(config=)`` as if it were a dict,
        and it is this object where the config is that of a model."""
        return self.to_dict().get(field, default)

    def check_can_pack(self) -> None:
        """Raise ValueError where a format is "stored", by which nothing can be packed."""
        for name, layer in {"config": self.config, "head": self.head, **self.plan}.items():
            if layer == STORED:
                raise ValueError(
                    f"LowbitConfig: {name} must be a configuration to pack a float checkpoint by, got 'stored', which "
                    "says that the file has packed weights"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowbitConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _format(config: Any) -> FormatConfig | str | None:
    return config if config is None or config == STORED else config_of(config)
