"""Synthetic data for the programs of the zoo: small, seeded, and in the form that each reads.

A maker gets the folder to fill. `MAKERS` has them by the name that entries use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.zoo import forms

ROWS = 64
_WORDS = "the a model learns to count from one and then on until it has seen each number".split()


def make(name: str, folder: Path) -> Path:
    """The data of a maker, under `folder`; made where it is not there yet. Returns its folder."""
    target = folder / name
    if not (target / "complete").exists():
        target.mkdir(parents=True, exist_ok=True)
        MAKERS[name](target)
        (target / "complete").touch()
    return target


def words(count: int, seed: int) -> str:
    """So many words, the same for a seed."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))  # noqa: S311 - not secret


def _lines(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as train.jsonl and, a quarter of them, as test.jsonl."""
    text = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(text), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(text[: len(text) // 4]), encoding="utf-8")


def _texts(folder: Path) -> None:
    _lines(folder, ({"text": words(400 + 10 * i, i)} for i in range(ROWS)))


def _conversations(folder: Path) -> None:
    _lines(
        folder,
        (
            {
                "messages": [
                    {"role": "user", "content": words(40, i)},
                    {"role": "assistant", "content": words(300, i + ROWS)},
                ]
            }
            for i in range(ROWS)
        ),
    )


def _preferences(folder: Path) -> None:
    _lines(
        folder,
        (
            {
                "prompt": words(40, i),
                "chosen": words(200, i + ROWS),
                "rejected": words(200, i + 2 * ROWS),
            }
            for i in range(ROWS)
        ),
    )


def _alpaca(folder: Path) -> None:
    _lines(
        folder,
        (
            {"instruction": words(20, i), "input": "", "output": words(300, i + ROWS)}
            for i in range(ROWS)
        ),
    )


def _labelled_images(folder: Path) -> None:
    """Two classes as folders, train/CLASS/N.png, as torchvision's ImageFolder reads them."""
    for split, count in (("train", 128), ("val", 32)):
        for i in range(count):
            _image(folder / split / f"class{i % 2}" / f"{i}.png", 256, i)


def _image(path: Path, side: int, seed: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.Random(seed).randbytes(side * side * 3)  # noqa: S311 - not secret
    Image.frombytes("RGB", (side, side), pixels).save(path)


MAKERS: dict[str, Callable[[Path], None]] = {
    "texts": _texts,
    "conversations": _conversations,
    "preferences": _preferences,
    "alpaca": _alpaca,
    "labelled_images": _labelled_images,
    **forms.MAKERS,
}
