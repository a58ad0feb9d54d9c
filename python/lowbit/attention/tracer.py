# SPDX-License-Identifier: Apache-2.0
"""Run a score_mod or mask_mod once on stand-ins, and write down what it does as a score program.

The mod is called with 0-d tensors that hold no number. Every op on one of them does one of three things:

- it depends on captured tensors alone: it becomes a *step*, which torch runs before each call (and differentiates);
- it depends on score, b, h, q or k: it becomes instructions of the program (aten_ops.py). A tensor of a few elements is so many values;
- neither is possible: `UnknownOp`, and the caller evaluates the mod through torch.

The usual functions are caught where Python calls them (`__torch_function__`, FUNCTIONS in aten_ops.py); what is built of several
ops, below, where torch dispatches them (`__torch_dispatch__`): the first use of that imports 800 modules of torch, 1.2 s. There is no
symbolic shape and no Dynamo in this: a mod of ten ops is traced in about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from lowbit.attention.aten_ops import FUNCTIONS, INSTRUCTIONS, KEYWORDS, VIEWS
from lowbit.attention.indexing import getitem
from lowbit.attention.program import Captured, ProgramBuilder, UnknownOp, Value
from lowbit.attention.stand_in import Inside, Outside, Part, StandIn

MAX_ELEMENTS = 1024  # of a tensor inside a program (a row of a captured tensor): every element is instructions
_SHAPE_READERS = {
    torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__, torch.Tensor.stride, torch.Tensor.shape.__get__,
}  # fmt: skip
_VALUE_READERS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
    torch.Tensor.__index__, torch.Tensor.__contains__, torch.equal, torch.allclose,
}  # fmt: skip


@dataclass(slots=True)
class Steps:
    """What torch runs before a call. Step i < leaves is captured tensor i; the others are constants, or (func, args, kwargs)."""

    leaves: int
    steps: list[Tensor | tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def run(self, captured: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
        if all(number < self.leaves for number in wanted):
            return [captured[number] for number in wanted]
        made: list[Any] = list(captured)
        for step in self.steps:
            if isinstance(step, Tensor):
                made.append(step)
            else:
                func, args, kwargs = tree_map(lambda leaf: made[leaf.step] if isinstance(leaf, Outside) else leaf, step)
                made.append(func(*args, **kwargs))
        return [made[number] for number in wanted]

    def add(self, step: Any) -> int:
        self.steps.append(step)
        return self.leaves + len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A mod that torch.compile has taken apart: a graph that gets what it captured as further arguments."""

    graph: Callable[..., Any]
    captured: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Any:
        made = self.graph(*arguments, *self.captured)
        return made[0] if isinstance(made, (tuple, list)) and len(made) == 1 else made

    @property
    def tensors(self) -> list[Tensor]:
        return list({id(item): item for item in self.captured if isinstance(item, Tensor)}.values())


