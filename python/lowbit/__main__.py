# SPDX-License-Identifier: Apache-2.0
"""Command line: `lowbit info` (machine, ops, threads, fallbacks), `lowbit kernels [op]`, `lowbit --version`; also
`python -m lowbit`."""

from __future__ import annotations

import argparse
import sys

import lowbit


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lowbit", description="What this build of lowbit runs on this machine.")
    parser.add_argument("--version", action="version", version=f"lowbit {lowbit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, ISA levels, threads, torch, registered ops, fallbacks and their reasons")
    kernels = commands.add_parser("kernels", help="the kernel rows of an op, best first")
    kernels.add_argument("op", nargs="?", default="linear")
    options = parser.parse_args(arguments)
    try:
        print(lowbit.info() if options.command == "info" else lowbit.kernels(options.op))
    except (ImportError, ValueError) as error:  # no torch, an unknown op, a wrong LOWBIT_ISA
        print(f"lowbit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
