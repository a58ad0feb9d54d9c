# SPDX-License-Identifier: Apache-2.0
"""Every op that is offered to other packages, called once: a row gets each argument under its name, and in a question the same without memory."""

from __future__ import annotations

import json
from collections.abc import Callable

from packages import Packages

from lowbit import backends

RECORDS = """
# A row before all others for every op, which keeps what it is given, in the question and in the run, and writes
# nothing but all_finite.
import lowbit.backends, torch

asked, given = {}, {}

def told(value):
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)[6:], None if value.is_meta else float(value.double().sum())]
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items()}
    return [told(each) for each in value] if isinstance(value, list) else value

def recording(op):
    def refuses(**call):
        asked[op] = told(call)
    def run(**call):
        given[op] = told(call)
        if op == "all_finite":
            call["result"].fill_(True)
        if op == "quantize":
            call["distortion"].copy_(torch.tensor([3.0, 2.0, 1.0]))
    return run, refuses

def register(api):
    for op in lowbit.backends.OPS:
        api.add_kernel(op, f"{op}_all_records", "cpu", *recording(op), first=True)
"""

CALLS = """
import json, torch, lowbit, records
from lowbit import _C, testing
from tests import internals
torch.set_grad_enabled(False)
f, u8, i8 = torch.float32, torch.uint8, torch.int8
full = lambda value, *shape, dtype=f: torch.full(shape, value, dtype=dtype)
int4, nf4, dynamic8 = _C.FORMATS["int4"], _C.FORMATS["nf4"], _C.STATE_FORMATS["dynamic8"]
packed = testing.empty_packed(40, 70, "int4", 32) + 1
rows = testing.empty_packed(40, 70, "int4", 32, layout="row-major") + 2
_C.quantize(full(3, 40, 70), packed, int4, 32, False, _C.MAPPINGS["symmetric"], _C.SCALE_CHOICES["search"], full(2, 70))
_C.repack(rows, _C.LAYOUTS["row-major"], packed, _C.LAYOUTS[_C.LAYOUT], 40, 70, int4, 32, False)
torch.ops.lowbit.linear(full(1, 3, 70), packed, 40, 70, int4, 32, False, _C.X_FORMATS["int8_group"], full(4, 40), _C.ACTIVATIONS["silu"], full(5, 3, 40), None)
torch.ops.lowbit.dequantize(packed, 40, 70, int4, 32, False)
_C.blocks_linear(full(1, 3, 64), full(7, 16 * 32, dtype=u8), full(2, 16), nf4, 64, full(0, 3, 16), full(4, 16))
_C.blocks_dequantize(full(7, 512, dtype=u8), full(2, 16), nf4, 64, 1024, 32, full(0, 64))
_C.int8_linear(full(1, 3, 64, dtype=i8), full(2, 16, 64, dtype=i8), full(3, 3), full(4, 16), full(0, 3, 16))
states = [[full(1, 300, dtype=u8)], [full(2, 300, dtype=u8)]], [[full(3, 2)], [full(4, 2)]]
kept = [full(5, 300)], [full(6, 300)], *states, [torch.tensor(7.0)], dict(testing.HYPER), full(8, 1)  # the step borrows them
_C.OptimStep(_C.OPTIM_RULES["adamw"]["number"], dynamic8, 256, *kept).run()
_C.encode_state(full(1, 300), dynamic8, True, 256, full(0, 300, dtype=u8), full(0, 2))
_C.decode_state(full(1, 300, dtype=u8), full(2, 2), dynamic8, False, 256, full(0, 300))
q, k, v = (full(value, 2, heads, length, 16).requires_grad_() for value, heads, length in ((1, 4, 40), (2, 2, 50), (3, 2, 50)))
with torch.enable_grad():
    out = lowbit.ops.attention.attention(q, k, v, scale=0.5, causal=True, sink=full(6, 4))[0]
    torch.autograd.grad(out, (q, k, v), full(9, 2, 4, 40, 16))
codes, scale = full(1, 2, 2, 50, 32, dtype=i8), full(2, 2, 2, 50, 1)
internals.decode(full(3, 2, 4, 1, 32), codes, codes, full(0, 2, 4, 1, 32), 0.25, scale, scale, True, True, 49, 30)
torch.ops.lowbit.kv_quantize_(full(3, 2, 2, 50, 32), codes, scale, True)
torch.ops.lowbit.kv_dequantize_(codes, scale, full(0, 2, 2, 50, 32), True)
print(json.dumps([records.asked, records.given]))
"""


