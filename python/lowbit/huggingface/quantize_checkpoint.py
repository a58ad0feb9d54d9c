# SPDX-License-Identifier: Apache-2.0
"""quantize_checkpoint: copy a transformers checkpoint with packed weights, one tensor at a time.

The work is done in ``<out>.partial``, which is renamed to ``out`` at the end. Each shard is written under a temporary
name, read back and compared by checksum, and then renamed. ``progress.json`` lists the finished shards with their
checksums, so that an interrupted run can resume.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from lowbit import _C
from lowbit.checkpoints.merged_weights import MergedWeight, merged_weights
from lowbit.checkpoints.methods.settings import settings_of
from lowbit.checkpoints.names import model_names
from lowbit.checkpoints.progress import CheckpointProgress
from lowbit.documents.whole_file import replaced_file, write_whole
from lowbit.huggingface.calibrate_by_layer import calibrated_by_layer, fits
from lowbit.huggingface.checkpoint_folder import copy_others, skeleton_of, write_config
from lowbit.huggingface.convert_checkpoint import convert_checkpoint
from lowbit.huggingface.lowbit_config import CHECKPOINT, METHOD, LowbitConfig
from lowbit.huggingface.plan_file import check_is_whole, read_plan
from lowbit.huggingface.quantizer import LowbitQuantizer, metadata_of
from lowbit.huggingface.selection import Selection
from lowbit.ops.fakes import FLOATS
from lowbit.quant.kinds import layout_name, weights_of
from lowbit.quant.output_head import INT8
from lowbit.quant.own_text import SELF
from lowbit.quant.packing import Matrices, Selected, check_finite, pack_group, pack_weight
from lowbit.quant.report import QuantizationReport, ReportRow, in_model_order, row_name
from lowbit.quant.safetensors_file import (
    DTYPES,
    INDEX,
    Entry,
    SafetensorsFile,
    bytes_of,
    file_checksum,
    safetensors_files,
    write_safetensors,
)


def quantize_checkpoint(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: Any = None,
    *,
    plan: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    modules_to_not_convert: list[str] | None = None,
    embeddings: Any = None,
    head: Any = INT8,
    calibration: Any = None,
    activations: str | None = None,
) -> QuantizationReport:
    """Quantize a transformers checkpoint into a new folder, which ``from_pretrained`` and `lowbit.load` read.

    A checkpoint that another package quantized needs no ``config``: its codes are packed as they are
    (docs/checkpoints.md), with one layer in memory at a time. An interrupted run then begins anew.

    Memory holds one tensor at a time, packed and as the checkpoint stores it; experts that it stores separately are
    read and packed one by one. After an interruption, the same call resumes the run and checks the files written so far
    by checksum. Layers that transformers splits while it loads (fused projections of a few models) stay float; the
    report names them.

    Args:
        model: the folder, with ``config.json`` and safetensors files.
        out: the folder to create, which must not exist.
        config, modules_to_not_convert, embeddings, head: the arguments of `lowbit.LowbitConfig`. For a checkpoint with
            codes of another package, ``config`` is "checkpoint" or None, and the others are not given.
        calibration: the argument of `lowbit.LowbitConfig`; text goes through the tokenizer of the folder. The whole
            float model is then in memory, and an interrupted run begins anew. With "self", a model whose files take
            more than half of the free memory is calibrated layer by layer, with one float layer at a time: weights that
            were packed without data write its text (the report says so).
        plan: the argument of `lowbit.LowbitConfig`, or the path of a JSON file: a saved Plan of autoquant, or an object
            that maps names of layers to configurations. Without ``config``, a saved Plan must have a row for each
            linear layer.
        activations: the argument of `lowbit.LowbitConfig` for a checkpoint with codes of another package; None for
            others.

    Returns:
        A `QuantizationReport`.

    Raises:
        FileNotFoundError: the folder has no such checkpoint.
        FileExistsError: ``out`` exists.
        ValueError: the checkpoint was packed by lowbit, or another package quantized it and formats are given, or none
            did and ``activations`` are; it lacks an expert, a configuration has GPTQ without calibration, weights are
            not finite, codes are not as their method has them, the settings differ from those of the interrupted run, a file of that run is
            damaged, or a written file reads back differently; or a plan from a file has an error, which is named with
            the file and the layer.

    Example:
        >>> lowbit.quantize_checkpoint("llama", "llama-int4", "int4_weight_only(group_size=32)")
    """
    source, target = Path(model), Path(out)
    if target.exists():
        raise FileExistsError(f"quantize_checkpoint: out must be a new folder, got {target}")
    told = settings_of(source)
    if told is not None:
        asked = {"config": None if config == CHECKPOINT else config, "plan": plan, "calibration": calibration}
        asked |= {"modules_to_not_convert": modules_to_not_convert, "embeddings": embeddings}
        asked |= {} if head == INT8 else {"head": head}
        _check_takes_codes(source, told, [name for name, value in asked.items() if value is not None or name == "head"])
        LowbitConfig(CHECKPOINT, activations=activations)  # checks the argument
        return convert_checkpoint(source, target, skeleton_of(source), told, activations)
    nothing = config is None and plan is None and embeddings is None
    if nothing or config == CHECKPOINT or activations is not None:
        raise ValueError(
            f"quantize_checkpoint: needs config, plan or embeddings, and no activations, for {source}, which has no "
            f"codes of another package; got config={config!r} and activations={activations!r}"
        )
    formats, lists_all = (
        (plan, False) if plan is None or isinstance(plan, Mapping) else read_plan(Path(plan), calibration)
    )
    settings = LowbitConfig(
        config, modules_to_not_convert, plan=formats, embeddings=embeddings, head=head, calibration=calibration
    )
    skeleton = skeleton_of(source)
    if lists_all and config is None:
        check_is_whole(Path(plan), formats, skeleton)
    if calibration is not None:
        return _calibrated(source, target, settings, skeleton)
    run = _Run(source, target.with_name(f"{target.name}.partial"), settings, skeleton)
    with run.progress_bar() as tell:
        for file in run.files:
            run.shard(file, tell)
    run.finish(target)
    return run.report()


def _check_takes_codes(source: Path, told: Mapping[str, Any], asked: list[str]) -> None:
    """Raise ValueError if a quantized folder is lowbit's own, or formats are asked for, which need float weights."""
    method = told.get("quant_method")
    if method == METHOD or asked:
        how = "" if method == METHOD else f", or leave out {', '.join(asked)}: its codes are packed as they are"
        raise ValueError(
            f"quantize_checkpoint: {source} is quantized already, by {method!r}; give it the float model{how}"
        )


