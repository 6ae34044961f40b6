"""The cause of an answer that surprises: a part of memory that a setting or a release explains."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tuner.core.errors import TunerError
from tuner.core.records import Memory, MemoryCategory
from tuner.core.setup.common import QUANTIZED
from tuner.core.units import GIB, significant
from tuner.space.models.catalogue import get_entry, resolve_config
from tuner.space.models.config_fields import EXPERTS

MUCH = 0.4
"""A part of device memory from which it is the cause."""


def has_experts(model: str) -> bool:
    """True for a mixture of experts, by the catalogue or the model's own configuration.

    Raises as `resolve_config` does.
    """
    entry = get_entry(model)
    known = entry.text_config if entry else resolve_config(model).get_text_config().to_dict()
    return bool(EXPERTS & known.keys())


def cause_of(
    memory: Memory, settings: Mapping[str, Any] = MappingProxyType({}), model: str = ""
) -> str:
    """The part that is most of the memory, where that isn't plain from the settings; else empty.

    Of an emulated run, neither `settings` nor `model` are known.
    """
    parts = memory.breakdown
    part, why = "", ""
    is_mixture = False
    with contextlib.suppress(TunerError):  # a cause that can't be found costs no answer
        is_mixture = settings.get("precision") in QUANTIZED and has_experts(model)
    if is_mixture:
        part = MemoryCategory.WEIGHTS
        why = "bitsandbytes leaves the experts in 16 bits"  # since transformers 5
    elif settings.get("precision") == "fp32":
        part, why = MemoryCategory.WEIGHTS, "loaded in fp32; dtype=torch.bfloat16 halves them"
    if not part or parts.get(str(part), 0) < MUCH * memory.device_bytes:
        part, why = MemoryCategory.LOGITS_AND_LOSS, "they grow with batch x length x vocabulary"
    size = parts.get(str(part), 0)
    if size < MUCH * memory.device_bytes:
        return ""
    used, whole = (significant(each / GIB) for each in (size, memory.device_bytes))
    return f"{str(part).replace('_', ' ')} {used} of {whole} GiB: {why}"
