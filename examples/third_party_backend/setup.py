# SPDX-License-Identifier: Apache-2.0
"""The C rows: a shared library that is compiled with lowbit's header and linked to nothing."""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

# The folder of lowbit.backends.include_dir(), without importing lowbit, which imports torch.
INCLUDE = Path(find_spec("lowbit").origin).with_name("include")

setup(
    ext_modules=[
        Extension(
            "lowbit_example._rows",
            ["lowbit_example/rows.c"],
            include_dirs=[str(INCLUDE)],
            extra_compile_args=["-std=c99", "-O2"],
        )
    ]
)
