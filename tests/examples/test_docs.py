# SPDX-License-Identifier: Apache-2.0
"""The docs are true of the code: links and paths lead somewhere, rows are named, the README's lines run, the
API page is current, the recipes' diffs apply, the README's commands are those of .ci/run."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_folder import module_in

import lowbit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
SOURCES = sorted(path for room in ("csrc", "python", "benchmarks", "examples") for path in (ROOT / room).rglob("*") if path.suffix in {".py", ".cpp", ".hpp"})
BASES = (ROOT, ROOT / "csrc", ROOT / "python" / "lowbit", ROOT / "csrc" / "cpu", ROOT / "docs")  # what a path in the text may begin at
TREES = ("csrc/", "python/", "tests/", "docs/", "benchmarks/", "examples/", "tools/")
MADE_BY_BUILD_OR_USER = {"cpu/isas.inc"}
OF_OTHERS = {"llama.cpp", "ik_llama.cpp", "test_flex_attention.py", "test_flex_decoding.py", "test_functional.py", "conftest.py", "setup.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target, place in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", plain(page)):
        file = page.parent / target if target else page
        assert file.exists(), target
        if place:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert place in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, f"{target}#{place}"
ROOMS = (
    "attention", "autotune", "backends", "checkpoints", "devices", "export", "formats", "models", "optim", "peers", "quant", "recorder", "testing", "training",
)  # fmt: skip


def plain(page: Path) -> str:
    """The page without its diffs, which name files that are not there yet."""
    return re.sub(r"^```diff\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def is_there(path: str, of: Path) -> bool:
    if of.name.startswith("outside_suites") and Path(path).name.startswith("test_"):  # files of those suites
        return True
    if path in MADE_BY_BUILD_OR_USER or any((base / path).exists() for base in (*BASES, of.parent)):
        return True
    added = set(re.findall(r"^\+\+\+ b/(\S+)", of.read_text(), re.MULTILINE))  # by the recipe that the page is
    return any(file.endswith(path) for file in added)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_a_page_lead_to_files(page: Path) -> None:
    names = {path.name for path in (*SOURCES, *(ROOT / "tests").rglob("*.*"), *(ROOT / "tools").glob("*.py"))}
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", plain(page)):
        for path in re.findall(r"(?<![\w/.<*{-])((?:[\w-]+/)*[\w-]+\.(?:hpp|cpp|py|md|ipynb|inc))\b", code):
            if "/" not in path:
                assert path in names | OF_OTHERS or is_there(path, page), path
            elif not path.startswith("test/"):
                assert is_there(path, page), path


def test_names_in_a_page_are_there_after_import_lowbit(python: Callable[..., str]) -> None:
    """`lowbit.devices.simulated.enable` without a further import. Each room is asked in a child of its own, so that no
    other one has loaded it."""
    pages = [page for page in PAGES if page.parent.name not in ("recipes", "measured")]
    lines = [line for page in pages for line in page.read_text().splitlines() if not re.match(r" *(>>> )?(from|import) ", line)]
    names = {name for line in lines for name in re.findall(r"(?<![\w./:-])lowbit(?:\.[A-Za-z_]\w*){2,}(?![\w/]|\.json|\.md)", line)}
    assert "lowbit.devices.simulated.enable" in names and len(names) > 40
    missing = python(
        """import itertools, os, sys, lowbit
