# SPDX-License-Identifier: Apache-2.0
"""Recording of torch.distributed's collectives of CPU tensors, by kernels in front of those of c10d's ops.

Every collective goes through an op of c10d, whether it comes from torch.distributed, DDP, FSDP or DTensor. The kernel
here is registered at the key AutogradCPU. It opens a record and redispatches; the future of the work closes the record.
For other devices torch has its own recorder, whose dumps `python -m lowbit recorder` reads too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from lowbit import _C
from lowbit.recorder.ring import BETWEEN_TWO

_OPS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor"),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensors", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensors", "outputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all_single", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("monitored_barrier", ""),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv_any_source", "tensors"),
}
"""For each op of c10d: its name in records, and the argument whose sizes are recorded."""
_library: list[torch.library.Library] = []
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # number of the next collective, by group
_rows: dict[str, str] = {}
_pending: list[tuple[Any, tuple[int, int]]] = []  # works without a future (sends and receives), with their records
_MOST_PENDING = 64


def hook() -> None:
    """Do the work of `lowbit.recorder.record_collectives`."""
    if _library:
        return
    if not torch.distributed.is_available():
        raise RuntimeError("record_collectives: this torch was built without torch.distributed")
    _C.recorder.start(None, "")
    library = torch.library.Library("c10d", "IMPL")
    for name, (recorded, tensors) in _OPS.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, recorded, tensors), "AutogradCPU", with_keyset=True)
    _library.append(library)


def _kernel(op: Any, recorded: str, tensors: str) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    group_at, tensors_at = names.index("process_group"), names.index(tensors) if tensors else None

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        _close_pending()
        sizes = [] if tensors_at is None else _sizes(arguments[tensors_at])
        handle = _open(recorded, arguments[group_at], sizes)
        try:
            result = op.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)
            _close_when_done(result, handle)
        except BaseException:
            _C.recorder.close_call(handle, False)
            raise
        return result

    return kernel


def _sizes(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _open(recorded: str, boxed: Any, tensors: list[torch.Tensor]) -> tuple[int, int]:
    group = torch.distributed.ProcessGroup.unbox(boxed)
    name = group.group_name
    row = _rows.get(name)
    if row is None:
        row = _rows[name] = f"{group._get_backend(torch.device('cpu')).name()}:{name} {group.group_desc}"[:47]
        if torch.distributed.is_initialized():
            _C.recorder.set_rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    op = f"c10d.{recorded}"
    number = -1 if op in BETWEEN_TWO else next(_numbers[name])
    sizes = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors[:3]]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return _C.recorder.open_call(op, row, sizes, moved, number)


def _close_when_done(result: Any, handle: tuple[int, int]) -> None:
    boxed = result[-1] if isinstance(result, tuple) else result
    if boxed is None:  # monitored_barrier blocks
        _C.recorder.close_call(handle, True)
        return
    work = torch.distributed.Work.unbox(boxed)
    try:
        future = work.get_future()
    except RuntimeError:  # gloo's sends and receives, which complete when they are waited for
        _pending.append((work, handle))
        return
    future.add_done_callback(lambda done: _C.recorder.close_call(handle, _succeeded(done)))


def _close_pending() -> None:
    """Close the records of completed works, and of the oldest ones if too many are pending."""
    for entry in _pending[:]:
        if entry[0].is_completed() or len(_pending) > _MOST_PENDING:
            _pending.remove(entry)
            _C.recorder.close_call(entry[1], True)


def _succeeded(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return False
    return True
