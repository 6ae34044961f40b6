"""Values that a shell completes while a command is typed.

Each function answers within tenths of a second: it reads names, and no numbers. Input that is wrong
in any way has no completions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    split_arg_string,
)

from tuner.core.errors import TunerError
from tuner.report.terminal.render import settings_text
from tuner.space import list_spaces, load_space
from tuner.space.gpus import load_catalogue
from tuner.space.models.catalogue import load_catalogue as load_models

_TRIAL_ID = re.compile(rb'"trial_id":\s*"([^"\\]{1,80})"')


SEARCHES = frozenset({"search", "estimate", "trial", "calibrate"})
"""Commands that need no results: every GPU type may follow."""


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Bash(BashComplete):
    """Completion in bash, which takes `KNOB=VALUE` for three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is typed, and that word so far."""
        words = split_arg_string(os.environ["COMP_WORDS"])[: int(os.environ["COMP_CWORD"]) + 1]
        if len(words) == int(os.environ["COMP_CWORD"]):
            words.append("")
        whole: list[str] = []
        for word in words:
            if whole and (word == "=" or (whole[-1].endswith("=") and len(whole) > 1)):
                whole[-1] += word
            else:
                whole.append(word)
        return whole[1:-1], whole[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """The text that replaces bash's last word: after an equals sign, the value alone."""
        value = (
            item.value if "=" not in self.get_completion_args()[1] else item.value.partition("=")[2]
        )
        return f"{item.type},{value}"


def spaces(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of search spaces, and YAML files."""
    found = _matching((info.name for info in list_spaces()), incomplete)
    return found or [CompletionItem(incomplete, type="file")]


def gpus(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """GPU types: those with results where a command reads results, else all."""
    folders = [] if ctx.info_name in SEARCHES else _folders(ctx)
    more = (
        ["all", *(folder.name for folder in folders)]
        if folders
        else ["auto", "cpu", *load_catalogue()]
    )
    # After a comma another type follows.
    head, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(f"{head}{comma}{item.value}")
        for item in _matching(dict.fromkeys(more), last)
    ]


def models(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Models that work offline."""
    return _matching(load_models(), incomplete) or [CompletionItem(incomplete, type="dir")]


def one_of(*names: str) -> Complete:
    """Completes words that are known in advance."""
    return lambda _context, _option, incomplete: _matching(names, incomplete)


def settings(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`KNOB=VALUE` of the space that was named."""
    name = ctx.params.get("space")
    if not name:
        return []
    try:
        knobs = load_space(name).knobs
    except TunerError:
        return []
    knob, equals, _value = incomplete.partition("=")
    if not equals:
        return _matching((f"{name}=" for name in knobs), incomplete)
    values = getattr(knobs.get(knob), "values", ())
    return _matching((settings_text({knob: value}) for value in values), incomplete)


def trials(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of the trials in the journal of the space and GPU that were named."""
    gpu = ctx.params.get("gpu_name")
    found: dict[str, None] = {}
    for folder in _folders(ctx):
        if not gpu or folder.name == gpu:
            data = (folder / "trials.jsonl").read_bytes()
            found.update((match.decode("utf-8"), None) for match in _TRIAL_ID.findall(data))
    return _matching(found, incomplete)


def _folders(ctx: click.Context) -> list[Path]:
    """The folders with a journal of the space that was named; of all spaces where none was."""
    root = Path(ctx.params.get("results") or "results")
    name = ctx.params.get("space") or "*"
    if "/" in name or not root.is_dir():
        return []
    return sorted({path.parent for path in root.glob(f"{name}/*/trials.jsonl")})


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
