# SPDX-License-Identifier: Apache-2.0
"""Damaged GGUF files: bits flipped, ends cut, numbers that are not those of the tensors, files that change while they are
read. Each is refused by a ValueError or an OSError that names the file, or means what it says now."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from gguf_files import gguf, transformers, write

import lowbit
from lowbit.checkpoints.gguf import file as gguf_file
from lowbit.checkpoints.gguf.counts import check_counts
from lowbit.checkpoints.gguf.errors import errors_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.weights import StateReader
from lowbit.huggingface.load_gguf import load_model


def header_length(whole: bytes) -> int:
    """To the end of the last tensor's description; this one is the last by name."""
    return whole.rindex(b"token_embd.weight") + 60


@pytest.mark.parametrize(("name", "trials"), [("llama", 100), ("phi3", 30), ("gpt2", 30), ("gemma3", 30)])
def test_flipped_bits_and_cut_ends_are_refused_by_the_name_of_the_file_or_load(name: str, trials: int, tmp_path: Path) -> None:
    """From the header to the tokenizer and the first logits; the memory and the time of a whole file are bounds too."""
    whole = write(tmp_path / "model.gguf", name, words=True).read_bytes()
    lowbit.load_gguf(tmp_path / "model.gguf")
    generator, path, refused = torch.Generator().manual_seed(0), tmp_path / "flipped.gguf", 0
    for trial in range(trials):
        damaged = bytearray(whole)
        for at in torch.randint(header_length(whole), (1 + trial % 3,), generator=generator).tolist():
            damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        if trial % 10 == 0:
            del damaged[int(torch.randint(len(whole), (1,), generator=generator)) :]
        path.write_bytes(damaged)
        try:
            lowbit.load_gguf(path)
        except (ValueError, OSError) as error:
            assert path.name in str(error), repr(error)
            refused += 1
    assert refused > trials / 5


def patched(tmp_path: Path, key: str, kind: str, value: object, name: str = "llama") -> Path:
    """A file with another number at a key, which has one of the same size."""
    path = write(tmp_path / "model.gguf", name, words=True)
    whole = bytearray(path.read_bytes())
    at = whole.index(key.encode()) + len(key) + 4
    struct.pack_into(f"<{kind}", whole, at, value)
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2 + (1 << 25), "must be 2, as many as layers have tensors, got 33554434"),
        ("block_count", 1, "must be 2, as many as layers have tensors, got 1"),
        ("block_count", 0, "must be 2, as many as layers have tensors, got 0"),
        ("embedding_length", 512, "must be 256, as many as token_embd.weight has, got 512"),
        ("feed_forward_length", 0, "must be 512, as many as blk.0.ffn_down.weight has, got 0"),
        ("attention.head_count", 0, "must be a number from 1 on, got 0"),
        ("attention.head_count", 3, "must divide the 256 rows of blk.0.attn_q.weight, got 3"),
        ("attention.head_count", 8, "heads of queries and keys must have as many columns, got 32 columns of blk.0.attn_q"),
    ],
)
def test_a_number_that_is_not_that_of_the_tensors_is_refused_before_anything_is_built(key, value, message, tmp_path):
    path = patched(tmp_path, f"llama.{key}", "I", value)
    with pytest.raises(ValueError, match=f"model.gguf: (llama.{key} )?{message}"):
        GgufFile.open(path)


def test_positions_of_another_table() -> None:
    keys, shapes = {"gpt2.context_length": 1 << 31, "gpt2.block_count": 0}, {"position_embd.weight": (1024, 256)}
    with pytest.raises(ValueError, match="a.gguf: gpt2.context_length must be 1024, as many as position_embd.weight has, got 2147483648"):
        check_counts(Path("a.gguf"), "gpt2", keys, shapes)
    check_counts(Path("a.gguf"), "gpt2", keys | {"gpt2.context_length": 1024}, shapes)


@pytest.mark.parametrize("value", [0, 3, 48])
def test_an_alignment_that_is_none(value: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32("general.alignment", value)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"model.gguf: general.alignment must be a power of two, got {value}"):
        GgufFile.open(tmp_path / "model.gguf")


def test_tensors_that_lie_over_one_another(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    whole, name = bytearray(path.read_bytes()), b"blk.1.attn_q.weight"
    struct.pack_into("<Q", whole, whole.index(name) + len(name) + 4 + 16 + 4, 0)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="tensor blk.1.attn_q.weight must begin behind the one before, at byte"):
        GgufFile.open(path)


# ---- files that change ---------------------------------------------------------------------------------------------


def reader_of(path: Path) -> StateReader:
    config = load_model(path, fuse=False).config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return StateReader(GgufFile.open(path), model, "int8")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    reader = reader_of(path)
    os.truncate(path, path.stat().st_size // 2)
    with errors_of(path, "the weights"), pytest.raises(ValueError, match="the file must have .* bytes, got .*: it was cut"):
        reader.read()


def test_a_file_that_is_written_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    reader, whole = reader_of(path), path.read_bytes()
    path.write_bytes(whole[:-4096] + bytes(4096))
    with pytest.raises(ValueError, match="model.gguf: the file must stay as it is while it is read"):
        reader.read()


def test_a_file_that_another_replaces_is_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    wanted, reader = load_model(path, fuse=False).state_dict(), reader_of(path)
    os.replace(write(tmp_path / "other.gguf", "llama", seed=1), path)
    assert all(torch.equal(value, wanted[name]) for name, value in reader.read().items())


@pytest.mark.parametrize("first", [24, 100, 1 << 20])
def test_a_header_of_any_length(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "llama", words=True)
    wanted = GgufFile.open(path)
    monkeypatch.setattr(gguf_file, "_FIRST", first)
    file = GgufFile.open(path)
    assert file.metadata == wanted.metadata and file.tensors.keys() == wanted.tensors.keys()
    monkeypatch.setattr(gguf_file, "_MOST", first)
    if first < 1 << 20:
        with pytest.raises(ValueError, match=f"the header must end within {first} bytes: it is damaged"):
            GgufFile.open(path)


def test_errors_of_others_get_the_name_of_the_file() -> None:
    for error, told in [
        (KeyError("scores"), "the words cannot be read: KeyError: 'scores'"),
        (ValueError("no such word"), "the words cannot be read: no such word"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UnicodeDecodeError: 'utf-8' codec"),
        (OSError(22, "Invalid argument"), "OSError: .Errno 22. Invalid argument"),
        (ValueError("a.gguf: key x"), "^a.gguf: key x"),
    ]:
        with pytest.raises(ValueError, match=told) as raised, errors_of("dir/a.gguf", "the words"):
            raise error
        assert "a.gguf" in str(raised.value)
    with pytest.raises(FileNotFoundError, match="a.gguf"), errors_of("dir/a.gguf", "the words"):
        raise FileNotFoundError(2, "No such file", "dir/a.gguf")