for _, names in itertools.groupby(sys.argv[1:], lambda name: name.split(".")[1]):
    child = os.fork()
    if child == 0:
        try:
            for name in names:
                eval(name)
        except AttributeError as error:
            print(name, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)""",
        *sorted(names),
    )
    assert not missing


def test_paths_in_a_comment_lead_to_files() -> None:
    for source in SOURCES:
        for path in re.findall(r"(?<![\w/.])((?:[\w.-]+/)+[\w-]+\.(?:hpp|cpp|py|md|ipynb))\b", source.read_text()):
            if path.startswith(TREES):
                assert is_there(path, source), f"{source.relative_to(ROOT)}: {path}"


def test_readme_has_the_two_commands_of_ci() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in (
        'pip install -c constraints.txt ".[examples]" && python examples/01_quantize_a_model.py',
        'pip install -c constraints.txt ".[test]" && pytest',
    ):
        assert command in readme.splitlines() and command in ci
    assert len(readme.splitlines()) <= 155, "a reader wants to be through in five minutes"


def tiny_llama(**options: Any) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        attn_implementation=options.get("attn_implementation"),
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page and with the model replaced by a small one, which no download is needed for."""
    transformers = pytest.importorskip("transformers")

    class Tokenizer:
        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}

        def decode(self, tokens: torch.Tensor) -> str:
            return f"{len(tokens)} tokens"

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, **options: tiny_llama(**options))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer())
    monkeypatch.chdir(tmp_path)
    query, key, value = (torch.randn(1, 2, 2048, 16) for _ in range(3))
    space: dict[str, Any] = {
        "torch": torch, "query": query, "key": key, "value": value, "fresh_model": tiny_llama(), "tokens": torch.tensor([[1, 2, 3]]),
    }  # fmt: skip
    first, second, *others = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(others) == 3
    exec(first, space)
    assert space["model"].config._attn_implementation == "lowbit"
    space["model"] = tiny_llama(attn_implementation="lowbit")
    exec(second, space)
    assert not any(isinstance(module, lowbit.QuantLinear) for module in space["model"].modules())
    assert any(isinstance(module, lowbit.QuantLinear) for module in space["fresh_model"].modules())
    for lines in others:
        exec(lines, space)
    space["out"].sum().backward()
    assert space["bias"].grad.ne(0).all() and isinstance(space["optimizer"], lowbit.optim.AdamW8bit)
    assert "tokens" in capsys.readouterr().out


def test_api_page_is_current() -> None:
    """`python tools/api_page.py` writes it."""
    pytest.importorskip("transformers")
    api_page = module_in("tools", "api_page")
    listed = [name for names in api_page.SECTIONS.values() if names.startswith("lowbit: ") for name in names.split()[1:]]
    assert sorted([*listed, "__version__", *ROOMS]) == sorted(lowbit.__all__), "a public name is in no section"
    assert api_page.page() == api_page.PAGE.read_text()


@pytest.mark.parametrize("page, op", [("linear", "linear"), ("optim", "optim_step")])
def test_every_row_is_in_the_page_of_its_op(page: str, op: str) -> None:
    text = (ROOT / "docs" / "ops" / f"{page}.md").read_text()
    for row in lowbit.kernels(op):
        name = str(row["name"]).removesuffix(f"_{row['backend']}")
        assert f"`{name}_<isa>`" in text and f"`{row['backend']}`" in text, row["name"]


def diff_of(recipe: Path) -> str:
    return "".join(re.findall(r"^```diff\n(.*?)^```$", recipe.read_text(), re.MULTILINE | re.DOTALL))


def test_the_table_of_additions_counts_the_files_of_the_recipes() -> None:
    """Code, all, C++, Python, tests, pages; a package of one's own, in examples/, counts as none of lowbit's."""
    rows = re.findall(r"^\| .* \| \[(\w+\.md)\]\(recipes/\w+\.md\) \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {page.name for page in RECIPES} - {"add_a_device.md"}
    for name, told in rows:
        files = set(re.findall(r"^\+\+\+ b/(\S+)", diff_of(ROOT / "docs" / "recipes" / name), re.MULTILINE))
        cpp, python, tests, pages = (
            {file for file in files if file.split("/")[0] in rooms} for rooms in (("csrc",), ("python",), ("tests",), ("docs", "tools"))
        )
        code = {file for file in cpp | python if not file.endswith(("__init__.py", "__init__.pyi"))}
        assert told == " | ".join(str(len(of)) for of in (code, cpp | python | tests | pages, cpp, python, tests, pages)), name


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_recipe_applies_to_the_code_as_it_is(page: Path) -> None:
    """tools/recipes builds the tree with them, and runs their tests."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not on this machine")
    diff = diff_of(page)
    assert diff.count("diff --git ") > 2
    way = ["--reverse"] if "git apply --check --reverse" in page.read_text() else []  # what it adds is in the tree
    done = subprocess.run([git, "apply", "--check", *way, "-"], input=diff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name} does not apply: {done.stderr}"
