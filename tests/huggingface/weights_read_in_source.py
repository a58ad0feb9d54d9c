# SPDX-License-Identifier: Apache-2.0
"""What the source of transformers' models shows of linear layers whose weight is read beside the layer: for a test of the
table in quant/read_weights.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_NAMED = re.compile(r"\bself\.(\w+)\.weight\b|\.weight\.[a-z]\w*_\(|\bnext\(self\..*parameters\(\)\)\.dtype")
_HARMLESS = {"device", "requires_grad"}  # attributes that a packed weight has like a float one
_CAREFUL = {"uint8", "is_floating_point"}  # a method that asks about these knows of packed weights
_NO_CALL = "init"  # in names of methods that are called before the weights are there
_LINEAR = re.compile(r"self\.(\w+) = nn\.(?:Linear|Sequential|ModuleList)\(")


def read_in_models(transformers: Path) -> dict[str, set[str]]:
    """The linear layers that each method reads, by ``folder.Class.method``."""
    found = {}
    for path in sorted(transformers.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if not _NAMED.search(text):
            continue
        classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
        for name, node in classes.items():
            for method in (of for of in node.body if isinstance(of, ast.FunctionDef)):
                layers = {layer for layer in _read_in(method) if "." in layer or layer in _linears(node, classes)}
                if layers:
                    found[f"{path.parent.name}.{name}.{method.name}"] = layers
    return found


def _linears(of: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    names = set(_LINEAR.findall(ast.unparse(of)))
    bases = (classes.get(ast.unparse(base)) for base in of.bases)
    return names.union(*(_linears(base, classes) for base in bases if base is not None and base is not of))


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
    found = re.fullmatch(r"next\(self\.(\w+\.parameters)\(\)\)", ast.unparse(node))
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
