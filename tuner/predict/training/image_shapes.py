"""Shapes of image features, as the processors of transformers make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tuner.core.errors import InputError

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
        hint="set image_size to the pixels of a side",
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
