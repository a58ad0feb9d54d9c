# SPDX-License-Identifier: Apache-2.0
"""Our reader and writer of safetensors files agree with the safetensors package, and refuse what is none."""

from __future__ import annotations

import json

import pytest
import torch

from lowbit.quant import safetensors_file
from lowbit.quant.safetensors_file import DTYPES, Entry, SafetensorsFile, bytes_of, file_checksum, safetensors_files

safetensors = pytest.importorskip("safetensors.torch")

STATE = {f"layer.{name}": torch.arange(24).reshape(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()}
STATE |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(1.5)}


def test_files_of_the_package_are_read(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.save_file(STATE, file, {"format": "pt"})
    opened = SafetensorsFile(file)
    assert opened.metadata == {"format": "pt"} and opened.entries.keys() == STATE.keys()
    for name, tensor in STATE.items():
        read = opened.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        assert read.shape == tensor.shape and b"".join(opened.chunks(name)) == bytes(bytes_of(tensor))


def test_the_package_reads_what_is_written(tmp_path):
    file = tmp_path / "a.safetensors"
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = {name: Entry(names[tensor.dtype], tuple(tensor.shape), tensor.nbytes) for name, tensor in STATE.items()}
    crc = safetensors_file.write_safetensors(file, entries, ([bytes_of(tensor)] for tensor in STATE.values()), {"format": "pt"})
    assert file_checksum(file) == crc and SafetensorsFile(file).entries == entries
    assert int.from_bytes(file.read_bytes()[:8], "little") % 64 == 56
    loaded = safetensors.load_file(file)
    assert all(torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)) for name, tensor in STATE.items())
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert file_checksum(file) != crc


def test_a_wrong_number_of_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a must have 8 bytes, got 4"):
        safetensors_file.write_safetensors(tmp_path / "a", {"a": Entry("F32", (2,), 8)}, [[b"1234"]], {})


def header(text: object, data: bytes = b"") -> bytes:
    told = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(told).to_bytes(8, "little") + told + data


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", (1 << 60).to_bytes(8, "little") + b"{}", header(b"{"), header([]), header({"a": {"dtype": "F32"}})]
    + [
        header({"a": {"dtype": "F32", "shape": [size], "data_offsets": [begin, end]}}, b"12345678"[:held])
        for size, begin, end, held in ((2, 0, 8, 4), (1, 4, 8, 8), (1, 0, 4, 8), (1, 0, -4, 8), (1, "0", 4, 4))
    ],
)
def test_what_is_no_safetensors_file_is_refused(content, tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="must be a safetensors file"):
        SafetensorsFile(file)


def test_a_tensor_that_does_not_fit_its_bytes_is_refused(tmp_path, subtests):
    file = tmp_path / "a.safetensors"
    for entry in ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, {"dtype": "X9", "shape": [1], "data_offsets": [0, 8]}):
        with subtests.test(entry=entry):
            file.write_bytes(header({"a": entry}, b"12345678"))
            with pytest.raises(ValueError, match=r"a must have the bytes of .*, got 8 bytes"):
                SafetensorsFile(file).read("a")


def test_a_folder_names_its_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors.index.json with its shards or model.safetensors"):
        safetensors_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (tmp_path / "1.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"there is no .*2\.safetensors"):
        safetensors_files(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"")
    assert [path.name for path in safetensors_files(tmp_path)] == ["1.safetensors", "2.safetensors"]
