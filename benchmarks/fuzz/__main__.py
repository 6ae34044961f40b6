"""Feeds damaged files to everything that reads files of people, and counts what comes out.

    python -m benchmarks.fuzz --inputs 100000 --seed 1

Each batch runs in a process of its own with a bound on its memory. An input is a failure when
it raises anything but `TunerError`, takes 10 s of processor time, writes, starts or connects to
anything, or ends its process. Each failure is kept as small as Hypothesis can make it, in the
folder `--failures`. Exit code 1 when there is one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.fuzz.sandbox import Sandbox, TookTooLongError, limit_memory, place_of
from benchmarks.fuzz.targets import TARGETS, Target

BATCH = 500
STALLED_S = 300.0
"""A process that reads one input for so long hangs where no signal reaches it."""


@dataclass(slots=True)
class Batch:
    """What came of one batch: how many inputs, how many answers, the smallest of each failure."""

    inputs: int = 0
    answers: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Inputs as hexadecimal digits, by what went wrong."""


def run_batch(target: Target, number: int, size: int, folder: Path) -> Batch:
    """Run in a process that has imported everything and ends after it."""
    sandbox = Sandbox(folder, target)
    found: dict[str, bytes] = {}

    @seed(number)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(target.inputs())
    def feed(data: bytes) -> None:
        try:
            sandbox.run(data)
        except Exception as error:
            known = found.setdefault(place_of(error), data)
            if len(data) < len(known):
                found[place_of(error)] = data
            raise

    try:
        feed()
    except TookTooLongError as error:
        found[str(error)] = sandbox.path.read_bytes()
    except Exception as error:  # noqa: BLE001 - Hypothesis raises again what is in `found`
        if not found:
            found[f"outside of an input: {place_of(error)}"] = b""
    return Batch(sandbox.inputs, sandbox.answers, {k: v.hex() for k, v in found.items()})


def in_process(target: Target, number: int, size: int) -> Batch:
    """`run_batch` in a fork, and what was left of it where that died or hung."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(theirs, target, number, size, folder)
        )
        process.start()
        theirs.close()
        path = folder / target.file
        while not ours.poll(5.0):
            if path.exists() and time.time() - path.stat().st_mtime > STALLED_S:
                process.kill()
                process.join()
                return Batch(failures={"hangs": path.read_bytes().hex()})
        try:
            found = Batch(**json.loads(ours.recv()))
        except EOFError:
            process.join()
            data = path.read_bytes() if path.exists() else b""
            return Batch(failures={f"the process ended with {process.exitcode}": data.hex()})
        process.join()
        return found


def _child(answer: Connection, target: Target, number: int, size: int, folder: Path) -> None:
    limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries warn of strange configs
    answer.send(json.dumps(asdict(run_batch(target, number, size, folder))))


def warm() -> None:
    """Import everything that a target needs, once for all processes."""
    os.environ.update(TUNER_CACHE="off", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / target.file
            (path.parent / "scratch").mkdir()
            for example in _examples(target):
                path.write_bytes(example)
                try:
                    target.check(path)
                except Exception as error:  # noqa: BLE001 - it is the imports that count
                    str(error)


def _examples(target: Target) -> list[bytes]:
    found: list[bytes] = []

    @settings(max_examples=20, database=None, derandomize=True, deadline=None,
              phases=(Phase.generate,), suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(target.inputs())
    def collect(data: bytes) -> None:
        if len(data) < 30_000:
            found.append(data)

    collect()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", help="names of kinds: " + ", ".join(t.name for t in TARGETS)
    )
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    chosen = parser.parse_args()
    targets = [t for t in TARGETS if not chosen.only or t.name in chosen.only]
    warm()
    whole = sum(target.share for target in targets)
    inputs, answers, failures = Counter[str](), Counter[str](), 0
    with ThreadPoolExecutor(chosen.workers) as pool:
        for target in targets:
            wanted = round(chosen.inputs * target.share / whole)
            batches = batches_of(target, wanted, chosen.seed * 1_000_000, (pool, chosen.workers))
            for batch in batches:
                inputs[target.name] += batch.inputs
                answers[target.name] += batch.answers
                failures += keep(target, batch, chosen.failures)
                if not inputs[target.name] // BATCH % 10:
                    print(f"{target.name:12} {inputs[target.name]:7} ...", flush=True)
            print(f"{target.name:12} {inputs[target.name]:7} inputs, "
                  f"{answers[target.name]:7} refused with an answer", flush=True)  # fmt: skip
    print(f"{sum(inputs.values())} inputs, {failures} failures")
    return 1 if failures else 0


def batches_of(
    target: Target, wanted: int, first: int, workers: tuple[ThreadPoolExecutor, int]
) -> Iterator[Batch]:
    """Batches until there were as many inputs as are wanted."""
    pool, most = workers
    number, done = first, 0
    while done < wanted:
        size = min(BATCH, wanted - done)
        count = min(most, -(-(wanted - done) // BATCH))
        for batch in pool.map(
            partial(in_process, target, size=size), range(number, number + count)
        ):
            # Of a batch that died nothing is known; it must not go on for ever.
            batch.inputs = batch.inputs or size
            done += batch.inputs
            yield batch
        number += count


def keep(target: Target, batch: Batch, folder: Path) -> int:
    """Write down failures that are new; how many there were."""
    new = 0
    for what, data in batch.failures.items():
        name = "".join(c if c.isalnum() else "-" for c in what)[:80]
        path = folder / target.name / name / target.file
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(data))
        print(f"FAILURE {target.name}: {what}\n  {bytes.fromhex(data)[:300]!r}", flush=True)
        new += 1
    return new


if __name__ == "__main__":
    raise SystemExit(main())
