# SPDX-License-Identifier: Apache-2.0
"""Mods that read an object each in another way, and what changes it: PROBES by name."""

from __future__ import annotations

import collections
import contextvars
import datetime
import enum
import functools
import os
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from reuse_protocols import Protocols, number
from torch import Tensor, nn

H, L, E = 2, 5, 4
Mod = Callable[..., Tensor]
Probe = tuple[Mod, Callable[[], Any]]
PROBES: dict[str, Callable[[], Probe]] = {}


def probe(make: Callable[[], Probe]) -> Callable[[], Probe]:
    PROBES[make.__name__] = make
    return make


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Relative(nn.Module):
    """A bias per distance, held in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList([parameter(H), parameter(H), parameter()])
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.layer, self.gain = 0, 1.0

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.gain + self.biases[self.layer][h]


@probe
def parameter_list_by_attribute() -> Probe:
    module = Relative()
    return module, lambda: setattr(module, "layer", 1)


@probe
def parameter_list_replaced() -> Probe:
    module = Relative()
    return module, lambda: module.biases.__setitem__(0, parameter(H))


@probe
def parameter_list_by_constant() -> Probe:
    module = Relative()
    return (lambda s, b, h, q, k: s * module.biases[2] + module.biases[1][h]), lambda: module.biases.__setitem__(2, parameter())


@probe
def module_list() -> Probe:
    module = Relative()
    return (lambda s, b, h, q, k: s + module.layers[module.layer].weight[0, 0]), lambda: setattr(module, "layer", 1)


@probe
def module_dict() -> Probe:
    table = nn.ModuleDict({"x": nn.Linear(1, 1), "y": nn.Linear(1, 1)})
    name = ["x"]
    return (lambda s, b, h, q, k: s * table[name[0]].bias[0]), lambda: name.__setitem__(0, "y")


@probe
def gain_of_a_module() -> Probe:
    module = Relative()
    return module, lambda: setattr(module, "gain", number())


@probe
def forward_replaced() -> Probe:
    module = Relative()
    return module, lambda: setattr(module, "forward", lambda s, b, h, q, k: s * 0.25)


@probe
def forward_hook() -> Probe:
    module, gain = Relative(), [1.0]
    module.register_forward_hook(lambda module, args, result: result * gain[0])
    return module, lambda: gain.__setitem__(0, 3.0)


def of_protocol(name: str, use: Callable[[Protocols, Tensor], Tensor]) -> None:
    def make() -> Probe:
        thing = Protocols()
        return (lambda s, b, h, q, k: use(thing, s)), lambda: setattr(thing, "values", [3.5, 4.5])

    PROBES[name] = make


def _in_with(thing: Protocols, s: Tensor) -> Tensor:
    with thing as gain:
        return s * gain


of_protocol("getitem", lambda thing, s: s * thing[0])
of_protocol("float", lambda thing, s: s * float(thing))
of_protocol("int", lambda thing, s: s * int(thing))
of_protocol("index", lambda thing, s: s * [0.5, 1.5][:: thing.__index__() // 10 or 1][0] + thing.__index__())
of_protocol("len", lambda thing, s: s * len(thing))
of_protocol("bool", lambda thing, s: s * 2 if thing else s * 3)
of_protocol("iter", lambda thing, s: s * sum(thing))
of_protocol("contains", lambda thing, s: s * 2 if 3.5 in thing else s * 3)
of_protocol("eq", lambda thing, s: s * 2 if thing == 1 else s * 3)
of_protocol("lt", lambda thing, s: s * 2 if thing < 1 else s * 3)
of_protocol("rmul", lambda thing, s: s * (2.0 * thing))
of_protocol("with", _in_with)
of_protocol("dynamic attribute", lambda thing, s: s * thing.anything)
of_protocol("computed getattr", lambda thing, s: s * getattr(thing, "val" + "ues")[0])
of_protocol("vars", lambda thing, s: s * vars(thing)["values"][0])
of_protocol("dict of the object", lambda thing, s: s * thing.__dict__["values"][0])


class Caches:
    shared = 1.0

    def __init__(self) -> None:
        self.gain = number()

    @functools.cached_property
    def cached(self) -> float:
        return self.gain * 2

    @property
    def doubled(self) -> float:
        return self.gain * 2

    @functools.lru_cache  # noqa: B019
    def remembered(self) -> float:
        return self.gain

    @staticmethod
    def static() -> float:
        return STATE["gain"]

    @classmethod
    def of_class(cls) -> float:
        return cls.shared

    def method(self) -> float:
        return self.gain


def of_cache(name: str, use: Callable[[Caches, Tensor], Tensor], change: Callable[[Caches], Any]) -> None:
    def make() -> Probe:
        thing = Caches()
        return (lambda s, b, h, q, k: use(thing, s)), lambda: change(thing)

    PROBES[name] = make


def _drop_cached(thing: Caches) -> None:
    thing.gain = 7.0
    thing.__dict__.pop("cached", None)
    Caches.remembered.cache_clear()


STATE = {"gain": 1.0}
GAIN, TABLE = 1.0, [1.0, 2.0]
of_cache("cached_property", lambda thing, s: s * thing.cached, _drop_cached)
of_cache("lru_cache", lambda thing, s: s * thing.remembered(), _drop_cached)
of_cache("property", lambda thing, s: s * thing.doubled, _drop_cached)
of_cache("method", lambda thing, s: s * thing.method(), _drop_cached)
of_cache("static method", lambda thing, s: s * thing.static(), lambda thing: STATE.update(gain=number()))
of_cache("class attribute", lambda thing, s: s * thing.shared, lambda thing: setattr(Caches, "shared", number()))
of_cache("class method", lambda thing, s: s * thing.of_class(), lambda thing: setattr(Caches, "shared", number()))
of_cache("computed class attribute", lambda thing, s: s * type(thing).shared, lambda thing: setattr(Caches, "shared", number()))


class Descriptor:
    def __get__(self, thing: Any, kind: type) -> float:
        return STATE["gain"]


class WithDescriptor:
    gain = Descriptor()


@probe
def descriptor() -> Probe:
    thing = WithDescriptor()
    return (lambda s, b, h, q, k: s * thing.gain), lambda: STATE.update(gain=number())


class Meta(type):
    @property
    def gain(cls) -> float:
        return STATE["gain"]


class OfMeta(metaclass=Meta):
    pass


@probe
def metaclass() -> Probe:
    return (lambda s, b, h, q, k: s * OfMeta.gain), lambda: STATE.update(gain=number())


class Slotted:
    __slots__ = ("gain", "missing")

    def __init__(self) -> None:
        self.gain = number()


@probe
def slots() -> Probe:
    thing = Slotted()
    return (lambda s, b, h, q, k: s * thing.gain), lambda: setattr(thing, "gain", 5.0)


@dataclass
class Config:
    gain: float = 1.0
    table: list[float] = field(default_factory=lambda: [1.0, 2.0])


@probe
def dataclass_field() -> Probe:
    config = Config()
    return (lambda s, b, h, q, k: s * config.gain), lambda: setattr(config, "gain", number())


@probe
def dataclass_equality() -> Probe:
    config, other = Config(), Config()
    return (lambda s, b, h, q, k: s * 2 if config == other else s * 3), lambda: setattr(config, "gain", number() + 1)


class Pair(NamedTuple):
    first: float
    second: float


@probe
def named_tuple() -> Probe:
    pairs = [Pair(1.0, 2.0)]
    return (lambda s, b, h, q, k: s * pairs[0].second), lambda: pairs.__setitem__(0, Pair(1.0, 3.0))


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


@probe
def enum_member() -> Probe:
    kinds = [Kind.FIRST]
    return (lambda s, b, h, q, k: s * 2 if kinds[0] is Kind.FIRST else s * 3), lambda: kinds.__setitem__(0, Kind.SECOND)


@probe
def user_dict() -> Probe:
    table = collections.UserDict(gain=1.0)
    return (lambda s, b, h, q, k: s * table["gain"]), lambda: table.update(gain=4.0)


@probe
def ordered_dict() -> Probe:
    table = collections.OrderedDict(x=1.0, y=2.0)
    return (lambda s, b, h, q, k: s * next(iter(table.values()))), lambda: table.move_to_end("x")


@probe
def deque() -> Probe:
    table = collections.deque([1.0, 2.0])
    return (lambda s, b, h, q, k: s * table[0]), lambda: table.rotate()


@probe
def environment() -> Probe:
    os.environ["LOWBIT_TEST_GAIN"] = "1.5"
    return (lambda s, b, h, q, k: s * float(os.environ["LOWBIT_TEST_GAIN"])), lambda: os.environ.update(LOWBIT_TEST_GAIN="2.5")


@probe
def getenv() -> Probe:
    os.environ["LOWBIT_TEST_GAIN"] = "1.5"
    return (lambda s, b, h, q, k: s * float(os.getenv("LOWBIT_TEST_GAIN", "1"))), lambda: os.environ.update(LOWBIT_TEST_GAIN="2.5")


@probe
def global_number() -> Probe:
    return (lambda s, b, h, q, k: s * GAIN), lambda: globals().update(GAIN=number())


@probe
def global_list_in_a_function() -> Probe:
    return (lambda s, b, h, q, k: s * first_of_table()), lambda: TABLE.__setitem__(0, number())


def first_of_table() -> float:
    return TABLE[0]


@probe
def attribute_of_a_function() -> Probe:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * mod.gain

    mod.gain = 1.0
    return mod, lambda: setattr(mod, "gain", number())


@probe
def default_argument() -> Probe:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gain: float = 1.0) -> Tensor:
        return s * gain

    return mod, lambda: setattr(mod, "__defaults__", (number(),))


@probe
def negative_zero() -> Probe:
    zeros = [0.0]
    return (lambda s, b, h, q, k: torch.where(torch.atan(zeros[0] / s.abs()) * 0 + 1 / torch.tensor(zeros[0]) > 0, s, -s)), lambda: zeros.__setitem__(0, -0.0)


@probe
def namespace() -> Probe:
    space = types.SimpleNamespace(gain=1.0)
    return (lambda s, b, h, q, k: s * space.gain), lambda: setattr(space, "gain", 2.0)


@probe
def context_variable() -> Probe:
    variable = contextvars.ContextVar("gain", default=1.0)
    return (lambda s, b, h, q, k: s * variable.get()), lambda: variable.set(2.0)


@probe
def weak_reference() -> Probe:
    import weakref

    config = Config()
    reference = weakref.ref(config)
    return (lambda s, b, h, q, k: s * reference().gain), lambda: setattr(config, "gain", 2.0)


class Clock:
    now = datetime.datetime(2020, 1, 1)


@probe
def date() -> Probe:
    clock = Clock()
    return (lambda s, b, h, q, k: s * clock.now.year / 2000), lambda: setattr(clock, "now", datetime.datetime(2030, 1, 1))


@probe
def state_of_random() -> Probe:
    random.seed(3)
    return (lambda s, b, h, q, k: s * random.Random(STATE["gain"]).random()), lambda: STATE.update(gain=number())


@probe
def set_of_numbers() -> Probe:
    numbers = {1.0}
    return (lambda s, b, h, q, k: s * sum(numbers)), lambda: numbers.add(2.0)


@probe
def closure_variable_rebound() -> Probe:
    gain = 1.0

    def change() -> None:
        nonlocal gain
        gain = 2.0

    return (lambda s, b, h, q, k: s * gain), change


@probe
def attribute_of_a_tensor() -> Probe:
    bias = parameter(H)
    bias.gain = 1.0
    return (lambda s, b, h, q, k: s + bias[h] * bias.gain), lambda: setattr(bias, "gain", 2.0)


@probe
def whether_a_tensor_requires_grad() -> Probe:
    bias = parameter(H)
    return (lambda s, b, h, q, k: s + bias[h] if bias.requires_grad else s - bias[h]), lambda: bias.requires_grad_(False)


@probe
def strides_of_a_tensor() -> Probe:
    holder = [torch.randn(H, H)]
    return (lambda s, b, h, q, k: s + holder[0][h, 0] * holder[0].stride(0)), lambda: holder.__setitem__(0, holder[0].t())


@probe
def value_of_a_tensor() -> Probe:
    gain = torch.tensor(1.0)
    return (lambda s, b, h, q, k: s * gain.item()), lambda: gain.fill_(3.0)


@probe
def value_of_what_is_computed_from_a_tensor() -> Probe:
    gain = torch.tensor([1.0, 2.0])
    return (lambda s, b, h, q, k: s * 2 if gain.sum() > 4 else s * 3), lambda: gain.fill_(3.0)


@probe
def rows_chosen_by_a_mask() -> Probe:
    chosen, bias = torch.tensor([True, False, True]), parameter(3)
    return (lambda s, b, h, q, k: s * bias[chosen].sum()), lambda: chosen.fill_(True)


@probe
def data_of_a_parameter() -> Probe:
    bias = parameter(H)
    return (lambda s, b, h, q, k: s + bias[h]), lambda: setattr(bias, "data", torch.randn(H))


@probe
def in_place() -> Probe:
    bias = torch.randn(L)
    return (lambda s, b, h, q, k: s + torch.softmax(bias, 0)[k]), lambda: bias.mul_(-2)


@probe
def captured_tensor_itself() -> Probe:
    values = [parameter()]
    return (lambda s, b, h, q, k: values[0]), lambda: values[0].data.fill_(2.0)


@probe
def default_dtype() -> Probe:
    return (lambda s, b, h, q, k: s + (q / 3).to(torch.float32)), lambda: None
