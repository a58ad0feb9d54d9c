# SPDX-License-Identifier: Apache-2.0
"""A GGUF file in a repository of the Hugging Face Hub, asked for by the name of the repository: huggingface_hub
downloads it into its cache, with its progress bar, or finds it there."""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_ENDING = ".gguf"


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Whether this names a repository: a text ``owner/name`` that is no path of a file or folder here."""
    is_name = isinstance(path, str) and _REPOSITORY.fullmatch(path) is not None
    return is_name and not path.lower().endswith(_ENDING) and not Path(path).exists()


def file_of(asker: str, path: str | os.PathLike[str], file: str | None) -> str | os.PathLike[str]:
    """Return the path of a file that is here, or of one of a repository after its download. Raises the errors of
    `download`, and ValueError if a ``file`` is given with a path."""
    if is_repository(path):
        return download(asker, str(path), file)
    if file is not None:
        raise ValueError(
            f"{asker}: file must be None unless path is a repository of the Hub, got {file!r} with path={str(path)!r}"
        )
    return path


def hub_files(asker: str, repository: str) -> list[str]:
    """Return the names of the files of a repository; where the Hub must not be asked, of those in the cache.

    Raises:
        ConnectionError: the Hub cannot be reached.
        ValueError: there is no such repository, or it is not open to this user.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        if constants.HF_HUB_OFFLINE:
            return _cached_files(repository)
        return huggingface_hub.HfApi().list_repo_files(repository)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise ValueError(
            f"{asker}: {repository} must be a path on this machine, or a repository of the Hugging Face Hub that is "
            f"open to you: {_first_line(error)}"
        ) from None
    except Exception as error:
        raise _unreachable(asker, repository, error) from error


def download(asker: str, repository: str, file: str | None) -> Path:
    """Return the path of a GGUF file of a repository, after its download, and that of its other parts.

    Args:
        asker: the function whose argument ``path`` named the repository, for errors.
        file: name of the file, or the part of it that says the quantization, such as ``Q4_K_M``; None: the only one.

    Raises:
        ConnectionError: the Hub cannot be reached.
        ValueError: there is no such repository or file, or several match; names them.
    """
    import huggingface_hub

    names = _chosen(asker, repository, file, hub_files(asker, repository))
    try:
        paths = [Path(huggingface_hub.hf_hub_download(repository, name)) for name in names]
    except Exception as error:
        raise _unreachable(asker, f"{repository}/{names[0]}", error) from error
    return paths[0]


def has_gguf_files(names: list[str]) -> bool:
    """Whether a repository with these files has a language model as a GGUF file."""
    return any(map(_is_model, names))


def _chosen(asker: str, repository: str, file: str | None, names: list[str]) -> list[str]:
    """Return the names of the file that is asked for, and of its parts, in order."""
    models = [name for name in names if _is_model(name) or name == file]
    by_first = {}  # file -> its parts
    for name in sorted(models):
        by_first.setdefault(_PART.sub(_ENDING, name), []).append(name)
    found = [whole for whole, parts in by_first.items() if file is None or _matches(file, whole, parts)]
    if len(found) == 1:
        return by_first[found[0]]
    told = ", ".join(found or by_first) or "none"
    if file is None:
        wanted = "file must say which of several GGUF files, such as Q4_K_M," if found else "there must be a GGUF file"
    else:
        wanted = (
            f"file must be the name, or a word of the name, of one GGUF file, got {file!r}, which {len(found)} have,"
        )
    raise ValueError(f"{asker}: {wanted} in {repository}: {told}")


def _is_model(name: str) -> bool:
    """Whether it is a GGUF file and no projector of images or importance matrix beside one."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(_ENDING) and not base.startswith("mmproj") and "imatrix" not in base


def _matches(file: str, whole: str, parts: list[str]) -> bool:
    """Whether ``file`` is the name of a file, of one of its parts, or a word of the name: Q4_K is none of Q4_K_M."""
    if file in (whole, whole.rpartition("/")[2], *parts):
        return True
    return re.search(rf"(^|[-./]){re.escape(file)}([-./]|$)", whole, re.IGNORECASE) is not None


def _cached_files(repository: str) -> list[str]:
    """The files of a repository that the cache of huggingface_hub has."""
    import huggingface_hub

    folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _unreachable(asker: str, what: str, error: Exception) -> Exception:
    """The error to raise for one of huggingface_hub, or of the HTTP library that it has: those of the disk as they
    are, all others as one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return ConnectionError(
        f"{asker}: the Hugging Face Hub must be reachable for {what}, which is neither a path here nor in the cache: "
        f"{type(error).__name__}: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
