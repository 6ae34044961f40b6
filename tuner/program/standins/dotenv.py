"""python-dotenv 1.2, where it is not installed: variables of a file `.env`."""

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


def find_dotenv(filename: str = ".env", *_: Any, usecwd: bool = False, **__: Any) -> str:
    """The nearest file of this name, from the folder of the caller on upwards; else ""."""
    own = os.path.dirname(users_frame().f_code.co_filename)
    at = os.path.abspath(own if os.path.isdir(own) and not usecwd else ".")
    while not os.path.isfile(found := os.path.join(at, filename)) and at != os.path.dirname(at):
        at = os.path.dirname(at)
    return found if os.path.isfile(found) else ""


def dotenv_values(dotenv_path: Any = None, stream: Any = None, *_: Any, **__: Any) -> Any:
    path, values = dotenv_path or find_dotenv(), dict[str, str]()
    if stream or os.path.isfile(path):
        with stream or open(path, encoding="utf-8") as file:
            found = _LINE.findall(file.read())
        for name, single, double, bare in found:
            known, said = {**values, **os.environ}, single or double or bare.strip()
            parts = _VARIABLE.split(said.replace("\\n", "\n") if double else said)
            told = (known.get(name, other or "") for name, other in zip(parts[1::3], parts[2::3]))
            values[name] = "".join(map("".join, zip(parts[::3], (*told, ""))))
    return values


def load_dotenv(*args: Any, override: bool = False, **given: Any) -> bool:
    values = dotenv_values(*args, **given)
    os.environ.update({k: v for k, v in values.items() if override or k not in os.environ})
    return bool(values)
