# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m lowbit info` (machine, ops, threads, fallbacks) and `python -m lowbit kernels [op]`."""

from __future__ import annotations

import argparse

import lowbit


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowbit", description="What this build of lowbit runs on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, ISA levels, threads, torch, registered ops, fallbacks and their reasons")
    kernels = commands.add_parser("kernels", help="the kernel rows of an op, best first")
    kernels.add_argument("op", nargs="?", default="linear")
    options = parser.parse_args(arguments)
    print(lowbit.info() if options.command == "info" else lowbit.kernels(options.op))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
