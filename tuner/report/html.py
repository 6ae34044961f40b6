"""Building blocks of the HTML pages: templates, texts that are safe to show, and plotly.js."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from msgspec.json import encode

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
    # Of 100,000 trials, the standard library takes a second longer.
    environment.policies["json.dumps_function"] = lambda value, **_: encode(value).decode()
    return environment


def _shown(value: Any) -> Any:
    """`value` without characters that turn the direction of writing or hide text."""
    # Markup is the page's own.
    return printable(value) if type(value) is str else value


def all_shown(value: Any) -> Any:
    """`value` with every text in it safe to show, in lists and mappings too."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {_shown(name): all_shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_shown(item) for item in value]
    return value


VERSION = "4.1.1"
"""Version of the bundle; its major version is that of the Python package's plotly.js."""
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Checksum of the published `plotly-basic.min.js`."""


def plotlyjs() -> str:
    """The bundle as JavaScript text; its first lines name its version and licence (MIT)."""
    return (files("tuner.report") / "page/vendor/plotly-basic.min.js").read_text("utf-8")
