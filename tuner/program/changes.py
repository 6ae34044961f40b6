"""A program with other values: what changes in its files and on its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.core.errors import InputError, Problem
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.candidates import arguments_of_trainers
from tuner.program.edit.place import Location, NotWritableError, is_wanted
from tuner.program.edit.source import PYTHON, SourceFile, TextEdit, diff_of, read_places
from tuner.program.edit.write import replace_files
from tuner.program.program import Program
from tuner.program.setting import Setting, Switch, as_named
from tuner.program.settings import find_settings

_BESIDE: Mapping[str, Mapping[str, str]] = {
    "per_device_train_batch_size": {
        "grad_accum": "gradient_accumulation_steps",
        "gradient_checkpointing": "gradient_checkpointing",
        "optimizer": "optim",
    },
    "micro_batch_size": {
        "grad_accum": "gradient_accumulation_steps",
        "gradient_checkpointing": "gradient_checkpointing",
        "optimizer": "optimizer",
    },
}
"""Names of omitted settings beside one that is there: of TrainingArguments, and of Axolotl."""


@dataclass(slots=True)
class _Edits:
    """The changes to each file, by the word that names it, and to the command."""

    command: Sequence[str]
    files: dict[str, list[TextEdit]]
    words: dict[int, list[str]] = field(default_factory=dict)
    """By number of the word: what takes its place."""
    behind: dict[int, list[str]] = field(default_factory=dict)
    """By number of the word: what is put behind it."""

    @classmethod
    def of(cls, program: Program) -> _Edits:
        return cls(program.command, {word: [] for word in program.files})

    @property
    def new_command(self) -> tuple[str, ...]:
        words: list[str] = []
        for number, word in enumerate(self.command):
            words += self.words.get(number, [word])
            words += self.behind.get(number, [])
        return tuple(words)

    def put(self, word: str, edit: TextEdit) -> bool:
        """Note an edit; False where another is to change the same characters."""
        for other in self.files[word]:
            if max(edit.start, other.start) < min(edit.end, other.end):
                return other == edit
        self.files[word].append(edit)
        return True


@dataclass(frozen=True, slots=True)
class Change:
    """A program and what it becomes."""

    before: Program
    after: Program
    values: Mapping[str, KnobValue]

    @property
    def difference(self) -> str:
        """A unified diff of the files; below it the command, where that changes."""
        texts = [
            diff_of(source.path, source.data, self.after.files[word].data, context=1)
            for word, source in self.before.files.items()
        ]
        if self.before.command != self.after.command:
            texts.append(f"-$ {shlex.join(self.before.command)}\n")
            texts.append(f"+$ {shlex.join(self.after.command)}\n")
        return "".join(texts)

    @property
    def files(self) -> dict[Path, tuple[bytes, bytes]]:
        """The files that change, with what they hold before and after."""
        pairs = zip(self.before.sources, self.after.sources, strict=True)
        return {o.path: (o.data, n.data) for o, n in pairs if o.data != n.data}

    def write(self) -> dict[Path, Path]:
        """Write the files; returns the dated copies of the old ones. See `replace_files`."""
        return replace_files(self.files)


def can_change(program: Program, settings: Mapping[str, Setting], knob: str) -> bool:
    """True if the program can be given another value of the parameter."""
    setting = settings.get(knob)
    if setting is not None:
        return setting.problem is None and setting.value is not None and not _is_text(setting)
    return _anchor(program, settings, knob) is not None


def _is_text(setting: Setting) -> bool:
    return setting.knob in ("micro_batch", "grad_accum") and isinstance(setting.value, str)


def obstacle(
    program: Program, settings: Mapping[str, Setting], knob: str, value: KnobValue
) -> Problem | None:
    """The obstacle to giving `program` one value, with the line to change; None if none."""
    return _put(program, settings, knob, value, _Edits.of(program))


def change(
    program: Program,
    settings: Mapping[str, Setting],
    values: Mapping[str, KnobValue],
    find: Callable[[Program], Mapping[str, Setting]] = find_settings,
) -> Change:
    """`program` with other values of parameters, read again with `find` to prove each of them.

    Raises one `InputError` with all values that cannot be written, each with the line to change.
    """
    edits = _Edits.of(program)
    found = [_put(program, settings, knob, value, edits) for knob, value in values.items()]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise InputError("not every value can be written", problems=problems)
    try:
        files = {w: _edited(source, edits.files[w]) for w, source in program.files.items()}
    except InputError as error:
        raise InputError(
            "the values cannot be written safely", problems=[Problem(error.message)]
        ) from None
    after = replace(program, command=edits.new_command, files=files)
    _require_read_back(settings, find(after), values)
    return Change(program, after, dict(values))


def _put(  # noqa: PLR0911 - one for each thing in the way
    program: Program,
    settings: Mapping[str, Setting],
    knob: str,
    value: KnobValue,
    edits: _Edits,
) -> Problem | None:
    """Note what writes one value; what is in the way, if anything is."""
    setting = settings.get(knob)
    if setting is None:
        return _insert(program, settings, knob, value, edits)
    if is_wanted(setting.value, value):
        return None
    named = f"{setting.where} {setting.name}"
    value = setting.written(value)
    if setting.problem is not None:
        return Problem(f"{setting.problem}: set it to {show(value)} by hand", named)
    if setting.switch is not None:
        return _switch(setting, setting.switch, value, edits)
    if setting.word is not None:
        head, equals, _ = edits.command[setting.word].partition("=")
        own = equals and re.match(r"[-+]*[A-Za-z_]", head)
        edits.words[setting.word] = [f"{head}={show(value)}" if own else show(value)]
        return None
    place = setting.location
    if place is None or setting.source is None:
        return Problem(f"is set where nobody knows: set it to {show(value)} by hand", named)
    try:
        text = place.render(value)
    except NotWritableError as error:
        return Problem(f"{error}: change it by hand", named)
    word = next(w for w, source in program.files.items() if source is setting.source)
    if edits.put(word, TextEdit(place.start, place.end, place.written(text))):
        return None
    return Problem(f"sets something else too, which is to get another value: {place.raw}", named)


def _switch(setting: Setting, switch: Switch, value: KnobValue, edits: _Edits) -> Problem | None:
    """An option without a value: its word is there, or it is not."""
    if not isinstance(value, bool):
        return Problem(f"is on or off and would become {show(value)}", f"the option {switch.on}")
    if setting.word is None:
        edits.behind.setdefault(len(edits.command) - 1, []).append(switch.on)
    elif value:
        edits.words[setting.word] = [switch.on]
    else:
        edits.words[setting.word] = [switch.off] if switch.off else []
    return None


def _insert(
    program: Program,
    settings: Mapping[str, Setting],
    knob: str,
    value: KnobValue,
    edits: _Edits,
) -> Problem | None:
    anchor = _anchor(program, settings, knob)
    if anchor is None:
        beside = settings.get("micro_batch")
        where = f", beside micro_batch ({beside.where})" if beside is not None else ""
        return Problem(
            f"nothing in the program sets {knob}: set it to {show(value)} by hand{where}"
        )
    name, at = anchor
    value = as_named(name, value)
    if isinstance(at, int):
        edits.behind.setdefault(at, []).extend((f"--{name}", show(value)))
        return None
    word, place = at
    for edit in _beside(program.files[word], place, name, value):
        edits.files[word].append(edit)
    return None


def _anchor(
    program: Program, settings: Mapping[str, Setting], knob: str
) -> tuple[str, int | tuple[str, Location]] | None:
    """The name of a knob that is left out, and what it is to stand behind."""
    set_by_word = settings.get("micro_batch")
    for anchor, names in _BESIDE.items():
        if knob not in names:
            continue
        name = names[knob]
        if program.trainer == "LLaMA-Factory" and name == "gradient_checkpointing":
            name = "disable_gradient_checkpointing"  # it checkpoints unless told not to
        for word, source in program.files.items():
            places = [p for p in source.places if p.path and p.path[-1] == anchor]
            if source.path.suffix in PYTHON:
                places = arguments_of_trainers(source, places)
            if len({place.start for place in places}) == 1 and not places[0].is_alias:
                return name, (word, places[0])
        if set_by_word and set_by_word.word is not None and set_by_word.name == anchor:
            head = program.command[set_by_word.word].partition("=")[0]
            before = program.command[set_by_word.word - 1]
            if f"--{anchor}" in (head, before):
                return name, set_by_word.word
    return None


def _beside(source: SourceFile, place: Location, name: str, value: KnobValue) -> list[TextEdit]:
    """The edits behind the value at `place` that set `name` too."""
    text = source.data.decode("utf-8")
    start = text.rfind("\n", 0, place.start) + 1
    end = text.find("\n", place.end)
    end = len(text) if end < 0 else end
    newline = "\n"
    if text[end - 1 : end] == "\r":
        end, newline = end - 1, "\r\n"
    before, behind = text[start : place.start], text[place.end : end]
    indent = before[: len(before) - len(before.lstrip())]
    literal = show(value) if not isinstance(value, str) else f'"{value}"'
    suffix = source.path.suffix
    if suffix in PYTHON:
        equals = re.search(r"\s*=\s*$", before)
        sign = equals[0] if equals and not place.in_json else "="
        argument = f"{name}{sign}{literal if isinstance(value, str) else value}"
        alone = re.fullmatch(rf"\s*{place.path[-1]}\s*=\s*", before) is not None
        rest = re.fullmatch(r"(\s*,)?\s*(#.*)?", behind)
        if place.in_json or not alone or rest is None:
            return [TextEdit(place.end, place.end, place.written(f", {argument}"))]
        comma = [] if rest[1] else [TextEdit(place.end, place.end, ",")]
        return [*comma, TextEdit(end, end, f"{newline}{indent}{argument},")]
    if suffix == ".json":
        return [TextEdit(place.end, place.end, f',{newline}{indent}"{name}": {literal}')]
    if re.fullmatch(r"\s*(#.*)?", behind) and re.fullmatch(r"\s*[\w-]+:\s*", before):
        return [TextEdit(end, end, f"{newline}{indent}{name}: {show(value)}")]
    return [TextEdit(place.end, place.end, f", {name}: {show(value)}")]


def _edited(source: SourceFile, edits: list[TextEdit]) -> SourceFile:
    if not edits:
        return source
    data = source.edited(edits)
    return SourceFile(source.path, data, read_places(data, source.path))


def _require_read_back(
    before: Mapping[str, Setting], after: Mapping[str, Setting], values: Mapping[str, KnobValue]
) -> None:
    """Every value is where the program takes it from, and every other setting is as it was."""
    wrong = []
    for knob in dict.fromkeys((*values, *before, *after)):
        was, now = before.get(knob), after.get(knob)
        old, read = was and was.value, now and now.value
        wanted = values.get(knob, old)
        is_off = knob in values and read is None and values[knob] is False
        if read == wanted or is_wanted(read, wanted) or is_off:
            continue
        shown = "nothing" if read is None else show(read)
        text = "stay as it is" if wanted is None else f"be {show(wanted)}"
        wrong.append(Problem(f"{knob} is to {text}, and would read as {shown}"))
    if wrong:
        raise InputError("the values cannot be written safely", problems=wrong)
