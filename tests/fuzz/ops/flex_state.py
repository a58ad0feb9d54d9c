# SPDX-License-Identifier: Apache-2.0
"""flex_attention and create_block_mask with mods that read Python state, which changes between two calls.

An axis is a way to hold a value: what is made first, how the mod reads it, and how it becomes another. Values are small numbers
(`V` in the text), tensors, or a truth. The reference runs the mod itself, so what it reads is what it should have read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..choices import Choices
from ..tensors import header


@dataclass(frozen=True)
class Axis:
    """``make`` defines `held` with the value V, ``read`` is what the mod says, ``change`` makes the value V."""

    make: str
    read: str
    change: str
    kind: str = "number"


def _class(body: str, make: str = "held = Held(V)") -> str:
    return f"class Held:\n    def __init__(self, value):\n        self.value = value\n\n{body}\n\n\n{make}"


AXES = {
    "closure": Axis("held = V", "held", "held = V"),
    "attribute": Axis("held = types.SimpleNamespace(value=V)", "held.value", "held.value = V"),
    "a new object": Axis("held = types.SimpleNamespace(value=V)", "held.value", "held = types.SimpleNamespace(value=V)"),
    "list element": Axis("held = [0, V]", "held[1]", "held[1] = V"),
    "nested list": Axis("held = [[0], [0, [V]]]", "held[1][1][0]", "held[1][1][0] = V"),
    "dict entry": Axis("held = {'a': V}", "held['a']", "held['a'] = V"),
    "dict entry by a key": Axis("held, which = {'a': V, 'b': 0}, ['a']", "held[which[0]]", "held['b'] = V; which[0] = 'b'"),
    "defaultdict": Axis("held = collections.defaultdict(int, a=V)", "held['a']", "held['a'] = V"),
    "UserDict": Axis("held = collections.UserDict(a=V)", "held['a']", "held['a'] = V"),
    "UserList": Axis("held = collections.UserList([V])", "held[0]", "held[0] = V"),
    "ChainMap": Axis("held = collections.ChainMap({}, {'a': V})", "held['a']", "held['a'] = V"),
    "OrderedDict": Axis("held = collections.OrderedDict(a=V)", "held['a']", "held['a'] = V"),
    "deque": Axis("held = collections.deque([V])", "held[0]", "held[0] = V"),
    "array": Axis("held = array.array('d', [V])", "held[0]", "held[0] = V"),
    "bytearray": Axis("held = bytearray([V])", "held[0]", "held[0] = V"),
    "numpy element": Axis("held = numpy.array([V], dtype=numpy.float32)", "float(held[0])", "held[0] = V"),
    "numpy 0-d": Axis("held = numpy.array(V, dtype=numpy.float32)", "float(held)", "held[...] = V"),
    "ctypes": Axis("held = ctypes.c_double(V)", "held.value", "held.value = V"),
    "len of a list": Axis("held = [0] * V", "len(held)", "held[:] = [0] * V"),
    "len of a set": Axis("held = set(range(V))", "len(held)", "held.clear(); held.update(range(V))"),
    "sum of a list": Axis("held = [V]", "sum(held)", "held.append(V)"),
    "__len__": Axis(_class("    def __len__(self):\n        return int(self.value)"), "len(held)", "held.value = V"),
    "__float__": Axis(_class("    def __float__(self):\n        return float(self.value)"), "float(held)", "held.value = V"),
    "__int__": Axis(_class("    def __int__(self):\n        return int(self.value)"), "int(held)", "held.value = V"),
    "__index__": Axis(_class("    def __index__(self):\n        return int(self.value)"), "operator.index(held)", "held.value = V"),
    "__bool__": Axis(_class("    def __bool__(self):\n        return self.value > 3"), "(1.0 if held else 5.0)", "held.value = V"),
    "__call__": Axis(_class("    def __call__(self):\n        return self.value"), "held()", "held.value = V"),
    "__iter__": Axis(_class("    def __iter__(self):\n        return iter([self.value])"), "sum(held)", "held.value = V"),
    "__contains__": Axis(_class("    def __contains__(self, x):\n        return x < self.value"), "(1.0 if 3 in held else 5.0)", "held.value = V"),
    "__getitem__": Axis(_class("    def __getitem__(self, at):\n        return self.value * at"), "held[1]", "held.value = V"),
    "__getattr__": Axis(_class("    def __getattr__(self, name):\n        return self.__dict__['value']"), "held.scale", "held.value = V"),
    "__eq__": Axis(_class("    def __eq__(self, x):\n        return self.value > x"), "(1.0 if held == 3 else 5.0)", "held.value = V"),
    "__lt__": Axis(_class("    def __lt__(self, x):\n        return self.value < x"), "(1.0 if held < 4 else 5.0)", "held.value = V"),
    "__rmul__": Axis(_class("    def __rmul__(self, x):\n        return x * self.value"), "(1.0 * held)", "held.value = V"),
    "__add__": Axis(_class("    def __add__(self, x):\n        return x + self.value"), "(held + 0.0)", "held.value = V"),
    "__neg__": Axis(_class("    def __neg__(self):\n        return -self.value"), "abs(-held)", "held.value = V"),
    "__round__": Axis(_class("    def __round__(self):\n        return int(self.value)"), "round(held)", "held.value = V"),
    "__enter__": Axis(
        _class("    def __enter__(self):\n        return self.value\n\n    def __exit__(self, *_):\n        pass"), "entered(held)", "held.value = V"
    ),
    "__get__": Axis("class Read:\n    def __get__(self, *_):\n        return store['value']\n\n\nclass Held:\n    value = Read()\n\n\nstore = {'value': V}\nheld = Held()",
                    "held.value", "store['value'] = V"),
    "__slots__": Axis("class Held:\n    __slots__ = ('value',)\n\n\nheld = Held()\nheld.value = V", "held.value", "held.value = V"),
    "property": Axis(_class("    @property\n    def scale(self):\n        return self.value"), "held.scale", "held.value = V"),
    "cached_property": Axis(
        _class("    @functools.cached_property\n    def scale(self):\n        return self.value"), "held.scale", "held.__dict__.clear(); held.value = V"
    ),
    "property over a dict": Axis(_class("    @property\n    def scale(self):\n        return self.__dict__['value']"), "held.scale", "held.value = V"),
    "class attribute": Axis("class Held:\n    value = V\n\n\nheld = Held()", "held.value", "Held.value = V"),
    "instance over class": Axis("class Held:\n    value = V\n\n\nheld = Held()", "held.value", "held.value = V"),
    "metaclass": Axis("class Meta(type):\n    value = V\n\n\nclass Held(metaclass=Meta):\n    pass\n\n\nheld = Held", "held.value", "Meta.value = V"),
    "classmethod": Axis("class Held:\n    value = V\n\n    @classmethod\n    def read(cls):\n        return cls.value\n\n\nheld = Held()", "held.read()", "Held.value = V"),
    "another class": Axis("class A:\n    def read(self):\n        return 1.0\n\n\nclass B:\n    def read(self):\n        return 5.0\n\n\nheld = A()",
                          "held.read()", "held.__class__ = B"),
    "getattr by a computed name": Axis("held, which = types.SimpleNamespace(a=V, b=0), ['a']", "getattr(held, which[0])", "held.b = V; which[0] = 'b'"),
    "getattr of joined names": Axis("held = types.SimpleNamespace(scale_1=V)", "getattr(held, '_'.join(['scale', '1']))", "held.scale_1 = V"),
    "attrgetter": Axis("held = types.SimpleNamespace(value=V)", "operator.attrgetter('value')(held)", "held.value = V"),
    "itemgetter": Axis("held = [V]", "operator.itemgetter(0)(held)", "held[0] = V"),
    "vars": Axis("held = types.SimpleNamespace(value=V)", "vars(held)['value']", "held.value = V"),
    "globals": Axis("held = V", "globals()['held']", "held = V"),
    "a module's attribute": Axis("held = types.ModuleType('held')\nheld.value = V", "held.value", "held.value = V"),
    "an imported module": Axis("sys.modules['held_module'] = types.ModuleType('held_module')\nsys.modules['held_module'].value = V",
                               "__import__('held_module').value", "sys.modules['held_module'].value = V"),
    "math's attribute": Axis("math.held = V", "math.held", "math.held = V"),
    "torch's attribute": Axis("torch.held = V", "torch.held", "torch.held = V"),
    "lru_cache": Axis("store = [V]\n\n\n@functools.lru_cache\ndef held():\n    return store[0]", "held()", "store[0] = V; held.cache_clear()"),
    "a wrapped function": Axis("store = [V]\n\n\ndef inner():\n    return store[0]\n\n\nheld = functools.wraps(inner)(lambda: inner())", "held()", "store[0] = V"),
    "partial": Axis("store = [V]\nheld = functools.partial(operator.getitem, store)", "held(0)", "store[0] = V"),
    "a helper's closure": Axis("def make(value):\n    def read():\n        return value\n\n    return read\n\n\nheld = make(V)", "held()", "held = make(V)"),
    "a helper's default": Axis("def held(value=V):\n    return value", "held()", "held.__defaults__ = (V,)"),
    "a helper's keyword default": Axis("def held(*, value=V):\n    return value", "held()", "held.__kwdefaults__ = {'value': V}"),
    "a helper's code": Axis("def held():\n    return 1.0\n\n\ndef other():\n    return 5.0", "held()", "held.__code__ = other.__code__"),
    "a function's attribute": Axis("def held():\n    return held.value\n\n\nheld.value = V", "held()", "held.value = V"),
    "os.environ": Axis("os.environ['HELD'] = str(V)", "float(os.environ['HELD'])", "os.environ['HELD'] = str(V)"),
    "os.getenv": Axis("os.environ['HELD'] = str(V)", "float(os.getenv('HELD'))", "os.environ['HELD'] = str(V)"),
    "contextvar": Axis("held = contextvars.ContextVar('held')\nheld.set(V)", "held.get()", "held.set(V)"),
    "weakref": Axis("class Held:\n    value = V\n\n\nstrong = Held()\nheld = weakref.ref(strong)", "held().value", "strong.value = V"),
    "generator": Axis("store = [V]\nheld = (store[0] for _ in iter(int, 1))", "next(held)", "store[0] = V"),
    "itertools": Axis("store = [V]", "next(itertools.islice(store, 1))", "store[0] = V"),
    "map": Axis("store = [V]", "list(map(float, store))[0]", "store[0] = V"),
    "enumerate": Axis("store = [0, V]", "dict(enumerate(store))[1]", "store[1] = V"),
    "sum of a set": Axis("held = {1.5}", "sum(held)", "held.add(V)"),
    "order of a dict": Axis("held = collections.OrderedDict(x=1.0, y=5.0)", "next(iter(held.values()))", "held.move_to_end('x')"),
    "deque that is rotated": Axis("held = collections.deque([V, 2.5])", "held[0]", "held.rotate()"),
    "a helper's list": Axis("store = [V]\n\n\ndef held():\n    return store[0]", "held()", "store[0] = V"),
    "__dict__": Axis("held = types.SimpleNamespace(value=V)", "held.__dict__['value']", "held.value = V"),
    "method": Axis(_class("    def read(self):\n        return self.value"), "held.read()", "held.value = V"),
    "static method": Axis("class Held:\n    @staticmethod\n    def read():\n        return store[0]\n\n\nstore = [V]\nheld = Held()", "held.read()", "store[0] = V"),
    "attribute of the type": Axis("class Held:\n    value = V\n\n\nheld = Held()", "type(held).value", "Held.value = V"),
    "property of the type": Axis("class Meta(type):\n    @property\n    def scale(cls):\n        return store[0]\n\n\nclass Held(metaclass=Meta):\n    pass\n\n\nstore = [V]",
                                 "Held.scale", "store[0] = V"),
    "equal dataclasses": Axis("@dataclasses.dataclass\nclass Held:\n    value: float = V\n\n\nheld, other = Held(), Held()", "(1.0 if held == other else 5.0)", "held.value = V"),
    "a new namedtuple": Axis("Held = collections.namedtuple('Held', 'value')\nheld = [Held(V)]", "held[0].value", "held[0] = Held(V)"),
    "another member of an enum": Axis("class Held(enum.Enum):\n    A = 1\n    B = 2\n\n\nheld = [Held.A]", "(1.0 if held[0] is Held.A else 5.0)", "held[0] = Held.B"),
    "date": Axis("held = types.SimpleNamespace(now=datetime.datetime(2000, 1, 1))", "(held.now.year / 1000)", "held.now = datetime.datetime(4000, 1, 1)"),
    "random number of a seed": Axis("held = [V]", "random.Random(held[0]).random()", "held[0] = V"),
    "format": Axis("store = [V]", "float(f'{store[0]}')", "store[0] = V"),
    "dataclass": Axis("@dataclasses.dataclass\nclass Held:\n    value: float = V\n\n\nheld = Held()", "held.value", "held.value = V"),
    "namedtuple": Axis("Held = collections.namedtuple('Held', 'value')\nheld = Held([V])", "held.value[0]", "held.value[0] = V"),
    "enum's member": Axis("class Held(enum.Enum):\n    A = (V,)\n\n\nheld = Held.A", "held.__dict__.get('extra', 2.0)", "held.extra = V"),
    "int with an attribute": Axis("class Held(int):\n    pass\n\n\nheld = Held(2)\nheld.value = V", "held.value", "held.value = V"),
    "torch default dtype": Axis("held = None", "torch.get_default_dtype().itemsize", "torch.set_default_dtype(torch.float64)"),
    "requires_grad": Axis("held = torch.ones(())", "(1.0 if held.requires_grad else 5.0)", "held.requires_grad_()"),
    "a tensor's attribute": Axis("held = torch.ones(())\nheld.value = V", "held.value", "held.value = V"),
    "module.training": Axis("held = torch.nn.Module()", "(1.0 if held.training else 5.0)", "held.eval()"),
    "strides of a tensor": Axis("held = [torch.arange(6.0).view(2, 3)]", "held[0].stride(0)", "held[0] = held[0].t()"),
    "truth of a tensor": Axis("held = torch.tensor([1.0, V])", "(1.0 if held.sum() > 5.5 else 5.0)", "held.fill_(V)"),
    "tensor": Axis("held = torch.tensor(float(V))", "held", "held = torch.tensor(float(V))", "tensor"),
    "tensor in place": Axis("held = torch.tensor(float(V))", "held", "held.fill_(V)", "tensor"),
    "tensor .data": Axis("held = torch.tensor(float(V))", "held", "held.data = torch.tensor(float(V))", "tensor"),
    "tensor .item()": Axis("held = torch.tensor(float(V))", "held.item()", "held.fill_(V)"),
    "tensor in a list": Axis("held = [torch.tensor(float(V))]", "held[0]", "held[0] = torch.tensor(float(V))", "tensor"),
    "tensor in a UserList": Axis("held = collections.UserList([torch.tensor(float(V))])", "held[0]", "held[0] = torch.tensor(float(V))", "tensor"),
    "tensor of __getitem__": Axis(_class("    def __getitem__(self, at):\n        return self.value", "held = Held(torch.tensor(float(V)))"), "held[0]",
                                  "held.value = torch.tensor(float(V))", "tensor"),
    "tensor of another shape": Axis("held = torch.full((2,), float(V))", "(held[0] * held.numel())", "held = torch.full((5,), float(V))", "tensor"),
    "Parameter": Axis("held = torch.nn.Parameter(torch.tensor(float(V)))", "held", "held.data.fill_(V)", "tensor"),
    "ParameterList element": Axis("held = torch.nn.ParameterList([torch.zeros(()), torch.tensor(float(V))])", "held[1]", "held[1] = torch.nn.Parameter(torch.tensor(float(V)))", "tensor"),
    "ParameterList by an index": Axis("held, at = torch.nn.ParameterList([torch.tensor(float(V)), torch.tensor(2.5)]), [0]", "held[at[0]]", "at[0] = 1", "tensor"),
    "ParameterDict": Axis("held = torch.nn.ParameterDict({'a': torch.tensor(float(V))})", "held['a']", "held['a'] = torch.nn.Parameter(torch.tensor(float(V)))", "tensor"),
    "ModuleList element": Axis("held = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])\nheld[0].weight.data.fill_(V)", "held[0].weight[0, 0]",
                               "held[0] = torch.nn.Linear(1, 1, bias=False); held[0].weight.data.fill_(V)", "tensor"),
    "self.biases[self.layer]": Axis(
        "class Held(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = 0\n"
        "        self.biases = torch.nn.ParameterList([torch.tensor(float(V)), torch.tensor(2.5)])\n\n\nheld = Held()",
        "held.biases[held.layer]", "held.layer = 1", "tensor",
    ),
    "buffer": Axis("held = torch.nn.Module()\nheld.register_buffer('value', torch.tensor(float(V)))", "held.value", "held.value = torch.tensor(float(V))", "tensor"),
    "load_state_dict": Axis("held = torch.nn.ParameterList([torch.tensor(float(V))])", "held[0]", "held.load_state_dict({'0': torch.tensor(float(V))})", "tensor"),
    "deepcopy": Axis("held = torch.nn.ParameterList([torch.tensor(float(V))])", "held[0]", "held = copy.deepcopy(held); held[0].data.fill_(V)", "tensor"),
    "ModuleList by an index": Axis("held, at = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]), [0]", "held[at[0]].weight[0, 0]", "at[0] = 1", "tensor"),
    "ModuleDict by a name": Axis("held, at = torch.nn.ModuleDict({'x': torch.nn.Linear(1, 1), 'y': torch.nn.Linear(1, 1)}), ['x']", "held[at[0]].bias[0]", "at[0] = 'y'", "tensor"),
    "function of a tensor": Axis("held = torch.tensor([0.5, float(V)])", "torch.softmax(held, 0)[0]", "held.fill_(V)", "tensor"),
    "rows chosen by a mask": Axis("held = torch.tensor([True, False, True])", "torch.arange(3.0)[held].sum()", "held.fill_(True)", "tensor"),
    "another instance": Axis("held = torch.nn.ParameterList([torch.tensor(float(V))])", "held[0]", "held = torch.nn.ParameterList([torch.tensor(float(V))])", "tensor"),
}  # fmt: skip
_SCORES = (
    "s * {} * 0.3",
    "s + {} * h",
    "s - {} * (i - j).abs() * 0.1",
    "torch.where(i - j < {}, s, -1.0)",
    "(s if {} > 3 else -s)",
    "{} * 0.1 + (i - j) * 0.3",
)
_MASKS = ("i - j < {}", "(i - j).abs() <= {}", "(j <= i) | (j < {})", "((i >= j) if {} > 3 else (i <= j))")
ENTERED = "def entered(held):\n    with held as value:\n        return value\n\n\n"
IMPORTS = "array, collections, contextvars, copy, ctypes, dataclasses, datetime, enum, functools, itertools, math, operator, os, random, sys, threading, types, weakref"


def generate(choices: Choices) -> str:
    return text_of(choices, choices.pick(*AXES))


def text_of(c: Choices, name: str) -> str:
    """A case of one axis."""
    axis = AXES[name]
    is_mask = c.chance(30)
    body = (c.pick(*_MASKS) if is_mask else c.pick(*_SCORES)).format(axis.read)
    arguments = "b, h, i, j" if is_mask else "s, b, h, i, j"
    leaves = "q"
    if axis.kind == "tensor" and not is_mask:
        body, leaves = c.pick(body, axis.read), f"q, *(tensor for tensor in [{axis.read}] if tensor.requires_grad)"
        body = body.replace("if " + axis.read, "if " + axis.read + ".item()")
    if is_mask and axis.kind == "tensor":
        body = body.replace(axis.read, axis.read + ".detach()")
    first, second = c.pick(2, 1, 3), c.pick(5, 4, 7)
    call = f"check.flex_now(q, k, v, {'mask_mod=mod' if is_mask else 'score_mod=mod'}{'' if is_mask else f', leaves=[{leaves}]'}, what={name!r})"
    imports = "import " + "\nimport ".join(IMPORTS.split(", ")) + "\n\nimport numpy\n"
    text = header(c).replace("import torch\n", f"{imports}import torch\n", 1)
    text += "\nq, k, v = (torch.randn(1, 2, 17, 8, dtype=torch.float32) for _ in range(3))\nq.requires_grad_()\n\n"
    text += ENTERED if name == "__enter__" else ""
    text = with_value(f"{text}{axis.make}\n\n\ndef mod({arguments}):\n    return {body}\n\n\n", first)
    again = c.pick("this thread", "this thread", "this thread", "another thread", "a forked child", "a new function")
    change = with_value(axis.change, second)
    if again == "a new function":
        change += f"\n\n\ndef mod({arguments}):\n    return {with_value(body, second)}\n\n"
    text += f"{call}\n{change}\n"
    where = {"another thread": ", where=check.in_thread", "a forked child": ", where=check.in_child"}.get(again, "")
    return f"{text}{call[:-1]}{where})\n"


def with_value(text: str, value: int) -> str:
    return re.sub(r"\bV\b", str(value), text)
