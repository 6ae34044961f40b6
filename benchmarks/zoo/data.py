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
_WORDS = ("the", "a", "model", "learns", "to", "count", "from", "one", "and", "then", "on", "until")


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
    """Write rows as lines of train.json and, a quarter of them, of test.json."""
    text = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.json").write_text("".join(text), encoding="utf-8")
    (folder / "test.json").write_text("".join(text[: len(text) // 4]), encoding="utf-8")


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


def _ratings(folder: Path) -> None:
    rows = ({"prompt": words(40, i), "completion": words(200, i + ROWS)} for i in range(ROWS))
    _lines(folder, ({**row, "label": i % 2 == 0} for i, row in enumerate(rows)))


def _prompts(folder: Path) -> None:
    _lines(folder, ({"prompt": [{"role": "user", "content": words(20, i)}]} for i in range(ROWS)))


def _pairs(folder: Path) -> None:
    """Two sentences and a label: GLUE's MRPC, also where programs ask the hub for it."""
    rows = [
        {"sentence1": words(20, i), "sentence2": words(22, i + ROWS), "label": i % 2, "idx": i}
        for i in range(ROWS)
    ]
    _lines(folder, rows)
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    splits = "".join(
        f"  - split: {split}\n    path: {split}.json\n" for split in ("train", "validation")
    )
    card = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n"
    (glue / "README.md").write_text(card, encoding="utf-8")
    for split in ("train", "validation"):
        (glue / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric in ("accuracy", "glue"):
        _metric(folder, metric)


def _questions(folder: Path) -> None:
    """As SQuAD: an answer within a context."""
    rows = []
    for i in range(ROWS):
        context = words(300, i)
        answer = {"text": [context[50:80]], "answer_start": [50]}
        rows.append({"id": str(i), "title": "", "context": context, "question": words(10, i)})
        rows[-1]["answers"] = answer
    (folder / "train.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    _metric(folder, "squad")


def _entities(folder: Path) -> None:
    texts = (words(40, i).split() for i in range(ROWS))
    tags = ("O", "B-PER", "I-PER")
    rows = ({"tokens": text, "ner_tags": [tags[len(one) % 3] for one in text]} for text in texts)
    _lines(folder, rows)
    _metric(folder, "seqeval")


def _translations(folder: Path) -> None:
    pairs = ({"en": words(30, i), "ro": words(34, i + ROWS)} for i in range(ROWS))
    _lines(folder, ({"translation": pair} for pair in pairs))
    _metric(folder, "sacrebleu")


def _metric(folder: Path, name: str) -> None:
    """A metric where evaluate looks for it first: a script in the program's folder."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / f"{name}.py").write_text(_METRIC, encoding="utf-8")


_METRIC = """import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        features = datasets.Features(features)
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": 0.5}
"""


def _conversations_with_images(folder: Path) -> None:
    from datasets import Dataset, Features, Image, List, Value

    _image(folder / "image.png", 448, 0)
    rows = [
        {
            "images": [str(folder / "image.png")],
            "messages": [
                {"role": "user", "content": words(20, i)},
                {"role": "assistant", "content": words(60, i + ROWS)},
            ],
        }
        for i in range(ROWS)
    ]
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "messages": List(message)})
    Dataset.from_list(rows, features=features).to_parquet(folder / "train.parquet")


def _captioned_images(folder: Path) -> None:
    """Pictures with texts, as diffusers' scripts read a folder."""
    rows = []
    for i in range(16):
        _image(folder / "train" / f"{i}.png", 512, i)
        rows.append({"file_name": f"{i}.png", "text": words(12, i)})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metadata.jsonl").write_text(text, encoding="utf-8")


def _pictures(folder: Path) -> None:
    """A few pictures of one thing, as DreamBooth takes them."""
    for i in range(8):
        _image(folder / f"{i}.png", 512, i)


def _pets(folder: Path) -> None:
    """Files named by their class, as the Oxford-IIIT Pet data set has them."""
    for i in range(256):
        _image(folder / f"{('Abyssinian', 'beagle')[i % 2]}_{i}.jpg", 256, i)


def _labelled_images(folder: Path) -> None:
    """Two classes as folders, train/CLASS/N.png, as torchvision's ImageFolder reads them."""
    for split, count in (("train", 128), ("val", 32)):
        for i in range(count):
            _image(folder / split / f"class{i % 2}" / f"{i}.png", 256, i)
    _metric(folder, "accuracy")


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
    "ratings": _ratings,
    "prompts": _prompts,
    "pairs": _pairs,
    "questions": _questions,
    "entities": _entities,
    "translations": _translations,
    "conversations_with_images": _conversations_with_images,
    "captioned_images": _captioned_images,
    "pictures": _pictures,
    "pets": _pets,
    **forms.MAKERS,
}
