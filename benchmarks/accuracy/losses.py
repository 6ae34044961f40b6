"""Losses of transformers that only published runs of old versions have.

`transformers_4_45`: up to 4.45 the model also widened the logits that it returns. `unwidened`: up
to 4.48, models such as GPT-BigCode that left the logits in their precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any


def register() -> None:
    """Make them known to the workload."""
    from tuner.workloads.losses import LOSSES, CrossEntropy, use_shifted

    def widened(model: Any, cross_entropy: CrossEntropy) -> None:
        use_shifted(model, cross_entropy)
        model.get_output_embeddings().register_forward_hook(lambda *called: called[-1].float())

    LOSSES["transformers_4_45"] = widened
    LOSSES["unwidened"] = partial(use_shifted, widen=False)
