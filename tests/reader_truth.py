"""What the reader says of a program, in the words of `reader_oracle`, and whether it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reader_programs import INSTALLED, UNKNOWN, Generated

from tuner.core.errors import TunerError
from tuner.program.program import read_program
from tuner.program.recorded import record


def flat(training: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recorded training, by the names that the oracle uses."""
    arguments = training["arguments"] or {}
    model, lora = training["model"] or {}, training["lora"]
    if isinstance(model, str):
        model = {"given": {"pretrained_model_name_or_path": model}}
    quantization = model.get("quantization") if isinstance(model, dict) else None
    settings = {**arguments.get("values", {})}
    # Since transformers 5.23 the old name is an alias at construction, and no more than that.
    if settings.get("activation_checkpointing") is not None:
        settings["gradient_checkpointing"] = settings["activation_checkpointing"]
    given = model.get("given", {})
    held = {**given, **given.get("model_init_kwargs", {})}
    settings |= {
        "trainer": next(
            (c for c in _line(training["trainer"]) if not c.startswith("__main__")), None
        ),
        "model": held.get("pretrained_model_name_or_path", held.get("model_name")),
        "dtype": held.get("dtype", held.get("torch_dtype")),
        "attention": held.get("attn_implementation"),
        "lora": lora is not None,
    }
    for name in ("load_in_4bit", "load_in_8bit"):
        settings[name] = held.get(name, False)
    settings |= (quantization or {}).get("values", {})
    if lora:
        settings |= lora.get("values") or lora["given"]
    settings["max_seq_length"] = held.get("max_seq_length")
    return {name: plain(value) for name, value in settings.items()}


def _line(told: Mapping[str, Any]) -> list[str]:
    return [told["class"], *told["bases"]]


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "$unknown" in value:
            return UNKNOWN
        name = value.get("$name")
        return name.removeprefix("torch.") if name else {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.removeprefix("torch.") if isinstance(value, str) else value


def read(program: Generated, folder: Path) -> list[dict[str, Any]] | str:
    """The settings of each training that the reader sees, or why it sees none."""
    program.write(folder)
    try:  # the environment is the program's own: others are read in threads beside it
        read_as = read_program(["train.py", *program.argv], folder)
        recorded = record(replace(read_as, environment=program.env))
    except TunerError as error:
        return f"{error} ({error.hint})"
    if any("unsure" in training for training in recorded.trainings):
        return "not sure whether it trains"
    return [flat(training) for training in recorded.trainings]


def verdict(program: Generated, told: Any) -> tuple[str, dict[str, tuple[str, Any, Any]]]:
    """Right, unknown or wrong, with the settings that make it so."""
    found = verdicts(program.truth, told)
    if INSTALLED in program.used and isinstance(told, list):
        found = {name: each for name, each in found.items() if each[0] != "unknown"}
    kinds = {kind for kind, _, _ in found.values()}
    worst = next((kind for kind in ("wrong", "unknown") if kind in kinds), "right")
    return worst, {name: each for name, each in found.items() if each[0] == worst != "right"}


def verdicts(truth: Mapping[str, Any], told: Any) -> dict[str, tuple[str, Any, Any]]:
    """By setting: right, unknown (said) or wrong, with what it is and what was said."""
    if isinstance(told, str) or len(told) != 1:
        said = told if isinstance(told, str) else f"{len(told)} trainings"
        kind = "unknown" if isinstance(told, str) or not told else "wrong"
        return {"program": (kind, "1 training", said)}
    found = {}
    for name, value in truth.items():
        said = told[0].get(name)
        if said == value and isinstance(said, bool) == isinstance(value, bool):
            kind = "right"
        else:
            kind = "unknown" if said == UNKNOWN else "wrong"
        found[name] = (kind, value, said)
    return found
