"""python-dotenv, where it is not installed: variables of a file `.env` (1.2, main.py)."""

from __future__ import annotations

import os
import re
from typing import Any

from tuner.program.standins.unknown import users_frame

NAMES = "load_dotenv dotenv_values find_dotenv"
_LINE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([^\s=\#'"]+)[ \t]*=[ \t]*"""
    r"""(?:'((?:\\'|[^'])*)'|"((?:\\"|[^"])*)"|((?:[^\n\#]|(?<![ \t])\#)*))""",
    re.MULTILINE,
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def find_dotenv(
    filename: str = ".env", raise_error_if_not_found: bool = False, usecwd: bool = False
) -> str:
    """The nearest file of this name, from the folder of the caller on upwards; else ""."""
    file = users_frame().f_code.co_filename
    at = os.getcwd() if usecwd or not os.path.isfile(file) else os.path.dirname(file)
    while not os.path.isfile(found := os.path.join(at, filename)):
        if (above := os.path.dirname(at)) == at:
            if raise_error_if_not_found:
                raise OSError("File not found")
            return ""
        at = above
    return found


def dotenv_values(dotenv_path: Any = None, stream: Any = None, *_: Any, **__: Any) -> Any:
    path = dotenv_path or find_dotenv()
    text = stream.read() if stream else ""
    if not stream and path and os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            text = file.read()
    values: dict[str, str] = {}
    for name, single, double, bare in _LINE.findall(text):
        said = single or double.replace("\\n", "\n") or bare.strip()
        known = {**values, **os.environ}
        values[name] = _VARIABLE.sub(lambda v, known=known: known.get(v[1], v[2] or ""), said)
    return values


def load_dotenv(
    dotenv_path: Any = None, stream: Any = None, verbose: bool = False, override: bool = False,
    *_: Any, **__: Any,
) -> bool:  # fmt: skip
    values = dotenv_values(dotenv_path, stream)
    os.environ.update({k: v for k, v in values.items() if override or k not in os.environ})
    return bool(values)
