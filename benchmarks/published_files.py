"""Predicts the settings files that trainers publish, read from a folder with their repository.

    python -m benchmarks.published_files axolotl FOLDER
    python -m benchmarks.published_files axolotl FOLDER --only examples/llama-3 --gpu h200

Without `--gpu` only the plan is made, which decides whether there is an answer; with it each is
predicted as well. `--models` is a folder with configurations of models that the catalogue lacks:
MODELS/organisation+name/config.json. Prints a row of CSV per file and a count of the reasons.
"""

from __future__ import annotations

import argparse
import collections
import csv
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.app.program_oracle import ProgramPredictions
from tuner.core.errors import InputError, TunerError
from tuner.core.units import GIB
from tuner.program.arguments import EMULATE
from tuner.program.planned import plan_program
from tuner.program.program import read_program
from tuner.program.training import named_models
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config

PUBLISHED: Mapping[str, tuple[str, str]] = {
    "axolotl": ("axolotl-ai-cloud/axolotl", "examples"),
    "llamafactory": ("hiyouga/LLaMA-Factory", "examples"),
    "torchtune": ("pytorch/torchtune", "recipes/configs"),
}
"""Repository and folder of the settings files by tool."""

COMMANDS: Mapping[str, Sequence[str]] = {
    "axolotl": ("axolotl", "train"),
    "llamafactory": ("llamafactory-cli", "train"),
}


SEVERAL = 8
"""GPUs of a file that shares a model between several, and leaves their number to the command."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one file; `reasons` are empty where there is one."""

    path: str
    model: str = ""
    gpus: int = 1
    reserved_gib: str = ""
    at_most: bool = False
    reasons: tuple[str, ...] = ()
    has_unknown_model: bool = False

    @property
    def kind(self) -> str:
        """In one word or two."""
        if self.has_unknown_model:
            return "unknown model"
        return "refused" if self.reasons else "at most" if self.at_most else "answered"


def answer(
    words: Sequence[str], path: str, gpu: str | None, models: Path, gpus: int | None = None
) -> Answer:
    """The plan of a file, and with `gpu` its prediction; on `SEVERAL` GPUs if it asks for some."""
    ranks = gpus or 1
    try:
        program = read_program(tuple(words), is_run=False)
        named = [named.name.replace("/", "+") for named in named_models(program, ())]
        model = next((str(models / name) for name in named if (models / name).is_dir()), None)
        plan = plan_program(program, model=model, gpus=gpus)
        try:
            resolve_config(plan.model)
        except TunerError as error:
            reasons = (error.message.partition(" is not in ")[0],)
            return Answer(path, plan.model, ranks, reasons=reasons, has_unknown_model=True)
        if gpu is None:
            return Answer(path, plan.model, ranks, at_most=bool(plan.at_most))
        found = ProgramPredictions(program, get_gpu(gpu), gpus=gpus, model=model).as_it_is()
        reserved_gib = f"{found.prediction.memory.peak_reserved_bytes / GIB:.2f}"
        return Answer(path, plan.model, ranks, reserved_gib, at_most=bool(plan.at_most))
    except InputError as error:
        reasons = tuple(_without_place(str(p), path) for p in error.problems) or (error.message,)
        if gpus is None and any("is of several GPUs" in reason for reason in reasons):
            return answer(words, path, gpu, models, SEVERAL)
        return Answer(path, gpus=ranks, reasons=reasons)
    except TunerError as error:
        return Answer(path, gpus=ranks, reasons=(error.message,))


def _without_place(problem: str, path: str) -> str:
    """A problem without file, line and the advice to emulate, to count it."""
    return re.sub(rf"^{re.escape(path)}:\d+ ", "", problem).removesuffix(f": {EMULATE}")


def words_of(tool: str, path: str) -> list[str]:
    """The command that trains with this file, as its tool documents it."""
    if tool == "torchtune":
        kind = "full" if "_full" in path else "lora"
        is_single = "_single_device" in path
        recipe = f"{kind}_finetune_{'single_device' if is_single else 'distributed'}"
        ranks = () if is_single else ("--nproc_per_node", str(SEVERAL))
        return ["tune", "run", *ranks, recipe, "--config", path]
    return [*COMMANDS[tool], path]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tool", choices=PUBLISHED)
    parser.add_argument("folder", type=Path, help="a checkout of the tool's repository")
    parser.add_argument("--only", default="", help="beginning of paths, commas between")
    parser.add_argument("--gpu", help="predict on this GPU type")
    parser.add_argument("--models", type=Path, default=Path("models"))
    options = parser.parse_args(arguments)
    models = options.models.resolve()
    os.chdir(options.folder)
    repository, under = PUBLISHED[options.tool]
    git = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    starts = tuple(options.only.split(","))
    paths = [str(p) for p in sorted(Path(under).rglob("*.y*ml")) if str(p).startswith(starts)]
    rows = csv.writer(sys.stdout, lineterminator="\n")
    head = ("repository", "commit", "path", "answer", "gpus", "model", "reserved_gib", "reasons")
    rows.writerow(head)
    counted: collections.Counter[str] = collections.Counter()
    for path in paths:
        found = answer(words_of(options.tool, path), path, options.gpu, models)
        reasons = "; ".join(found.reasons)
        rest = (found.kind, found.gpus, Path(found.model).name, found.reserved_gib, reasons)
        rows.writerow((repository, commit, path, *rest))
        sys.stdout.flush()
        counted.update([found.kind, *(found.reasons if found.kind == "refused" else ())])
    for reason, times in counted.most_common():
        print(f"{times:4} {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