def _calibrated(source: Path, target: Path, settings: LowbitConfig, skeleton: nn.Module) -> QuantizationReport:
    """Load the model, pack its layers with the calibration of the settings, and save it.

    Its float weights are loaded as a whole if they fit into memory, and otherwise layer by layer.
    """
    own = settings.calibration == SELF
    if own and not fits(source):
        model = calibrated_by_layer(source, settings, skeleton)
    else:
        settings.tokenizer = None if own else AutoTokenizer.from_pretrained(source, local_files_only=True)
        model = type(skeleton).from_pretrained(
            source, quantization_config=settings, dtype="auto", local_files_only=True
        )
    folder = target.with_name(f"{target.name}.partial")
    if folder.exists():  # of an interrupted run
        shutil.rmtree(folder)
    model.save_pretrained(folder)
    copy_others(source, folder)
    os.rename(folder, target)
    return model.hf_quantizer.report


class _Run:
    """The state of one run: the structure of the model, the layers to pack, and the finished shards."""

    def __init__(self, source: Path, folder: Path, settings: LowbitConfig, model: nn.Module) -> None:
        self.source, self.folder, self.settings, self.model = source, folder, settings, model
        self.files = [SafetensorsFile(path) for path in safetensors_files(source)]
        quantizer = LowbitQuantizer(settings, pre_quantized=False)
        self.left = quantizer.select(self.model)
        self.selection: Selection = quantizer.selection
        self.homes = {key: file for file in self.files for key in file.entries}
        self.names = model_names(self.model, self.homes)
        self.merged = {key: weight for weight in self._merged_weights() for key in weight.sources}
        stats = [(file.path.name, file.path.stat()) for file in self.files]
        identity = {
            "settings": settings.to_dict() | {"lowbit": _C.version, "layout": _C.LAYOUT},
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.progress = CheckpointProgress(folder, identity)

    def progress_bar(self) -> Any:
        """Return a progress bar over the bytes read, shown in a terminal. As a context manager, it gives the function
        that advances it."""
        return _Bar(sum(entry.nbytes for file in self.files for entry in file.entries.values()))

    def shard(self, file: SafetensorsFile, tell: Callable[[int], None]) -> None:
        """Write one shard and record it, unless it is already finished."""
        name = file.path.name
        if name in self.progress.rows:
            tell(sum(entry.nbytes for entry in file.entries.values()))
            return
        rows: list[ReportRow] = []
        entries, tensors, formats = self._parts(file, rows, tell)
        metadata = {"format": "pt"} | file.metadata | metadata_of(formats)
        with replaced_file(self.folder / name) as path:
            crc = write_safetensors(path, entries, tensors, metadata)
            written = SafetensorsFile(path)
            if file_checksum(path) != crc or written.entries != entries:
                raise ValueError(
                    f"quantize_checkpoint: {path} must read back as it was written, and differs: is the disk broken?"
                )
        self.progress.add(name, crc, rows)

    def _parts(
        self, file: SafetensorsFile, rows: list[ReportRow], tell: Callable[[int], None]
    ) -> tuple[dict[str, Entry], list[Iterable[bytes]], list[str]]:
        """Return the tensors of the new shard, the chunks of their bytes, and their formats. Packed weights come first,
        so that they are aligned to cache lines. Nothing is read until it is written."""
        packed: dict[str, tuple[Entry, Iterable[bytes]]] = {}
        others: dict[str, tuple[Entry, Iterable[bytes]]] = {}
        formats = set()
        for key, entry in file.entries.items():
            merged = self.merged.get(key)
            if merged is not None and key != merged.sources[0]:
                continue  # packed together with the first source
            layers = self._layers(key, entry) if merged is None else self._merged_layer(merged)
            if not layers:
                others[key] = entry, _told(file.chunks(key), tell)
                continue
            source, (key, item) = key, next(iter(layers.items()))
            read = functools.partial(self._read, source, merged, file, item)
            nbytes = sum(self.homes[one].entries[one].nbytes for one in (merged.sources if merged else (source,)))
            layout = self.selection.layout(item.name)
            shape = item.weight.stored(item.spec, layout).shape
            packed[key] = Entry("U8", shape, math.prod(shape)), _packed(read, nbytes, layers, layout, rows, tell)
            for name, item in layers.items():
                stored = item.weight.stored(item.spec, layout)
                numbers = torch.tensor(stored.numbers, dtype=torch.int64, device="cpu")
                others[layout_name(name)] = (
                    Entry("I64", tuple(numbers.shape), numbers.nbytes),
                    [bytes(bytes_of(numbers))],
                )
                formats.add(item.spec.name)
        parts = packed | others
        return {key: entry for key, (entry, _) in parts.items()}, [part for _, part in parts.values()], sorted(formats)

    def _merged_weights(self) -> Iterator[MergedWeight]:
        """Yield the weights to pack that transformers merges.

        Raises:
            ValueError: the checkpoint lacks tensors of one, or they have another size.
        """
        for weight in merged_weights(self.model, self.homes).values():
            found = self.selection.find(weight.name)
            if found is None:
                continue
            entries, wanted = [self.homes[key].entries[key] for key in weight.sources], found[2].float_shape
            if any(DTYPES.get(entry.dtype) not in FLOATS for entry in entries):
                dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
                raise ValueError(
                    f"quantize_checkpoint: {weight.name} must be float32, bfloat16 or float16, got {dtypes}"
                )
            missing = ", ".join(map(str, weight.missing(wanted[0])[:5])) if weight.by_expert else ""
            if missing or sum(math.prod(entry.shape) for entry in entries) != math.prod(wanted):
                got = f"expert {missing} is missing" if missing else f"{len(entries)} of {list(entries[0].shape)}"
                raise ValueError(f"quantize_checkpoint: {weight.name} must have shape {list(wanted)}, got {got}")
            yield weight

    def _merged_layer(self, weight: MergedWeight) -> dict[str, Selected]:
        dtype = DTYPES[self.homes[weight.sources[0]].entries[weight.sources[0]].dtype]
        return {weight.name: self.selection.selected(weight.name, torch.empty(0, dtype=dtype, device="cpu"))}

    def _read(
        self, key: str, merged: MergedWeight | None, file: SafetensorsFile, item: Selected
    ) -> torch.Tensor | Matrices:
        """Return the float weight to pack of a tensor, or of the tensors to merge; separate experts are read one by
        one."""

        def read(one: str) -> torch.Tensor:
            return self.homes[one].read(one)

        def checked(label: str, value: torch.Tensor) -> torch.Tensor:
            check_finite("quantize_checkpoint", f"{label} of {file.path}", value)
            return item.weight.matrix(value)

        if merged is None:
            return checked(key, file.read(key))
        if not merged.by_expert:
            return checked(merged.name, merged.value(read))
        shape = list(item.weight.float_shape[1:])

        def expert(number: int) -> torch.Tensor:
            value, label = merged.expert(number, read), f"expert {number} of {merged.name}"
            if list(value.shape) != shape:
                raise ValueError(f"quantize_checkpoint: {label} must have shape {shape}, got {list(value.shape)}")
            return checked(label, value)

        return Matrices(item.weight.experts, expert)

    def _layers(self, key: str, entry: Entry) -> dict[str, Selected]:
        """Return the layer with this weight, and the tied layers that have none in the checkpoint, by the names of
        their weights. The result is empty if the weight is not packed."""
        parameter, selection = self.names[key], self.selection
        found = None if parameter is None else selection.find(parameter)
        if found is None:
            return {}
        (name, _, weight), dtype = found, DTYPES.get(entry.dtype)
        if dtype not in FLOATS or entry.shape != weight.float_shape:
            raise ValueError(
                f"quantize_checkpoint: {key} must be float32, bfloat16 or float16 of shape "
                f"{list(weight.float_shape)}, got {entry.dtype} {list(entry.shape)}"
            )
        there = set(self.names.values())
        sharing = [f"{other}.{weight.key}" for other in selection.shared_with(name)]
        like = torch.empty(0, dtype=dtype, device="cpu")
        # A name ending in "weight" would be separated from its layout when transformers renames it.
        own = key if weight.experts is None else parameter
        names = {own: parameter} | {other: other for other in sharing if other not in there}
        return {of: selection.selected(one, like) for of, one in names.items()}

    def finish(self, target: Path) -> None:
        """Write the other files of the checkpoint, and rename the folder."""
        for path in self.folder.glob("*.tmp"):  # left by killed runs
            shutil.rmtree(path)
        copy_others(self.source, self.folder)
        homes = {key: file.path.name for file in self.files for key in self._written(file).entries}
        if (self.source / INDEX).exists():
            size = sum(entry.nbytes for file in self.files for entry in self._written(file).entries.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
            write_whole(self.folder / INDEX, json.dumps(index, indent=2))
        write_config(self.source, self.folder, self.settings.to_dict())
        self.progress.remove()
        os.rename(self.folder, target)
        self.folder = target

    def report(self) -> QuantizationReport:
        """Return the report of this run and the runs that it resumed."""
        report = QuantizationReport(str(self.settings.config or "by plan"))
        rows = {row.layer: row for part in self.progress.rows.values() for row in part}
        rows |= {row.layer: row for row in self.left}
        note = "transformers makes its weight out of others while it loads, or the checkpoint has none"
        for name in self.selection.layers:
            module = self.model.get_submodule(name)
            if not any(row_name(name, module, weight) in rows for weight in weights_of(module)):
                rows[name] = ReportRow.skipped(name, module, note)
        report.rows = in_model_order(self.model, rows.values())
        for files, name in ((self.files, "model_bytes_before"), (map(self._written, self.files), "model_bytes_after")):
            setattr(report, name, sum(entry.nbytes for file in files for entry in file.entries.values()))
        return report

    def _written(self, file: SafetensorsFile) -> SafetensorsFile:
        return SafetensorsFile(self.folder / file.path.name)


def _packed(
    read: Callable[[], torch.Tensor | Matrices],
    nbytes: int,
    layers: Mapping[str, Selected],
    layout: str,
    rows: list[ReportRow],
    tell: Callable[[int], None],
) -> Iterator[bytes]:
    """Pack the weight of these layers, of so many bytes, and add a report row for each."""
    first, *_ = layers.values()
    make = functools.partial(pack_weight, read(), first.spec, None)
    packed, made = pack_group([*layers.values()], make, nbytes, layout=layout, hold=False)
    rows += made
    tell(nbytes)
    del make, read
    yield bytes_of(packed)  # type: ignore[misc]


def _told(chunks: Iterable[bytes], tell: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        tell(len(chunk))


class _Bar:
    """A tqdm progress bar, shown in a terminal if tqdm is installed."""

    def __init__(self, total: int) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(total=total, desc="quantize", unit="B", unit_scale=True, disable=None)

    def __enter__(self) -> Callable[[int], None]:
        return (lambda count: None) if self.bar is None else self.bar.update

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
