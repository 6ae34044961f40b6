"""Losses of transformers that only published runs of old versions have.

`transformers_4_45`: up to 4.45 the model also widened the logits that it returns. `unwidened`: up
to 4.48, models such as GPT-BigCode that left the logits in their precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tuner.core.errors import InputError
from tuner.core.setup.schemas import SCHEMAS

_AFTER_THE_HEAD = {"logits_scaling": 1, "logit_scale": 1, "final_logit_softcapping": None}
"""What some models do to their logits, with the values that do nothing (Granite, Cohere, Gemma)."""


def register() -> None:
    """Make them known to the workload."""
    from tuner.predict.training.losses import LOSSES, CrossEntropy, use_shifted

    def widened(model: Any, cross_entropy: CrossEntropy) -> None:
        _require_plain_logits(model)
        use_shifted(model, cross_entropy)
        model.get_output_embeddings().register_forward_hook(lambda *called: called[-1].float())

    LOSSES["transformers_4_45"] = widened
    LOSSES["unwidened"] = partial(use_shifted, widen=False)
    for name in ("transformers_4_45", "unwidened"):
        SCHEMAS["causal_lm"].allow("loss", name)


def _require_plain_logits(model: Any) -> None:
    """Raise `InputError` where 4.45 did something to the logits before it widened them.

    What stands in for it here widens what the output head returns.
    """
    config = model.config.get_text_config()
    for name, nothing in _AFTER_THE_HEAD.items():
        value = getattr(config, name, nothing)
        if value is not None and value != nothing:
            raise InputError(
                f"loss transformers_4_45 is not known for models with {name} (here {value})",
                hint="take transformers_4_46 or transformers",
            )
