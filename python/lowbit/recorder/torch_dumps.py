# SPDX-License-Identifier: Apache-2.0
"""Dumps of torch's own flight recorder (pickle or JSON, versions 2.x), as recordings.

They are written by NCCL's watchdog (TORCH_FR_DUMP_TEMP_FILE), `torch._C._distributed_c10d._dump_fr_trace`, or the debug
server. torch's own analyzer fails for dumps of gloo, whose entries name process groups that are missing in the dump's
table of groups. Here only the number of ranks is read from that table.
"""

from __future__ import annotations

import ast
import io
import pickle
import re
from pathlib import Path
from typing import Any

from lowbit.recorder.ring import Record, Recording, RecordingError, Sizes

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8", "Char": "int8",
    "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip
_NAMES = {
    "_allgather_base": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}


class _Plain(pickle.Unpickler):
    """An unpickler of containers, strings and numbers. It refuses anything that must be imported, so that a file cannot
    run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dump needs")


def unpickle(content: bytes, path: str) -> Any:
    """Load a pickle of plain values.

    Raises:
        RecordingError: it is not such a pickle.
    """
    try:
        return _Plain(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise RecordingError(f"{path}: not a dump of torch's flight recorder: {error}") from error


def from_torch(content: Any, path: str) -> Recording:
    """Return a dump of torch's recorder as a recording of one rank, whose number is at the end of the file's name.

    Raises:
        RecordingError: the version is not 2.x, or something is missing or of another type.
    """
    version = str(content.get("version", "")) if isinstance(content, dict) else ""
    if not version.startswith("2."):
        raise RecordingError(f"{path}: not a dump of torch's flight recorder of version 2.x, got version {version!r}")
    number = re.search(r"(\d+)$", Path(path).stem)
    try:
        rank = int(number[1]) if number else int(content.get("rank", -1))
        groups = (content.get("pg_config") or {}).values()
        world = max((len(_ranks(group)) for group in groups), default=0)
        records = sorted((_record(entry) for entry in content.get("entries", [])), key=lambda record: record.sequence)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordingError(f"{path}: a damaged dump of torch's flight recorder: {error!r}") from error
    calls = records[-1].sequence + 1 if records else 0
    return Recording(path, "", 0, rank, world, 0, 0, 0, (), len(records), calls, 0, 0, tuple(records))


def _ranks(group: Any) -> list[int]:
    told = group.get("ranks", "[]") if isinstance(group, dict) else "[]"
    try:
        return list(ast.literal_eval(told)) if isinstance(told, str) else list(told)
    except (SyntaxError, ValueError):
        return []


def _record(entry: dict[str, Any]) -> Record:
    backend, _, op = entry["profiling_name"].partition(":")
    state = "finished" if entry.get("retired") or entry["state"] == "completed" else "started"
    created = int(entry["time_created_ns"])
    ended = entry.get("time_discovered_completed_ns")
    sizes, dtypes = entry["input_sizes"], entry.get("input_dtypes") or []
    tensors = tuple(
        Sizes(str(_DTYPES.get(dtype, dtype)), tuple(map(int, shape)), len(shape))
        for shape, dtype in zip(sizes, dtypes, strict=False)
    )
    group = entry["process_group"]
    return Record(
        int(entry["record_id"]), f"c10d.{_NAMES.get(op, op)}", f"{backend}:{group[0]} {group[1]}", state, "", 0,
        int(entry.get("thread_id") or 0), 0, created, int(ended or 0), "", 0, 0, 0,
        -1 if entry.get("is_p2p") else int(entry["collective_seq_id"]), tensors,
    )  # fmt: skip