class Tracer:
    """One run of one mod."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.program = ProgramBuilder()
        self.steps = Steps(len(captured))
        self.sources: list[int] = []  # per captured tensor of the program the step that makes it
        self.reads_shapes = False     # the program holds for captured tensors of these shapes only
        self.reads_values = False     # and of these values: it is not kept
        self.foreign: list[Tensor] = []
        self._declared: dict[int, Captured] = {}
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, Outside] = {}
        self._metas = {number: _empty(tensor) for number, tensor in enumerate(captured)}  # of steps
        self.stand_ins = {id(tensor): StandIn(self, Outside(i), self._metas[i], True) for i, tensor in enumerate(captured)}

    def argument(self, name: str, dtype: torch.dtype) -> StandIn:
        return self.inside([self.program.op(name)], torch.ones((), dtype=dtype), argument=True)

    def run(self, mod: Callable[..., Any], arguments: Sequence[StandIn]) -> Any:
        if isinstance(mod, Subgraph):
            mod = Subgraph(mod.graph, tuple(self.stand_ins.get(id(item), item) for item in mod.captured))
        with _Capture(self):
            return mod(*arguments)

    # -- values

    def inside(self, values: Sequence[Value], meta: Tensor, argument: bool = False) -> StandIn:
        numbers = torch.tensor([self.number(value) for value in values], dtype=torch.int64).reshape(meta.shape)
        return StandIn(self, Inside(numbers), meta, argument)

    def number(self, value: Value) -> int:
        number = self._numbers.setdefault(value.number, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def numbers(self, operand: Any) -> Tensor:
        """The values of an operand, as numbers in its shape."""
        if isinstance(operand, StandIn):
            content = operand.content
            if isinstance(content, Inside):
                return content.numbers
            if operand.numel() > MAX_ELEMENTS:
                raise UnknownOp(f"a tensor of shape {list(operand.shape)} inside the mod")
            part = content if isinstance(content, Part) else Part(content, (None,) * operand.dim())
            self.reads_shapes |= operand.dim() > 0
            numbers = torch.empty(operand.shape, dtype=torch.int64)
            for at in _positions(operand.shape):
                numbers[at] = self.number(self.gather(part, at))
            return numbers
        if isinstance(operand, Tensor):
            if operand.numel() > MAX_ELEMENTS:
                raise UnknownOp(f"a tensor of shape {list(operand.shape)} made inside the mod")
            constants = [self.number(self.program.constant(item)) for item in operand.flatten().tolist()]
            return torch.tensor(constants, dtype=torch.int64).reshape(operand.shape)
        return torch.tensor(self.number(self.program.constant(operand)))

    def values(self, numbers: Tensor) -> list[Value]:
        return [self._values[number] for number in numbers.flatten().tolist()]

    def gather(self, part: Part, at: Sequence[int]) -> Value:
        left = iter(at)
        indices = [self.program.constant(next(left)) if index is None else index for index in part.indices]
        return self.program.gather(self.declared(part.tensor), *indices)

    def declared(self, tensor: Outside) -> Captured:
        if tensor.step not in self._declared:
            meta = self._metas[tensor.step]
            type = "float" if meta.is_floating_point() else "bool" if meta.dtype == torch.bool else "int"
            source = tensor.step
            if type == "int" and meta.dtype not in (torch.int32, torch.int64):
                source = self.steps.add((torch.Tensor.to, (tensor, torch.int32), {}))
            self.sources.append(source)
            self._declared[tensor.step] = self.program.captured(type, meta.dim())
        return self._declared[tensor.step]

    def outside(self, step: Any, meta: Tensor) -> StandIn:
        number = self.steps.add(step)
        self._metas[number] = meta
        return StandIn(self, Outside(number), meta)

    def constant(self, tensor: Tensor) -> Outside:
        """A real tensor that the mod made, or that nobody told us of."""
        if id(tensor) not in self._constants:
            number = self.steps.add(tensor)
            self._metas[number] = _empty(tensor)
            self._constants[id(tensor)] = Outside(number)
            self.foreign.append(tensor)  # keeps the id taken
        return self._constants[id(tensor)]

    # -- ops

    def dispatch(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op: ``func`` (for shape and dtype of its result, and as a step), meaning the ATen op ``name``."""
        if name == "_local_scalar_dense":
            raise DataDependent
        if name == "detach":
            return self._detach(func, args[0])
        if name in ("alias", "lift_fresh", "clone", "lift_fresh_copy", "contiguous"):
            return args[0]
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        if all(isinstance(stand_in.content, Outside) for stand_in in stand_ins):
            return self._step(func, args, kwargs, stand_ins)
        if name == "index":
            return INSTRUCTIONS[name](self, *args)
        meta = func(*_metas(args), **_metas(kwargs))
        if name in VIEWS:
            return self._view(name, func, args, kwargs, meta)
        if name not in INSTRUCTIONS or not isinstance(meta, Tensor):
            raise UnknownOp(f"aten.{name}")
        return INSTRUCTIONS[name](self, meta, *args, **kwargs)

    def _detach(self, func: Callable[..., Any], tensor: StandIn) -> StandIn:
        if isinstance(tensor.content, Outside):
            return self.outside((func, (tensor.content,), {}), tensor.meta)
        if tensor.is_floating_point():
            raise UnknownOp("aten.detach of what depends on the score")  # programs have nothing that stops a gradient
        return tensor

    def _step(self, func: Any, args: Any, kwargs: Any, stand_ins: list[StandIn]) -> Any:
        self.reads_shapes |= any(stand_in.dim() > 0 for stand_in in stand_ins)
        meta = func(*_metas(args), **_metas(kwargs))

        def kept(leaf: Any) -> Any:
            return leaf.content if isinstance(leaf, StandIn) else leaf

        step = func, tree_map(kept, args), tree_map(kept, kwargs)
        if isinstance(meta, Tensor):
            return self.outside(step, meta)
        if not isinstance(meta, (tuple, list)):
            raise UnknownOp(str(func))
        whole = Outside(self.steps.add(step))
        return [self.outside((_item, (whole, index), {}), item) for index, item in enumerate(meta)]

    def view(self, name: str, *args: Any) -> Any:
        """A view or an index of a stand-in, or of a tensor by a stand-in."""
        func = getattr(torch.ops.aten, name)
        return self.dispatch(name, func, args, {}) if tree_any(_is_stand_in, args) else func(*args)

    def _view(self, name: str, func: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if name == "select" and isinstance(args[0].content, Part):
            part, (_, dim, index) = args[0].content, args
            free = [position for position, value in enumerate(part.indices) if value is None]
            indices = list(part.indices)
            indices[free[dim % len(free)]] = self.program.constant(index)
            return self.part(Part(part.tensor, tuple(indices)), meta)
        tensors = tree_map(lambda leaf: self.numbers(leaf) if isinstance(leaf, Tensor) else leaf, args)
        if name in ("cat", "stack") and len({leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}) > 1:
            raise UnknownOp(f"aten.{name} of several dtypes")
        made = func(*tensors, **kwargs)
        if isinstance(made, (tuple, list)):
            return [StandIn(self, Inside(numbers), item) for numbers, item in zip(made, meta, strict=True)]
        return StandIn(self, Inside(made), meta)

    def part(self, part: Part, meta: Tensor) -> StandIn:
        if None in part.indices:
            return StandIn(self, part, meta)
        return self.inside([self.gather(part, ())], meta)

    def write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if not name.endswith("_") or not isinstance(target, StandIn) or target.argument or not isinstance(target.content, Inside):
            raise MutatedArgument(name)
        made = INSTRUCTIONS["_to_copy"](self, target.meta, getattr(torch.ops.aten, name[:-1])(*args, **kwargs))
        target.content = made.content
        return target


class DataDependent(Exception):
    """The mod asks for the number behind one of its arguments."""


class MutatedArgument(Exception):
    """The mod writes to its arguments or to a captured tensor."""


class _Capture(TorchFunctionMode):
    """Puts the stand-in in place of each captured tensor, and watches what is read from it."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        if func in _VALUE_READERS and id(args[0]) in tracer.stand_ins:
            tracer.reads_values = True
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._replace, (args, kwargs))
        if func in _SHAPE_READERS and isinstance(args[0], StandIn):
            tracer.reads_shapes |= args[0].dim() > 0
        if func is torch.Tensor.__getitem__ and (isinstance(args[0], StandIn) or tree_any(_is_stand_in, args[1])):
            return getitem(tracer.view, *args)
        name, swapped = FUNCTIONS.get(getattr(func, "__name__", ""), ("", False))
        if name and kwargs.keys() <= KEYWORDS and tree_any(_is_stand_in, (args, kwargs)):
            if swapped:
                return tracer.dispatch(name, lambda a, b: func(b, a), args[::-1], kwargs)
            return tracer.dispatch(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _replace(self, leaf: Any) -> Any:
        return self.tracer.stand_ins.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf


def _is_stand_in(leaf: Any) -> bool:
    return isinstance(leaf, StandIn)


def _metas(tree: Any) -> Any:
    """The arguments of an op as tensors that it can be asked for the shape and dtype of its result with."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    small = all(leaf.numel() <= MAX_ELEMENTS for leaf in tensors)

    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        empty = leaf.meta if isinstance(leaf, StandIn) else _empty(leaf)
        return empty if small == (empty.device.type == "cpu") else torch.empty(empty.shape, dtype=empty.dtype, device="meta")

    return tree_map(meta, tree)


def _empty(tensor: Tensor) -> Tensor:
    """A tensor of this shape and dtype; a symbolic size (torch.compile, torch.export) counts as what it is while tracing.

    A small one is real (ones: nothing divides by them in vain), as the first op on torch's meta device costs the 1.2 s as well.
    """
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    return torch.ones(sizes, dtype=tensor.dtype, device="cpu" if math.prod(sizes) <= MAX_ELEMENTS else "meta")


def _item(items: Sequence[Any], index: int) -> Any:
    return items[index]


def _positions(shape: torch.Size) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = [()]
    for size in shape:
        made = [(*head, index) for head in made for index in range(size)]
    return made
