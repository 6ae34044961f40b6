"""Ways of published programs that no other setting expresses: the values of `program_ways`.

Each function names the source that it follows. For traces: they need no values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tuner.predict.training.session import build_optimizer, unscale_without_data

HEADS = {
    "question_answering": "AutoModelForQuestionAnswering",
    "pretraining": "AutoModelForPreTraining",
}
"""By way: transformers' class of a model with another head."""


ATTENTIONS = ("repeated_heads", "masked_heads")
"""sdpa on key and value heads that are repeated beforehand, and the same with a dense mask.

PyTorch's memory-efficient kernel refuses grouped queries; some harnesses repeat the heads so that
it accepts, and so did transformers 4.49 (integrations/sdpa_attention.py). The names must not
contain "sdpa": transformers 5 refuses such names for Gemma 2, which took sdpa by default from 4.48
on, when its class no longer overrode `_check_and_enable_sdpa`.

`masked_heads` has a dense mask, as transformers made one of a batch with padding: it rules flash
attention out, and no block of scores is skipped.
"""


@functools.cache
def register_attentions() -> None:
    """Make `ATTENTIONS` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for name, mask in zip(ATTENTIONS, (sdpa_mask, eager_mask), strict=True):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, mask)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=options.get("scaling"),
    )
    return output.transpose(1, 2).contiguous(), None


def with_fused_attention(model: Any) -> None:
    """One product for query, key and value: `c_attn` of the first Qwen (modeling_qwen.py)."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            _fuse(module)


def _fuse(attention: Any) -> None:
    width, dtype = attention.q_proj.in_features, attention.q_proj.weight.dtype
    attention.c_attn = nn.Linear(width, 3 * width, device="meta", dtype=dtype)
    parts: list[Any] = []

    class Query(nn.Module):
        def forward(self, hidden: torch.Tensor) -> Any:
            parts[:] = attention.c_attn(hidden).chunk(3, dim=-1)
            return parts.pop(0)

    class Next(nn.Module):
        def forward(self, _: torch.Tensor) -> Any:
            return parts.pop(0)

    attention.q_proj, attention.k_proj, attention.v_proj = Query(), Next(), Next()


def _question_answering(session: Any) -> None:
    """A batch of SQuAD: padded to the length, with the places of an answer."""

    def batch(_: int | None = None) -> dict[str, torch.Tensor]:
        tokens = _padded(session)
        place = torch.zeros(len(tokens["input_ids"]), dtype=torch.long).to(session_device(session))
        types = torch.zeros_like(tokens["input_ids"])
        return {**tokens, "token_type_ids": types, "start_positions": place, "end_positions": place}

    session._next_batch = batch


def session_device(session: Any) -> Any:
    """The device of a session's batches."""
    return session._environment.device


def _padded(session: Any) -> dict[str, torch.Tensor]:
    """Tokens and their mask, made on the host so that a trace knows that some are padding."""
    shape = (session._settings.batch.micro, session._settings.examples.length)
    mask = torch.ones(shape, dtype=torch.long)
    mask[:, -1] = 0
    device = session_device(session)
    tokens = torch.zeros(shape, dtype=torch.long).to(device)
    return {"input_ids": tokens, "attention_mask": mask.to(device)}


def _padded_texts(session: Any) -> None:
    """Sequences of several lengths in a batch: attention gets a mask."""

    def batch(_: int | None = None) -> dict[str, torch.Tensor]:
        tokens = _padded(session)
        return {**tokens, "labels": tokens["input_ids"].clone()}

    session._next_batch = batch


def _loss_outside(session: Any) -> None:
    """The model gets tokens alone, and the program takes the cross entropy of all its logits."""

    def forward(batch: dict[str, torch.Tensor], model: Any = None) -> Any:
        outputs = session._ranks.called(input_ids=batch["input_ids"])
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        flat = logits.view(-1, logits.shape[-1])
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(flat, batch["input_ids"].view(-1)), logits=None
        )

    session._forward = forward


