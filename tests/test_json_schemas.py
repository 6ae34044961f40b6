"""What commands print with `--json` is what docs/schemas says; its fields stay."""

import json

import pytest
from json_schemas import COMMANDS, FOLDER, ROOT, printed, schema_of
from jsonschema import Draft202012Validator

QUICK = ("best", "show", "gpus", "models", "spaces")


@pytest.mark.parametrize(
    "command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS]
)
def test_a_command_prints_what_its_schema_says(monkeypatch, command):
    monkeypatch.chdir(ROOT)
    schema = json.loads((FOLDER / f"{command}.json").read_text())
    Draft202012Validator.check_schema(schema)
    for arguments in COMMANDS[command]:
        errors = Draft202012Validator(schema).iter_errors(printed(command, arguments))
        assert not [f"{error.json_path}: {error.message[:200]}" for error in errors]


@pytest.mark.parametrize(
    "changed", [{"a": 1}, {"a": 1, "b": None, "c": 2}, {"a": "1", "b": None}, {"a": 1, "b": [2]}]
)
def test_fields_that_go_come_or_change_are_seen(changed):
    schema = schema_of([{"a": 1, "b": None}, {"a": 1.5, "b": ["x"]}])
    assert list(Draft202012Validator(schema).iter_errors(changed))
