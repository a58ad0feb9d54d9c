# SPDX-License-Identifier: Apache-2.0
"""Packages that are there for a test: a folder with the module and its metadata, to be put on PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import backends

ROWS = """
#include <lowbit/backend.h>
#include <stdio.h>
#ifdef __cplusplus
#include <stdexcept>
#endif
#ifndef SIZE
#define SIZE sizeof(lowbit_rows)
#endif
#ifndef VERSION
#define VERSION LOWBIT_BACKEND_API
#endif
#ifndef ARGS
#define ARGS sizeof(lowbit_linear_args)
#endif
#ifndef NAME
#define NAME "linear_test_" BY
#endif
#ifndef FIRST
#define FIRST 0
#endif
static int refuses(const void *args, char *reason, size_t bytes) {
  const lowbit_linear_args *a = (const lowbit_linear_args *)args;
  if (a->call.struct_size != sizeof *a || a->call.api_version != 1 || a->weight.n != 16) {
    snprintf(reason, bytes, "n must be 16, got %d", (int)a->weight.n);
    return 1;
  }
  return 0;
}
static int run(const void *args, char *error, size_t bytes) {
  const lowbit_linear_args *a = (const lowbit_linear_args *)args;
  int64_t i;
#ifdef THROW
  throw THROW;
#endif
#ifdef FAIL
  snprintf(error, bytes, "the accelerator is on fire");
  return 1;
#endif
  for (i = 0; i < a->y.shape[0] * a->y.shape[1]; i++) ((float *)a->y.data)[i] = 7;
  return 0;
}
static const lowbit_row rows[] = {{"linear", NAME, "cpu", ARGS, FIRST, refuses, run}};
LOWBIT_BACKEND_EXPORT const lowbit_rows *SYMBOL(void) {
  static const lowbit_rows table = {SIZE, VERSION, sizeof(lowbit_row), 1, rows};
  return &table;
}
"""


class Packages:
    """Makes packages in a folder, which `path` puts before PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def path(self) -> str:
        return os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def add(self, name: str, code: str, group: str = "lowbit.backends", entry: str = "register") -> None:
        """A package of this name, whose module has this code."""
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(code)
        metadata = self.folder / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{entry}\n")

    def add_library(self, name: str, *definitions: str, language: str = "c") -> Path:
        """A package with one C row, `linear_test_<name>`, which writes 7s and takes weights of 16 columns."""
        path = self.library(name, *definitions, language=language)
        self.add(name, f"def register(api):\n    api.add_library({str(path)!r})\n")
        return path

    def library(self, name: str, *definitions: str, language: str = "c") -> Path:
        compiler = shutil.which({"c": "gcc", "c++": "g++"}[language])
        if compiler is None:
            pytest.skip("no C compiler on this machine: C rows are compiled by this test")
        source, path = self.folder / f"{name}.{language}", self.folder / f"lib{name}.so"
        source.write_text(ROWS)
        given = [f"-D{definition}" for definition in (f'BY="{name}"', *definitions)]
        given += [] if any(each.startswith("-DSYMBOL=") for each in given) else ["-DSYMBOL=lowbit_backend_rows"]
        flags = ["-x", language, "-shared", "-fPIC", "-O1", f"-I{backends.include_dir()}"]
        subprocess.run([compiler, *flags, *given, str(source), "-o", str(path)], check=True)
        return path
