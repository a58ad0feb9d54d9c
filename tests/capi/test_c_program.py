# SPDX-License-Identifier: Apache-2.0
"""lowbit/lowbit.h is C99 and C++; programs find it with CMake, run without torch, and compute what Python does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cross_built
import for_windows
import pytest
import torch

import lowbit
from lowbit import _C, backends, testing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY = Path(_C.__file__).parent
LINKED = [f"-L{LIBRARY}", "-llowbit", f"-Wl,-rpath,{LIBRARY}"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{backends.include_dir()}"]


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine" + (": pip install cmake" if program == "cmake" else ""))


@pytest.mark.parametrize("compiler, standard", [("gcc", "c99"), ("gcc", "c17"), ("g++", "c++11"), ("g++", "c++20")])
def test_headers_are_c_and_cpp(compiler: str, standard: str, tmp_path: Path) -> None:
    needs(compiler)
    for headers in (["lowbit"], ["lowbit", "backend"], ["backend", "lowbit"]):
        source = tmp_path / ("program.c" if compiler == "gcc" else "program.cpp")
        lines = [f"#include <lowbit/{header}.h>" for header in headers]
        source.write_text("\n".join([*lines, "int main(void) { return lowbit_api_version() != LOWBIT_API_VERSION; }\n"]))
        subprocess.run([compiler, f"-std={standard}", *WARNINGS, str(source), *LINKED, "-o", str(tmp_path / "program")], check=True)
        subprocess.run([str(tmp_path / "program")], check=True)


def test_the_code_of_the_page_compiles(tmp_path: Path) -> None:
    needs("gcc")
    (code,) = re.findall(r"^```c$(.*?)^```$", (ROOT / "docs" / "c_api.md").read_text(), re.MULTILINE | re.DOTALL)
    include, _, body = code.strip().partition("\n")
    source = tmp_path / "page.c"
    declared = "void page(float *floats, float *x, float *y, int64_t m, int64_t n, int64_t k);"
    source.write_text(f"#include <stdio.h>\n#include <stdlib.h>\n{include}\n{declared}\n{declared[:-1]} {{\n{body}\n}}\n")
    subprocess.run(["gcc", "-std=c99", *WARNINGS, "-fsyntax-only", str(source)], check=True)


def test_a_program_computes_what_python_computes(tmp_path: Path) -> None:
    needs("gcc")
    m, n, k, heads, kv_heads, length, tokens, e = 33, 256, 192, 4, 2, 5, 40, 64
    x, weight = torch.randn(m, k), torch.randn(n, k)
    query, key, value = (torch.randn(1, *shape, e) for shape in ((heads, length), (kv_heads, tokens), (kv_heads, tokens)))
    (tmp_path / "in").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in (x, weight, query, key, value)))
    flags = ["-std=c99", "-O1", *WARNINGS, *LINKED, "-pthread"]
    subprocess.run(["gcc", str(HERE / "program.c"), *flags, "-o", str(tmp_path / "program")], check=True)
    command = [str(tmp_path / "program"), str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

    packed = testing.pack_weight(weight, "int4", 32, "symmetric", scale="search")
    spec = n, k, _C.FORMATS["int4"], 32, False
    y = torch.ops.lowbit.linear(x, packed, *spec, _C.X_FORMATS["int8_group"], activation=_C.ACTIVATIONS["gelu"])
    attended, _, _ = torch.ops.lowbit.attention_forward(query, key, value, e**-0.5, False, None, 0.0, None, [], [], [], [], [], [0, 0], None)
    cache = lowbit.QuantizedKVCache("int8")
    cache.append(0, key, value)
    wanted = [packed, y, attended, cache.attend(0, query)]
    assert (tmp_path / "out").read_bytes() == b"".join(tensor.contiguous().numpy().tobytes() for tensor in wanted)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of examples/c, built as its CMakeLists.txt says."""
    needs("gcc", "cmake")
    folder = tmp_path_factory.mktemp("decode")
    found = subprocess.run([sys.executable, "-m", "lowbit", "cmake-dir"], capture_output=True, text=True, check=True)
    configure = ["cmake", "-S", ROOT / "examples" / "c", "-B", folder, f"-Dlowbit_DIR={found.stdout.strip()}"]
    for command in ([*configure, "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror"], ["cmake", "--build", folder]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "decode"


def tokens_of(program: Path, *arguments: object) -> list[int]:
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout
    return [int(token) for token in done.stdout.splitlines()[0].split()]


@pytest.fixture(scope="module", params=["int4", "mixed", "float"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A small random Llama and its file; mixed: the formats of its layers differ, and its head is the table of words."""
    transformers = pytest.importorskip("transformers")
    mixed = request.param == "mixed"
    config = transformers.LlamaConfig(hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                                      vocab_size=300, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=mixed, rms_norm_eps=1e-4)  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="lowbit").eval()  # which attends over codes
    for norm in (module for name, module in model.named_modules() if name.endswith("norm")):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    if mixed:
        lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: isinstance(module, torch.nn.Linear) and "k_proj" in name)
    if request.param != "float":
        others = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
        lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32), lambda _, name: name in others)
    lowbit.fuse(model)
    path = tmp_path_factory.mktemp("llama") / "model.bin"
    _write_model()(model, path, 64)
    return model, path


def _write_model() -> object:
    from in_folder import module_in

    return module_in("examples/c", "write_model").write_model


@pytest.mark.parametrize("cache", ["float", "int8", "int4"])
def test_the_example_decodes_the_tokens_of_python(decode: Path, llama: tuple[torch.nn.Module, Path], cache: str) -> None:
    from lowbit.models.quantized_cache import QuantizedCache

    model, path = llama
    prompt = torch.tensor([[7, 123, 45, 6, 299, 0, 31]])
    past = {} if cache == "float" else {"past_key_values": QuantizedCache(cache)}
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0, **past)
    tokens = tokens_of(decode, path, 20, cache, *prompt[0].tolist())
    assert tokens == wanted[0, prompt.shape[1] :].tolist() and len(set(tokens)) > 3


def test_the_example_decodes_the_same_tokens_on_windows(decode: Path, llama: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    cross_built.skip_without("windows/csrc/liblowbit.dll", "windows")
    for_windows.needs()
    library, program = ROOT / "build/windows/csrc", tmp_path / "decode.exe"
    flags = ["-std=c99", "-O1", *WARNINGS, f"-L{library}", "-llowbit", "-static-libgcc", "-Wl,-Bstatic", "-lwinpthread"]
    compiler = for_windows.COMPILER.replace("g++", "gcc")
    subprocess.run([compiler, str(ROOT / "examples/c/decode.c"), *flags, "-o", str(program)], check=True)
    shutil.copy(library / "liblowbit.dll", tmp_path)
    for cache in ("float", "int8", "int4"):
        done = for_windows.run(program, for_windows.path(llama[1]), "20", cache, "7", "123", "45", "6")
        assert done.returncode == 0 and "tokens/s" in done.stdout, done.stdout + done.stderr
        got = [int(token) for token in done.stdout.splitlines()[0].split()]
        assert got == tokens_of(decode, llama[1], 20, cache, 7, 123, 45, 6)


def test_the_example_refuses_other_files_and_words(decode: Path, llama: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    data = llama[1].read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    (tmp_path / "other").write_bytes(b"GGUF" * 9)
    (tmp_path / "sizes").write_bytes(data[:8] + bytes(8) + data[16:])  # no layers
    (tmp_path / "shape").write_bytes(data[:16] + (97).to_bytes(8, "little") + data[24:])  # other columns
    for arguments, text in ((("cut", 1, "float", 1), "MODEL is cut"), (("other", 1, "float", 1), "write_model.py"), (("none", 1, "float", 1), "opened"),
                            (("sizes", 1, "float", 1), "a size that is not 1"), (("shape", 1, "float", 1), "of another shape")):
        done = subprocess.run([str(decode), *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and text in done.stderr
    for arguments, text in (((1, "float", 300), "indices must be 0..299"), ((1, "int5", 1), "CACHE"), ((64, "float", 1), "--context"), (("x", "int8", 1), "numbers"), ((1, "float"), "COUNT")):
        done = subprocess.run([str(decode), str(llama[1]), *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 1 and text in done.stderr, done.stderr
