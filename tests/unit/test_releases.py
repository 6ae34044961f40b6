"""The tables of what libraries take: beside the classes themselves, installed and shipped."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect

import pytest

from tuner.program import releases
from tuner.program.sources import SOURCES

HOMES = {
    "transformers": ("transformers", "transformers.utils.quantization_config"),
    "trl": ("trl", "trl.scripts.utils", "trl.trainer.base_config"),
    "peft": ("peft", "peft.config"),
    "accelerate": ("accelerate.utils", "accelerate", "accelerate.utils.dataclasses"),
    "torch": ("torch.optim", "torch.utils.data", "torch.optim.optimizer"),
    "bitsandbytes": ("bitsandbytes.optim", "bitsandbytes.optim.optimizer"),
}
"""The modules that have a library's classes under their names."""


@pytest.fixture(scope="module")
def read() -> dict[str, dict]:
    """The classes as the sources of the installed libraries say them."""
    tables = releases.classes(SOURCES)
    assert tables
    return tables


def plain(value: object) -> object:
    """A default as the tables have it."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def defaults_of(kind: type) -> dict[str, object]:
    """The fields of a dataclass that its constructor takes, with what they are by default."""
    none = dataclasses.MISSING
    return {
        field.name: field.default_factory() if field.default is none is not field.default_factory
        else field.default
        for field in dataclasses.fields(kind) if field.init
    }  # fmt: skip


def real_classes(library: str, tables: dict[str, dict]) -> dict[str, type]:
    modules = [importlib.import_module(name) for name in HOMES[library]]
    found = {}
    for name in tables:
        root, _, own = name.partition(".")
        here = [getattr(m, own) for m in modules if hasattr(m, own)] if root == library else []
        if here:
            found[name] = here[0]
    return found


@pytest.mark.parametrize("library", HOMES)
def test_fields_are_those_of_the_imported_classes(read, library):
    """Equal or unknown, and hardly anything is unknown."""
    unknown, compared = [], 0
    for name, kind in real_classes(library, read).items():
        if not dataclasses.is_dataclass(kind) or "parameters" in read[name]:
            continue
        fields, real = read[name]["fields"], defaults_of(kind)
        assert list(fields) == list(real), name
        for field, value in real.items():
            compared += 1
            said = fields[field].get("default", dataclasses.MISSING)
            if isinstance(said, dict) and "$unknown" in said:
                unknown.append(f"{name}.{field}")
            elif isinstance(said, dict) and "$object" in said:
                assert said["$object"]["class"].endswith(f".{type(value).__name__}")
            else:
                assert said == plain(value), f"{name}.{field}"
    assert unknown == []
    assert compared > 100 or library in ("torch", "bitsandbytes")


@pytest.mark.parametrize("library", HOMES)
def test_parameters_are_those_of_the_imported_functions(read, library):
    compared = 0
    for name, real in real_classes(library, read).items():
        if "parameters" not in read[name]:
            continue
        made = real.__init__ if isinstance(real, type) else real
        own = [p for p in inspect.signature(made).parameters.values() if p.name != "self"]
        positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        assert read[name]["parameters"] == positional, name
        compared += 1
    assert compared
