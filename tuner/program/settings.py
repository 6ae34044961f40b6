"""The settings in a program's files and on its command line, under the names of knobs.

A value that takes another's place is followed: `per_device_train_batch_size=BATCH_SIZE` is set
where `BATCH_SIZE = 4` stands, `args.batch` where its option has a default, or on the command line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.apply.place import Location, Value
from tuner.apply.source import SourceFile
from tuner.program.program import Program
from tuner.space.keypath import Path

NAMES: Mapping[str, tuple[str, ...]] = {
    "micro_batch": (
        "per_device_train_batch_size",
        "micro_batch_size",
        "per_gpu_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "micro_batch",
        "train_batch_size",
        "batch_size",
        "batch",
        "bs",
    ),
    "grad_accum": (
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
        "grad_accumulation_steps",
        "accumulation_steps",
        "grad_accum_steps",
        "grad_accum",
        "accum_steps",
    ),
    "max_length": (
        "max_length",
        "max_seq_length",
        "sequence_len",
        "cutoff_len",
        "max_seq_len",
        "seq_length",
        "seq_len",
        "block_size",
    ),
    "lora_rank": ("r", "lora_r", "lora_rank", "rank"),
    "gradient_checkpointing": (
        "gradient_checkpointing",
        "use_gradient_checkpointing",
        "enable_activation_checkpointing",
        "grad_ckpt",
    ),
    "use_reentrant": ("use_reentrant",),
    "optimizer": ("optim", "optimizer"),
    "attention": ("attn_implementation",),
    "packing": ("packing", "sample_packing"),
    "fused_kernels": ("use_liger_kernel",),
}
"""By knob: what trainers and people call it, the most certain name first."""

_CALLS = re.compile(
    r"(Config|Arguments|Args)$|^(DataLoader|get_peft_model|from_pretrained"
    r"|prepare_model_for_kbit_training|gradient_checkpointing_enable|Accelerator)$"
)
"""Calls whose keyword arguments are settings of a training."""

_ONLY_IN = {"lora_rank": {"r": re.compile("[Ll]ora|peft")}}
"""Names that mean a knob in some calls and dictionaries only."""

_NOT_IN = re.compile(r"eval|valid|test|infer|generat", re.IGNORECASE)

PYTHON = (".py", ".ipynb")

_CONVERSIONS = ("int", "float", "str", "bool")

_MOST_STEPS = 8
"""From one name to the next; more is a circle."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One knob of a program: where its value is set, or why it cannot be changed there.

    `name` is what the program calls it. `word` is the number of the word of the command that sets
    it, where one does; else `source` and `location` say where it stands.
    """

    knob: str
    name: str
    value: Value = None
    source: SourceFile | None = None
    location: Location | None = None
    word: int | None = None
    problem: str | None = None

    @property
    def where(self) -> str:
        """For people: "train.py:12", or "the command line"."""
        if self.source is None or self.location is None:
            return "the command line"
        return f"{self.source.path}:{self.location.line}"


def find_settings(program: Program) -> dict[str, Setting]:
    """The settings of `program`, by knob; what it leaves to its trainer's defaults is not there."""
    found = {}
    for knob, names in NAMES.items():
        setting = _find(program, knob, names)
        if setting is not None:
            found[knob] = setting
    return found


def _find(program: Program, knob: str, names: Sequence[str]) -> Setting | None:
    for name in names:
        word = _word_of(program.command, name)
        if word is not None:
            return _of_word(program.command, word, knob, name)
    candidates = [
        (strength, source, place)
        for source in program.sources
        for place in source.places
        if (strength := _strength(knob, names, source, place)) is not None
    ]
    if not candidates:
        return None
    best = min(strength for strength, _, _ in candidates)
    ends: dict[object, Setting] = {}
    for strength, source, place in candidates:
        if strength == best:
            end = _followed(program, knob, source, place)
            span = (end.source and end.source.path, end.location and end.location.start, end.word)
            ends.setdefault(span, end)
    settings = list(ends.values())
    if len(settings) > 1:
        where = ", ".join(s.where for s in settings)
        first = settings[0]
        return Setting(knob, first.name, problem=f"is set in several places: {where}")
    return settings[0]


def _strength(
    knob: str, names: Sequence[str], source: SourceFile, place: Location
) -> tuple[int, int] | None:
    """How certain it is that a place is the knob's, less is more; None where it is not."""
    if not place.path or not isinstance(place.path[-1], str):
        return None
    own = place.path[-1].lower()
    if own not in names:
        return None
    above = [str(step) for step in place.path[:-1]]
    if any(_NOT_IN.search(step) for step in above):
        return None
    needed = _ONLY_IN.get(knob, {}).get(own)
    if needed is not None and not any(needed.search(step) for step in above):
        return None
    is_argument = source.path.suffix in PYTHON and bool(above and _CALLS.search(above[-1]))
    is_python = source.path.suffix in PYTHON
    # In a Python file a trainer's own argument is certain. The name of a constant or an option is
    # a guess, and a variable that holds some object (`optimizer = AdamW(...)`) is none.
    if is_python and not is_argument and place.is_reference and _reference(source, place) is None:
        return None
    return (0 if is_argument or not is_python else 1, names.index(own))


