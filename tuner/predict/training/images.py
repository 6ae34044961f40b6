"""Images in the batches of a model that reads text and images: as many, and as large, as asked.

What a model is called with follows from the arguments of its own `get_image_features`, and how
many tokens an image takes from what that function makes of them, on tensors without data. Models
that cut an image into tiles see each tile as an image.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.predict.training.known_values import declare, known_values

CHANNELS = 3
"""Colours of an image."""
_MOST_TILES = 36

Candidate = tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor], int | None]
"""Shapes and fixed tensors of an example's images, and the dimension that joins examples."""


def candidates(config: Any, arguments: set[str], number: int, size: int) -> Iterator[Candidate]:
    """Shapes to try, as the processors of models with such arguments make them."""
    vision = getattr(config, "vision_config", None)
    if "image_grid_thw" in arguments:
        return _patches(vision, arguments, number, size)
    if "spatial_shapes" in arguments:
        return _padded_patches(vision, number, size)
    if "image_position_ids" in arguments:
        return _positions(vision, number, size)
    if "target_sizes" in arguments:
        return _strip(vision, number, size)
    if vision is None and hasattr(config, "patch_size"):
        return _without_tower(config, number, size)
    return _of_a_side(config, arguments, number, size)


def _without_tower(config: Any, number: int, size: int) -> Iterator[Candidate]:
    """Patches that the language model itself reads."""
    patch = int(config.patch_size)
    side = (size or own_size(config)) // patch
    shape = (number, side * side, config.num_channels * patch * patch)
    yield {"pixel_values": shape}, {}, 0


def _of_a_side(config: Any, arguments: set[str], number: int, size: int) -> Iterator[Candidate]:
    """Whole images, or tiles, of the side that the tower takes."""
    vision = config.vision_config
    own = own_size(vision)
    if "image_sizes" not in arguments:
        require_own_size(vision, size)
    side = size or own
    if not side:
        raise _needs_size(config.model_type)
    pixels = (number, CHANNELS, side, side)
    if "image_token_pooling" in arguments:
        yield _two_crops(vision, number)
        return
    if "high_res_pixel_values" in arguments:
        high = own_size(config.high_res_vision_config)
        finer = (number, CHANNELS, high, high)
        yield {"pixel_values": pixels, "high_res_pixel_values": finer}, {}, 0
        return
    sizes = {"image_sizes": torch.tensor([[side, side]] * number)}
    if getattr(config, "image_grid_pinpoints", None) and own:
        # As many tiles as the model finds for such a size, and the whole image as another.
        for tiles in range(1, _MOST_TILES + 1):
            tiled = (number, tiles + 1, CHANNELS, own, own)
            yield {"pixel_values": tiled}, sizes, 0
    elif "image_sizes" in arguments:
        yield {"pixel_values": pixels}, sizes, 0
    elif "pixel_attention_mask" in arguments:
        yield {"pixel_values": pixels}, {}, None
        for mask in (torch.ones((number, side, side)).long(), torch.ones(number).bool()):
            yield {"pixel_values": pixels}, {"pixel_attention_mask": mask}, None
    else:
        yield {"pixel_values": pixels}, {}, 0
        yield {"pixel_values": pixels}, {}, None


def require_own_size(vision: Any, size: int) -> None:
    """Raise `InputError` unless `size` is the tower's own, or 0."""
    own = own_size(vision)
    if size and own and size != own:
        raise InputError(
            f"image_size {size} is not what this model takes: its {vision.model_type} vision "
            f"tower sees images of {own}",
            hint=f"set image_size to {own} or leave it out; images counts tiles",
        )


def _needs_size(model_type: str) -> InputError:
    return InputError(
        f"image_size is not set, and this {model_type} model takes images of any size",
        hint="say the pixels of a side: --set image_size=1024, for example",
    )


def own_size(vision: Any) -> int:
    """Pixels of a side of the images that a tower was made for; 0 where it takes any size."""
    size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None)
    if isinstance(size, list | tuple):
        size = size[0]
    return int(size) if isinstance(size, int) else 0


