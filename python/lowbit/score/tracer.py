# SPDX-License-Identifier: Apache-2.0
"""Run a score_mod or mask_mod once on proxies, and record its ops as a score program.

The mod is called with 0-d tensors that have no value. For every op on one of them, there are three cases:

- It depends only on captured tensors: it becomes a *step*, which torch runs before each call (and differentiates).
- It depends on score, b, h, q or k: it becomes instructions of the program (aten_ops.py). A tensor of a few elements
  becomes as many values.
- Neither is possible: `UnknownOp` is raised, and the caller evaluates the mod through torch.

Common functions are intercepted where Python calls them (`__torch_function__`, FUNCTIONS in aten_ops.py). Functions
composed of several ops are intercepted below, where torch dispatches them (`__torch_dispatch__`). The first use of that
is slow, because it imports hundreds of torch modules. There are no symbolic shapes and no Dynamo, so tracing is fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit.score.aten_ops import FUNCTIONS, INSTRUCTIONS, KEYWORDS, VIEWS
from lowbit.score.indexing import getitem
from lowbit.score.program import Captured, ProgramBuilder, UnknownOp, Value
from lowbit.score.proxy import Inside, Outside, Part, Proxy, RandomOp, mapped, proxies_of

MAX_ELEMENTS = 1024  # max elements of a tensor in a program (a row of a captured one): each has its own instructions
_SHAPE_READERS = {
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.__len__,
    torch.Tensor.shape.__get__,
}
_VALUE_READERS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__, torch.Tensor.__contains__, torch.equal, torch.allclose, torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.storage_offset, torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__repr__,
    torch.Tensor.__format__,
    *(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad", "grad_fn", "is_leaf", "_version")),
}  # fmt: skip
"""Attributes whose value a proxy does not know, but the tensor it stands for does."""
_NEVER_DRAW = frozenset(
    (
        "__get__",
        "__len__",
        "__getitem__",
        "__iter__",
        "dim",
        "size",
        "tensor",
        "to",
        "reshape",
        "view",
        "expand",
        "numel",
    )
)


@dataclass(slots=True)
class Steps:
    """The steps that torch runs before a call. Steps below ``leaves`` are the captured tensors; the others are
    constants or (func, args, kwargs)."""

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
                func, args, kwargs = mapped(lambda leaf: made[leaf.step] if type(leaf) is Outside else leaf, step)
                made.append(func(*args, **kwargs))
        return [made[number] for number in wanted]

    def add(self, step: Any) -> int:
        self.steps.append(step)
        return self.leaves + len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A mod that torch.compile has turned into a graph, which gets its captured tensors as further arguments."""

    graph: Callable[..., Any]
    captured: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Any:
        made = self.graph(*arguments, *self.captured)
        return made[0] if isinstance(made, (tuple, list)) and len(made) == 1 else made

    @property
    def tensors(self) -> list[Tensor]:
        return list({id(item): item for item in self.captured if isinstance(item, Tensor)}.values())


