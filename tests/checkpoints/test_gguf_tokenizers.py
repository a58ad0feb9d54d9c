# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files beside llama.cpp's: its algorithms in Python on small vocabularies, the texts that come with
its own vocabularies, and random texts that llama-cpp-python cuts."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from gguf_files import gguf, transformers, write

import lowbit
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.splitting import SPLITTINGS
from lowbit.checkpoints.gguf.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = (gguf.TokenType[name] for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "BYTE"))


def vocabulary(path: Path, model: str, words: list[str], types: list[int], *, scores: list[float] | None = None, merges: list[str] | None = None, pre: str = "", more=lambda writer: None) -> GgufFile:
    """A file of a tokenizer alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model), writer.add_token_list(words), writer.add_token_types(types)
    if pre:
        writer.add_tokenizer_pre(pre)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    more(writer)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


# ---- SentencePiece -------------------------------------------------------------------------------------------------

PIECES = ["a", "b", "c", "\u2581", "ab", "bc", "\u2581a", "\u2581\u2581", "abc", "ca", "\u2581ab", "aa", "cab", "bca", "\u2581\u2581\u2581"]


def sentencepiece(path: Path, pieces: list[str], seed: int = 0, more=lambda writer: None) -> GgufFile:
    """Words of every byte, three special ones, one that a user defined, and these pieces with scores of their own."""
    scores = random.Random(seed).sample(range(-1000, 0), len(pieces))
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<user>", *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER, *[NORMAL] * len(pieces)]
    return vocabulary(path, "llama", words, types, scores=[0.0] * 260 + [float(score) for score in scores], more=more)


def merged_by_score(text: str, file: GgufFile) -> list[int]:
    """llm_tokenizer_spm_session: the two neighbours whose union has the highest score, the first of equals."""
    words = list(file.texts["tokenizer.ggml.tokens"])
    scores = dict(zip(words, file.metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(text)
    while found := [(-scores[left + right], at) for at, (left, right) in enumerate(zip(symbols, symbols[1:])) if left + right in scores]:
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    number = {word: index for index, word in enumerate(words)}
    return [index for symbol in symbols for index in ([number[symbol]] if symbol in number else [number[f"<0x{byte:02X}>"] for byte in symbol.encode()])]


@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_are_merged_by_score(prefixed, tmp_path):
    file = sentencepiece(tmp_path / "model.gguf", PIECES, more=lambda writer: writer.add_add_space_prefix(prefixed))
    tokenizer, randomly = load_tokenizer(file), random.Random(1)
    for _ in range(2000):
        text = "".join(randomly.choices("abc \u00e9", k=randomly.randint(1, 12)))
        wanted = merged_by_score((" " * prefixed + text).replace(" ", "\u2581"), file)
        assert tokenizer(text)["input_ids"] == [1, *wanted], text
        assert tokenizer.decode(wanted) == text


def test_a_space_is_put_before_each_text_that_follows_no_piece(tmp_path):
    """Also behind a special word and one that a user defined; a space of the text stays."""
    file = sentencepiece(tmp_path / "model.gguf", PIECES)
    tokenizer = load_tokenizer(file)
    for text, fragments in {
        "a": ["\u2581a"], " a": ["\u2581\u2581a"], "  a": ["\u2581\u2581\u2581a"], "</s>ab": [2, "\u2581ab"],
        "a<user>c": ["\u2581a", 259, "\u2581c"], "<user>": [259], "": [],
    }.items():  # fmt: skip
        wanted = [number for part in fragments for number in ([part] if isinstance(part, int) else merged_by_score(part, file))]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted, text


def test_a_text_begins_and_ends_as_the_file_says(tmp_path):
    for add in (lambda writer: None, lambda writer: (writer.add_add_bos_token(False), writer.add_add_eos_token(True))):
        tokenizer = load_tokenizer(sentencepiece(tmp_path / "model.gguf", PIECES, more=add))
        a = tokenizer("a", add_special_tokens=False)["input_ids"]
        assert tokenizer("a")["input_ids"] == ([1, *a] if not tokenizer.add_eos_token else [*a, 2])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_special_words_of_phi3_take_the_spaces_behind_them(tmp_path):
    file = sentencepiece(tmp_path / "model.gguf", PIECES, more=lambda writer: writer.add_name("Phi-3 Mini"))
    tokenizer = load_tokenizer(file)
    assert tokenizer("</s>  a", add_special_tokens=False)["input_ids"] == tokenizer("</s>a", add_special_tokens=False)["input_ids"]
    assert tokenizer("<s>  a", add_special_tokens=False)["input_ids"] != tokenizer("<s>a", add_special_tokens=False)["input_ids"]


# ---- byte-level ----------------------------------------------------------------------------------------------------

LETTERS = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]  # of the bytes
MERGES = ["a b", "b c", "ab c", "\u0120 a", "\u0120 ab", "1 2", "12 3", "\u0120 \u0120"]


def byte_level(path: Path, pre: str = "", more=lambda writer: None) -> GgufFile:
    merged = [merge.replace(" ", "") for merge in MERGES]
    words = ["<unk>", "<s>", "</s>", *LETTERS, *merged, "zz", "<|im_end|>", "<think>"]
    types = [NORMAL, CONTROL, CONTROL, *[NORMAL] * (len(LETTERS) + len(merged) + 1), CONTROL, USER]
    return vocabulary(path, "gpt2", words, types, merges=MERGES, pre=pre, more=more)


def texts_of(file: GgufFile, text: str, **kwargs) -> list[str]:
    tokenizer, words = load_tokenizer(file), list(file.texts["tokenizer.ggml.tokens"])
    return [words[number] for number in tokenizer(text, **kwargs)["input_ids"]]


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_a_text_is_cut_and_begun_as_its_kind_is(pre, tmp_path):
    file = byte_level(tmp_path / "model.gguf", pre)
    digits = {"": ["123", "1"], "1": ["1", "2", "3", "1"]}["1" if any(r == r"\p{N}" or r"|\p{N}|" in r for r in SPLITTINGS[pre].expressions) else ""]
    assert texts_of(file, "1231", add_special_tokens=False) == digits
    begins = pre in "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split()
    assert texts_of(file, "abc ab<|im_end|><think>") == ["<s>"] * begins + ["abc", "\u0120ab", "<|im_end|>", "<think>"]
    assert texts_of(file, "zz", add_special_tokens=False) == (["zz"] if SPLITTINGS[pre].whole_words else ["z", "z"])  # a word that no merge makes


def test_a_file_without_a_kind_is_cut_as_by_llama_cpp(tmp_path):
    assert texts_of(byte_level(tmp_path / "model.gguf"), "1231 ab", add_special_tokens=False) == ["123", "1", "\u0120ab"]


@pytest.mark.parametrize("added", [True, False])
def test_the_file_says_whether_a_text_begins_with_bos(added, tmp_path):
    for pre in ("llama-bpe", "qwen2"):
        file = byte_level(tmp_path / "model.gguf", pre, more=lambda writer: writer.add_add_bos_token(added))
        assert texts_of(file, "abc") == ["<s>"] * added + ["abc"]


def test_a_saved_tokenizer_is_the_same(tmp_path):
    for name, file in ("byte", byte_level(tmp_path / "byte.gguf", "llama-bpe")), ("piece", sentencepiece(tmp_path / "piece.gguf", PIECES)):
        tokenizer = load_tokenizer(file)
        tokenizer.save_pretrained(tmp_path / name)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        for text in ("abc ab", " a", "<s>ab</s>", "\u00e9"):
            assert again(text)["input_ids"] == tokenizer(text)["input_ids"], (name, text)


def test_load_gguf_gives_what_generate_takes(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", words=True, more=lambda writer: writer.add_chat_template("{{ messages[0].content }}"))
    model, tokenizer = lowbit.load_gguf(path)
    tokens = tokenizer("abc ab", return_tensors="pt")
    assert tokens["input_ids"].tolist() == [[5, 6, 4]]
    assert model.generate(**tokens, max_new_tokens=2).shape[1] > 3
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], return_dict=False) == [5]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template is not None) == (0, 8, True)


# ---- files that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "message"), [
    (lambda path: byte_level(path, "gpt-9"), "tokenizer.ggml.pre must be one of .*, got 'gpt-9'"),
    (lambda path: vocabulary(path, "bert", ["a"], [NORMAL]), "tokenizer.ggml.model must be gpt2 or llama, got 'bert'"),
    (lambda path: vocabulary(path, "llama", ["a", "b", "c"], [NORMAL] * 3, scores=[0.0]), "tokenizer.ggml.scores must be a score for each of the 3 words, got '1 scores'"),
    (lambda path: vocabulary(path, "gpt2", ["a", "b", "a"], [NORMAL] * 3, merges=[]), "tokenizer.ggml.tokens must be 3 words, got 2"),
    (lambda path: vocabulary(path, "gpt2", ["a", "b", "c"], [NORMAL] * 3, merges=["a x"]), "tokenizer.ggml.merges must be pairs of words, got .*x"),
    (lambda path: vocabulary(path, "gpt2", ["a", "b"], [NORMAL] * 2, merges=[], more=lambda writer: writer.add_add_eos_token(True)), "tokenizer.ggml.eos_token_id must be there, since add_eos_token is true, got None"),
], ids=["kind", "model", "scores", "words", "merges", "eos"])  # fmt: skip
def test_a_tokenizer_that_is_refused(file, message, tmp_path):
    with pytest.raises(ValueError, match=f"model.gguf: {message}"):
        load_tokenizer(file(tmp_path / "model.gguf"))


# ---- llama.cpp's own -----------------------------------------------------------------------------------------------

VOCABULARIES = "command-r deepseek-coder deepseek-llm falcon gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 refact starcoder".split()


def of_llama_cpp(name: str) -> Path:
    folder = os.environ.get("LOWBIT_LLAMA_VOCABULARIES")
    if folder is None:
        pytest.skip("LOWBIT_LLAMA_VOCABULARIES: the folder models/ of llama.cpp, which is in the source of llama-cpp-python (pip install)")
    return Path(folder) / f"ggml-vocab-{name}.gguf"


def texts_beside(path: Path) -> list[str]:
    return path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_texts_beside_a_vocabulary_of_llama_cpp(name):
    path = of_llama_cpp(name)
    tokenizer, texts = load_tokenizer(GgufFile.open(path)), texts_beside(path)
    wanted = path.with_name(f"{path.name}.out").read_text().split("\n")[: len(texts)]
    assert len(texts) > 40
    for text, numbers in zip(texts, wanted, strict=True):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == [int(number) for number in numbers.split()], text


SCRIPT = """
import ctypes, json, sys
import llama_cpp as c

