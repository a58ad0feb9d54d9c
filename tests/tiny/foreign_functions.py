# SPDX-License-Identifier: Apache-2.0
"""All that code of ours could replace in another package that was imported."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

from transformers.utils.generic import GeneralInterface


def callables_and_tables(packages: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Functions and classes of modules, functions of classes, and entries of tables, of these packages, by their paths."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] not in packages or module is None:
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__compiled_fn_"):  # Dynamo's, gone when it is reset
                continue
            path = f"{module_name}.{name}"
            if type(value) is FunctionType or isinstance(value, type):
                yield path, value
            if isinstance(value, type) and value.__module__ == module_name:
                yield from ((f"{path}.{key}", of) for key, of in vars(value).items() if isinstance(of, FunctionType))
            if name.isupper():
                yield from entries(path, value)


def entries(path: str, table: Any) -> Iterator[tuple[str, Any]]:
    parts = [table] if type(table) is dict else [table._local_mapping, table._global_mapping] if isinstance(table, GeneralInterface) else []
    for number, part in enumerate(parts):
        yield from ((f"{path}[{number}][{key!r}]", value) for key, value in list(part.items()))
