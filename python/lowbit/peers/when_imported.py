# SPDX-License-Identifier: Apache-2.0
"""Join lowbit to the packages that it serves once these are imported, and never import them ourselves.

``attn_implementation="lowbit"`` is a name in a table of transformers. It has to be there before a model is made, also
where a program never names lowbit (torch imports this package by its autoload entry point). So the import system is
asked to tell us: a finder of one comparison per import, gone when it has done its work.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_SERVED = {
    "torch.utils.flop_counter": ("lowbit.ops.flop_counter",),
    "transformers.modeling_utils": ("lowbit.huggingface.registration", "lowbit.huggingface.quantizer"),
    "torchao.quantization.quant_api": ("lowbit.peers.torchao_configs",),
    "torchao.float8.float8_linear_utils": ("lowbit.peers.float8_of_torchao",),
    "accelerate.utils": ("lowbit.huggingface.accelerate",),
    "liger_kernel.transformers.monkey_patch": ("lowbit.huggingface.liger",),
    "peft.tuners.tuners_utils": ("lowbit.huggingface.peft",),
    "peft.tuners.lora.model": ("lowbit.huggingface.peft_lora",),
    "peft.peft_model": ("lowbit.huggingface.peft_prompts",),
    "trl.trainer.utils": ("lowbit.huggingface.trl",),
    "trl.trainer.distillation_trainer": ("lowbit.huggingface.trl_distillation",),
    "trl.experimental.async_distillation.async_distillation_trainer": ("lowbit.huggingface.trl_async_distillation",),
}
failures: dict[str, str] = {}
"""Integrations that do not fit the package that is there: they say why when they are imported by name, and in info."""


def join_when_imported() -> None:
    """Import what serves a package as soon as that has been imported, now if it is already.
    Imports nothing itself."""
    for package, integrations in _SERVED.items():
        finder = _Finder(package, integrations)
        if not finder.joined() and not any(
            isinstance(other, _Finder) and other.package == package for other in sys.meta_path
        ):
            sys.meta_path.insert(0, finder)


class _Finder:
    def __init__(self, package: str, integrations: tuple[str, ...]) -> None:
        self.package, self.integrations = package, integrations
        self.family = package.partition(".")[0] + "."

    def joined(self) -> bool:
        """Join if the package is there as a whole. An error must not break the import of another package, and
        is raised only with LOWBIT_STRICT=1."""
        module = sys.modules.get(self.package)
        if module is None or getattr(module.__spec__, "_initializing", False):
            return False
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # modules that it imports need not ask again
        for integration in self.integrations:
            try:
                importlib.import_module(integration)
                failures.pop(integration, None)
            except Exception as error:
                failures[integration] = str(error)
                if os.environ.get("LOWBIT_STRICT") == "1":
                    raise
        return True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the package as Python does, and join behind its execution; any other module of the family joins before
        it is found, for where the package was half imported when we came (it imports torch, and torch us)."""
        if not name.startswith(self.family):
            return None
        if name != self.package:
            self.joined()
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_join(module: ModuleType) -> None:
            execute(module)
            spec._initializing = False  # type: ignore[attr-defined]  # all that it does is done
            self.joined()

        spec.loader.exec_module = execute_and_join  # type: ignore[method-assign]
        return spec
