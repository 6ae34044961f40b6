"""Prints how many programs are read, beside what was asked for.

`python -m benchmarks.reader CORPUS` reads the repositories below CORPUS, as owner+name, and with
--everyday the programs of a folder. What isn't there is left out. A program is *read* if its
training is seen, and *answered* if it is predicted as well; the rest says what is not predicted.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tuner.core.errors import TunerError
from tuner.program.planned import plan_program
from tuner.program.program import read_program, starts_of
from tuner.program.recorded import record
from tuner.space.gpus import get_gpu

TESTS = Path(__file__).parents[2] / "tests"
Command = tuple[Path, list[str]]

_NUMPY = "import numpy"
_SHORT = (
    "from trl import SFTConfig, SFTTrainer\nSFTTrainer('x/y', SFTConfig(output_dir='o')).train()"
)


def notebooks(corpus: Path) -> Iterator[Command]:
    for path in sorted((corpus / "unslothai+notebooks/nb").glob("*.ipynb")):
        if path.name.startswith(("AMD-", "Kaggle-", "HuggingFace")):  # copies of the others
            continue
        cells = json.loads(path.read_text())["cells"]
        code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        if ".train(" in code:
            yield path.parent, [path.name]


def trl(corpus: Path) -> Iterator[Command]:
    """The commands in the docstrings of TRL's scripts."""
    root = corpus / "huggingface+trl"
    for path in sorted([*root.glob("trl/scripts/*.py"), *root.glob("examples/scripts/**/*.py")]):
        tree = ast.parse(path.read_text())
        texts = [ast.literal_eval(e.value) for e in tree.body if _is_text(e)]
        name = str(path.relative_to(root))
        for line in "\n".join(texts).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if f"{path.name} -" in line else []
            at = next((i for i, word in enumerate(words) if word.endswith(path.name)), None)
            if at is not None and ".train()" in path.read_text():
                yield root, [name, *words[at + 1 :]]


def _is_text(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def llamafactory(corpus: Path) -> Iterator[Command]:
    return _files(corpus / "hiyouga+LLaMA-Factory", "^do_train: true")


def axolotl(corpus: Path) -> Iterator[Command]:
    return _files(corpus / "axolotl-ai-cloud+axolotl", "^base_model:")


def _files(root: Path, has: str) -> Iterator[Command]:
    for path in sorted(root.glob("examples/**/*.y*ml")):
        if re.search(has, path.read_text(), re.MULTILINE):
            yield root, [str(path.relative_to(root))]


def everyday(folder: Path) -> Iterator[Command]:
    """Its scripts, notebooks and shell scripts, with the settings file of their name if any."""
    for path in sorted([*folder.glob("p*.*"), *folder.glob("p*/train.py")]):
        given = [*folder.glob(f"{path.name[:3]}.yaml")] if path.suffix == ".py" else []
        if path.suffix in (".py", ".ipynb", ".sh"):
            start = ["bash"] if path.suffix == ".sh" else []
            config = ["--config", given[0].name] if given else []
            yield path.parent, [*start, path.name, *config]


def judged(folder: Path, words: Sequence[str]) -> tuple[str, str]:
    """Answered, read, file of the hub or stopped, and why."""
    gpu = get_gpu("h100_sxm")
    try:
        program = read_program(words, folder, is_run=False)
        starts = [start for start in starts_of(program) if start.main]
        recorded = [record(start, gpu=gpu) for start in starts]
        if starts and not any(one.trainings or one.loops for one in recorded):
            return "stopped", "no training is seen"
    except TunerError as error:
        return "stopped", str(error)
    for gpus in (None, 8):
        try:
            plan_program(program, gpu=gpu, gpus=gpus)
        except TunerError as error:
            why = str(error)
        else:
            return "answered", ""
    return ("hub", why) if "needs the network" in why else ("read", why)


def corpora(title: str, commands: Sequence[Command], asked: str, why: Counter[str]) -> None:
    kinds = Counter[str]()
    for folder, words in commands:
        kind, said = judged(folder, words)
        kinds[kind] += 1
        if kind != "answered":
            why[
                f"{title}, {kind}: {re.sub(r'[^ ]*/|:[0-9]+', '', said.splitlines()[-1])[:120]}"
            ] += 1
    seen = kinds["answered"] + kinds["read"] + kinds["hub"]
    share = f"{seen / max(len(commands), 1):.0%}"
    row(title, asked, f"{share} of {len(commands)} read, {kinds['answered']} answered, "
        f"{kinds['hub']} models of the hub, {kinds['stopped']} stopped")  # fmt: skip


def row(*columns: str) -> None:
    print("| " + " | ".join(columns) + " |", flush=True)


def ways(title: str, count: int, asked: str) -> None:
    """Programs with a known truth: each way alone, or `count` made at random."""
    sys.path.insert(0, str(TESTS))
    import reader_programs
    import reader_truth

    made = [reader_programs.single(way) for way in reader_programs.WAYS]
    programs = [reader_programs.generate(2**20 + seed) for seed in range(count)] or made
    kinds = Counter[str]()
    for program in programs:
        with tempfile.TemporaryDirectory() as folder:
            kind, why = reader_truth.verdict(program, reader_truth.read(program, Path(folder)))
        kinds[kind] += 1
        if kind == "wrong":
            print(program, why, file=sys.stderr)
    right = f"{kinds['right'] / len(programs):.1%} right, {kinds['unknown']} unknown"
    row(title, asked, f"{kinds['wrong']} of {len(programs)} wrong; {right}")


def speed() -> None:
    """One reading beside `import numpy`, each in a process, a short program, without seeds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def reading() -> None:
            (folder / "train.py").write_text(f"{_SHORT}  # {time.monotonic_ns()}\n")
            record(read_program(["train.py"], folder))

        def numpy() -> None:
            subprocess.run([sys.executable, "-P", "-c", _NUMPY], check=True)

        def timed(function: Callable[[], None]) -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        pairs = [(timed(reading), timed(numpy)) for _ in range(15)]
    one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    row("one reading, beside `import numpy`", "3 x", f"{one / other:.1f} x ({one:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--everyday", type=Path)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--why", action="store_true", help="what is not answered, by kind")
    options = parser.parse_args()
    row("", "asked", "measured")
    row("---", "---", "---")
    why = Counter[str]()
    speed()
    ways("ways to set a value", 0, "0 wrong; 98 % right")
    if options.everyday:
        corpora("everyday programs", list(everyday(options.everyday)), "20 of 26", why)
    for title, commands, asked in (
        ("Unsloth's notebooks", notebooks, "85 %"),
        ("TRL's scripts", trl, "100 %"),
        ("LLaMA-Factory's examples", llamafactory, "80 %"),
        ("Axolotl's examples", axolotl, "13 of 14"),
    ):
        if found := list(commands(options.corpus)):
            corpora(title, found, asked, why)
    ways("generated programs", options.programs, "0 of 5,000 wrong; 97 % right")
    if options.why:
        print(*(f"{count:4} {kind}" for kind, count in why.most_common()), sep="\n")


if __name__ == "__main__":
    main()
