"""What people write from other tools is answered with tuner's word for it, then with spelling."""

import json
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tuner.core.aliases import meant
from tuner.core.errors import InputError, UnavailableError, install_command, nearest
from tuner.core.records import Configuration
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.export import FORMATS
from tuner.program.writing import SettingsReader
from tuner.space import configure, default_space
from tuner.space.gpus import get_gpu, load_catalogue

KNOBS = list(SCHEMAS["causal_lm"].terms)


@pytest.mark.parametrize(
    ("noted", "requirement"),
    [
        (None, "tuner-fit[all]"),
        (
            {"url": "file:///home/you/tuner", "dir_info": {}},
            "tuner-fit[all] @ file:///home/you/tuner",
        ),
        (
            {"url": "https://x.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "tuner-fit[all] @ git+https://x.org/t.git@0a1b",
        ),
    ],
)
def test_an_extra_is_installed_from_where_tuner_is_from(monkeypatch, noted, requirement):
    installed = SimpleNamespace(read_text=lambda _: noted and json.dumps(noted))
    monkeypatch.setattr(metadata, "distribution", lambda _: installed)
    assert install_command("all") == f"pip install '{requirement}'"
    Requirement(requirement)  # pip can read it


@pytest.mark.parametrize(
    ("word", "knob"),
    [
        ("batch_size", "micro_batch"),
        ("train_batch_size", "effective_batch"),
        ("r", "lora_rank"),
        ("load_in_4bit", "precision=nf4"),
        ("bf16", "mixed_precision=bf16"),
        ("lora_rnak", "lora_rank"),
        ("learning_rate", None),
    ],
)
def test_a_knob_by_its_meaning_then_by_its_letters(word, knob):
    assert nearest(word, KNOBS) == knob


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision=int4", "nf4"),
        ("precision=qlora", "nf4"),
        ("mixed_precision=false", "no"),
        ("optimizer=8bit", "adamw_8bit"),
        ("optimizer=paged_adamw_8bits", "paged_adamw_8bit"),
        ("distributed=fsdp", "fsdp2"),
    ],
)
def test_a_value_by_its_meaning_then_by_its_letters(setting, value):
    space = default_space("causal_lm", "tiny-llama-3m")
    with pytest.raises(InputError, match="cannot be") as caught:
        configure(space, dict([setting.split("=")]), strict=False)
    assert caught.value.hint == f"did you mean {value!r}?"


OTHER_VALUES: dict[str, Any] = {
    "micro_batch": 4,
    "grad_accum": 7,
    "max_length": 640,
    "lora_rank": 24,
    "lora_alpha": 99,
    "lora_dropout": 0.25,
    "lora_targets": ("q_proj",),
    "max_grad_norm": 0.75,
    "optimizer": "paged_adamw_8bit",
    "attention": "eager",
    "double_quant": False,
    "gradient_checkpointing": False,
    "num_workers": 3,
    "pin_memory": False,
    "adapter": "dora",
}


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"command"}))
def test_every_name_that_an_export_writes_is_known(name):
    """So that the table keeps up with the tools: what changes with a knob is a name of it."""
    space = default_space("causal_lm", "tiny-llama-3m")
    usual = {
        **configure(space, {"precision": "nf4"}, strict=False),
        "num_workers": 2,
        "pin_memory": True,
    }
    before = dict(_leaves(FORMATS[name].build(SettingsReader(Configuration(usual)), "m")))
    for knob, value in OTHER_VALUES.items():
        changed = Configuration({**usual, knob: value})
        after = dict(_leaves(FORMATS[name].build(SettingsReader(changed), "m")))
        paths = {path for path in before | after if before.get(path) != after.get(path)}
        known = [_names_of(path) for path in paths]
        assert not paths or any(knob in names for names in known), (knob, paths)
        assert all(known), (knob, paths)


def _leaves(settings: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, settings


def _names_of(path: tuple[str, ...]) -> set[str]:
    """The knobs that a key or one of those around it is a name of."""
    found = [part if part in KNOBS else meant(part, KNOBS) for part in path]
    return {name.partition("=")[0] for name in found if name}


@pytest.mark.parametrize(
    ("word", "vendor"),
    [
        ("mi300x", "AMD"),
        ("rx 7900 xtx", "AMD"),
        ("arc-b580", "Intel"),
        ("tpu-v5e", "Google"),
        ("mps", "Apple"),
        ("trn2", "Amazon"),
    ],
)
def test_other_vendors_are_named_in_place_of_the_nearest_letters(word, vendor):
    with pytest.raises(UnavailableError, match=f"no GPU of {vendor} is supported") as caught:
        get_gpu(word)
    assert "did you mean" not in str(caught.value)


def test_no_name_of_the_catalogue_is_another_vendors():
    for gpu in load_catalogue().values():
        for name in (gpu.id, gpu.name, *gpu.aliases, *gpu.device_names):
            try:
                get_gpu(f"{name}x")
            except InputError:
                continue  # unknown, but not foreign
