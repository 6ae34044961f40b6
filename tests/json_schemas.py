"""JSON schemas of what commands print with `--json`, and the commands that they are made from.

    python tests/json_schemas.py        # writes docs/schemas again, from what commands print

A field that is gone, new or of another type fails `test_json_schemas.py` until that is done.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.app.cli.main import run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "schemas"

TINY = ("--model", "tiny-llama-3m", "--gpu", "rtx4090")
GEMMA = ("--space", "gemma2_2b", "--gpu", "t4")
LARGE = ("--space", "qlora27b", "--gpu", "a6000")
ONE_STRUCTURE = tuple(
    word
    for setting in (
        "precision=fp32", "attention=sdpa", "optimizer=adamw_torch",
        "gradient_checkpointing=true", "max_length=64",
    )
    for word in ("--set", setting)
)  # fmt: skip
EVALUATED = ("--set", "eval_batch=64", "--set", "micro_batch=1")
COMPILED = ("--set", "torch_compile=true")
PROGRAM = ("examples/programs/sft.py", "tiny-llama-3m")
FILE = "tests/programs/axolotl_full.yml"
"""Sets words and booleans, and no steps."""
CPU = ("--space", "tiny_cpu", "--gpu", "cpu")

COMMANDS: Mapping[str, Sequence[Sequence[str]]] = {
    "best": (LARGE, GEMMA, ("--space", "naics_embedder", "--gpu", "rtx6000"), CPU),
    "show": (GEMMA, ("--space", "naics_embedder", "--gpu", "rtx6000"), CPU),
    "estimate": (
        TINY,
        (*TINY, "--set", "precision=nf4", "--set", "optimizer=paged_adamw_8bit"),
        (*TINY, "--set", "micro_batch=4096", "--set", "effective_batch=4096"),
        (*TINY, *COMPILED),
    ),
    "check": (
        ("--predict", *TINY[2:], *PROGRAM),
        ("--predict", *TINY[2:], "--gpu-memory", "3GiB", *PROGRAM),
        ("--predict", *TINY[2:], "--no-changes", *PROGRAM),
        ("--predict", *TINY[2:], "--gpu-memory", "1GiB", *EVALUATED, *PROGRAM),
        ("--predict", *TINY[2:], "--gpu-memory", "3GiB", *COMPILED, *PROGRAM),
        ("--predict", *TINY, FILE),
    ),
    "check-all-gpus": (("--predict", *PROGRAM), ("--predict", *COMPILED, *PROGRAM)),
    "check-largest": (
        ("--predict", *TINY[2:], "--gpu-memory", "3GiB", "--largest", "micro_batch", *PROGRAM),
        ("--predict", *TINY[2:], "--gpu-memory", "600MiB", "--largest", "lora_rank", *PROGRAM),
    ),
    "search": (("--space", "tiny_cpu", *TINY[2:], *ONE_STRUCTURE, "--quiet", "--fresh"),),
    "gpus": ((), ("a6000",), ("cpu",)),
    "models": ((), ("tiny-llama-3m",), ("qwen3-8b",)),
    "spaces": ((), ("qlora27b",), ("naics_embedder",)),
    "doctor": ((),),
}
"""By command: arguments that bring out every field."""

MAPS = frozenset((
    "apply", "baseline", "breakdown", "breakdown_s", "config", "configuration", "corrections",
    "derived", "fixed", "flops", "intervals", "knobs", "phase_peak_bytes", "settings",
    "sources", "stages", "unsupported", "values", "versions", "other_limits",
))  # fmt: skip
"""Fields whose own keys are names of knobs, phases, types and the like."""

SETTINGS = frozenset({"configuration", "fixed", "values"})
"""Fields of any knobs' values, whichever have one here."""

ANY = frozenset({"value", "arrived"})
"""Fields of one setting's value, whatever the programs here set."""

VALUE = {
    "type": ["array", "boolean", "null", "number", "string"],
    "items": {"type": ["boolean", "number", "string"]},
}

