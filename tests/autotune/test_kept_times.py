# SPDX-License-Identifier: Apache-2.0
"""The file of measured times: keys, the user's folder, damage, several writers."""

from __future__ import annotations

import json
import os

import pytest
import torch
from settings import ambient

import lowbit
from lowbit import _C
from lowbit.autotune import kept_times
from lowbit.autotune.kept_times import KeptTimes


def test_a_set_is_there_for_the_next_process(tmp_path):
    path = tmp_path / "folder" / "times.json"
    KeptTimes(path).put("key", {"float": 1.5, "int8": 0.5})
    assert KeptTimes(path).get("key", ["int8", "float"]) == {"int8": 0.5, "float": 1.5}
    assert KeptTimes(path).get("key", ["int8", "int4"]) is None, "a set is taken as a whole"
    assert KeptTimes(path).get("other", []) == {}
    assert os.listdir(path.parent) == [path.name]


def test_the_file_lies_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    KeptTimes().put("key", {"float": 1.0})
    assert (tmp_path / "lowbit" / "autoquant.json").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_times.default_path() == tmp_path / ".cache" / "lowbit" / "autoquant.json"


def test_without_a_file_sets_are_kept_while_the_object_lives(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = KeptTimes(False)
    kept.put("key", {"float": 1.0})
    assert kept.get("key", ["float"]) == {"float": 1.0} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["threads", "isa", "lowbit", "torch", "cpu"])
def test_the_key_changes_with_the_machine(tmp_path, monkeypatch, change):
    before = KeptTimes(False).key(layer="64x64", x="1 x float32")
    assert KeptTimes(False).key(layer="64x64", x="1 x float32") == before
    if change == "threads":
        with ambient(f"threads {torch.get_num_threads() + 1}"):
            after = KeptTimes(False).key(layer="64x64", x="1 x float32")
    else:
        if change == "isa":
            monkeypatch.setattr(_C, "isa", lambda: {"chosen": "abacus"})
        elif change == "lowbit":
            monkeypatch.setattr(_C, "version", "9.9")
        elif change == "torch":
            monkeypatch.setattr(torch, "__version__", "9.9")
        else:
            monkeypatch.setattr(kept_times, "_cpu_model", lambda: "another")
        after = KeptTimes(False).key(layer="64x64", x="1 x float32")
    assert after != before
    assert KeptTimes(False).key(layer="64x65", x="1 x float32") != KeptTimes(False).key(layer="64x64", x="1 x float32")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 1, "sets": []}', '{"schema": 1, "sets": {"key": {"float": "x"}}}',
             '{"schema": 2, "sets": {}}', '{"schema": 1, "sets": {"key": 3}}'],
)  # fmt: skip
def test_a_damaged_file_is_said_and_replaced(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="times.json is not read, times are measured anew"):
        kept = KeptTimes(path)
    assert kept.get("key", ["float"]) is None
    kept.put("key", {"float": 1.0})
    assert KeptTimes(path).get("key", ["float"]) == {"float": 1.0}


def test_two_writers_lose_nothing_of_each_other(tmp_path):
    first, second = KeptTimes(tmp_path / "times.json"), KeptTimes(tmp_path / "times.json")
    first.put("a", {"float": 1.0})
    second.put("b", {"float": 2.0})
    assert set(json.loads((tmp_path / "times.json").read_text())["sets"]) == {"a", "b"}


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="times are not kept"):
        KeptTimes(tmp_path / "file" / "times.json").put("key", {"float": 1.0})


@pytest.mark.parametrize("cache", [True, 3, b"x"])
def test_another_kind_of_cache_is_refused(cache):
    with pytest.raises(TypeError, match="autoquant: cache must be None, False or a path, got"):
        lowbit.autoquant(torch.nn.Linear(4, 4), torch.zeros(1, 4), cache=cache)
