"""The review of a branch as text, Markdown, SARIF 2.1.0, and annotations of a GitHub workflow."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tuner import __version__
from tuner.app.cli.checked_text import answer_of
from tuner.app.review import OnGpu, Review, ReviewedProgram, delta_text
from tuner.core.records import Verdict
from tuner.predict.releases import predicted_stack
from tuner.report.terminal.render import echo
from tuner.report.terminal.verdict import interval_text, numbers_text, verdict_words, versions_text

DOES_NOT_FIT, UNKNOWN, TIGHT = "does-not-fit", "unknown", "tight"

RULES = {
    DOES_NOT_FIT: "The training does not fit the memory of a GPU type.",
    UNKNOWN: "Whether the training fits a GPU type is not known.",
    TIGHT: "The training fits a GPU type, and the interval of the prediction spans the limit.",
}
"""The rules of a review, with what each finding says."""

_LEVELS = {DOES_NOT_FIT: "error", UNKNOWN: "error", TIGHT: "warning"}
"""SARIF's level of each rule; errors fail the review."""

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

MARKER = "<!-- tuner-review -->"
"""The first line of the Markdown: the Action finds its comment by it."""


def rule_of(on: OnGpu) -> str | None:
    """The rule that a program breaks on a GPU type; None for one that fits clearly."""
    if on.fits is None:
        return UNKNOWN
    if not on.fits:
        return DOES_NOT_FIT
    return TIGHT if on.found is not None and on.found.verdict is Verdict.TIGHT else None


def _told(program: ReviewedProgram) -> Iterator[tuple[OnGpu, str]]:
    """Each GPU type with its sentence; those that are unknown for the same reason share one."""
    sharing: defaultdict[str, list[OnGpu]] = defaultdict(list)
    for on in program.gpus:
        sharing[on.refused or on.gpu.id].append(on)
    for group in sharing.values():
        yield group[0], _message(program, group[0], ", ".join(on.gpu.id for on in group))


def _message(program: ReviewedProgram, on: OnGpu, gpus: str) -> str:
    """One sentence: "+2.1 GiB: max_length 2048 -> 4096 at train.py:31; no longer fits rtx4090"."""
    parts = []
    if on.more_bytes is not None and program.settings:
        shown = [str(one) + _share(one.more_bytes) for one in program.settings]
        parts.append(f"{delta_text(on.more_bytes)}: {', '.join(shown)}")
    if on.found is None:
        return "; ".join([*parts, f"unknown on {gpus}: {on.refused}"])
    answer = answer_of(on.found)
    numbers = answer.reason or numbers_text(answer).removesuffix(f" on {answer.gpu}")
    return "; ".join([*parts, f"{on.outcome} ({numbers}{_ends(on)}, predicted)"])


def _share(more_bytes: int | None) -> str:
    return f" ({delta_text(more_bytes)})" if more_bytes is not None else ""


def _ends(on: OnGpu) -> str:
    assert on.found is not None
    ends = interval_text(answer_of(on.found).ends).strip(" ()")
    return f", {ends}" if ends else ""


def _findings(review: Review) -> Iterator[tuple[ReviewedProgram, OnGpu, str, str]]:
    """Each program with a GPU type, the rule that it breaks there, and its sentence."""
    for program in review.programs:
        for on, text in _told(program):
            rule = rule_of(on)
            if rule is not None:
                yield program, on, rule, text


def title(review: Review) -> str:
    """The verdict of the review in one line."""
    number = len(review.programs)
    if not number:
        return "no training program changed"
    fits = [{on.fits for on in program.gpus} for program in review.programs]
    bad = sum(False in one for one in fits)
    unknown = sum(None in one and False not in one for one in fits)
    counts = {"does not fit": bad, "unknown": unknown, "fits": number - bad - unknown}
    shown = [f"{word}: {count}" for word, count in counts.items() if count]
    return f"{', '.join(shown)} of {number} changed training program{'s' * (number != 1)}"


# -- text ---------------------------------------------------------------------------------------


def print_review(review: Review, *, quiet: bool) -> None:
    """A line for each program on each GPU type; if `quiet`, of findings only."""
    for program in review.programs:
        path, line = program.place
        for on, text in _told(program):
            if not quiet or rule_of(on) is not None:
                echo(f"{path}:{line}: {text}")
        for note in () if quiet else program.notes:
            echo(f"{path}: note: {note}")
    for advice in _advice(review):
        echo(f"hint: {advice}")
    if quiet:
        return
    for path, why in review.skipped.items():
        echo(f"{path}: skipped: {why}")
    source = _source(review)
    echo(f"{title(review)} ({source})" if source else title(review))


