"""Check published training programs by their settings alone, and count the answers.

    git clone https://github.com/huggingface/trl
    git clone https://github.com/unslothai/notebooks
    python -m benchmarks.published_programs --trl trl --unsloth notebooks --gpu a100_80gb

Each script is started with the command lines in its docstring. The table has one row for each:
the program, its command, the answer, and the reason where there is none.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tuner.app.programs import check
from tuner.core.errors import TunerError
from tuner.core.units import GIB
from tuner.program.planned import plan_program
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config

UNSLOTH = (
    "Llama3.1_(8B)-Alpaca",
    "Llama3.2_(1B_and_3B)-Conversational",
    "Qwen3_(14B)-Reasoning-Conversational",
    "Qwen2.5_(7B)-Alpaca",
    "Gemma3_(4B)",
    "Gemma2_(9B)-Alpaca",
    "Phi_4-Conversational",
    "Mistral_v0.3_(7B)-Conversational",
    "CodeGemma_(7B)-Conversational",
    "TinyLlama_(1.1B)-Alpaca",
    "Zephyr_(7B)-DPO",
    "Llama3_(8B)-ORPO",
)
"""The notebooks of unslothai/notebooks that are counted, from its folder `nb`."""

GENERATING = re.compile(
    r"grpo|gspo|rloo|online|nash|xpo|ppo|gold|gkd|distill|sdft|sdpo|ssd|openenv|openreward|harbor"
    r"|async|vllm|env|carla"
)
"""Scripts that generate completions while they train, which only the emulator prices."""

_COMMAND = re.compile(r"^(?:CUDA\S+ |TRL\S+ )?((?:python3?|accelerate|torchrun|trl|uv) .*)")


@dataclass(frozen=True, slots=True)
class Row:
    """One published program with one command line, and what tuner says of it."""

    source: str
    commit: str
    path: str
    command: str
    kind: str
    answer: str
    predicted_gib: str = ""
    reason: str = ""


def commands_of(text: str) -> Iterator[list[str]]:
    """The command lines in a script's docstring."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    for line in docstring.replace("\\\n", " ").splitlines():
        found = _COMMAND.match(line.strip().strip("`"))
        if found and ".py" in found[1]:
            yield shlex.split(found[1])


def programs(trl: Path | None, unsloth: Path | None) -> Iterator[tuple[Path, str, list[str]]]:
    """Each program: its repository, its path there, and the words that start it."""
    if trl is not None:
        paths = sorted({*trl.glob("examples/scripts/**/*.py"), *trl.glob("trl/scripts/*.py")})
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if "parser" not in text and "Trainer(" not in text:
                continue
            name = str(path.relative_to(trl))
            found = [words for words in commands_of(text) if name in words]
            found += [] if found else [
                [name if word == one else word for word in words]
                for words in commands_of(text)
                for one in words[:4]
                if one.endswith(path.name)
            ]  # fmt: skip
            if not found and "parser" not in text:
                found = [["python", name]]
            for words in found:
                yield trl, name, words
    if unsloth is not None:
        for notebook in UNSLOTH:
            yield unsloth, f"nb/{notebook}.ipynb", [f"nb/{notebook}.ipynb"]


def checked(words: list[str], gpu_name: str, *, is_read: bool) -> tuple[str, str, str]:
    """The answer, the predicted memory, and the reason if there is no answer."""
    try:
        if is_read:
            resolve_config(plan_program(read_program(words, is_run=False)).model)
            return "fits or not", "", ""
        found = check(words, get_gpu(gpu_name), improve=False, predict=True).found
    except TunerError as error:
        reasons = [str(problem) for problem in getattr(error, "problems", ())] or [error.message]
        return type(error).__name__, "", " | ".join(reasons)
    answer = "fits" if found.fits else "does not fit"
    return answer, f"{found.used_bytes / GIB:.2f}", ""


def rows(
    trl: Path | None, unsloth: Path | None, gpu_name: str, only: str, *, is_read: bool
) -> Iterator[Row]:
    """A row for each program whose path has `only` in it."""
    for root, name, words in programs(trl, unsloth):
        if only not in name:
            continue
        os.chdir(root)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        kind = "generates" if GENERATING.search(name) else "fixed data"
        answer, gib, reason = checked(words, gpu_name, is_read=is_read)
        yield Row(root.name, commit, name, shlex.join(words), kind, answer, gib, reason)


def main() -> None:
    """Write the table, and the number of answers to standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", type=lambda text: Path(text).resolve())
    parser.add_argument("--unsloth", type=lambda text: Path(text).resolve())
    parser.add_argument("--gpu", default="a100_80gb")
    parser.add_argument("--only", default="")
    parser.add_argument("--read", action="store_true", help="read the settings, predict nothing")
    arguments = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    writer.writeheader()
    found: dict[str, list[bool]] = {}
    how = (arguments.trl, arguments.unsloth, arguments.gpu, arguments.only)
    for row in rows(*how, is_read=arguments.read):
        writer.writerow(asdict(row))
        sys.stdout.flush()
        found.setdefault(f"{row.source}, {row.kind}", []).append("fit" in row.answer)
    for name, answers in found.items():
        print(f"{name}: {sum(answers)} of {len(answers)} answered", file=sys.stderr)


if __name__ == "__main__":
    main()
