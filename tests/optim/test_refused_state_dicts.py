# SPDX-License-Identifier: Apache-2.0
"""A state dict with anything in it that is missing, too much, or of another type, dtype, shape or device is refused, and nothing has changed.

Every entry of the state dicts of every optimizer, and of torch's, bitsandbytes' and torchao's, is mutated in every way of a table.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from twins import Case, copies, parameters, run, trained

from lowbit import optim


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    return a == b


def check_refused(optimizer: torch.optim.Optimizer, bad: dict[str, Any], match: str = "", what: str = "") -> None:
    before = snapshot(optimizer)
    addresses = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}\.load_state_dict: .*{match}"):
        optimizer.load_state_dict(bad)
        pytest.fail(f"{what or bad} was accepted")
    assert same(snapshot(optimizer), before)
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == addresses


def renamed(entry: dict[Any, Any], name: Any) -> None:
    entry[f"{name}_"] = entry.pop(name)


OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda value: None,
    "text": lambda value: "x",
    "list": lambda value: value.tolist(),
    "one element more": lambda value: torch.cat([value.flatten(), value.flatten()[:1]]),
    "thrice": lambda value: value.repeat(3, *[1] * (value.dim() - 1)) if value.dim() else value.repeat(3),
    "empty": lambda value: value.flatten()[:0],
    "another rank": lambda value: value[None, None],
    "int64": lambda value: value.long(),
    "bool": lambda value: value.bool(),
    "complex": lambda value: value.to(torch.complex64),
    "float8": lambda value: value.to(torch.float8_e4m3fn),
    "meta": lambda value: value.to("meta"),
    "sparse": lambda value: value.reshape(-1).to_sparse(),
}
HARMLESS = {("step", label) for label in ("list", "another rank", "int64", "bool", "float8")}  # one number in another form


def is_codes(value: Tensor) -> bool:
    return value.dtype == torch.uint8


def of_tensor(name: str, value: Tensor) -> Iterator[tuple[str, Any]]:
    for label, change in OF_TENSORS.items():
        if (name, label) not in HARMLESS:
            yield label, change(value)
    if name == "step":
        yield from [("negative", torch.tensor(-1.0)), ("nan", torch.tensor(float("nan"))), ("inf", float("inf")), ("two", torch.zeros(2))]
    elif is_codes(value):
        yield from [("float codes", value.float()), ("int8 codes", value.to(torch.int8))]
    elif value.dim():
        yield "uint8", value.to(torch.uint8)
    if value.dim() == 2:
        yield "transposed", value.t()


def test_every_tensor_of_every_parameter(case: Case, subtests: pytest.Subtests) -> None:
    _, optimizer = trained(case.make)
    good = snapshot(optimizer)
    optimizer.load_state_dict(good)
    count = 0
    for index, state in good["state"].items():
        for name, value in state.items():
            for label, mutation in of_tensor(name, value):
                with subtests.test(index=index, name=name, label=label):
                    bad = copy.deepcopy(good)
                    bad["state"][index][name] = mutation
                    check_refused(optimizer, bad, f"parameter {index}", f"{name} of parameter {index}: {label}")
                    count += 1
            for change in (dict.pop, renamed):
                with subtests.test(index=index, name=name, change=change.__name__):
                    bad = copy.deepcopy(good)
                    change(bad["state"][index], name)
                    check_refused(optimizer, bad, f"parameter {index}")
        bad = copy.deepcopy(good)
        bad["state"][index]["mu_product"] = torch.tensor(1.0)  # NAdam's
        check_refused(optimizer, bad, "mu_product")
    assert count > 50


GROUP: dict[str, list[Any]] = {
    "rule": [None, "x", 3],
    "lr": [None, "x", -1.0, float("nan"), [1e-3], torch.zeros(2), torch.zeros((), device="meta"), 1j],
    "betas": [None, "ab", 0.9, (0.9,), (0.9, 0.9, 0.9), (None, 0.9), (0.9, "x"), (1.0, 0.9), (0.9, -0.1)],
    "eps": [None, "x", -1.0, float("nan"), (1e-8,)],
    "weight_decay": [None, "x", -1.0, float("nan")],
    "momentum": [None, "x", -1.0, float("nan")],
    "dampening": [None, "x", float("nan")],
    "amsgrad": [None, "x", 2, torch.zeros(2)],
    "nesterov": [None, "x", 2],
    "maximize": [None, "x", 2],
    "state_format": [None, "x", 8, "int8", "DYNAMIC8", "float64"],
    "block_size": [None, "x", 0, 100, 256.0, 8192],
    "min_8bit_size": [None, "x", -1, 4096.0],
    "bf16_stochastic_round": [None, "x", 2],
    "master": ["x", "bf16", 8, True],
    "rounding_seed": [None, "x", -1, 2**64],
    "params": [None, "x", 0, {}],
}


def test_every_option_of_a_group(case: Case, subtests: pytest.Subtests) -> None:
    _, optimizer = trained(case.make)
    good = snapshot(optimizer)
    for name in good["param_groups"][0]:
        for value in GROUP[name]:
            with subtests.test(name=name, value=value):
                bad = copy.deepcopy(good)
                bad["param_groups"][0][name] = value
                check_refused(optimizer, bad, "param group 0", f"{name}={value!r}")
        for change in (dict.pop, renamed) if name != "master" else ():  # which older state dicts lack
            with subtests.test(name=name, change=change.__name__):
                bad = copy.deepcopy(good)
                change(bad["param_groups"][0], name)
                if name == "state_format":  # not known as ours any more: codes and scales are not torch's
                    if not any("scale" in entry for state in good["state"].values() for entry in state):
                        continue
                    check_refused(optimizer, bad, "parameter 0")
                else:
                    check_refused(optimizer, bad, "param group 0")


def test_a_format_that_is_not_that_of_the_states(case: Case, subtests: pytest.Subtests) -> None:
    _, optimizer = trained(case.make)
    good = snapshot(optimizer)
    ours = good["param_groups"][0]["state_format"]
    for other in ("float32", "bfloat16", "dynamic8", "dynamic4"):
        with subtests.test(other):
            if other != ours and not (other == "dynamic8" and ours == "float8"):  # both are a byte an element: only the name tells
                bad = copy.deepcopy(good)
                bad["param_groups"][0]["state_format"] = other
                check_refused(optimizer, bad, "parameter [01]")
    if any("scale" in name for name in good["state"][0]):
        for name, value in (("block_size", 64), ("min_8bit_size", 10**6)):
            with subtests.test(name):
                bad = copy.deepcopy(good)
                bad["param_groups"][0][name] = value
                check_refused(optimizer, bad, "parameter 0")


OUTLINES: list[Callable[[dict[str, Any]], Any]] = [
    lambda bad: [],
    lambda bad: bad["state"],
    lambda bad: {**bad, "state": list(bad["state"].values())},
    lambda bad: {**bad, "param_groups": bad["param_groups"][0]},
    lambda bad: {**bad, "param_groups": [None]},
    lambda bad: {**bad, "state": {**bad["state"], 17: bad["state"][0]}},
    lambda bad: {**bad, "state": {**bad["state"], 0: [1, 2]}},
    lambda bad: {**bad, "state": {str(index): state for index, state in bad["state"].items()}},
    lambda bad: {**bad, "param_groups": [{**bad["param_groups"][0], "params": [0, 0, 1]}]},
]


@pytest.mark.parametrize("change", OUTLINES)
def test_what_is_no_state_dict(change: Callable[[dict[str, Any]], Any]) -> None:
    _, optimizer = trained(optim.AdamW8bit, 1)
    bad = change(copy.deepcopy(optimizer.state_dict()))
    if isinstance(bad, list):
        with pytest.raises((ValueError, AttributeError)):  # torch's loader copies it before anyone sees it
            optimizer.load_state_dict(bad)
    else:
        check_refused(optimizer, bad)


def foreign() -> Iterator[tuple[str, Any, Any]]:
    yield "torch AdamW", torch.optim.AdamW, optim.AdamW8bit
    yield "torch Adam amsgrad", lambda params: torch.optim.Adam(params, amsgrad=True), optim.Adam4bit
    yield "torch SGD", lambda params: torch.optim.SGD(params, momentum=0.9), optim.SGD8bit
    yield "bitsandbytes AdamW8bit", bitsandbytes.optim.AdamW8bit, optim.AdamW8bit
    yield "bitsandbytes AdamW", bitsandbytes.optim.AdamW, optim.AdamW
    yield "bitsandbytes SGD8bit", lambda params: bitsandbytes.optim.SGD8bit(params, lr=0.1, momentum=0.9), optim.SGD8bit
    yield "bitsandbytes Lion8bit", bitsandbytes.optim.Lion8bit, optim.Lion8bit


@pytest.mark.parametrize(("theirs", "ours"), [pytest.param(*rest, id=name) for name, *rest in foreign()])
def test_every_entry_of_the_state_dicts_of_others(theirs: Any, ours: Any, subtests: pytest.Subtests) -> None:
    params = parameters()
    other = theirs(params)
    run(other, params, 2)
    good, optimizer = snapshot(other), ours(copies(params))
    optimizer.load_state_dict(good)
    nested = "__bnb_optimizer_quant_state__"
    for index, state in good["state"].items():
        entries = [(name, value, False) for name, value in state.items() if name != nested]
        entries += [(name, value, True) for name, value in state.get(nested, {}).items()]
        for name, value, inner in entries:
            mutations = dict(of_tensor(name, value)) if isinstance(value, Tensor) else {"text": "x", "negative": -1, "nan": float("nan")}
            if name.startswith("qmap"):
                mutations |= {"another map": value.flip(0)}
            for label, mutation in mutations.items():
                with subtests.test(index=index, name=name, label=label):
                    if mutation is None and name in ("momentum_buffer", "qmap1", "qmap2"):  # torch's SGD before its first step; no map to compare
                        continue
                    bad = copy.deepcopy(good)
                    (bad["state"][index][nested] if inner else bad["state"][index])[name] = mutation
                    check_refused(optimizer, bad, f"parameter {index}", f"{name} of parameter {index}: {label}")


def test_torchao_states() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    p = nn.Parameter(torch.randn(64, 128))
    theirs = torchao.optim.AdamW8bit([p])
    theirs.state[p]["step"] = torch.tensor(1.0)
    for name in ("exp_avg", "exp_avg_sq"):
        theirs.state[p][name] = OptimState8bit.zeros(p.shape, name == "exp_avg", 256).copy_(torch.rand(64, 128))
    good, optimizer = theirs.state_dict(), optim.AdamW8bit([nn.Parameter(p.detach().clone())])
    optimizer.load_state_dict(good)
    for inner in ("codes", "scale", "qmap"):
        value = getattr(good["state"][0]["exp_avg"], inner)
        for mutation in (value[:-1], value.repeat(3, *[1] * (value.dim() - 1)), value.long(), value.to("meta"), value.flip(0) if inner == "qmap" else value[:0]):
            state = good["state"][0]["exp_avg"]
            parts = {name: getattr(state, name) for name in ("codes", "scale", "qmap")} | {inner: mutation}
            broken = OptimState8bit.__new__(OptimState8bit, parts["codes"], parts["scale"], parts["qmap"], True)
            broken.codes, broken.scale, broken.qmap, broken.signed = parts["codes"], parts["scale"], parts["qmap"], True
            bad = {**good, "state": {0: {**good["state"][0], "exp_avg": broken}}}
            check_refused(optimizer, bad, re.escape("parameter 0: exp_avg"))
