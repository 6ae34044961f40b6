"""sdpa on key and value heads that are repeated beforehand, and the same with a dense mask.

PyTorch's memory-efficient kernel refuses grouped queries; some harnesses repeat the heads so that
it accepts, and so did transformers 4.49 (integrations/sdpa_attention.py). The names must not
contain "sdpa": transformers 5 refuses such names for Gemma 2, which took sdpa by default from 4.48
on, when its class no longer overrode `_check_and_enable_sdpa`.

`masked_heads` has a dense mask, as transformers made one of a batch with padding: it rules flash
attention out, and no block of scores is skipped.
"""

from __future__ import annotations

import functools
from typing import Any

NAMES = ("repeated_heads", "masked_heads")


@functools.cache
def register() -> None:
    """Make both known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for name, mask in zip(NAMES, (sdpa_mask, eager_mask), strict=True):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, mask)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    from torch.nn.functional import scaled_dot_product_attention

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=options.get("scaling"),
    )
    return output.transpose(1, 2).contiguous(), None
