# SPDX-License-Identifier: Apache-2.0
"""Only the registry and the files of kinds ask of which class a layer is and name its weight: a kind is added in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "lowbit"
OF_KINDS = {"quant/kinds.py", "quant/quant_linear.py", "quant/quant_embedding.py"}
PREDICATES = {"is_embedding", "is_linear", "is_conv1d"}
KEYS = ("weight", "layout")
OTHERS = {
    "compile/dense_choice.py": "arguments of the op",
    "compile/post_ops.py": "arguments of the op",
    "compile/row_choice.py": "arguments of the op",
    "checkpoints/gguf/tensor_names.py": "names of the tensors of a file",
    "checkpoints/methods/quark.py": "settings of quark",
    "formats/spec.py": "names of the numbers",
    "peers/bitsandbytes.py": "names of bitsandbytes",
    "models/folded_weights.py": "float weights, before they are packed",
    "models/attention_in_training.py": "norms, and how heads lie",
    "models/fused_attention.py": "norms",
    "models/fused_self_attention.py": "how heads lie in the product",
    "models/half_steps.py": "norms",
    "models/products.py": "what the steps of a program take",
    "models/recurrent_steps.py": "norms, taps of convolutions, and small float layers",
    "models/steps.py": "norms, and what the steps of a program take",
    "huggingface/quantize_checkpoint.py": "a setting in progress.json",
    "models/rotate.py": "float weights, before they are packed",
    "models/smooth.py": "float weights, before they are packed",
    "quant/block_sparse.py": "float blocks",
    "quant/fused_gated_norm.py": "norms",
    "quant/fused_layer_norm.py": "norms",
    "quant/linear_subclass.py": "float weights of copies",
    "quant/fused_norm.py": "norms",
    "quant/merged.py": "the path of every call, which reads the dictionary of a QuantLinear",
    "reference/causal_conv1d.py": "arguments of the op",
    "training/float8_config.py": "operands of a product",
    "training/int8_weight_linear.py": "the weight of its own layer",
}
"""Files that have these words for something else than packed weights, and for what."""


def keys_in(path: Path) -> Iterator[str]:
    """Constants that are a key, or end a name with one: "weight", f"{prefix}weight", f"{name}.weight"."""
    tree = ast.parse(path.read_text())
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[-1:]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = KEYS if id(node) not in pieces else (*KEYS, *(f".{key}" for key in KEYS))
            if node.value in words:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_the_keys_of_packed_weights_stand_in_the_files_of_kinds() -> None:
    found = {str(path.relative_to(PACKAGE)): [*keys_in(path)] for path in PACKAGE.rglob("*.py")}
    strangers = [place for name, places in found.items() if name not in OF_KINDS | OTHERS.keys() for place in places]
    assert not strangers, f"ask lowbit.quant.kinds for names of weights: {', '.join(strangers)}"
    assert {name for name, places in found.items() if places} >= OF_KINDS | OTHERS.keys(), "a file is in the list in vain"


def test_no_file_asks_for_the_class_of_a_layer() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        names |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert not names & PREDICATES, f"{path.relative_to(PACKAGE)}: ask lowbit.quant.kinds.kind_of"


def test_quant_linear_hands_on_no_functions_of_packing() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "lowbit.quant.quant_linear":
                names = {alias.name for alias in node.names}
                assert names <= {"QuantLinear", "LINEAR"}, f"{path.relative_to(PACKAGE)} imports {names}"
