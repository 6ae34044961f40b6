"""What every page that is written as one HTML file has: its templates, and safe texts."""

from __future__ import annotations

from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from tuner.core.units import printable


def page_environment() -> Environment:
    """The templates of `page/`. Every text is shown as text, whatever it contains.

    Pages ask nothing of the network, and the content security policy in their head forbids it.
    """
    environment = Environment(
        loader=PackageLoader("tuner.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.policies["json.dumps_function"] = _json
    return environment


def _json(value: Any, **_: Any) -> str:
    """`value` as JSON; of 100,000 trials, the standard library takes a second longer."""
    return msgspec.json.encode(value).decode()


def _shown(value: Any) -> Any:
    """What a name may not do to a page either: turn the direction of writing, or hide."""
    # Markup is the page's own.
    return printable(value) if type(value) is str else value


def all_shown(value: Any) -> Any:
    """The same of every text in lists and tables of them."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {_shown(name): all_shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_shown(item) for item in value]
    return value
