"""The optimizers that a configuration can name: one row each, and nothing elsewhere.

Names are those of transformers' `OptimizerNames`; a row says what its Trainer builds for the name
(`Trainer.get_optimizer_cls_and_kwargs`, transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The class `path` ("package.module:Name"), made of parameters, a learning rate and `options`.

    `recipe` is what torchtune's recipes say of it beside the class, where that differs from
    `options`. `can_shard` is false where the class does not know parameters that FSDP2 has
    sharded: it reads raw memory, or makes whole tensors of its own. One that `needs_shapes` takes
    what follows from the shapes of parameters, not from their sizes alone. Where the class takes
    only the matrices of hidden layers, `rest` names the optimizer of all other parameters.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    can_shard: bool = True
    needs_shapes: bool = False
    rest: str | None = None


_PAGED = {"is_paged": True}
_FIXED_RATE = {"scale_parameter": False, "relative_step": False}


OPTIMIZERS: Mapping[str, Optimizer] = {
    # The multi-tensor implementation, PyTorch's default on CUDA.
    "adamw_torch": Optimizer("torch.optim:AdamW", {"foreach": True}, {"fused": False}),
    "adamw_torch_fused": Optimizer("torch.optim:AdamW", {"fused": True}, {"fused": True}),
    "adamw_8bit": Optimizer("bitsandbytes.optim:AdamW8bit", can_shard=False),
    "adamw_bnb_8bit": Optimizer("bitsandbytes.optim:AdamW8bit", can_shard=False),  # another name
    "paged_adamw_8bit": Optimizer("bitsandbytes.optim:PagedAdamW8bit", can_shard=False),
    "paged_adamw_32bit": Optimizer("bitsandbytes.optim:PagedAdamW32bit", can_shard=False),
    # In fp32 whatever the weights are in; a row and a column of numbers for each matrix.
    "adafactor": Optimizer(
        "transformers.optimization:Adafactor",
        _FIXED_RATE,
        _FIXED_RATE,
        can_shard=False,
        needs_shapes=True,
    ),
    "lion_32bit": Optimizer("bitsandbytes.optim:Lion", can_shard=False),
    "lion_8bit": Optimizer("bitsandbytes.optim:Lion8bit", can_shard=False),
    "paged_lion_32bit": Optimizer("bitsandbytes.optim:Lion", _PAGED, _PAGED, can_shard=False),
    "paged_lion_8bit": Optimizer("bitsandbytes.optim:Lion8bit", _PAGED, _PAGED, can_shard=False),
    # A momentum for each matrix; the Newton-Schulz iteration works on a copy in bf16.
    "muon": Optimizer("torch.optim:Muon", can_shard=False, needs_shapes=True, rest="adamw_torch"),
    "sgd": Optimizer("torch.optim:SGD", {"foreach": True}),
    "rmsprop": Optimizer("torch.optim:RMSprop", {"foreach": True}),
}

_LOW_RANK = "its states are of a low rank: adafactor, whose are smaller still, comes nearest"
_IN_BACKWARD = "it updates in the backward pass: sgd comes nearest, less the gradients"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), _LOW_RANK),
    **dict.fromkeys(("apollo_adamw", "q_galore_adamw8bit"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo", "galore_adamw_layerwise"), _IN_BACKWARD),
    "adamw_torch_8bit": "adamw_8bit, bitsandbytes' in place of torchao's, comes nearest",
    "adamw_torch_4bit": "adamw_8bit, with twice the bits, comes nearest",
}
"""Optimizers that are not predicted, with what comes nearest."""
