# SPDX-License-Identifier: Apache-2.0
"""GGUF files of repositories of the Hugging Face Hub: which one is meant, where it comes from, and what is said when
there is none. huggingface_hub is asked for nothing over the network here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import gguf, write

import lowbit
from lowbit.__main__ import main
from lowbit.huggingface.hub_file import is_repository

huggingface_hub = pytest.importorskip("huggingface_hub")
NAMES = ["README.md", "tiny-Q4_0.gguf", "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "mmproj-tiny-f16.gguf", "tiny.imatrix.gguf"]


def with_template(writer: gguf.GGUFWriter) -> None:
    writer.add_chat_template("{% for turn in messages %}{{ turn['content'] }}{% endfor %}")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hub") / "tiny.gguf", "llama", words=True, more=with_template)


class Hub:
    """What huggingface_hub says of one repository, and what it was asked to download."""

    def __init__(self, names: list[str], file: Path) -> None:
        self.names, self.file, self.asked = names, file, []

    def list_repo_files(self, _: Any, repository: str) -> list[str]:
        return self.names

    def hf_hub_download(self, repository: str, name: str) -> str:
        self.asked.append((repository, name))
        return str(self.file)


@pytest.fixture
def hub(file: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(NAMES, file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, name: hub.list_repo_files(api, name))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    return hub


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path of the folder of the tests is the name of a repository."""
    monkeypatch.chdir(tmp_path)


def test_a_repository_and_a_quantization_are_a_model_and_a_tokenizer(hub, file):
    model, tokenizer = lowbit.load_gguf("org/tiny-GGUF", "q4_k_m")
    assert hub.asked == [("org/tiny-GGUF", "tiny-Q4_K_M.gguf")]
    wanted, _ = lowbit.load_gguf(file)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize("name", ["Q4_0", "tiny-Q4_0.gguf", "tiny-Q4_0"])
def test_a_file_is_named_by_a_word_of_it_or_whole(hub, name):
    lowbit.load_gguf("org/tiny", name)
    assert hub.asked == [("org/tiny", "tiny-Q4_0.gguf")]


def test_the_only_file_needs_no_name_and_projectors_count_for_nothing(hub):
    hub.names = ["mmproj-f16.gguf", "tiny.imatrix.gguf", "tiny.gguf"]
    lowbit.load_gguf("org/tiny")
    assert hub.asked == [("org/tiny", "tiny.gguf")]


def test_all_parts_of_a_split_file_are_downloaded_and_the_first_is_read(hub):
    hub.names = [f"Q8_0/tiny-Q8_0-{i:05}-of-00002.gguf" for i in (2, 1)] + ["tiny-Q4_0.gguf"]
    lowbit.load_gguf("org/tiny", "Q8_0")
    assert [name for _, name in hub.asked] == [f"Q8_0/tiny-Q8_0-{i:05}-of-00002.gguf" for i in (1, 2)]


@pytest.mark.parametrize(
    ("file", "names", "text"),
    [(None, NAMES, "file must say which of several GGUF files, such as Q4_K_M, in org/tiny: tiny-Q4_0.gguf, tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf"),
     ("Q4_K", NAMES, "got 'Q4_K', which 0 have, in org/tiny: tiny-Q4_0.gguf, tiny-Q4_K_M"),
     ("tiny", ["a/tiny-Q4_0.gguf", "b/tiny-Q4_0.gguf"], "got 'tiny', which 2 have, in org/tiny: a/tiny-Q4_0.gguf, b/tiny-Q4_0.gguf"),
     (None, ["README.md"], "there must be a GGUF file in org/tiny: none")],
)  # fmt: skip
def test_no_file_and_several_are_refused_with_their_names(hub, file, names, text):
    hub.names = names
    with pytest.raises(ValueError, match=f"load_gguf: .*{text}"):
        lowbit.load_gguf("org/tiny", file)
    assert not hub.asked


