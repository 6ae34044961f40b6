"""The exceptions that people see: what is wrong, the value, what is allowed, what to do.

A `TunerError` is an answer to the user and is printed without a traceback. Any other
exception that reaches the command line is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.core.aliases import meant

EXIT_FOUND = 0
EXIT_NOTHING_FITS = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_UNKNOWN = 4
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_FOUND: "it fits, or the command found what it was asked for",
    EXIT_NOTHING_FITS: "it does not fit, or nothing does",
    EXIT_BAD_INPUT: "the input is wrong, or the program failed",
    EXIT_UNAVAILABLE: "tuner cannot: something is missing, unsupported, or a fault of tuner's own",
    EXIT_UNKNOWN: "unknown: too little is known to say whether it fits",
    EXIT_INTERRUPTED: "interrupted; finished work is kept",
}
"""The exit codes of every command. No failure and nothing unknown ends with 0."""


EXIT_CODES_TEXT = (
    "0 fits, 1 doesn't fit, 2 bad input or the program failed, 3 tuner can't, 4 unknown, "
    "130 interrupted"
)
"""The exit codes in one line, for `--help`."""


def verdict_code(fits: bool | None) -> int:
    """The exit code of a verdict; None is unknown."""
    if fits is None:
        return EXIT_UNKNOWN
    return EXIT_FOUND if fits else EXIT_NOTHING_FITS


class TunerError(Exception):
    """Base of every error that is an answer to the user.

    `message` says what is wrong with which value; `hint` says what to do. `exit_code`
    is the status with which the command line ends.
    """

    exit_code = EXIT_UNAVAILABLE
    word = "error"
    problems: tuple[Problem, ...] = ()

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def reason(self) -> str:
        """All problems in one line, or the message where none is listed."""
        return "; ".join(problem.message for problem in self.problems) or self.message

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in an input: where it stands, and what it is.

    `where` is a place a person can find ("qlora27b.yaml:12 knobs.micro_batch"), or empty.
    """

    message: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class InputError(TunerError):
    """The input is wrong (exit code 2). Carries every problem found, not only the first."""

    exit_code = EXIT_BAD_INPUT

    def __init__(
        self, message: str, *, hint: str | None = None, problems: Iterable[Problem] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [self.message, *(f"  - {problem}" for problem in self.problems)]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class UnsupportedError(InputError):
    """The input may be right, and tuner has no answer for it (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class UndecidedError(UnsupportedError):
    """Only a run of the program knows the answer (exit code 4)."""

    exit_code = EXIT_UNKNOWN
    word = "unknown"


class NothingFitsError(TunerError):
    """The search ended, and no configuration fits the GPU (exit code 1)."""

    exit_code = EXIT_NOTHING_FITS


class UnavailableError(TunerError):
    """Something this machine lacks is needed: a library, a GPU, the network (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class Note(UserWarning):
    """A remark on what was asked for; the command line prints it as one line."""


def nearest(value: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that means what `value` says, else the closest in spelling, else None.

    One letter of three may differ, and one of four: in short words more is another word.
    """
    by_lower = {word.lower(): word for word in reversed(list(allowed))}
    if known := meant(value, by_lower.values()):
        return known
    cutoff = 0.66 if len(value) < 4 else 0.75 if len(value) < 8 else 0.72
    close = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def unknown(
    kind: str,
    value: str,
    allowed: Iterable[str],
    *,
    list_command: str = "",
    spellings: Iterable[str] = (),
) -> InputError:
    """An `InputError` for a word that is not in the catalogue, with the nearest one.

    `kind` is the field's noun ("GPU", "search space", "knob"); `list_command` is a command
    that lists what is allowed, shown when the list is long; `spellings` are other names of what
    is allowed.
    """
    words = sorted(allowed)
    close = nearest(value, [*words, *spellings])
    parts = [f"did you mean {close!r}?"] if close else []
    if len(words) > 12 and list_command:
        parts.append(f"`{list_command}` lists all {len(words)}")
    elif words != [close] and (len(words) <= 12 or not close):
        parts.append(f"allowed: {', '.join(words)}")
    return InputError(f"unknown {kind} {value!r}", hint=" ".join(parts))


DISTRIBUTION = "tuner-fit"
"""The name of this package on the package index, where `tuner` is another program."""


def install_command(extra: str) -> str:
    """The command that installs an extra from where this installation is from (PEP 610).

    That is a clone, a wheel or a repository; the package index, where none of them is noted.
    """
    import json
    from importlib import metadata

    requirement = f"{DISTRIBUTION}[{extra}]"
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        noted = None
    source = json.loads(noted) if noted else {}
    if vcs := source.get("vcs_info"):
        requirement += f" @ {vcs['vcs']}+{source['url']}@{vcs['commit_id']}"
    elif "url" in source:
        requirement += f" @ {source['url']}"
    return f"pip install '{requirement}'"


MODULES = {
    "accelerate": "peft", "bitsandbytes": "bitsandbytes", "huggingface_hub": "transformers",
    "optuna": "optuna", "peft": "peft", "ray": "ray", "scipy": "scipy",
    "threadpoolctl": "threadpoolctl", "tokenizers": "transformers", "torch": "torch",
    "transformers": "transformers",
}  # fmt: skip
"""The package of the extra that brings each module."""


def missing_extra(error: ModuleNotFoundError) -> UnavailableError | None:
    """The answer to people where a module of the extra is missing; None for any other module."""
    package = MODULES.get((error.name or "").partition(".")[0])
    if package is None:
        return None
    return UnavailableError(
        f"this needs {package}, which is not installed: tuner traces and trains with the real "
        "libraries, and runs the trials of a search with Ray",
        hint=install_command("all"),
    )
