"""sdpa on key and value heads repeated beforehand, registered as `repeated_heads`.

PyTorch's memory-efficient kernel refuses grouped queries; fitcheck-llm's harness repeats the heads
so that it accepts, and so did transformers 4.49 (integrations/sdpa_attention.py). The name must
not contain "sdpa": transformers 5 refuses such names for Gemma 2, which took sdpa by default from
4.48 on, when its class no longer overrode `_check_and_enable_sdpa`.

`masked_heads` is the same with a dense mask, as transformers made one of a batch with padding: it
rules flash attention out, and no block of scores is skipped.
"""

from __future__ import annotations

from typing import Any

from tuner.core.setup.schemas import SCHEMAS

NAME = "repeated_heads"
MASKED = "masked_heads"


def register() -> None:
    """Make both known to transformers and to the workload."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for name in (NAME, MASKED):
        SCHEMAS["causal_lm"].allow("attention", name)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(MASKED, _attention)
    AttentionMaskInterface.register(MASKED, eager_mask)


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
