# SPDX-License-Identifier: Apache-2.0
"""Load lowbit's integration with a package once that package is imported, without importing the package itself.

For example, ``attn_implementation="lowbit"`` is an entry in a table of transformers. It must exist before a model is
created, even in a program that never mentions lowbit (torch imports lowbit through its autoload entry point). So an
import hook waits for the package. It costs one comparison per import, and is removed once it has done its work.
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
    "peft.peft_model": ("lowbit.huggingface.peft_prompts",),
    "trl.trainer.utils": ("lowbit.huggingface.trl",),
    "trl.trainer.distillation_trainer": ("lowbit.huggingface.trl_distillation",),
    "trl.experimental.async_distillation.async_distillation_trainer": ("lowbit.huggingface.trl_async_distillation",),
}
failures: dict[str, str] = {}
"""Integrations that do not work with the installed version, with the error. It is raised when the module is imported by
name, and shown by `lowbit.info()`."""


def join_when_imported() -> None:
    """Import the integrations of each package as soon as the package has been imported, or now if it already has been.
    This imports no package by itself."""
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
        """Import the integrations if the package is fully imported; return whether it is. An error must not break the
        import of another package, so it is raised only if LOWBIT_STRICT=1."""
        module = sys.modules.get(self.package)
        if module is None or getattr(module.__spec__, "_initializing", False):
            return False
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # not needed for modules that the integration imports
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
        """Find the package as Python does, and import the integrations after its execution.

        The import of any other module of the same family also tries this. It is needed if the package was half imported
        when the hook was installed, because the package imports torch and torch imports lowbit.
        """
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
            spec._initializing = False  # its execution is complete
            self.joined()

        spec.loader.exec_module = execute_and_join  # type: ignore[method-assign]
        return spec
