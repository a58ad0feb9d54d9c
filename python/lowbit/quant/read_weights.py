# SPDX-License-Identifier: Apache-2.0
"""Linear layers of transformers' models whose weight is read beside the layer, and so must not be packed: T5 looks at
its dtype, Mamba multiplies by it, RWKV scales it in place, Swin V2 makes a table of the dtype that the first parameter
of a part has.

The source of the class that owns the layer shows it, or of one further out, since no call of the layer does.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator

from torch import nn

from lowbit.quant.kinds import kind_of
from lowbit.quant.quant_linear import LINEAR

_NAMED = re.compile(r"\bself\.(\w+)\.weight\b|\.weight\.[a-z]\w*_\(|\bnext\(self\..*parameters\(\)\)\.dtype")
_HARMLESS = {"device", "requires_grad"}  # attributes that a packed weight has like a float one
_CAREFUL = {"uint8", "is_floating_point"}  # a method that asks about these knows of packed weights
_PARAMETERS = "parameters"
_NO_CALL = "init"  # in names of methods that are called before the weights are there


def weights_that_are_read(model: nn.Module) -> dict[int, str]:
    """Return, by the ids of layers, a sentence that names the class that reads their weight."""
    found = {}
    for module in model.modules():
        read = _read_by(type(module)) if any(map(_is_of_transformers, type(module).__mro__)) else frozenset()
        for path in read:
            for layer in _layers_at(module, path):
                if layer is not None and kind_of(layer) is LINEAR:
                    found[id(layer)] = f"{type(module).__name__} reads its weight"
    return found


def _layers_at(module: nn.Module, path: str) -> list[nn.Module | None]:
    """The layers that an entry of `_read_by` names."""
    part, _, last = path.rpartition(".")
    if last == _PARAMETERS:
        owner = module._modules.get(part) if part else module
        return [] if owner is None else [next((one for one in owner.modules() if one._parameters), None)]
    if not part:
        return [module._modules.get(path)]
    return [layer for name, layer in module.named_modules() if f".{name}".endswith(f".{path}")]


def _is_of_transformers(cls: type) -> bool:
    return cls.__module__.startswith("transformers.") or cls.__module__.startswith("transformers_modules.")


@functools.cache
def _read_by(cls: type) -> frozenset[str]:
    """The names of layers whose weight a method of this class reads, the ends of paths to those whose weight it
    changes, and ``part.parameters`` for the layer with the first parameter of a part; methods that are replaced
    do not count."""
    names: set[str] = set()
    replaced: set[str] = set()
    for base in cls.__mro__:
        if _is_of_transformers(base):
            for method, read in _methods_of(base.__module__).get(base.__qualname__, {}).items():
                if method not in replaced:
                    names |= read
        replaced |= vars(base).keys()
    return frozenset(names)


@functools.cache
def _methods_of(home: str) -> dict[str, dict[str, set[str]]]:
    """The layers whose weight each method of each class in a file reads; none where there is no source."""
    try:
        text = inspect.getsource(sys.modules[home])
    except (KeyError, OSError, TypeError):
        return {}
    if not _NAMED.search(text):
        return {}
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: {method.name: _read_in(method) for method in _methods(node)} for node in classes}


def _methods(of: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (node for node in of.body if isinstance(node, ast.FunctionDef))


def _read_in(method: ast.FunctionDef) -> set[str]:
    if _NO_CALL in method.name:
        return set()
    attributes = [node for node in _walked(method) if isinstance(node, ast.Attribute)]
    if any(node.attr in _CAREFUL for node in attributes):
        return set()
    in_place = (node.value for node in attributes if node.attr.endswith("_"))
    changed = {path for path in map(_path_to_weight, in_place) if path}
    first = {path for node in attributes if node.attr == "dtype" for path in _path_to_parameters(node.value)}
    harmless = {id(node.value) for node in attributes if node.attr in _HARMLESS}
    read = {
        node.value.attr
        for node in attributes
        if node.attr == "weight"
        and id(node) not in harmless
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    }
    return changed | first | read


def _path_to_parameters(node: ast.expr) -> set[str]:
    """``part.parameters`` of ``next(self.part.parameters())``; nothing of another expression."""
    found = re.fullmatch(r"next\(self\.((?:\w+\.)?parameters)\(\)\)", ast.unparse(node))
    return {found[1]} if found else set()


def _path_to_weight(node: ast.expr) -> str:
    """``attention.output`` of ``block.attention.output.weight``; nothing where it is another expression, or a layer
    that only this method knows."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names[:-1]) if len(names) > 2 and names[-1] == "weight" and isinstance(node, ast.Name) else ""


def _walked(method: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a method, but for those of training alone: there Mamba hands weights to kernels for GPUs, and
    computes as always where it has none."""
    waiting: list[ast.AST] = [method]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _is_of_training(node.test):
            waiting += [node.test, *node.orelse]
        else:
            waiting += ast.iter_child_nodes(node)


def _is_of_training(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(isinstance(part, ast.Attribute) and part.attr == "training" for part in parts)