class Tracer:
    """One trace of one mod."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.program = ProgramBuilder()
        self.captured = captured
        self.steps = Steps(len(captured))
        self.sources: list[int] = []  # for each captured tensor of the program, the step that computes it
        self.reads_shapes = False  # whether the program is valid only for these shapes of captured tensors
        self.reads_values = False  # whether it is valid only for these values, and so not cached
        self.made: dict[
            int, Tensor
        ] = {}  # real tensors that the mod created; any others are neither captured nor its own
        self._declared: dict[int, Captured] = {}
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, Outside] = {}
        # The meta tensors, by number of captured tensor or step.
        self._metas = {number: _empty(tensor) for number, tensor in enumerate(captured)}
        self.proxies = {id(tensor): Proxy(self, Outside(i), self._metas[i], True) for i, tensor in enumerate(captured)}

    def argument(self, name: str, dtype: torch.dtype) -> Proxy:
        return self.inside([self.program.op(name)], torch.ones((), dtype=dtype, device="cpu"), argument=True)

    def run(self, mod: Callable[..., Any], arguments: Sequence[Proxy]) -> Any:
        if isinstance(mod, Subgraph):
            mod = Subgraph(mod.graph, tuple(self.proxies.get(id(item), item) for item in mod.captured))
        with _Capture(self):
            return mod(*arguments)

    # -- values

    def inside(self, values: Sequence[Value], meta: Tensor, argument: bool = False) -> Proxy:
        numbers = torch.tensor([self.number(value) for value in values], dtype=torch.int64, device="cpu")
        return Proxy(self, Inside(numbers.reshape(meta.shape)), meta, argument)

    def number(self, value: Value) -> int:
        number = self._numbers.setdefault(value.number, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def numbers(self, operand: Any) -> Tensor:
        """Return the numbers of an operand's values, in its shape."""
        if not isinstance(operand, Tensor):
            return torch.tensor(self.number(self.program.constant(operand)), device="cpu")
        if isinstance(operand, Proxy) and isinstance(operand.content, Inside):
            return operand.content.numbers
        if operand.numel() > MAX_ELEMENTS:
            raise UnknownOp(f"a tensor of shape {list(operand.shape)} inside the mod")
        if isinstance(operand, Proxy):
            content = operand.content
            self.reads_shapes |= operand.dim() > 0
        elif operand.requires_grad:
            content = self.constant(operand)
        else:
            found = [self.number(self.program.constant(item)) for item in operand.flatten().tolist()]
            return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(operand.shape)
        part = content if isinstance(content, Part) else Part(content, (None,) * operand.dim())
        found = [self.number(self.gather(part, at)) for at in _positions(operand.shape)]
        return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(operand.shape)

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

    def outside(self, step: Any, meta: Tensor) -> Proxy:
        number = self.steps.add(step)
        self._metas[number] = meta
        return Proxy(self, Outside(number), meta)

    def constant(self, tensor: Tensor) -> Outside:
        """Return the step for a real tensor that the mod created, or read in a way that captured.py does not detect."""
        if id(tensor) not in self._constants:
            number = self.steps.add(tensor)
            self._metas[number] = _empty(tensor)
            self._constants[id(tensor)] = Outside(number)
            self.made[id(tensor)] = tensor
        return self._constants[id(tensor)]

    def real(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that a proxy stands for if it depends only on captured tensors, else None. The program is
        then valid only for their values."""
        if not isinstance(tensor, Proxy):
            return tensor
        if not isinstance(tensor.content, Outside):
            return None
        self.reads_values = True
        return self.steps.run(self.captured, [tensor.content.step])[0]

    def real_leaf(self, leaf: Any) -> Any:
        return self.real(leaf) if isinstance(leaf, Tensor) else leaf

    def own(self, made: Any) -> Any:
        """Record the real tensors that a function returned to the mod."""
        if isinstance(made, Tensor):
            if not isinstance(made, Proxy):
                self.made[id(made)] = made
        elif isinstance(made, (tuple, list)):
            for item in made:
                self.own(item)
        return made

    def replace(self, leaf: Any) -> Any:
        """Return the proxy of a captured tensor. If captured.py did not list the tensor, the key does not cover it and
        the program is not cached."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, Proxy):
            return leaf
        proxy = self.proxies.get(id(leaf))
        if proxy is None and id(leaf) not in self.made:
            self.reads_values = True
        return leaf if proxy is None else proxy

    # -- ops

    def dispatch(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle one op. ``func`` gives the shape and dtype of its result and is run as a step; ``name`` is the ATen op
        that it stands for."""
        if name == "_local_scalar_dense":
            number = self.real(args[0])
            if number is None:
                raise DataDependent
            return number.item()
        if name == "detach":
            return self._detach(func, args[0])
        if name in ("alias", "lift_fresh", "clone", "lift_fresh_copy", "contiguous"):
            return args[0]
        proxies = proxies_of((args, kwargs))
        if all(type(proxy.content) is Outside for proxy in proxies):
            return self._step(name, func, args, kwargs, proxies)
        if name == "index":
            return INSTRUCTIONS[name](self, *args)
        meta = _meta_of(func, args, kwargs)
        if name in VIEWS:
            return self._view(name, func, args, kwargs, meta)
        if name not in INSTRUCTIONS or not isinstance(meta, Tensor):
            raise UnknownOp(f"aten.{name}")
        return INSTRUCTIONS[name](self, meta, *args, **kwargs)

    def _detach(self, func: Callable[..., Any], tensor: Proxy) -> Proxy:
        if isinstance(tensor.content, Outside):
            return self.outside((func, (tensor.content,), {}), tensor.meta)
        if tensor.is_floating_point():
            raise UnknownOp("aten.detach of a value that depends on the score")  # programs cannot stop a gradient
        return tensor

    def _step(self, name: str, func: Any, args: Any, kwargs: Any, proxies: list[Proxy]) -> Any:
        self.reads_shapes |= any([proxy.dim() > 0 for proxy in proxies])
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and (
            name != "index" or any(map(_is_mask, args[1]))
        ):
            return self.own(func(*mapped(self.real_leaf, args), **mapped(self.real_leaf, kwargs)))
        if name in ("view", "_unsafe_view") and not isinstance(args[1], torch.dtype):
            func = torch.reshape  # a captured tensor may have other strides than its proxy
        meta = _meta_of(func, args, kwargs)

        def kept(leaf: Any) -> Any:
            return leaf.content if type(leaf) is Proxy else leaf

        step = func, mapped(kept, args), mapped(kept, kwargs)
        if isinstance(meta, Tensor):
            return self.outside(step, meta)
        if not isinstance(meta, (tuple, list)):
            raise UnknownOp(str(func))
        whole = Outside(self.steps.add(step))
        return [self.outside((_item, (whole, index), {}), item) for index, item in enumerate(meta)]

    def view(self, name: str, *args: Any) -> Any:
        """Apply a view or an index op to a proxy, or to a tensor with proxy indices."""
        func = getattr(torch.ops.aten, name)
        return self.dispatch(name, func, args, {}) if proxies_of(args) else func(*args)

    def _view(self, name: str, func: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if name == "select" and isinstance(args[0].content, Part):
            part, (_, dim, index) = args[0].content, args
            free = [position for position, value in enumerate(part.indices) if value is None]
            indices = list(part.indices)
            indices[free[dim % len(free)]] = self.program.constant(index)
            return self.part(Part(part.tensor, tuple(indices)), meta)
        tensors = mapped(lambda leaf: self.numbers(leaf) if isinstance(leaf, Tensor) else leaf, args)
        if name in ("cat", "stack") and len({leaf.dtype for leaf in args[0]}) > 1:
            raise UnknownOp(f"aten.{name} of several dtypes")
        made = func(*tensors, **kwargs)
        if isinstance(made, (tuple, list)):
            return [Proxy(self, Inside(numbers), item) for numbers, item in zip(made, meta, strict=True)]
        return Proxy(self, Inside(made), meta)

    def part(self, part: Part, meta: Tensor) -> Proxy:
        if None in part.indices:
            return Proxy(self, part, meta)
        return self.inside([self.gather(part, ())], meta)

    def write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if (
            not name.endswith("_")
            or not isinstance(target, Proxy)
            or target.argument
            or not isinstance(target.content, Inside)
        ):
            raise MutatedArgument(name)
        made = INSTRUCTIONS["_to_copy"](self, target.meta, getattr(torch.ops.aten, name[:-1])(*args, **kwargs))
        target.content = made.content
        return target


class DataDependent(Exception):
    """The mod reads the value of one of its arguments."""


class MutatedArgument(Exception):
    """The mod writes to its arguments or to a captured tensor."""


class _Capture(TorchFunctionMode):
    """Replaces each captured tensor by its proxy, and tracks its reads."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        if func in _VALUE_READERS:
            tensors = [tracer.real(leaf) for leaf in args if isinstance(leaf, Tensor)]
            if all([tensor is not None for tensor in tensors]):
                tracer.reads_values = True
                return tracer.own(
                    func(*[tensors.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in args], **kwargs)
                )
        args, kwargs = mapped(tracer.replace, args), mapped(tracer.replace, kwargs) if kwargs else kwargs
        if func in _SHAPE_READERS and isinstance(args[0], Proxy):
            tracer.reads_shapes |= args[0].dim() > 0
        proxies = proxies_of((args, kwargs))
        if func is torch.Tensor.__getitem__ and proxies:
            return tracer.own(getitem(tracer.view, *args))
        name, swapped = FUNCTIONS.get(getattr(func, "__name__", ""), ("", False))
        if name and proxies and kwargs.keys() <= KEYWORDS:
            if swapped:
                return tracer.dispatch(name, lambda a, b: func(b, a), args[::-1], kwargs)
            return tracer.dispatch(name, func, args, kwargs)
        if name or not _may_draw(getattr(func, "__name__", "")):
            return tracer.own(func(*args, **kwargs))
        before = torch.random.default_generator.get_state()
        made = func(*args, **kwargs)
        if not torch.equal(before, torch.random.default_generator.get_state()):
            torch.random.default_generator.set_state(before)
            raise RandomOp
        return tracer.own(made)


@functools.cache
def _may_draw(name: str) -> bool:
    """Whether a function of this name may draw random numbers. A function that is not an ATen op may be composed of
    any."""
    if name in _NEVER_DRAW:
        return False
    packet = getattr(torch.ops.aten, name, None)
    return packet is None or any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _meta_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of an op in shape and dtype. Integer inputs are ones, so that division works, or zeros if ones
    are out of range as indices."""
    try:
        return func(*_metas(args, False), **_metas(kwargs, False))
    except (IndexError, RuntimeError):
        try:
            return func(*_metas(args, True), **_metas(kwargs, True))
        except (IndexError, RuntimeError):
            pass
        raise


def _metas(tree: Any, zeros: bool) -> Any:
    """Return the arguments of an op as tensors without data, from which the shape and dtype of its result can be
    computed."""
    small = True

    def meta(leaf: Any) -> Any:
        nonlocal small
        if not isinstance(leaf, Tensor):
            return leaf
        empty = leaf.meta if type(leaf) is Proxy else _empty(leaf)
        small &= empty.device.type == "cpu"
        return torch.zeros_like(empty) if zeros and not empty.is_floating_point() else empty

    made = mapped(meta, tree)
    return made if small else mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, made)


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and dtype. A symbolic size (torch.compile, torch.export) counts as its value at
    tracing time.

    A small tensor is a real one, because the first op on torch's meta device is slow too. It has ones, so that
    divisions by it succeed.
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
