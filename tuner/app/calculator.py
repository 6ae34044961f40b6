"""A page that predicts in the browser, from the timelines that come with tuner.

The page has what `tuner.cost.sized` and `tuner.cost.speed.roofline` compute from: the events of
each structure with the polynomials of their sizes, optimizer steps, and the rates of each GPU type.
Its program, `report/page/calculator.js`, does the same with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tuner import __version__
from tuner.app.estimate import asked
from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, MemoryBudget, MemoryCategory
from tuner.cost import allocator
from tuner.cost.calibrate import step_factors
from tuner.cost.interval import MEMORY_ERRORS
from tuner.cost.library_memory import context_bytes, cublas_workspace_bytes
from tuner.cost.speed.rates import BOARDS_DIFFER, matmul_peak, power_limit, rate_of
from tuner.cost.speed.roofline import (
    CACHED,
    KEPT,
    KEPT_ENDS,
    RECOMPUTED,
    TRAINED,
    Efficiency,
    Roofline,
)
from tuner.cost.work_arrays import SEGMENTS
from tuner.predict.compiler.structure import TILE_TOKENS, Structure, kernels_like
from tuner.predict.portable import (
    PHASES,
    Arrays,
    PortableStructure,
    Words,
    attention_rates,
    steps_data,
)
from tuner.predict.predict import check_supported
from tuner.predict.shipped import PAGED_ELEMENTS, RANKS, SHIPPED_OPTIMIZERS, Shipped
from tuner.report.report import page_environment
from tuner.report.terminal.verdict import SAMPLES
from tuner.space.gpus import load_catalogue as all_gpus
from tuner.space.models.catalogue import architecture
from tuner.space.models.catalogue import load_catalogue as all_models

Settings = Mapping[str, Any]

METHODS: Mapping[str, tuple[str, str, Settings]] = {
    "qlora": ("QLoRA, NF4", "--qlora", {"precision": "nf4"}),
    "lora": ("LoRA, bf16", "--lora", {"precision": "bf16"}),
    "int8": ("LoRA, int8", "--set precision=int8", {"precision": "int8"}),
    "full": ("Full fine-tuning", "--full", {"precision": "bf16", "lora_rank": 0}),
}
"""By name: a title, and options of `tuner estimate` with the settings that they stand for."""


def calculator_html(timelines: Shipped) -> str:
    """The page as HTML text; it asks nothing of the network.

    Raises `UnavailableError` if no timelines ship.
    """
    data, numbers = page_data(timelines)
    text: str = (
        page_environment()
        .get_template("calculator.html.j2")
        .render(page=data, numbers=numbers, versions=sorted(timelines.versions.items()))
    )
    return text


def page_data(timelines: Shipped) -> tuple[dict[str, Any], str]:
    """The data of the page, and its arrays: deflated, in base64, and found by their places.

    Of each model the structures of `METHODS` that ship, with and without checkpointing.
    """
    arrays, digests = Arrays(), set(timelines.models())
    models = [name for name in all_models() if architecture(name).digest in digests]
    if not models:
        raise UnavailableError("no timelines come with this installation of tuner")
    gpus = list(all_gpus().values())
    kernels = sorted({kernels_like(gpu.compute_capability) for gpu in gpus})
    structures: list[PortableStructure] = []
    shown = []
    for name in models:
        found, places = architecture(name), {}
        for key, structure, is_half in _structures(name, kernels):
            sized = timelines.timeline(found.digest, structure.key)
            if sized is not None:
                places[key] = len(structures)
                structures.append(PortableStructure(sized, timelines, found.digest, is_half))
        shown.append(
            {
                "name": name,
                "window": found.sliding_window,
                "positions": found.positions,
                "structures": places,
            }
        )
    words = Words()
    portable = [one.data(arrays, words) for one in structures]
    steps = [steps_data(timelines.steps(*key), arrays, words) for key in words.optimizers]
    data = {
        "version": __version__,
        "models": shown,
        "structures": portable,
        "methods": [
            {"id": name, "title": title, "options": options}
            for name, (title, options, _) in METHODS.items()
        ],
        "optimizers": SHIPPED_OPTIMIZERS,
        "ranks": RANKS,
        "categories": [str(category) for category in MemoryCategory],
        "phases": [str(phase) for phase in PHASES],
        "segments": [[str(s.phase), s.micro_step] for s in SEGMENTS],
        "steps": steps,
        "cached": words.kinds.get(CACHED, -1),
        "gpus": [_gpu(gpu, models[0], kernels, words) for gpu in gpus],
        "constants": _constants(),
    }
    return data, arrays.packed()


def _structures(
    model: str, kernels: list[tuple[int, int]]
) -> Iterable[tuple[str, Structure, bool]]:
    """Each structure of the page with its key: the words by which the page finds it."""
    found = architecture(model)
    # Lengths by whether they are beyond the window and in one tile of the loss.
    short, long, window = 256, 2 * TILE_TOKENS, found.sliding_window
    lengths = {
        (window is not None and short >= window, True): short,
        (window is not None and long >= window, False): long,
    }
    if window is not None and window > long:
        lengths[True, False] = window
    for (method, (*_, settings)), (place, kind), checkpointing, batch, (
        of,
        length,
    ) in itertools.product(
        METHODS.items(), enumerate(kernels), (True, False), (1, 2), lengths.items()
    ):
        gpu = next(g for g in all_gpus().values() if kernels_like(g.compute_capability) == kind)
        sizes = {"micro_batch": batch, "max_length": length}
        chosen = {**settings, **sizes, "gradient_checkpointing": checkpointing}
        configuration = asked(None, model, chosen, gpu=gpu).configuration
        structure = Structure.of(
            configuration,
            window=found.sliding_window,
            positions=found.positions,
            linears=found.linears,
            compute_capability=kind,
        )
        words = (method, place, int(checkpointing), int(batch == 1), *map(int, of))
        yield "/".join(map(str, words)), structure, configuration["mixed_precision"] == "fp16"


def _gpu(gpu: Gpu, model: str, kernels: list[tuple[int, int]], words: Words) -> dict[str, Any]:
    """The numbers of a GPU type; rates are those of the kinds that the structures name."""
    budget, efficiency, roofline = MemoryBudget.of(gpu.memory_bytes), Efficiency(), Roofline()
    rates = []
    for dtype in words.dtypes:
        key, limit = rate_of(gpu, dtype, False), power_limit(gpu, dtype, False)
        reached = matmul_peak(gpu, dtype, False) * efficiency.reached(gpu, key)
        ends = efficiency.ends_of(gpu, "", "", key)
        rates.append([reached, None if math.isinf(limit) else limit, *ends])
    refused: dict[str, str] = {}
    for method, (*_, settings) in METHODS.items():
        problems = check_supported(asked(None, model, settings, gpu=gpu).configuration, gpu)
        refused[method] = problems[0].message if problems else ""
    return {
        "id": gpu.id,
        "name": gpu.name,
        "kernels": kernels.index(kernels_like(gpu.compute_capability)),
        "limit_bytes": budget.limit_bytes,
        "usable_bytes": budget.usable_bytes,
        "context_bytes": {
            method: context_bytes(gpu, Configuration({**settings}))
            for method, (*_, settings) in METHODS.items()
        },
        "workspace_bytes": cublas_workspace_bytes(gpu.compute_capability),
        "bandwidths": [roofline.traffic_bytes_per_s(gpu, kind) for kind in words.kinds],
        "launches_s": roofline.host(gpu),
        "l2": gpu.l2_bytes,
        "multiprocessors": gpu.sm_count,
        "price": gpu.price_usd_per_hour,
        "price_date": gpu.price_date,
        "rates": rates,
        "attention": attention_rates(gpu, words, efficiency),
        "refused": refused,
    }


def _constants() -> dict[str, Any]:
    off = MEMORY_ERRORS
    roofline, efficiency = Roofline(), Efficiency()
    return {
        "tile_tokens": TILE_TOKENS,
        "samples": SAMPLES,
        "device": {
            "allocated": off.allocated,
            "context": off.context,
            "gap_below": off.gap_below,
            "gap_above": off.gap_above,
            "least_gap": off.least_gap,
        },
        "step": step_factors(has_profile=False),
        "recomputed": RECOMPUTED,
        "trained": TRAINED,
        "kernel_s": roofline.shortest_s,
        "tile": efficiency.tile,
        "fill": efficiency.fill,
        "boards_differ": BOARDS_DIFFER,
        "l2_kept": KEPT,
        "l2_kept_ends": KEPT_ENDS,
        "paged_elements": PAGED_ELEMENTS,
        "block_bytes": allocator.MIN_BLOCK_BYTES,
        "small_bytes": allocator.SMALL_LIMIT_BYTES,
        "small_segment_bytes": allocator.SMALL_SEGMENT_BYTES,
        "large_segment_bytes": allocator.LARGE_SEGMENT_BYTES,
        "own_segment_bytes": allocator.LARGE_OWN_SEGMENT_BYTES,
        "round_large_bytes": allocator.ROUND_LARGE_BYTES,
    }
