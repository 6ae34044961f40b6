"""GPT-BigCode of transformers up to 4.48: training keeps the key-value cache of the forward.

That model (modeling_gpt_bigcode.py, `use_cache`) did not switch its cache off under gradient
checkpointing. The cached keys and values are a slice of the fused projection's output, so the
whole output of every layer stays alive until the model's outputs die.
"""

from __future__ import annotations

from typing import Any

PROJECTION = "c_attn"


class CachingWorkload:
    """A workload whose models keep the outputs of their fused projections in their outputs."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload
        self.name = workload.name

    def open(self, model_config: Any, configuration: Any, environment: Any) -> Any:
        """As the workload, with hooks on the model."""
        session = self._workload.open(model_config, configuration, environment)
        keep_projections(session.model)
        return session


def keep_projections(model: Any) -> None:
    """Hold each projection's output from the forward pass in the outputs of `model`."""
    kept: list[Any] = []
    inside = [False]  # checkpointing runs the projections again, outside of a forward pass

    def begin(*_: Any) -> None:
        inside[0] = True

    def keep(module: Any, inputs: Any, output: Any) -> None:
        if inside[0]:
            kept.append(output.detach())

    def end(module: Any, inputs: Any, outputs: Any) -> None:
        inside[0] = False
        outputs.kept = list(kept)
        kept.clear()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)
    for name, module in model.named_modules():
        if name.endswith(f".{PROJECTION}"):
            module.register_forward_hook(keep)