texts, out = json.load(open(sys.argv[1])), {}
c.llama_backend_init()
params = c.llama_model_default_params()
params.vocab_only = True
for path in sys.argv[3:]:
    model = c.llama_model_load_from_file(path.encode(), params)
    assert model, path
    vocab, out[path] = c.llama_model_get_vocab(model), []
    for text in texts:
        data = text.encode()
        tokens = (c.llama_token * (len(data) + 8))()
        count = c.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, True)
        assert count >= 0
        out[path].append(list(tokens[:count]))
json.dump(out, open(sys.argv[2], "w"))
"""
APPROXIMATED = "tekken gpt-4o llama4 kanana2 talkie minimax-m2 deepseek-llm kimi-k2".split()
"""llama.cpp's expression takes letters beyond ASCII as both cases, or no wide space as punctuation; the model's does not."""
POOL = ["a", "b", "the", " the", "The", "THE", "'s", "'S", "'ll", "x1", "12", "1234", " ", "  ", "\t", "\n", "\r\n", "\n\n", ".", "...", "!?", "(", ")", "$", "+", "=", "^", "|", "`", "_", "-", "/", "\u00e9", "\u00c4", "\u00df", "e\u0301", "\u0416", "\u043d\u0435", "\u6211", "\u60f3\u5728", "\u3042", "\u30ab", "\ud55c\uad6d", "\u0e01\u0e32", "\u0915\u094d\u0937", "\u0663", "\u00bd", "\u00b2", "\u2167", "\U0001f680", "\U0001f636\u200d\U0001f32b\ufe0f", "\u00a0", "\u3000", "\u2019", "\u201c", "\u2014", "\uff0c", "\u3002", "<s>", "<|im_end|>"]  # fmt: skip


def replaced(source: Path, path: Path, pre: str) -> Path:
    """The vocabulary of another kind."""
    file, writer = GgufFile.open(source), gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key.startswith("tokenizer.") and key != "tokenizer.ggml.pre":
            writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(key, value, file.kinds[key])
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        writer.add_array(key, list(file.texts[key]))
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return path


def test_random_texts_are_cut_as_by_llama_cpp(tmp_path, subtests):
    source = of_llama_cpp("gpt-2")
    interpreter = os.environ.get("LOWBIT_LLAMA_PYTHON")
    if interpreter is None:
        pytest.skip("pip install llama-cpp-python (LOWBIT_LLAMA_PYTHON names an interpreter that has it)")
    randomly = random.Random(0)
    texts = texts_beside(source) + ["".join(randomly.choices(POOL, k=randomly.randint(1, 15))) for _ in range(1000)]
    paths = {pre: replaced(source, tmp_path / f"{pre}.gguf", pre) for pre in SPLITTINGS}
    paths |= {f"its own {name}": of_llama_cpp(name) for name in ("phi-3", "llama-spm", "llama-bpe", "qwen2", "deepseek-llm", "starcoder")}
    (tmp_path / "texts.json").write_text(json.dumps(texts)), (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([interpreter, tmp_path / "script.py", tmp_path / "texts.json", tmp_path / "out.json", *paths.values()], check=True, capture_output=True)
    wanted = json.loads((tmp_path / "out.json").read_text())
    for name, path in paths.items():
        with subtests.test(name):
            tokenizer = load_tokenizer(GgufFile.open(path))
            differing = [text for text, numbers in zip(texts, wanted[str(path)], strict=True) if tokenizer(text)["input_ids"] != numbers]
            few = 5 if name.removeprefix("its own ") in APPROXIMATED else 0
            assert len(differing) <= few, (len(differing), differing[:5])