def _cache_in_outputs(session: Any) -> None:
    """The model is called without `use_cache=False`: its outputs keep keys and values."""

    def forward(batch: dict[str, torch.Tensor], model: Any = None) -> Any:
        return session._ranks.called(**batch)

    session._forward = forward


def _gradients_until_next(session: Any) -> None:
    """`optimizer.zero_grad()` stands before the forward pass."""
    step = session.micro_step

    def micro_step(number: int) -> None:
        session.optimizer.zero_grad(set_to_none=True)
        step(number)

    def update() -> None:
        session.clip(session._trainable)
        session.optimizer.step()

    session.micro_step, session._update = micro_step, update


def _master_weights(session: Any) -> None:
    """Apex's amp O2: half precision everywhere, and FusedAdam on copies in fp32.

    apex/amp/_process_optimizer.py: gradients become those of the copies (the scaler reads and
    checks them there), and after the step the copies are written back.
    """
    halves = session._trainable
    masters = [nn.Parameter(p.detach().float()) for p in halves]
    session.optimizer = build_optimizer("adamw_torch_fused", masters)

    def update() -> None:
        with torch.no_grad():
            for half, master in zip(halves, masters, strict=True):
                if half.grad is not None:
                    master.grad = half.grad.float()
            unscale_without_data(masters)
            session.clip(masters)
            session.optimizer.step()
            known = [(h, m) for h, m in zip(halves, masters, strict=True) if m.grad is not None]
            torch._foreach_copy_([h for h, _ in known], [m for _, m in known])
            session.optimizer.zero_grad(set_to_none=True)
            for half in halves:
                half.grad = None

    session._update = update


class _LoopAdam(torch.optim.Optimizer):
    """Adam as a loop over parameters, one kernel for each line of its formula."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, bert: bool) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self._bert = bert

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if self._bert:
                nn.utils.clip_grad_norm_(parameter, 1.0, foreach=False)
            state = self.state[parameter]
            if not state:
                state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
            gradient, mean, square = parameter.grad, state["mean"], state["square"]
            mean.mul_(0.9).add_(gradient, alpha=0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            if not self._bert:
                parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-4)
                continue
            change = mean / (square.sqrt() + 1e-6)
            if parameter.dim() > 1:
                change += 0.01 * parameter
            scaled = 1e-4 * change
            parameter.add_(-scaled)


def _with_optimizer(session: Any, *, bert: bool) -> None:
    session.optimizer = _LoopAdam(session._trainable, bert=bert)


def _plain_optimizer(session: Any) -> None:
    """An optimizer of the program's own, which keeps the states of embeddings like all others."""
    session.optimizer = build_optimizer(session._update_settings.optimizer, session._trainable)


def _keep_cache(session: Any) -> None:
    """GPT-BigCode of transformers up to 4.48: training keeps the key-value cache of the forward.

    That model (modeling_gpt_bigcode.py, `use_cache`) did not switch its cache off under gradient
    checkpointing. The cached keys and values are a slice of the fused projection's output, so the
    whole output of every layer stays alive until the model's outputs die.
    """
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

    session.model.register_forward_pre_hook(begin)
    session.model.register_forward_hook(end)
    for name, module in session.model.named_modules():
        if name.endswith(".c_attn"):
            module.register_forward_hook(keep)


_SESSIONS: dict[str, Callable[[Any], None]] = {
    "keeps_cache": _keep_cache,
    "question_answering": _question_answering,
    "padded": _padded_texts,
    "loss_outside": _loss_outside,
    "cache_in_outputs": _cache_in_outputs,
    "gradients_until_next": _gradients_until_next,
    "master_weights": _master_weights,
    # NVIDIA's BertAdam (LanguageModeling/BERT/optimization.py), with its clipping.
    "bert_adam": functools.partial(_with_optimizer, bert=True),
    # Transformers' own AdamW, Trainer's default up to 4.45.
    "adamw_hf": functools.partial(_with_optimizer, bert=False),
    "plain_optimizer": _plain_optimizer,
}


def apply_ways(session: Any, names: Sequence[str]) -> None:
    """Give a session the ways with these names."""
    for name in names:
        if name in _SESSIONS:
            _SESSIONS[name](session)