def test_an_argument_that_is_wrong_is_refused_before_the_download(hub, file):
    with pytest.raises(ValueError, match="activations must be one of"):
        lowbit.load_gguf("org/tiny", "Q4_0", activations="int9")
    assert not hub.asked
    with pytest.raises(ValueError, match="file must be None unless path is a repository of the Hub, got 'Q4_0' with path="):
        lowbit.load_gguf(file, "Q4_0")


def test_paths_are_no_repositories(tmp_path):
    Path("there/tiny").mkdir(parents=True)
    assert is_repository("org/tiny") and is_repository("bartowski/SmolLM2-135M-Instruct-GGUF")
    for path in ("there/tiny", "models/tiny.gguf", "./org/tiny", "/org/tiny", "a/b/c", "tiny", "org/tiny/", Path("org/tiny")):
        assert not is_repository(path), path
    with pytest.raises(FileNotFoundError):
        lowbit.load_gguf("models/tiny.gguf")


def test_a_hub_that_is_not_reached_is_an_error_that_says_so(hub, monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise RuntimeError("[Errno -2] Name or service not known")  # as the HTTP library's, of no class of Python's

    monkeypatch.setattr(hub, "list_repo_files", fail)
    with pytest.raises(ConnectionError, match="load_gguf: the Hugging Face Hub must be reachable for org/tiny, which is neither a path here nor in the cache: RuntimeError: .*Name or service"):
        lowbit.load_gguf("org/tiny")
    assert main(["chat", "org/tiny", "abc"]) == 1
    assert "lowbit: chat: the Hugging Face Hub must be reachable for org/tiny" in capsys.readouterr().err


def test_a_full_disk_is_no_hub_that_is_not_reached(hub, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(OSError, match="No space left"):
        lowbit.load_gguf("org/tiny", "Q4_0")


@pytest.fixture
def cache(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with one of the files of org/tiny, as huggingface_hub lays it out, and no network."""
    home = tmp_path / "cache" / "models--org--tiny"
    snapshot = home / "snapshots" / ("a" * 40)
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text("a" * 40)
    (home / "blobs" / "b").write_bytes(file.read_bytes())
    (snapshot / "tiny-Q4_0.gguf").symlink_to("../../blobs/b")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def test_offline_the_cache_is_read_and_what_it_has_not_is_named(cache):
    model, _ = lowbit.load_gguf("org/tiny", "Q4_0")
    assert model.config.model_type == "llama"
    with pytest.raises(ValueError, match="got 'Q8_0', which 0 have, in org/tiny: tiny-Q4_0.gguf"):
        lowbit.load_gguf("org/tiny", "Q8_0")
    with pytest.raises(ConnectionError, match="must be reachable for org/other"):
        lowbit.load_gguf("org/other")


def test_chat_takes_a_repository_with_and_without_a_word(hub, capsys):
    assert main(["chat", "org/tiny:Q4_0", "abc", "--greedy", "--max-new-tokens", "4"]) == 0
    assert hub.asked == [("org/tiny", "tiny-Q4_0.gguf")] and "4 tokens, " in capsys.readouterr().err
    assert main(["chat", "org/tiny", "abc"]) == 1
    assert "chat: file must say which of several GGUF files, such as Q4_K_M" in capsys.readouterr().err


def test_chat_takes_a_repository_of_transformers(hub, file, tmp_path, capsys, monkeypatch):
    model, tokenizer = lowbit.load_gguf(file)
    model.save_pretrained(tmp_path / "saved"), tokenizer.save_pretrained(tmp_path / "saved")
    hub.names = ["config.json", "model.safetensors"]
    from lowbit.huggingface import chat

    for cls in ("AutoModelForCausalLM", "AutoTokenizer"):
        read = getattr(chat, cls).from_pretrained
        there = lambda name, read=read, **options: read({"org/tiny": tmp_path / "saved"}[name], **options)  # noqa: E731
        monkeypatch.setattr(getattr(chat, cls), "from_pretrained", there)
    assert main(["chat", "org/tiny", "abc", "--greedy", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert main(["chat", str(file), "abc", "--greedy", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == out and not hub.asked