INTEGER, NUMBER, STRING, OBJECT = (
    {"type": [kind, "null"]} for kind in ("integer", "number", "string", "object")
)
STRINGS = {"type": "array", "items": {"type": "string"}}
NOT_HERE: Mapping[str, dict[str, Any]] = {
    "num_alloc_retries": INTEGER,
    "timed_alloc_retries": INTEGER,
    "nvml_process_bytes": INTEGER,
    "nvml_device_bytes": INTEGER,
    "memory_limit_bytes": INTEGER,
    "requested_bytes": INTEGER,
    "margin_bytes": INTEGER,
    "missing_bytes": INTEGER,
    "gpu_utilization": NUMBER,
    "epochs": NUMBER,
    "truncated_examples_share": {"type": ["array", "null"], "items": {"type": "number"}},
    "phase": STRING,
    "remarks": STRING,
    "refused": STRING,
    "exhausted": STRING,
    "stage": STRING,
    "problem": STRING,
    "not_priced": STRING,
    "ends_in": STRING,
    "space": STRING,
    "device": STRING,
    "command": OBJECT,
    "by_gpus": {"type": "array", "items": {"type": "object"}},
    "measured": OBJECT,
    "needed": OBJECT,
    "reentrant_checkpointing": OBJECT,
    "notes": STRINGS,
    "findings": STRINGS,
    "left_out": STRINGS,
    "searched": STRINGS,
    "below_floors": STRINGS,
    "points": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "pairs_that_fit": {"type": "array", "items": {"type": "object"}},
}
"""Fields of which no command here has a value: those of a GPU that measures, of trials that end."""

UNKNOWN_OF_A_PROCESSOR = ("bandwidth_bytes_per_s", "link_bytes_per_s")
"""Fields that are null where the device is a processor."""

TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def printed(name: str, arguments: Sequence[str]) -> Any:
    """What a command prints for programs."""
    out, said = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as results,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        command = name.partition("-")[0]  # "check-all-gpus" is `check` without --gpu
        elsewhere = ("--results", results) if command == "search" else ()  # it writes
        code = run([command, *arguments, *elsewhere, "--json"])
    assert code in (0, 1), said.getvalue()
    return json.loads(out.getvalue())


def schema_of(values: Iterable[Any], *, name: str = "") -> dict[str, Any]:
    """A schema that all of the values meet, and nothing with other fields."""
    known = list(values)
    if name in ANY:
        return VALUE
    if name in NOT_HERE and all(value in (None, []) for value in known):
        return NOT_HERE[name]
    types = {TYPES[type(value)] for value in known}
    if name in UNKNOWN_OF_A_PROCESSOR:
        types |= {"null", "number"}
    if name in ("fits", "run_time"):
        types |= {"null"}  # unknown
    if {"integer", "number"} <= types:
        types.discard("integer")
    found: dict[str, Any] = {"type": min(types) if len(types) == 1 else sorted(types)}
    if lists := [value for value in known if isinstance(value, list)]:
        items = [item for value in lists for item in value]
        found |= {"items": schema_of(items)} if items else {}
    if objects := [value for value in known if isinstance(value, dict)]:
        names = list(dict.fromkeys(key for value in objects for key in value))
        if name in SETTINGS:
            found["additionalProperties"] = VALUE
        elif name in MAPS:
            inner = [item for value in objects for item in value.values()]
            within = next((key for key in names if key in MAPS), "")  # a baseline's configuration
            found |= {"additionalProperties": schema_of(inner, name=within)} if inner else {}
        else:
            found["properties"] = {
                key: schema_of((v[key] for v in objects if key in v), name=key) for key in names
            }
            found["required"] = [key for key in names if all(key in v for v in objects)]
            found["additionalProperties"] = False
    return found


def command_schema(command: str) -> dict[str, Any]:
    """The schema of a command, from what it prints for each of its arguments here."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"tuner {command.partition('-')[0]} --json",
        **schema_of(printed(command, arguments) for arguments in COMMANDS[command]),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or COMMANDS:
        text = json.dumps(command_schema(chosen), indent=1) + "\n"
        (FOLDER / f"{chosen}.json").write_text(text)
