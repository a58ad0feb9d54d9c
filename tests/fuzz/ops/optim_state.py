# SPDX-License-Identifier: Apache-2.0
"""State of optimizers that changes between steps, state dicts that must be refused, and those of other libraries."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import header
from .optim import NAMES, options, parameters

CHANGES = {
    "nothing": "pass",
    ".data of a state replaced": "state[NAME].data = torch.zeros_like(state[NAME])",
    ".data of a state replaced by a clone": "state[NAME].data = state[NAME].data.clone()",
    "a state replaced": "state[NAME] = torch.zeros_like(state[NAME])",
    "a state changed in place": "state[NAME].zero_()",
    "set_ of a state": "state[NAME].set_(torch.zeros_like(state[NAME]))",
    ".data of step replaced": "state['step'].data = torch.tensor(7.0)",
    "step replaced": "state['step'] = torch.tensor(7.0)",
    "step in place": "state['step'].fill_(7.0)",
    ".data of a parameter replaced": "p.data = torch.randn(p.shape, dtype=torch.float32).to(p.dtype)",
    "a parameter swapped in place": "p.data.mul_(0.5)",
    "set_ of a parameter": "torch.no_grad()(p.set_)(p.detach().clone())",
    "load_state_dict of itself": "optimizer.load_state_dict(optimizer.state_dict())",
    "load_state_dict of a copy": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "deepcopy": "return copy.deepcopy(optimizer)",
    "pickle": "return pickle.loads(pickle.dumps(optimizer))",
    "lr and decay of a group": "optimizer.param_groups[0]['lr'] = 0.5; optimizer.param_groups[0]['weight_decay'] = 0.3",
    "another order of the state's keys": "optimizer.state[p] = dict(sorted(state.items()))",
    "the parameter in another layout": "p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data.clone()",
}
MUTATIONS = {
    "no scale entries": "return drop(state, 'scale')",
    "no moment": "return drop(state, 'exp_avg', 'momentum_buffer')",
    "three times as many scales": "return change(state, 'scale', lambda t: t.repeat(3))",
    "no scales in their tensor": "return change(state, 'scale', lambda t: t[:0])",
    "a group's state_format of another name": "group['state_format'] = 'dynamic4' if group['state_format'] != 'dynamic4' else 'dynamic8'; return bool(scales) and params[0].shape != (1,)",  # one element: a byte and a scale in either
    "a group's state_format that does not exist": "group['state_format'] = 'float7'; return bool(scales)",
    "a group's block_size of another size": "group['block_size'] = 2 * group['block_size']; return bool(scales) and moment.numel() > group['block_size'] // 2",
    "eps None": "return replace(group, 'eps', None)",
    "eps negative": "return replace(group, 'eps', -1.0)",
    "lr of text": "return replace(group, 'lr', 'x')",
    "lr negative": "return replace(group, 'lr', -1.0)",
    "lr None": "return replace(group, 'lr', None)",
    "betas of one element": "return replace(group, 'betas', (0.9,))",
    "betas of 1": "return replace(group, 'betas', (0.9, 1.0))",
    "betas None": "return replace(group, 'betas', None)",
    "weight_decay negative": "return replace(group, 'weight_decay', -1.0)",
    "weight_decay of text": "return replace(group, 'weight_decay', 'x')",
    "momentum of text": "return replace(group, 'momentum', 'x')",
    "codes of another dtype": "return change(state, 'exp_avg', lambda t: t.to(torch.int8)) if scales else False",
    "a moment of another shape": "return change(state, 'exp_avg', lambda t: torch.cat([t.flatten(), t.flatten(), t.new_zeros(1)]))",
    "a moment of text": "return change(state, 'exp_avg', lambda t: 'x')",
    "scales of text": "return change(state, 'scale', lambda t: 'x')",
    "scales of ints": "return change(state, 'scale', lambda t: t.to(torch.int64))",
    "another number of groups": "saved['param_groups'].append(group)",
    "another number of parameters": "group['params'] = [*group['params'], 99]",
    "no step of its type": "return replace(state, 'step', 'x')",
}
FOREIGN = {
    "bitsandbytes SGD": ("SGD8bit", "{'state1': torch.zeros(p.shape), 'step': 3}", "'lr': 0.01, 'betas': (0.9, 0.0), 'eps': 0.0, 'weight_decay': 0.0, 'lars': 0.0"),
    "bitsandbytes SGD8bit": (
        "SGD8bit", "{'state1': torch.zeros(p.shape, dtype=torch.uint8), 'absmax1': torch.zeros(-(-p.numel() // 256)), 'qmap1': check.dynamic_map(), 'step': 3}",
        "'lr': 0.01, 'betas': (0.9, 0.0), 'eps': 0.0, 'weight_decay': 0.0, 'lars': 0.0",
    ),
    "bitsandbytes AdamW": (
        "AdamW8bit", "{'state1': torch.zeros(p.shape), 'state2': torch.zeros(p.shape), 'step': 3}",
        "'lr': 0.01, 'betas': (0.9, 0.99), 'eps': 1e-8, 'weight_decay': 0.0, 'alpha': 0.0, 't_alpha': None, 't_beta3': None",
    ),
    "torch AdamW": (
        "AdamW8bit", "{'exp_avg': torch.zeros(p.shape), 'exp_avg_sq': torch.zeros(p.shape), 'step': torch.tensor(3.0)}",
        "'lr': 0.01, 'betas': (0.9, 0.99), 'eps': 1e-8, 'weight_decay': 0.0, 'amsgrad': False, 'maximize': False, 'foreach': None, 'fused': None",
    ),
    "torch SGD": (
        "SGD8bit", "{'momentum_buffer': torch.zeros(p.shape)}",
        "'lr': 0.01, 'momentum': 0.9, 'dampening': 0.0, 'weight_decay': 0.0, 'nesterov': False, 'maximize': False, 'foreach': None",
    ),
}  # fmt: skip
_TOOLS = """
def drop(entries, *words):
    found = [name for name in entries if any(word in name for word in words)]
    for name in found:
        del entries[name]
    return bool(found)


