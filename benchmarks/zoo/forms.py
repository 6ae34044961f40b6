"""Synthetic data in the forms that the programs of repositories read: token files, COCO, YOLO.

Each maker gets the folder to fill; `data.MAKERS` has them.
"""

from __future__ import annotations

import array
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GPT2_WORDS = 50257
_BOXES = 7


def _tokens(count: int, seed: int) -> array.array[int]:
    """So many 16-bit tokens of GPT-2's vocabulary."""
    some = random.Random(seed).choices(range(_GPT2_WORDS), k=65536)  # noqa: S311 - not secret
    return (array.array("H", some) * (count // 65536 + 1))[:count]


def _gpt_tokens(folder: Path) -> None:
    """train.bin and val.bin, as nanoGPT maps them."""
    for seed, split in enumerate(("train", "val")):
        (folder / f"{split}.bin").write_bytes(_tokens(300_000, seed).tobytes())


def _speedrun_tokens(folder: Path) -> None:
    """fineweb_*.bin with the header that modded-nanogpt checks."""
    target = folder / "data" / "fineweb10B"
    target.mkdir(parents=True, exist_ok=True)
    for seed, (name, blocks) in enumerate((("train_000001", 4), ("val_000000", 20))):
        count = blocks * 524_288 + 8
        header = array.array("i", [20240520, 1, count, *[0] * 253])
        content = header.tobytes() + _tokens(count, seed).tobytes()
        (target / f"fineweb_{name}.bin").write_bytes(content)


def _characters(folder: Path) -> None:
    """input.txt, as minGPT's chargpt reads it; 65 characters, as in its Shakespeare."""
    letters = "".join(map(chr, range(32, 96))) + "\n"
    text = "O God, O God! how weary, stale, flat and unprofitable\n".upper()
    (folder / "input.txt").write_text((letters + "O God, O God!" + text) * 400, encoding="utf-8")


def _picture(path: Path, size: tuple[int, int], seed: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)  # noqa: S311 - not secret
    Image.frombytes("RGB", size, pixels).save(path)


def _coco(folder: Path) -> None:
    """Images of 640 x 480 with seven boxes each, and their masks, as pycocotools reads them."""
    for split, count in (("train2017", 16), ("val2017", 4)):
        images: list[dict[str, Any]] = []
        objects: list[dict[str, Any]] = []
        for i in range(count):
            name = f"{i:012d}.jpg"
            _picture(folder / split / name, (640, 480), i)
            images.append({"id": i, "file_name": name, "width": 640, "height": 480})
            for k in range(_BOXES):
                objects.append(_object(len(objects) + 1, i, k))
        said = {
            "images": images,
            "annotations": objects,
            "categories": [{"id": c, "name": f"c{c}"} for c in range(1, 91)],
        }
        (folder / "annotations").mkdir(exist_ok=True)
        path = folder / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(said), encoding="utf-8")


def _object(number: int, image: int, k: int) -> dict[str, Any]:
    x, y, w, h = 20 + 60 * k, 30 + 20 * k, 80, 120
    return {
        "id": number,
        "image_id": image,
        "category_id": 1 + k,
        "bbox": [x, y, w, h],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
    }


def _yolo(folder: Path) -> None:
    """Images of 640 x 480 with seven boxes each, and the data.yaml that Ultralytics reads."""
    boxes = "\n".join(f"{k} {0.1 + 0.1 * k} {0.2 + 0.08 * k} 0.12 0.25" for k in range(_BOXES))
    for split, count in (("train", 64), ("val", 16)):
        (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            _picture(folder / "images" / split / f"{i}.jpg", (640, 480), i)
            (folder / "labels" / split / f"{i}.txt").write_text(boxes, encoding="utf-8")
    names = "".join(f"  {i}: c{i}\n" for i in range(80))
    said = f"path: {folder.absolute()}\ntrain: images/train\nval: images/val\nnames:\n{names}"
    (folder / "data.yaml").write_text(said, encoding="utf-8")


def _chat_turns(folder: Path) -> None:
    """train.json and eval.json, as DeepSpeed-Chat reads local data."""
    said = " one more of them" * 80
    rows = [{"prompt": f" Human: {i}?", "chosen": said, "rejected": said} for i in range(64)]
    for split in ("train", "eval"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.json").write_text(text, encoding="utf-8")


MAKERS: dict[str, Callable[[Path], None]] = {
    "gpt_tokens": _gpt_tokens,
    "speedrun_tokens": _speedrun_tokens,
    "characters": _characters,
    "coco": _coco,
    "yolo": _yolo,
    "chat_turns": _chat_turns,
}
