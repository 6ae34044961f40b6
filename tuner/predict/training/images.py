"""Images in the batches of a model that reads text and images: as many, and as large, as asked.

What a model is called with follows from the arguments of its own `get_image_features`, and how
many tokens an image takes from what that function makes of them, on tensors without data. Models
that cut an image into tiles see each tile as an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.predict.training.image_shapes import CHANNELS, candidates, own_size, require_own_size
from tuner.predict.training.known_values import declare, known_values

_TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
"""Arguments that say of each token whether it is of an image (1) or of text (0)."""
_ID_ENDINGS = ("_token_id", "_token_index")
_BEFORE = 1
"""Ordinary tokens before the first image."""


@dataclass(frozen=True, slots=True)
class Images:
    """The images of one example, for one kind of model.

    `shapes` are those of `pixel_values` and its like for one example, the first dimension being
    that of images or patches; `fixed` are small tensors of whole numbers for one example.
    """

    token: int
    tokens: int
    """Tokens that all images of an example take."""
    special: tuple[int, ...]
    """Ids that mean something else than text, none of which may be drawn."""
    shapes: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, torch.Tensor]
    type_ids: tuple[str, ...]
    joined: int | None = 0
    """The dimension in which examples follow each other; None where they have one of their own."""
    tiles: int = 0
    """Tiles of each image if text attends to images in layers of its own, else 0."""

    def require(self, max_length: int) -> None:
        """Raise `InputError` unless an example has room for its images and a text."""
        if self.tokens + _BEFORE >= max_length:
            raise InputError(
                f"max_length {max_length} has no room for text beside {self.tokens} tokens of "
                "images",
                hint=f"set max_length to more than {self.tokens + _BEFORE}, or images or "
                "image_size to less",
            )

    def placed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch with tokens of images in place of some of its text; changes it."""
        ids = inputs["input_ids"]
        for special in self.special:
            ids.masked_fill_(ids == special, _ordinary(self.special))
        where = slice(_BEFORE, _BEFORE + self.tokens)
        ids[:, where] = self.token
        if "labels" in inputs:
            inputs["labels"][:, where] = -100
        for name in self.type_ids:
            inputs[name] = torch.zeros_like(ids)
            inputs[name][:, where] = 1
        if self.tiles:
            seen = ids.new_ones((*ids.shape, self.tokens, self.tiles))
            seen[:, :_BEFORE] = 0  # text before an image does not see it
            inputs["cross_attention_mask"] = seen
        return inputs

    def fields(
        self, examples: int, device: str, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """The image arguments of a model: pixels in fp32, as processors make them."""
        made: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            full = [examples, *shape] if self.joined is None else list(shape)
            if self.joined is not None:
                full[self.joined] *= examples
            # Some models look for images of zeros, which are padding.
            made[name] = declare(torch.rand(full, device=device, dtype=dtype), 1.0)
        for name, values in self.fixed.items():
            many = values.unsqueeze(0) if self.joined is None else values
            made[name] = many.repeat(examples, *[1] * (many.dim() - 1)).to(device)
        return made


def _ordinary(special: tuple[int, ...]) -> int:
    return next(i for i in range(100, 100 + len(special) + 1) if i not in special)


def images_of(model: Any, config: Any, *, number: int, size: int) -> Images:
    """The features of `number` images of `size` pixels a side, for a model on the meta device.

    `size` 0 is what the model's vision tower was made for. Raises `InputError` for models whose
    images are not predicted, and for sizes that they do not take.
    """
    token = _image_token(config)
    called = set(inspect.signature(type(model).forward).parameters)
    features = _features(model)
    if token is None or (features is None and "cross_attention_mask" not in called):
        raise _not_predicted(config)
    found = Images(
        token=token,
        tokens=number,
        special=_special_ids(config),
        shapes={},
        fixed={},
        type_ids=tuple(name for name in _TYPE_IDS if name in called),
    )
    if features is None:
        return _attended(found, config.vision_config, size)
    arguments = set(inspect.signature(features).parameters)
    arguments |= called & {"image_merge_sizes"}
    problems: list[str] = []
    for shapes, fixed, joined in candidates(config, arguments, number, size):
        tried = replace(found, shapes=shapes, fixed=fixed, joined=joined)
        try:
            return replace(tried, tokens=_tokens(features, tried, model.dtype))
        except Exception as error:  # noqa: BLE001 - whatever a model makes of a wrong shape
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
    raise _not_predicted(config, "; ".join(dict.fromkeys(problems)))


def _features(model: Any) -> Any:
    """The method that makes features of images; None if the model has none."""
    for part in (model, getattr(model, "model", None)):
        found = getattr(part, "get_image_features", None)
        if found is not None and "pixel_values" in inspect.signature(found).parameters:
            return found
    return None


def _attended(images: Images, vision: Any, size: int) -> Images:
    """Mllama's images: one token each, padded to the most tiles that its tower can have."""
    require_own_size(vision, size)
    own = own_size(vision)
    number, tiles = images.tokens, int(vision.max_num_tiles)
    return replace(
        images,
        shapes={"pixel_values": (number, tiles, CHANNELS, own, own)},
        fixed={
            "aspect_ratio_ids": torch.full((number,), vision.max_aspect_ratio_id),
            "aspect_ratio_mask": torch.ones((number, tiles), dtype=torch.long),
        },
        joined=None,
        tiles=tiles,
    )


def _not_predicted(config: Any, why: str = "") -> InputError:
    return InputError(
        f"images are not predicted for {config.model_type} models" + (f" ({why})" if why else ""),
        hint="set images to 0 for its language model on text, or emulate the program",
    )


def _image_token(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index", "img_context_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _special_ids(config: Any) -> tuple[int, ...]:
    return tuple(
        sorted(
            {
                value
                for name, value in vars(config).items()
                if name.endswith(_ID_ENDINGS) and isinstance(value, int) and value >= 0
            }
        )
    )


def _tokens(features: Any, images: Images, dtype: torch.dtype) -> int:
    """Tokens of one example's images: the rows that come out of the vision tower."""
    with torch.no_grad(), known_values():
        found = features(**images.fields(1, "meta", dtype))
    pooled = getattr(found, "pooler_output", found)
    parts = list(_leaves(found.last_hidden_state if pooled is None else pooled))
    tokens = sum(part.numel() // part.shape[-1] for part in parts)
    if not tokens:
        raise ValueError("no features come out of the vision tower")
    return tokens


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