def test_rows_get_every_argument_by_its_name(packages: Packages, python: Callable[..., str]) -> None:
    packages.add("records", RECORDS)
    asked, given = json.loads(python("import lowbit.ops.attention\n" + CALLS, PYTHONPATH=packages.path))
    assert given.keys() == set(backends.OPS) and asked.keys() == given.keys()
    for op, call in given.items():
        assert without_sums(asked[op]) == without_sums(call), op
    weight = {"format": "int4", "layout": "x86-panel-16x64", "n": 40, "k": 70, "group_size": 32, "asymmetric": False}
    linear = given["linear"]
    assert {name: linear["weight"][name] for name in weight} == weight
    assert linear["x"] == [[3, 70], "float32", 210.0] and linear["bias"] == [[40], "float32", 160.0] and linear["mul"] == [[3, 40], "float32", 600.0]
    assert (linear["add"], linear["x_format"], linear["activation"]) == (None, "int8_group", "silu")
    quantize = given["quantize"]
    assert quantize["importance"] == [[70], "float32", 140.0] and (quantize["mapping"], quantize["scale_choice"]) == ("symmetric", "search")
    assert given["repack"]["from"]["layout"] == "row-major" and given["repack"]["to"] | {"packed": 0} == weight | {"packed": 0}
    assert given["blocks_linear"]["weight"]["codes"] == [[512], "uint8", 3584.0] and given["blocks_linear"]["bias"][2] == 64.0
    assert given["blocks_dequantize"]["begin"] == 32 and given["blocks_dequantize"]["weight"]["numel"] == 1024
    assert [given["int8_linear"][name][2] for name in ("x", "weight", "row_scale", "column_scale")] == [192.0, 2048.0, 9.0, 64.0]
    step = given["optim_step"]
    [tensor] = step["tensors"]
    assert tensor["param"][2] == 1500.0 and tensor["grad"][2] == 1800.0 and tensor["step"][2] == 7.0
    assert [each[2] for each in tensor["moments"] + tensor["scales"]] == [300.0, 600.0, 6.0, 8.0] and step["grad_scale"][2] == 8.0
    assert (step["rule"], step["format"], step["moments"], step["lr"], step["decoupled"]) == ("adamw", "dynamic8", 2, 0.01, True)
    assert given["decode_state"]["is_signed"] is False and given["encode_state"]["is_signed"] is True
    forward = given["attention_forward"]
    assert [forward[name][2] for name in "qkv"] == [5120.0, 6400.0, 9600.0] and forward["sink"][2] == 24.0
    assert (forward["causal"], forward["scale"], forward["mask"], forward["kv_indices"]) == (True, 0.5, None, None)
    backward = given["attention_backward"]
    assert backward["grad_out"][2] == 46080.0 and backward["forward"]["k"] == forward["k"] and backward["grad_v"][0] == [2, 2, 50, 16]
    decode = given["decode"]
    assert (decode["position"], decode["window"], decode["causal"], decode["rotated"]) == (49, 30, True, True)
    assert given["kv_quantize"]["rotate"] is True and given["kv_dequantize"]["rotated"] is True


def without_sums(value: object) -> object:
    """The arguments of a row, without the sums of its tensors."""
    if isinstance(value, dict):
        return {name: without_sums(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], list):
        return value[:2]
    return [without_sums(each) for each in value] if isinstance(value, list) else value
