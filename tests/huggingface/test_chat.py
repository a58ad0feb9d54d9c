# SPDX-License-Identifier: Apache-2.0
"""``lowbit chat``: prompts and options in any order, pipes, a conversation that goes on, the end of the context."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import CONFIGS, gguf, write

import lowbit
from lowbit.__main__ import main
from lowbit.huggingface import chat as module

TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
GREEDY = ("--greedy", "--max-new-tokens", "4")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40 words, a template that says the turns one after the other."""
    def with_template(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(TEMPLATE)

    return write(tmp_path_factory.mktemp("chat") / "tiny.gguf", "llama", words=True, more=with_template)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch):
    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return pipe


def answers(file: Path, *prompts: str, system: str = "") -> list[str]:
    """Return what the model says to each prompt, for which it reads the whole conversation anew."""
    model, tokenizer = lowbit.load_gguf(file)
    text, said = system, []
    for prompt in prompts:
        ids = tokenizer(text + prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=4, do_sample=False)
        said.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
        text += prompt + said[-1]
    return said


def test_prompts_and_options_come_in_any_order_and_answers_alone_go_to_the_output(file, capsys):
    wanted = answers(file, "abc ab", "b")
    for order in (("abc ab", "b", *GREEDY), ("abc ab", *GREEDY, "b"), (*GREEDY, "abc ab", "b")):
        assert main(["chat", str(file), *order]) == 0
        out, remarks = capsys.readouterr()
        assert out.splitlines() == wanted and "8 tokens, " in remarks


def test_lines_of_a_pipe_are_prompts_and_empty_ones_are_none(file, capsys, piped):
    piped(b"abc ab\n\nb")
    assert main(["chat", str(file), *GREEDY, "--system", "ab"]) == 0
    assert capsys.readouterr().out.splitlines() == answers(file, "abc ab", "b", system="ab")


def test_a_line_that_is_no_text_is_named(file, capsys, piped):
    piped(b"abc\n\xff\n")
    assert main(["chat", str(file), *GREEDY]) == 1
    assert "line 2 of the standard input must be UTF-8, got b'\\xff\\n'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["abc", "d\udcff"], ["abc", "--system", "\udcff"]])
def test_a_prompt_that_is_no_text_is_refused_before_the_file_is_read(arguments, capsys):
    assert main(["chat", "there is none.gguf", *arguments]) == 1
    assert "must be UTF-8, got b'" in capsys.readouterr().err


def test_in_a_terminal_with_a_pipe_behind_it_the_output_has_answers_alone(file, capsys, monkeypatch):
    typed = io.StringIO("abc ab\n\nb\n")
    typed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["chat", str(file), *GREEDY]) == 0
    out, remarks = capsys.readouterr()
    assert out.splitlines() == answers(file, "abc ab", "b") and remarks.count("> ") == 4 and "8 tokens, " in remarks


def test_a_standard_input_that_is_closed_has_no_prompts(file, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", str(file)]) == 0
    assert capsys.readouterr() == ("", "no answer\n")


def test_a_folder_without_a_model_is_refused_with_the_files_in_it(file, tmp_path, capsys):
    assert main(["chat", str(file.parent), "abc"]) == 1
    assert f"a folder must have a config.json, {file.parent} has none; GGUF files in it: tiny.gguf" in capsys.readouterr().err
    with pytest.raises(IsADirectoryError, match="path must be a GGUF file, got the folder .*GGUF files in it: none"):
        lowbit.load_gguf(tmp_path)


def test_an_interrupted_chat_does_not_promise_to_go_on(file, capsys, monkeypatch):
    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "chat", interrupt)
    assert main(["chat", str(file), "abc"]) == 130
    assert capsys.readouterr().err == "lowbit: interrupted\n"


def test_the_word_that_ends_a_turn_ends_an_answer_where_the_folder_does_not_name_it(file, tmp_path, capsys):
    """Llama 3 and others: the template ends a turn with a word that generation_config.json does not have."""
    model, tokenizer = lowbit.load_gguf(file)
    ids = tokenizer("abc ab", return_tensors="pt")
    with torch.no_grad():
        second = int(model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] + 1])
    word = tokenizer.convert_ids_to_tokens(second)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path), "abc ab", *GREEDY]) == 0
    assert "4 tokens, " in capsys.readouterr().err
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"eos_token": word}))
    assert main(["chat", str(tmp_path), "abc ab", *GREEDY]) == 0
    assert "2 tokens, " in capsys.readouterr().err


def test_a_reader_that_ends_is_no_error(file):
    command = [sys.executable, "-m", "lowbit", "chat", str(file), *GREEDY, *["abc"] * 40]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and "Traceback" not in errors and "Broken pipe" not in errors, errors


def test_the_end_of_the_context_is_said_before_it_is_reached(tmp_path, capsys):
    config = CONFIGS["llama"]
    short = type(config)(**config.to_dict() | {"max_position_embeddings": 16})
    file = write(tmp_path / "short.gguf", "llama", words=True, config=short, more=lambda writer: writer.add_chat_template(TEMPLATE))
    assert main(["chat", str(file), "abc" * 5, *GREEDY, "abc" * 5, "a"]) == 0
    out, remarks = capsys.readouterr()
    said = remarks.splitlines()
    assert "7 of 16 tokens are left for this conversation" in said[0] and "0 of 16 tokens are left" in said[1]
    assert "the model reads 16: no room for an answer" in said[2] and len(out.splitlines()) == 2


def test_a_folder_of_transformers_answers_as_its_model_does(file, tmp_path, capsys):
    model, tokenizer = lowbit.load_gguf(file)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path), "abc ab", *GREEDY]) == 0
    assert capsys.readouterr().out.splitlines() == answers(file, "abc ab")
    assert main(["chat", str(tmp_path), "abc ab", "--activations", "float"]) == 1
    assert "activations must not be given with a folder" in capsys.readouterr().err


def test_a_seed_repeats_what_is_sampled(file, capsys):
    def sampled(**options) -> str:
        module.chat(file, ["abc"], max_new_tokens=12, temperature=5.0, top_p=1.0, **options)
        return capsys.readouterr().out

    texts = [sampled(seed=seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"), ({"temperature": float("nan")}, "temperature must be"),
     ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"), ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0")],
)  # fmt: skip
def test_a_number_out_of_its_range_is_refused_before_the_file_is_read(options, text):
    with pytest.raises(ValueError, match=f"chat: {text}"):
        module.chat("there is none.gguf", ["a"], **options)
