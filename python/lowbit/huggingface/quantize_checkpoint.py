# SPDX-License-Identifier: Apache-2.0
"""quantize_checkpoint: a folder of transformers in, the same folder with packed weights out, one tensor at a time.

The work is done in ``<out>.partial``, which becomes ``out`` at the end by one rename. Each shard is written under a
temporary name, read back and compared by checksum, and then renamed; ``progress.json`` lists those that are done with
their checksums, so that an interrupted run resumes where it stopped.
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
import transformers
from torch import nn
from transformers import AutoConfig

from lowbit import _C
from lowbit.checkpoints.merged_weights import MergedWeight, merged_weights
from lowbit.checkpoints.names import model_names
from lowbit.checkpoints.progress import CheckpointProgress
from lowbit.documents.whole_file import replaced_file, write_whole
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.huggingface.quantizer import LowbitQuantizer, metadata_of
from lowbit.huggingface.selection import Selection
from lowbit.ops.fakes import FLOATS
from lowbit.quant.kinds import layout_name, weights_of
from lowbit.quant.output_head import INT8
from lowbit.quant.packing import Selected, check_finite, pack_group, pack_weight
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

_CONFIG = "config.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}  # weights: not copied


def quantize_checkpoint(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: Any = None,
    *,
    plan: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    modules_to_not_convert: list[str] | None = None,
    embeddings: Any = None,
    head: Any = INT8,
) -> QuantizationReport:
    """Quantize a checkpoint of transformers into a new folder, which ``from_pretrained`` and `lowbit.load` read.

    One tensor at a time is in memory, or those of a layer's experts, which transformers merges while it loads. A run
    that was interrupted is taken up by the same call, which compares its files with their checksums. Layers that
    transformers splits while it loads (fused projections of a few models) stay float; the report names them.

    Args:
        model: the folder, with ``config.json`` and safetensors files.
        out: the folder to make; there must be none.
        config, modules_to_not_convert, embeddings, head: the arguments of `lowbit.LowbitConfig`.
        plan: the argument of `lowbit.LowbitConfig`, or a JSON file: one that a Plan of autoquant saved, or an object of
            names and configurations of layers.

    Returns:
        A QuantizationReport.

    Raises:
        FileNotFoundError: the folder holds no such checkpoint.
        FileExistsError: ``out`` is there.
        ValueError: the checkpoint is quantized already or lacks an expert, a configuration is with GPTQ, which needs
            inputs of the model, weights are not finite, the settings are not those of an interrupted run, a file of
            that run is damaged, or a written file reads back otherwise.

    Example:
        >>> lowbit.quantize_checkpoint("llama", "llama-int4", "int4_weight_only(group_size=32)")
    """
    source, target = Path(model), Path(out)
    if target.exists():
        raise FileExistsError(f"quantize_checkpoint: out must be a new folder, got {target}")
    settings = LowbitConfig(config, modules_to_not_convert, plan=_read_plan(plan), embeddings=embeddings, head=head)
    run = _Run(source, target.with_name(f"{target.name}.partial"), settings)
    with run.progress_bar() as tell:
        for file in run.files:
            run.shard(file, tell)
    run.finish(target)
    return run.report()


def _read_plan(plan: Any) -> Mapping[str, Any] | None:
    if plan is None or isinstance(plan, Mapping):
        return plan
    try:
        told = json.loads(Path(plan).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"quantize_checkpoint: plan {plan} is no JSON: {error}") from None
    if isinstance(told, dict) and "lowbit_plan" in told:  # a plan of lowbit.autoquant
        return _of_autoquant(told.get("rows"), plan)
    if not isinstance(told, dict):
        raise ValueError(f"quantize_checkpoint: plan {plan} must be an object of layer names and configurations")
    return told


def _of_autoquant(rows: Any, path: Any) -> dict[str, Any]:
    """The formats of a plan by layer."""
    wanted = f"quantize_checkpoint: plan {path} must have a list of rows, each with layer and spec"
    if not isinstance(rows, list):
        raise ValueError(f"{wanted}, got rows={rows!r}")
    for number, row in enumerate(rows):
        spec = row.get("spec", "") if isinstance(row, dict) else ""
        if not isinstance(spec, (dict, type(None))) or not isinstance(row.get("layer"), str):
            raise ValueError(f"{wanted}, got {row!r} in place {number}")
    return {row["layer"]: row["spec"] for row in rows}


class _Run:
    """The state of one run: the structure of the model, the layers to pack, the shards that are done."""

    def __init__(self, source: Path, folder: Path, settings: LowbitConfig) -> None:
        self.source, self.folder, self.settings = source, folder, settings
        self.model = _skeleton(source)
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
        """A bar over the bytes that are read, on a terminal; entering it gives the function that moves it on."""
        return _Bar(sum(entry.nbytes for file in self.files for entry in file.entries.values()))

    def shard(self, file: SafetensorsFile, tell: Callable[[int], None]) -> None:
        """Write one shard and note that it is done, unless it is."""
        name = file.path.name
        if name in self.progress.rows:
            tell(sum(entry.nbytes for entry in file.entries.values()))
            return
        rows: list[ReportRow] = []
        entries, tensors, formats = self._parts(file, rows, tell)
        metadata = {"format": "pt"} | file.metadata | metadata_of(formats)
        with replaced_file(self.folder / name) as place:
            crc = write_safetensors(place, entries, tensors, metadata)
            written = SafetensorsFile(place)
            if file_checksum(place) != crc or written.entries != entries:
                raise ValueError(
                    f"quantize_checkpoint: {place} reads back otherwise than it was written: a broken disk?"
                )
        self.progress.add(name, crc, rows)

    def _parts(
        self, file: SafetensorsFile, rows: list[ReportRow], tell: Callable[[int], None]
    ) -> tuple[dict[str, Entry], list[Iterable[bytes]], list[str]]:
        """The tensors of the new shard and where their bytes come from: packed weights first, which then begin on cache
        lines; nothing is read before it is written."""
        packed: dict[str, tuple[Entry, Iterable[bytes]]] = {}
        others: dict[str, tuple[Entry, Iterable[bytes]]] = {}
        formats = set()
        for key, entry in file.entries.items():
            merged = self.merged.get(key)
            if merged is not None and key != merged.sources[0]:
                continue  # it is packed where the first is
            layers = self._layers(key, entry) if merged is None else self._merged_layer(merged)
            if not layers:
                others[key] = entry, _told(file.chunks(key), tell)
                continue
            read = functools.partial(self._read, key, merged, file)
            key, item = next(iter(layers.items()))
            layout = self.selection.layout(item.name)
            shape = item.weight.stored(item.spec, layout).shape
            packed[key] = Entry("U8", shape, math.prod(shape)), _packed(read, key, layers, layout, rows, tell)
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
        """The weights to pack that transformers merges.

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
            if sum(math.prod(entry.shape) for entry in entries) != math.prod(wanted):
                missing = ", ".join(map(str, weight.missing(wanted[0])[:5]))
                got = f"expert {missing} is missing" if missing else f"{len(entries)} of {list(entries[0].shape)}"
                raise ValueError(f"quantize_checkpoint: {weight.name} must have shape {list(wanted)}, got {got}")
            yield weight

    def _merged_layer(self, weight: MergedWeight) -> dict[str, Selected]:
        dtype = DTYPES[self.homes[weight.sources[0]].entries[weight.sources[0]].dtype]
        return {weight.name: self.selection.selected(weight.name, torch.empty(0, dtype=dtype, device="cpu"))}

    def _read(self, key: str, merged: MergedWeight | None, file: SafetensorsFile) -> torch.Tensor:
        """The float weight of a tensor, or of those that are merged."""
        value = file.read(key) if merged is None else merged.value(lambda one: self.homes[one].read(one))
        check_finite("quantize_checkpoint", f"{key if merged is None else merged.name} of {file.path}", value)
        return value

    def _layers(self, key: str, entry: Entry) -> dict[str, Selected]:
        """The layer whose weight this tensor is, and those that share it and have none in the checkpoint, by the names
        of their weights; nothing if it is not packed."""
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
        # Renamed by transformers, a name that ends in "weight" and its layout would not stay beside each other.
        own = key if weight.experts is None else parameter
        names = {own: parameter} | {other: other for other in sharing if other not in there}
        return {of: selection.selected(one, like) for of, one in names.items()}

    def finish(self, target: Path) -> None:
        """Write the files beside the weights, and give the folder its name."""
        for path in self.folder.glob("*.tmp"):  # left by runs that were killed
            shutil.rmtree(path)
        for path in self.source.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS and path.name not in (_CONFIG, INDEX):
                shutil.copy2(path, self.folder / path.name)
        homes = {key: file.path.name for file in self.files for key in self._written(file).entries}
        if (self.source / INDEX).exists():
            size = sum(entry.nbytes for file in self.files for entry in self._written(file).entries.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
            write_whole(self.folder / INDEX, json.dumps(index, indent=2))
        config = json.loads((self.source / _CONFIG).read_text())
        config["quantization_config"] = self.settings.to_dict()
        write_whole(self.folder / _CONFIG, json.dumps(config, indent=2))
        self.progress.remove()
        os.rename(self.folder, target)
        self.folder = target

    def report(self) -> QuantizationReport:
        """The report of this run and of the runs before it."""
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
    read: Callable[[], torch.Tensor],
    key: str,
    layers: Mapping[str, Selected],
    layout: str,
    rows: list[ReportRow],
    tell: Callable[[int], None],
) -> Iterator[bytes]:
    """Pack the weight ``key`` of these layers and note a row for each."""
    value, item = read(), layers[key]
    make = functools.partial(pack_weight, item.weight.matrix(value), item.spec, None)
    packed, made = pack_group([*layers.values()], make, value.nbytes, layout=layout, hold=False)
    rows += made
    tell(value.nbytes)
    del value, make, read
    yield bytes_of(packed)  # type: ignore[misc]


def _told(chunks: Iterable[bytes], tell: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        tell(len(chunk))


def _skeleton(source: Path) -> nn.Module:
    """The model on the meta device, with the class that its config names."""
    if not (source / _CONFIG).is_file():
        raise FileNotFoundError(f"quantize_checkpoint: {source} must be a folder with {_CONFIG} and safetensors files")
    told = json.loads((source / _CONFIG).read_text())
    if told.get("quantization_config"):
        method = told["quantization_config"].get("quant_method")
        raise ValueError(f"quantize_checkpoint: {source} is quantized already, by {method!r}; give it the float model")
    names = told.get("architectures") or ["no architecture"]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise ValueError(f"quantize_checkpoint: {_CONFIG} must name a model of transformers, got {names[0]}")
    with torch.device("meta"):
        return cls(AutoConfig.from_pretrained(source, local_files_only=True))


class _Bar:
    """tqdm's bar on a terminal, where tqdm is installed."""

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
