# SPDX-License-Identifier: Apache-2.0
"""``lowbit train``: a run over each kind of record, resumed, merged and written as GGUF; what is wrong is named first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("datasets")
from gguf_files import write  # noqa: E402
from tiny_models import save, transformers  # noqa: E402
from trl_runs import tokenizer  # noqa: E402

import lowbit  # noqa: E402
from lowbit.__main__ import main  # noqa: E402
from lowbit.checkpoints.gguf.file import GgufFile  # noqa: E402
from lowbit.huggingface import train as module  # noqa: E402

TEMPLATE = "{% for turn in messages %}{{ turn['role'] }} {{ turn['content'] }} {% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float model of 97 words with a chat template."""
    made = save("tied", tmp_path)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(made)
    return made


def record(kind: str, number: int) -> dict[str, Any]:
    text = " ".join(f"w{(number * 7 + i) % 40}" for i in range(6))
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"w{number % 9}"}]
    return {
        "messages": {"messages": turns},
        "text": {"text": text, "source": "not read"},
        "completion": {"prompt": text, "completion": " w1 w2 w3"},
    }[kind]


def data(folder: Path, kind: str = "text", count: int = 30) -> Path:
    file = folder / f"{kind}.jsonl"
    file.write_text("\n".join(json.dumps(record(kind, i)) for i in range(count)) + "\n\n")
    return file


def run(*words: Any) -> int:
    return main(["train", *map(str, words), "--batch-size", "1", "--max-length", "32", "--learning-rate", "0.01"])


@pytest.mark.parametrize("kind", ["messages", "text", "completion"])
def test_records_of_each_kind_train_adapters(kind: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert run(folder, data(tmp_path, kind), "--out", out, "--steps", 6, "--evaluation-share", 0.2) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("6 steps in ") and f"adapters in {out}" in told
    before, after = (float(word) for word in told.partition("evaluation ")[2].partition(";")[0].split(", then "))
    assert after < before
    weights = lowbit.LowbitConfig(module.DEFAULT_CONFIG)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=weights)
    model.load_adapter(str(out))
    adapters = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert adapters and all(p.any() for p in adapters)


def test_a_gguf_file_is_trained_resumed_merged_and_written(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "a.gguf", "llama", "Q4_0", embedding="Q8_0", words=True)
    out, merged, written = tmp_path / "out", tmp_path / "merged", tmp_path / "b.gguf"
    given = (file, data(tmp_path), "--out", out, "--save-every", 1, "--evaluation", data(tmp_path, count=4))
    assert run(*given, "--steps", 2) == 0
    assert run(*given, "--steps", 2) == 1
    assert "out must be a new folder, or --resume must be given" in capsys.readouterr().err
    assert run(*given, "--steps", 3, "--resume", "--merge", merged, "--gguf", written) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-3].startswith("3 steps") and told[-2:] == [f"merged model in {merged}", f"merged model in {written}"]
    assert json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before, after = (lowbit.load_gguf(path, activations="float")[0](ids).logits for path in (file, written))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(merged)(ids).logits
        model = lowbit.load_gguf(file, activations="float", fuse=False)[0]
        adapted = peft.PeftModel.from_pretrained(model, str(out))
        beside = adapted(ids).logits
        inside = adapted.merge_and_unload()(ids).logits
    torch.testing.assert_close(loaded, inside, rtol=1e-5, atol=1e-5 * float(inside.abs().max()))
    assert (after - beside).norm() < 0.3 * (before - beside).norm(), "bfloat16 keeps what the adapters do"


@pytest.mark.parametrize(("format", "type"), [("int4_weight_only", "Q4_0"), ("int8_weight_only", "Q8_0")])
def test_a_merged_file_is_packed_in_the_format_asked_for(format: str, type: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "llama", "Q4_0", embedding="Q8_0", words=True)
    given = (file, data(tmp_path), "--out", tmp_path / "out", "--steps", 2)
    assert run(*given, "--gguf", tmp_path / "b.gguf", "--gguf-config", f"{format}(group_size=32)") == 0
    assert GgufFile.open(tmp_path / "b.gguf").tensors["blk.0.attn_q.weight"].type == type
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        base = lowbit.load_gguf(file, activations="float", fuse=False)[0]
        lowbit.dequantize_(base)
        wanted = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).merge_and_unload()(ids).logits
        after = lowbit.load_gguf(tmp_path / "b.gguf", activations="float")[0](ids).logits
    assert (after - wanted).norm() < (0.5 if type == "Q4_0" else 0.05) * wanted.norm()


@pytest.mark.parametrize(
    "lines, said",
    [
        (['{"text": "a"}', "{text}"], "line 2 of .* must be a JSON object, got '{text}'"),
        (['{"text": "a"}', '{"texts": "a"}'], r"line 2 of .* must have messages, or text, or .*, got \['texts'\]"),
        (['["a"]'], "line 1 of .* must have messages, or text, or prompt and completion, got list"),
        (['{"prompt": "a"}'], "line 1 of .* must have messages, or text, or prompt and completion"),
        (['{"text": "a"}', "", '{"messages": []}'], "line 3 of .* must have text as the lines before it"),
        (['{"text": 3}'], "line 1 of .*: text must be a text, got 3"),
        (
            ['{"messages": [{"role": "user"}]}'],
            "line 1 of .*: messages must be a list of objects with role and content",
        ),
        ([""], "must have a record in each line, got none"),
    ],
)
def test_records_are_checked_before_a_model_is_read(lines: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=said):
        module.train("no-such-model.gguf", str(file), module.TrainOptions(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_what_else_is_wrong_is_named(folder: Path, tmp_path: Path, capsys: Any, subtests: pytest.Subtests) -> None:
    texts, file = data(tmp_path), write(tmp_path / "a.gguf", "llama", "Q4_0", embedding="Q8_0", words=True)
    wrong: dict[str, tuple[Any, ...]] = {
        "No such file": (file, tmp_path / "none.jsonl"),
        "none.gguf": (tmp_path / "none.gguf", texts),
        "must have a chat template for records with messages": (file, data(tmp_path, "messages")),
        "rank must be positive, got 0": (file, texts, "--rank", 0),
        "evaluation_share must be 0 or more and below 1, got 1.0": (file, texts, "--evaluation-share", 1),
        "config: 'int9' must begin with": (file, texts, "--gguf", tmp_path / "b.gguf", "--gguf-config", "int9"),
        "gguf_config is for the file of gguf": (file, texts, "--gguf-config", "int8_weight_only(group_size=32)"),
        "config must not be given with a GGUF file": (file, texts, "--config", "int8_weight_only()"),
        "--resume goes on from the last checkpoint": (file, texts, "--resume"),
        "--gguf needs --like": (folder, texts, "--gguf", tmp_path / "b.gguf"),
        "merge must be new": (file, texts, "--merge", folder),
        "evaluation must have records with text, got": (file, texts, "--evaluation", data(tmp_path, "completion")),
    }
    for said, words in wrong.items():
        with subtests.test(said):
            assert run(*words, "--out", tmp_path / "out") == 1
            assert said in capsys.readouterr().err
            assert not (tmp_path / "out").exists()


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(ImportError, match="train: pip install trl peft datasets"):
        module.train("a.gguf", str(data(tmp_path)), module.TrainOptions())
