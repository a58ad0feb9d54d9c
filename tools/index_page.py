# SPDX-License-Identifier: Apache-2.0
"""Make the package index's page of a source tree complete: `python tools/index_page.py TREE URL`, for .ci/wheels.

The index shows README alone, beside no other file: links and pictures become those of the project's public address at
the tag of this version, and the metadata name the address. In a checkout links are relative, so that they lead to the
files of the same commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def absolute_links(page: str, url: str, version: str) -> str:
    """``page`` with each relative link at ``url``: pictures as files (raw), everything else as it is
    shown there (blob)."""

    def link(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, page)


def with_urls(pyproject: str, url: str, version: str) -> str:
    """``pyproject`` with the addresses of home page, documentation, changelog and issues, before its first
    table after [project]."""
    urls = {
        "Homepage": url,
        "Documentation": f"{url}/blob/v{version}/docs/index.md",
        "Changelog": f"{url}/blob/v{version}/docs/changelog.md",
        "Issues": f"{url}/issues",
    }
    table = "[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    return pyproject.replace("[project.optional-dependencies]", f"{table}\n[project.optional-dependencies]", 1)


def main(tree: Path, url: str) -> None:
    if not re.fullmatch(r"https://\S+[^/\s]", url):
        raise SystemExit(f"index_page: URL must be https://... without a slash at its end, got {url!r}")
    pyproject, readme = tree / "pyproject.toml", tree / "README.md"
    version = re.search(r'^version = "(.+)"$', pyproject.read_text(), re.MULTILINE)[1]
    pyproject.write_text(with_urls(pyproject.read_text(), url, version))
    readme.write_text(absolute_links(readme.read_text(), url, version))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