# -- following a value ------------------------------------------------------------------------


def _followed(program: Program, knob: str, source: SourceFile, place: Location) -> Setting:
    name = str(place.path[-1])
    for _ in range(_MOST_STEPS):
        own = str(place.path[-1])
        word = _word_of(program.command, own)
        if word is not None:
            return _of_word(program.command, word, knob, name)
        if not place.is_reference:
            return Setting(knob, name, place.value, source, place, problem=place.problem)
        steps = _reference(source, place)
        if steps is None:
            break
        targets = _targets(program, steps, place)
        if len(targets) != 1:
            where = ", ".join(f"{s.path}:{p.line}" for s, p in targets)
            text = f"is {_raw(place)}, which is set in several places: {where}"
            return Setting(
                knob, name, None, source, place,
                problem=text if targets else f"is {_raw(place)}, which is set nowhere here",
            )  # fmt: skip
        source, place = targets[0]
    return Setting(knob, name, None, source, place, problem=f"is computed: {_raw(place)}")


def _raw(place: Location) -> str:
    return " ".join(place.raw.split())[:60]


def _reference(source: SourceFile, place: Location) -> Path | None:
    """The names that an expression takes its value from: ("args", "batch") of int(args.batch)."""
    if source.path.suffix not in PYTHON:
        inner = re.fullmatch(r"""["']?\$\{([\w.]+)\}["']?""", place.raw.strip())
        return tuple(inner[1].split(".")) if inner else None
    try:
        node: ast.expr = ast.parse(place.raw.strip(), mode="eval").body
    except SyntaxError:
        return None
    return _names_of(node)


def _names_of(node: ast.expr) -> Path | None:
    """The names behind `args.batch`, `CONFIG["batch"]` or `config.get("batch", 4)`."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return _below(node.value, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _below(node.value, node.slice.value)
    if isinstance(node, ast.Call) and node.args:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "get":
            key = node.args[0]
            return _below(called.value, key.value) if isinstance(key, ast.Constant) else None
        if isinstance(called, ast.Name) and called.id in _CONVERSIONS and len(node.args) == 1:
            return _names_of(node.args[0])
    return None


def _below(node: ast.expr, key: object) -> Path | None:
    base = _names_of(node)
    return (*base, key) if base and isinstance(key, str | int) else None


def _targets(
    program: Program, steps: Path, reference: Location
) -> list[tuple[SourceFile, Location]]:
    """Where the names `steps` get their value: the places whose path ends most alike."""
    found: dict[object, tuple[int, SourceFile, Location]] = {}
    for source in program.sources:
        for place in source.places:
            if place.start == reference.start and place.raw == reference.raw:
                continue
            alike = _alike(steps, place.path)
            if alike == 0 or _is_argument_of_a_call(source, place):
                continue
            span = (source.path, place.start)
            if span not in found or found[span][0] < alike:
                found[span] = (alike, source, place)
    best = max((alike for alike, _, _ in found.values()), default=0)
    if len(steps) == 1 and best == 0:
        return []
    return [(source, place) for alike, source, place in found.values() if alike == best]


def _alike(steps: Path, path: Path) -> int:
    """How many of the last names agree; of a plain name all must."""
    count = 0
    for one, other in zip(reversed(steps), reversed(path), strict=False):
        if str(one) != str(other):
            break
        count += 1
    return count


def _is_argument_of_a_call(source: SourceFile, place: Location) -> bool:
    """Whether a place is a keyword argument of a call, of which nobody takes a value."""
    if source.path.suffix not in PYTHON or len(place.path) < 2:
        return False
    return bool(_CALLS.search(str(place.path[-2]))) and _is_call(source, place)


def _is_call(source: SourceFile, place: Location) -> bool:
    """Whether the name before the last is called, and is not a class with attributes."""
    text = source.data.decode("utf-8")
    before = text[max(0, place.start - 200) : place.start]
    return re.search(rf"\b{re.escape(str(place.path[-1]))}\s*=\s*$", before) is not None and not (
        re.search(rf"class\s+{re.escape(str(place.path[-2]))}\b", text)
    )


# -- the command line -------------------------------------------------------------------------


def _word_of(command: Sequence[str], name: str) -> int | None:
    """The number of the word that holds the value of option `name`, or None."""
    wanted = name.replace("-", "_").lower()
    for number, word in enumerate(command):
        head, equals, _ = word.partition("=")
        option = head.lstrip("-+").replace("-", "_").lower()
        dashed = word.startswith("--")
        if option != wanted or not (dashed or equals):
            continue
        if equals:
            return number
        if number + 1 < len(command) and not command[number + 1].startswith("--"):
            return number + 1
    return None


def _of_word(command: Sequence[str], number: int, knob: str, name: str) -> Setting:
    word = command[number]
    text = word.partition("=")[2] if _names_itself(word) else word
    return Setting(knob, name, typed(text), word=number)


def _names_itself(word: str) -> bool:
    return bool(re.match(r"[-+]*[A-Za-z_][\w.-]*=", word))


def typed(text: str) -> Value:
    """The value that a word of a command line stands for: a number, a boolean, else itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