def _advice(review: Review) -> list[str]:
    """Advice for the predictions that are missing, each piece once."""
    each = {on.advice for program in review.programs for on in program.gpus} - {""}
    return sorted(one for one in each if not any(o != one and o.startswith(one) for o in each))


def _source(review: Review) -> str:
    """The source of the numbers with its versions; empty if there is no number."""
    if not any(on.found for program in review.programs for on in program.gpus):
        return ""
    stack = predicted_stack()
    return f"predicted; {versions_text({name: stack[name] for name in ('torch', 'transformers')})}"


# -- Markdown -----------------------------------------------------------------------------------


def markdown(review: Review) -> str:
    """A table of all programs, the findings, and the changes with which they fit."""
    lines = [MARKER, f"### tuner: {title(review)}", ""]
    if review.programs:
        lines += [
            "| program | GPU | memory at the base | memory now | verdict |",
            "|---|---|---:|---:|---|",
            *(_row(program, on) for program in review.programs for on in program.gpus),
            "",
        ]
    for program, _, _, text in _findings(review):
        path, line = program.place
        lines.append(f"- `{path}:{line}`: {_plain(text)}")
    for program in review.programs:
        for on in program.gpus:
            if on.difference:
                fitting = f"With this change `{program.command}` fits {on.gpu.id}"
                lines += ["", f"<details><summary>{_plain(fitting)}</summary>", "", "```diff"]
                lines += [on.difference.replace("```", "'''").rstrip(), "```", "", "</details>"]
    notes = [f"- `{p.command}`: {_plain(note)}" for p in review.programs for note in p.notes]
    notes += [f"- {_plain(advice)}" for advice in _advice(review)]
    skipped = [f"- `{path}`: {why}" for path, why in review.skipped.items()]
    for name, items in (("Notes", notes), ("Skipped files", skipped)):
        if items:
            lines += ["", f"<details><summary>{name}: {len(items)}</summary>", "", *items, ""]
            lines.append("</details>")
    facts = filter(None, (_source(review), f"base {review.base[:12]}"))
    lines += ["", f"Nothing was run: {'; '.join(facts)}"]
    return "\n".join(lines) + "\n"


def _row(program: ReviewedProgram, on: OnGpu) -> str:
    before, now, verdict = "", "", "unknown"
    if on.found is not None:
        answer = answer_of(on.found)
        numbers = numbers_text(answer).removesuffix(f" on {answer.gpu}")
        more = f" ({delta_text(on.more_bytes)})" if on.more_bytes is not None else ""
        now, verdict = f"{numbers}{more}", verdict_words(answer)
    if on.before is not None:
        before = numbers_text(answer_of(on.before)).partition(" of ")[0] + " GiB"
    cells = (f"`{program.command}`", on.gpu.id, before, now, f"**{verdict}**")
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Text in which nothing of a program is read as a table or as HTML."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


# -- SARIF --------------------------------------------------------------------------------------


def sarif(review: Review) -> str:
    """The findings as a SARIF 2.1.0 log, each on the line of its setting."""
    results = [
        {
            "ruleId": rule,
            "ruleIndex": list(RULES).index(rule),
            "level": _LEVELS[rule],
            "message": {"text": text},
            "locations": [_location(*program.place)],
            "relatedLocations": [
                {**_location(one.path, one.line), "message": {"text": str(one)}}
                for one in program.settings[1:]
            ],
            "partialFingerprints": {"program/v1": f"{program.command}:{on.gpu.id}:{rule}"},
        }
        for program, on, rule, text in _findings(review)
    ]
    rules = [
        {
            "id": rule,
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": _LEVELS[rule]},
        }
        for rule, text in RULES.items()
    ]
    driver = {"name": "tuner", "semanticVersion": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2) + "\n"


def _location(path: str, line: int) -> dict[str, Any]:
    from urllib.parse import quote

    artifact = {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}


# -- annotations --------------------------------------------------------------------------------


def annotated(review: Review) -> list[str]:
    """Workflow commands that show each finding on its line of a pull request."""
    lines = []
    for program, _, rule, text in _findings(review):
        path, line = program.place
        head = f"file={_escaped(path, ':,')},line={line},title=tuner"
        lines.append(f"::{_LEVELS[rule]} {head}::{_escaped(text)}")
    return lines


def _escaped(text: str, more: Sequence[str] = "") -> str:
    for letter in ("%", "\r", "\n", *more):
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