def _first(vision: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(vision, name, None)
        if isinstance(value, list | tuple):
            value = value[-1]
        if isinstance(value, int):
            return value
    return default


def _patches(vision: Any, arguments: set[str], number: int, size: int) -> Iterator[Candidate]:
    """Patches of all images one after the other, and the grid that each has."""
    if not size:
        raise _needs_size(str(getattr(vision, "model_type", "")))
    patch = _first(vision, "patch_size", default=14)
    merged = _first(vision, "spatial_merge_size", "merge_kernel_size", default=1)
    side = max(1, round(size / (patch * merged))) * merged
    grid = {"image_grid_thw": torch.tensor([[1, side, side]] * number)}
    if "image_merge_sizes" in arguments:
        grid["image_merge_sizes"] = torch.tensor([merged] * number)
    count = number * side * side
    channels = _first(vision, "in_channels", "in_chans", "num_channels", default=CHANNELS)
    # An image is repeated over the frames that a patch of a video has.
    own = _first(vision, "temporal_patch_size", default=1)
    for frames in dict.fromkeys((own, 1, 2)):
        yield {"pixel_values": (count, channels * frames * patch * patch)}, grid, 0
    yield {"pixel_values": (count, channels, patch, patch)}, grid, 0


def _padded_patches(vision: Any, number: int, size: int) -> Iterator[Candidate]:
    """Patches of each image, with the rows and columns of them, and which are no padding."""
    if not size:
        raise _needs_size(str(getattr(vision, "model_type", "")))
    patch = _first(vision, "patch_size", default=16)
    side = max(1, size // (2 * patch)) * 2
    fixed = {
        "spatial_shapes": torch.tensor([[side, side]] * number),
        "pixel_attention_mask": torch.ones((number, side * side), dtype=torch.long),
    }
    yield {"pixel_values": (number, side * side, CHANNELS * patch * patch)}, fixed, 0


def _strip(vision: Any, number: int, size: int) -> Iterator[Candidate]:
    """Patches of all images side by side in one strip, and how many rows and columns each has."""
    if not size:
        raise _needs_size(str(vision.model_type))
    patch = _first(vision, "patch_size", default=14)
    # Windows of two by two patches are merged, and once more by the merger after the tower.
    side = max(1, size // (4 * patch)) * 4
    fixed = {"target_sizes": torch.tensor([[side, side]] * number, dtype=torch.int32)}
    yield {"pixel_values": (1, CHANNELS, patch, number * side * side * patch)}, fixed, -1


def _two_crops(vision: Any, number: int) -> Candidate:
    """Each image twice, coarse and fine, as Molmo 2 takes one that is not cut into tiles.

    Two by two patches are pooled into a token, which its Molmo2ImageProcessor says.
    """
    patch = int(vision.patch_size)
    side = own_size(vision) // patch
    pooled = -(-side // 2)
    crops = torch.arange(2 * number * side * side).reshape(-1, side, side)
    even = torch.nn.functional.pad(crops, (0, side % 2, 0, side % 2), value=-1)
    fixed = {
        "image_token_pooling": even.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 4),
        "image_grids": torch.tensor([[pooled] * 4] * number),
        "image_num_crops": torch.tensor([2] * number),
    }
    return {"pixel_values": (2 * number, side * side, CHANNELS * patch * patch)}, fixed, 0


def _positions(vision: Any, number: int, size: int) -> Iterator[Candidate]:
    """Patches of each image, with the place that each has in it."""
    if not size:
        raise _needs_size(str(getattr(vision, "model_type", "")))
    patch = _first(vision, "patch_size", default=16)
    pooled = _first(vision, "pooling_kernel_size", default=1)
    # Models without a tower take patches that are pooled already.
    blocks = max(1, size // (patch * pooled))
    yield _placed_patches(number, blocks * pooled, patch)
    yield _placed_patches(number, blocks, patch * pooled)


def _placed_patches(number: int, side: int, patch: int) -> Candidate:
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    fixed = {"image_position_ids": places.repeat(number, 1, 1)}
    return {"pixel_values": (number, side * side, CHANNELS * patch * patch)}, fixed, 0


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
    number: int
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
        most = _BEFORE + self.tokens + self.number - 1
        if most >= max_length:
            raise InputError(
                f"max_length {max_length} has no room for text beside {self.tokens} tokens of "
                "images",
                hint=f"set max_length to more than {most}, or images or image_size to less",
            )

    def placed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch with tokens of images in place of some of its text; changes it."""
        ids = inputs["input_ids"]
        special_ids = self.special
        ordinary = next(i for i in range(100, 101 + len(special_ids)) if i not in special_ids)
        for special in special_ids:
            ids.masked_fill_(ids == special, ordinary)
        inputs |= {name: torch.zeros_like(ids) for name in self.type_ids}
        ends = [self.tokens * n // self.number for n in range(self.number + 1)]
        # A token of text between two images, as processors have it: models count images by it.
        for before, (start, end) in enumerate(itertools.pairwise(ends), _BEFORE):
            where = slice(before + start, before + end)
            ids[:, where] = self.token
            if "labels" in inputs:
                inputs["labels"][:, where] = -100
            for name in self.type_ids:
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
    ids = (value for name, value in vars(config).items() if name.endswith(_ID_ENDINGS))
    found = Images(
        token=token,
        number=number,
        tokens=number,
        special=tuple(sorted({n for n in ids if isinstance(n, int) and n >= 0})),
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