def change(entries, word, function):
    found = [name for name in entries if word in name and (word == "scale" or "scale" not in name)]
    for name in found[:1]:
        entries[name] = function(entries[name])
    return bool(found)


def replace(entries, name, value):
    found = name in entries
    entries[name] = value
    return found


"""


def generate(choices: Choices) -> str:
    c = choices
    kind = c.pick("changed", "refused", "refused", "foreign")
    if kind == "foreign":
        return header(c) + foreign(c, c.pick(*FOREIGN))
    name, what = c.pick(*NAMES), c.pick(*(CHANGES if kind == "changed" else MUTATIONS))
    return header(c) + (
        changed(c, what, name, CHANGES[what]) if kind == "changed" else refused(c, what, name, MUTATIONS[what])
    )


def changed(c: Choices, what: str, name: str, change: str) -> str:
    """A case of `CHANGES`."""
    dtype = c.pick("float32", "bfloat16")
    moment = "momentum_buffer" if name.startswith("SGD") else "exp_avg"
    moment = c.pick(moment, moment if name == "AdamW" else f"{moment}_scale")
    body = change.replace("NAME", repr(moment))
    guard = f"    if {moment!r} not in state:\n        return\n"
    return (
        f"import copy\nimport pickle\n\n{parameters(c, dtype)}\n\ndef change(optimizer, leaves):\n    p = leaves[0]\n    state = optimizer.state[p]\n"
        f"{guard}    {body}\n\n\ncheck.same_as_fresh({name!r}, params, change, {what!r}, {options(c, name)})\n"
    )


def refused(c: Choices, what: str, name: str, change: str) -> str:
    """A case of `MUTATIONS`."""
    dtype = c.pick("float32", "bfloat16")
    return (
        f"{_TOOLS}{parameters(c, dtype)}\n\ndef broken(saved):\n    group = saved['param_groups'][0]\n"
        "    state = saved['state'].get(0, {})\n    scales = [name for name in state if 'scale' in name]\n"
        "    moments = [value for name, value in state.items() if name in ('exp_avg', 'momentum_buffer')]\n"
        "    if not moments or moments[0].numel() == 0:\n        return False\n    moment = moments[0]\n"
        f"    {change}\n\n\ncheck.refuses_state({name!r}, params, broken, {what!r}, {options(c, name)})\n"
    )


def foreign(c: Choices, what: str) -> str:
    """A case of `FOREIGN`."""
    name, entry, group = FOREIGN[what]
    size = c.pick(64, 300, 5000)
    return (
        f"p = torch.randn({size})\nsaved = {{'state': {{0: {entry}}}, 'param_groups': [{{{group}, 'params': [0]}}]}}\n"
        f"check.loads({name!r}, [p], saved, {what!r}, min_8bit_size={c.pick(0, 4096)})\n"
    )
