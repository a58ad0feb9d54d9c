# SPDX-License-Identifier: Apache-2.0
"""LowbitConfig: the ``quantization_config`` of transformers' ``from_pretrained``, and its entry in a checkpoint's
config.json."""

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
from lowbit.formats.nearest import nearest
from lowbit.formats.text import config_of
from lowbit.quant.output_head import INT8, head_config

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"lowbit.LowbitConfig needs transformers 5 or later, got {transformers.__version__}: older ones load "
        "weights in another way"
    )

METHOD = FormatConfig.quant_method
STORED = "stored"
"""Used in the entry of a checkpoint in place of a configuration, for a format that no configuration produces."""
_FIELDS = (
    "config", "modules_to_not_convert", "plan", "embeddings", "head", "activations", "fuse", "calibration", "tokenizer",
    "version",
)  # fmt: skip
CHECKPOINT = "checkpoint"
"""Used in place of a configuration, for a checkpoint of another quantization method."""
VERSION = 1
"""The version of the entry ``quantization_config`` in a config.json. Packed weights have a version of their own."""


class LowbitConfig(QuantizationConfigMixin):
    """The ``quantization_config`` for ``from_pretrained``: the format of each linear layer and, optionally, each
    embedding.

    Args:
        config: the configuration of all layers that ``plan`` does not name: a configuration, its text such as
            ``"int4_weight_only(group_size=32)"``, or a dict (``{"format": "int4_weight_only", "group_size": 32}``).
            None leaves them float. "gguf" keeps the codes of the file passed as ``from_pretrained(...,
            gguf_file=...)``, and "checkpoint" those of a checkpoint that another package quantized (GPTQ, AWQ and so
            on; docs/checkpoints.md). These two cannot be combined with ``modules_to_not_convert``, ``plan`` or
            ``embeddings``.
            "stored", also in ``plan`` and for ``head``, appears in the config.json of a model whose layers have a
            format that no configuration produces (block-sparse, MXFP4).
        modules_to_not_convert: names or patterns of modules that stay float, as in transformers; None is none. Layers
            whose weight is tied to another stay float, unless ``embeddings`` or ``head`` packs them.
        plan: configurations of single layers by their qualified names; None leaves a layer float. It takes precedence
            over ``modules_to_not_convert``, and may name embeddings.
        embeddings: the configuration of every nn.Embedding that ``plan`` does not name; None leaves them float. Output
            heads that are tied to an embedding are packed with it and share its weight.
        head: the configuration of the output head of a language model, and of the embedding that is tied to it, unless
            ``plan`` or ``modules_to_not_convert`` names them. "int8" gives it ``config``, or 8 bits if that has fewer.
            None treats it like any other layer; a head that is tied to an embedding then stays float.
        activations: the activations for "gguf" and "checkpoint": "int8" rounds the inputs of layers on the fly;
            "float" leaves them. None is what the files mean: "int8" for "gguf", as in llama.cpp, and for "checkpoint"
            what the method does.
        fuse: whether to fuse the loaded model with `lowbit.fuse`.
        calibration, tokenizer: the arguments of `quantize_`, such as calibration="self". The whole float model is then
            loaded before its layers are packed. A config.json never has them, nor the algorithm that chose the codes: a
            saved model has its codes.
        version: the version of this entry in a config.json; 1.

    Raises:
        TypeError, ValueError: there is no format, modules_to_not_convert is no list of names, an argument is not a
            configuration, a configuration has GPTQ without calibration, there is a calibration for "gguf", or the
            version or a field is unknown.

    Example:
        >>> config = lowbit.LowbitConfig("int4_weight_only(group_size=32)")
        >>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    """

    def __init__(
        self,
        config: Any = None,
        modules_to_not_convert: list[str] | None = None,
        *,
        plan: Mapping[str, Any] | None = None,
        embeddings: Any = None,
        head: Any = INT8,
        activations: str | None = None,
        fuse: bool = False,
        calibration: Any = None,
        tokenizer: Any = None,
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
            near = "".join(nearest(name, _FIELDS) for name in unknown)
            raise ValueError(f"LowbitConfig: fields must be {', '.join(_FIELDS)}; got {names}{near}")
        if config is None and embeddings is None and not plan:
            raise ValueError("LowbitConfig: config must name a format if plan and embeddings are not given, got None")
        self.gguf = isinstance(config, str) and config == "gguf"
        self.checkpoint = isinstance(config, str) and config == CHECKPOINT
        if (self.gguf or self.checkpoint) and (modules_to_not_convert or plan or embeddings is not None):
            raise ValueError(
                f"LowbitConfig: modules_to_not_convert, plan and embeddings must not be given with {config!r}: the "
                "file has the formats"
            )
        if (self.gguf or self.checkpoint) and calibration is not None:
            raise ValueError(f"LowbitConfig: calibration must be None with {config!r}: the file has the codes")
        self.calibration, self.tokenizer = calibration, tokenizer
        if activations not in ("int8", "float", None):
            raise ValueError(f"LowbitConfig: activations must be 'int8', 'float' or None, got {activations!r}")
        self.activations, self.fuse = activations if not self.gguf else activations or "int8", bool(fuse)
        self.quant_method = METHOD
        self.config: FormatConfig | str | None = None if self.gguf or self.checkpoint else _format(config)
        self.embeddings: FormatConfig | None = None if embeddings is None else config_of(embeddings)
        if isinstance(modules_to_not_convert, str):
            raise TypeError(
                f"LowbitConfig: modules_to_not_convert must be a list of names, got {modules_to_not_convert!r}"
            )
        self.modules_to_not_convert = modules_to_not_convert
        self.plan: dict[str, FormatConfig | str | None] = {
            name: _format(layer, f"LowbitConfig: plan: {name}: ") for name, layer in (plan or {}).items()
        }
        self.head = STORED if head == STORED else self._head(head)
        named = {"config": self.config, "embeddings": self.embeddings, "head": self.head}
        for name, layer in {**named, **self.plan}.items():
            gptq = isinstance(layer, FormatConfig) and isinstance(layer.spec(torch.float32).algorithm, GPTQ)
            if gptq and calibration is None:
                raise ValueError(
                    f"LowbitConfig: {name} must be quantized without inputs of the model, which GPTQ needs, got "
                    f"{layer}; give calibration='self' or batches, or take lowbit.HQQ()"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a config.json, made of strings, numbers, lists and dicts."""
        told = {
            "quant_method": METHOD,
            "version": VERSION,
            "config": self._config_text(),
            "modules_to_not_convert": self.modules_to_not_convert,
            "plan": {name: None if layer is None else str(layer) for name, layer in self.plan.items()},
        }
        # These fields are written only if set, so that versions of lowbit without them read other entries.
        told |= {} if self.embeddings is None else {"embeddings": str(self.embeddings)}
        is_default = self.head == self._head(INT8)
        told |= {} if is_default else {"head": self.head and str(self.head)}
        told |= {"fuse": True} if self.fuse else {}
        read = self.gguf or (self.checkpoint and self.activations is not None)
        return told | ({"activations": self.activations} if read else {})

    def _config_text(self) -> str | None:
        if self.gguf or self.checkpoint:
            return "gguf" if self.gguf else CHECKPOINT
        return None if self.config is None else str(self.config)

    def _head(self, head: Any) -> FormatConfig | None:
        return head_config("LowbitConfig", head, None if self.config == STORED else self.config)

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field of the entry. transformers treats the entry in the config passed to
        ``from_pretrained(config=)`` as a dict, and in the config of a model it is this object."""
        return self.to_dict().get(field, default)

    def check_can_pack(self) -> None:
        """Raise ValueError if a format is "stored", which cannot be used to pack weights."""
        for name, layer in {"config": self.config, "head": self.head, **self.plan}.items():
            if layer == STORED:
                raise ValueError(
                    f"LowbitConfig: {name} must be a configuration to pack a float checkpoint by, got 'stored', which "
                    "says that the file has packed weights"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowbitConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _format(config: Any, where: str = "") -> FormatConfig | str | None:
    """Return a configuration, None or "stored". Errors begin with ``where``."""
    if config is None or config == STORED:
        return config
    try:
        return config_of(config)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}{error}") from None
