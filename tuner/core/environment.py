"""The environment variables of started processes, and masking the secrets in their output.

A token that a program prints must not become part of a record or of a report.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

DEVICE_ORDER: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The driver's order of devices, which NVML has too; CUDA's own puts the fastest first."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def trial_environment(threads: int) -> dict[str, str]:
    """The environment of a trial: `threads` processors, and the driver's device order.

    A trial computes with as many threads as it has processors, whatever the user's shell says:
    two trials of one configuration are to measure the same.
    """
    return {**DEVICE_ORDER, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


_MODULE = (
    "import runpy, sys; sys.path[:] = sys.argv.pop(1).split(':');"
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def this_python() -> str:
    """The Python that runs this, for your own programs, which find what they always find."""
    return sys.executable


def isolated(code: str, *words: str, python: str | Path | None = None) -> list[str]:
    """The command that runs `code` where no file of any folder stands for a library."""
    return [str(python or sys.executable), "-I", "-c", code, *words]


def own_python(module: str, *words: str) -> list[str]:
    """The command that runs a module of tuner in a process of its own, `isolated`.

    It finds the libraries that are found here, but none in the current folder or the script's.
    """
    main, home = sys.modules["__main__"], Path(__file__).parents[2]
    script = getattr(main, "__file__", None) if main.__spec__ is None else None
    others = [folder for folder in (Path(), Path(script or "").parent) if folder.exists()]
    path = [
        str(folder)
        for folder in (Path(each).absolute() for each in sys.path)
        if folder == home or (folder.exists() and not any(map(folder.samefile, others)))
    ]
    return isolated(_MODULE, os.pathsep.join(path), module, *words)


def your_python(module: str, *words: str) -> list[str]:
    """The command that runs a module of tuner which imports your code by PYTHONPATH.

    -P: no file of the folder that it starts in (click.py) stands for a library.
    """
    return [sys.executable, "-P", "-m", module, *words]


def search_path() -> str:
    """The value of PYTHONPATH by which the modules that are found here are found there."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)


def joined(*parts: str | None) -> str:
    """Values of PYTHONPATH, one after the other; those that are empty are left out."""
    return os.pathsep.join(filter(None, parts))


MASK = "***"

LEAST_CHARS = 8
"""Shorter values of variables are left: they would be found in words that mean something else."""

_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|(?:^|_)(?:AUTH|PASS|PAT|COOKIE)(?:_|$)"
    r"|(?:TOKEN|KEY)S?(?:_|$)"
)
# What a variable is about that says where a secret lies, or how large it may be.
_NO_SECRET = re.compile(r"_(?:FILE|PATH|DIR|SOCK|SOCKET|TYPE|NAME|HOST|PORT|URL|URI|TIMEOUT)$")

_WORD = r"[A-Za-z0-9_.~+/=-]"

# Each line names whose tokens it finds; the whole match is masked, but for what "keep" names.
_SHAPES = re.compile(
    r"(?P<keep>"
    rf"\bBearer\s+(?={_WORD}{{8}})"  # RFC 6750
    r"|\bAuthorization['\"]?\s*[:=]\s*['\"]?(?:(?:Basic|Token|Bearer)\s+)?"  # HTTP
    r"|\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]*:(?=[^\s/@'\"]+@)"  # passwords in URLs
    r"|\b[a-z][a-z0-9+.-]*://(?=[^\s/:@'\"]{16,}@)"  # tokens in URLs
    r"|\b[\w-]*(?:api[_-]?key|access[_-]?(?:key|token)|auth[_-]?token|secret|passw(?:or)?d"
    r"|passphrase)[\w-]*['\"]?\s*[:=]\s*['\"]?(?=[^\s'\"]{8})"  # assignments
    r")[^\s'\",;@]+"
    r"|(?P<key>\b(?:wandb|api|key)[^\n]{0,60}?)\b[0-9a-f]{40}\b"  # Weights & Biases
    r"|\bwandb_v1_\w{16,}"
    r"|\bhf_[A-Za-z0-9]{16,}|\bapi_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"  # GitHub
    r"|\bglpat-[\w-]{16,}"  # GitLab
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bxox[a-z]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\bAIza[\w-]{35}|\bya29\.[\w-]{16,}"  # Google
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.IGNORECASE | re.DOTALL,
)


def names_secret(name: str) -> bool:
    """True if an environment variable of this name holds a token or a password."""
    upper = name.upper()
    return _NAME.search(upper) is not None and _NO_SECRET.search(upper) is None


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """The values of variables that hold tokens or passwords, and other ways to write them.

    Files that exist, and what is shorter than `LEAST_CHARS`, are none.
    """
    values = [value.strip() for name, value in environment.items() if names_secret(name)]
    found = {value for value in values if len(value) >= LEAST_CHARS and not _is_file(value)}
    written = {json.dumps(value)[1:-1] for value in found} | {repr(value)[1:-1] for value in found}
    return frozenset(found | written | {quote(value, safe="") for value in found})


def _is_file(value: str) -> bool:
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):  # no name that a file can have
        return False


def masked(text: str, secrets: Collection[str] = ()) -> str:
    """`text` with `MASK` in place of these secrets and of what has the shape of a known token."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _SHAPES.sub(lambda found: f"{found['keep'] or found['key'] or ''}{MASK}", text)


def all_masked(value: Any, secrets: Collection[str] = ()) -> Any:
    """`value`, of JSON types, with every text in it `masked`; names of fields are left."""
    if isinstance(value, str):
        return masked(value, secrets)
    if isinstance(value, Mapping):
        return {name: all_masked(each, secrets) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(all_masked(each, secrets) for each in value)
    return value
