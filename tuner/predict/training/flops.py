"""FLOPs of a causal language model's training step, from the layers that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tuner.predict.training.quantized import logical_numel


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of forward and backward pass: so much a token, and so much a pair of tokens."""

    per_token: float
    per_token_pair: float

    def of(self, samples: int, length: int) -> float:
        """FLOPs of one micro-step on `samples` sequences of `length` tokens, padding included."""
        return samples * (length * self.per_token + length * length * self.per_token_pair)


def step_flops(model: nn.Module, model_config: Any) -> StepFlops | None:
    """Model FLOPs: what the mathematics of the step needs, without recomputation.

    A product of T tokens with an m x n matrix is 2 T m n forward, as much for the gradient of
    its input, and as much again for that of the matrix where it is trained. Attention is two
    products of length x length x head size for each head, half of them masked, and twice that
    backward (Chowdhery et al. 2022, PaLM, appendix B, less the masked half). A vision tower runs
    on no token of a text. None for models with experts, whose layers do not see every token.
    """
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    if heads is None or layers is None:
        return None
    parts = _language_parts(model, model_config)
    if any(p.dim() > 2 for part in parts for p in part.parameters(recurse=False)):
        return None
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    weights: list[Any] = [module.weight for module in parts if _is_linear(module)]
    per_token = sum((6.0 if w.requires_grad else 4.0) * logical_numel(w) for w in weights)
    # Forward 2 products of 2 FLOPs, backward twice as many, and half of the pairs.
    return StepFlops(per_token, 3 * 2 * 2 * heads * head_size * layers / 2)


def _is_linear(module: Any) -> bool:
    # GPT-2 has linear layers of its own kind, with the matrix transposed.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _language_parts(model: Any, model_config: Any) -> list[nn.Module]:
    """The modules that see every token of a text.

    peft keeps the original of a module that is trained whole, which sees none.
    """
    towers = [model]
    if getattr(model_config, "vision_config", None) is not None:
        towers = [model.get_decoder(), model.get_output_embeddings()]
    named = (item for tower in towers for item in tower.named_modules())
    return [module for name, module in named if "original_module" not in name.split(".")]
