"""Models of one architecture: a base model, its fine-tuned versions and its copies."""

from __future__ import annotations

import re
from typing import Any

from tuner.core.errors import InputError, UnavailableError
from tuner.space.models.catalogue import get_entry, resolve_config

_SIZES = re.compile(r"(size|layers?|heads?|experts?|dim|rank|depth|width)$|^(n|d)_[a-z]+$")
"""Fields of a configuration that shape its weights; lengths and ids of tokens do not."""


def same_architecture(one: str, other: str) -> bool | None:
    """True if the weights of both have the same shapes; None if one of them is unknown.

    A name is one of the catalogue, a folder, or one of the hub's.
    """
    entries = [get_entry(name) for name in (one, other)]
    if one == other or (entries[0] is not None and entries[0] == entries[1]):
        return True
    try:
        return _shapes(one) == _shapes(other)
    except (InputError, UnavailableError):
        return None


def _shapes(name: str) -> dict[str, Any]:
    config = resolve_config(name)
    text = config.get_text_config()
    fields = {**config.to_dict(), **text.to_dict()}
    shapes = {
        key: value
        for key, value in fields.items()
        if _SIZES.search(key) and isinstance(value, int) and not isinstance(value, bool)
    }
    return {**shapes, "model_type": config.model_type}
