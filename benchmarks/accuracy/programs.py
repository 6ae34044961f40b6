"""Ways of published programs that no setting of the workload expresses, by name.

A case names its ways, and `Program` opens a session of workload `causal_lm` that has them. Each
function names the source that it follows. A way may have an argument behind a colon.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tuner.predict.training import causal_lm_model
from tuner.predict.training.session import build_optimizer, unscale_without_data

ADAPTERS = Path(__file__).parent / "peft_adapters.json"
"""Adapters of PEFT's method comparison by run: its `adapter_config.json` without empty fields."""


class Program:
    """Workload `causal_lm` with the ways of a program."""

    def __init__(self, workload: Any, ways: Sequence[str]) -> None:
        self._workload = workload
        self._ways = [way.partition(":")[::2] for way in ways]
        self.name = workload.name

    def open(self, model_config: Any, configuration: Any, environment: Any) -> Any:
        """As the workload, with the ways applied to how it builds and to its session."""
        with contextlib.ExitStack() as stack:
            for name, argument in self._ways:
                if name in _BUILDS:
                    stack.enter_context(_BUILDS[name](argument))
            session = self._workload.open(model_config, configuration, environment)
        for name, _ in self._ways:
            if name in _SESSIONS:
                _SESSIONS[name](session)
        return session


def _class(name: str) -> Iterator[None]:
    """The model is of another Auto class of transformers."""
    import transformers

    found = getattr(transformers, name)
    with mock.patch.object(causal_lm_model, "trained_class", return_value=found):
        yield


def _fused_attention(_: str) -> Iterator[None]:
    """One product for query, key and value: `c_attn` of the first Qwen (modeling_qwen.py)."""
    build = causal_lm_model.build_skeleton

    def built(*arguments: Any, **options: Any) -> Any:
        model = build(*arguments, **options)
        for module in model.modules():
            if hasattr(module, "q_proj"):
                _fuse(module)
        return model

    with mock.patch.object(causal_lm_model, "build_skeleton", built):
        yield


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


def _adapter(run: str) -> Iterator[None]:
    """Adapters of any kind that peft has, by the name of a run of its method comparison."""
    fields = json.loads(ADAPTERS.read_text("utf-8"))[run]

    def adapted(model: Any, settings: Any, device: str) -> Any:
        import peft

        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[fields["peft_type"]]
        model = peft.get_peft_model(model, kind.from_peft_type(**fields), low_cpu_mem_usage=True)
        model.without_adapters = ()
        if "lorafa" in run:  # peft's create_lorafa_optimizer trains the second matrix alone
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
        return model

    with mock.patch.object(causal_lm_model, "_with_adapters", adapted):
        yield


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
        nn.utils.clip_grad_norm_(session._trainable, session._update_settings.max_grad_norm)
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
            if session._update_settings.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(masters, session._update_settings.max_grad_norm)
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
    def step(self, closure: Any = None) -> None:
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


def _bert_adam(session: Any) -> None:
    """NVIDIA's BertAdam (LanguageModeling/BERT/optimization.py), with its clipping."""
    _with_optimizer(session, bert=True)


def _adamw_hf(session: Any) -> None:
    """Transformers' own AdamW, Trainer's default up to 4.45 (`adamw_hf`)."""
    _with_optimizer(session, bert=False)


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


def _chunked_loss(session: Any) -> None:
    """Head and cross entropy in chunks, so that no logits of a whole batch exist: Liger's loss.

    As in fms-acceleration's fused-ops-and-kernels plugin (kernels/liger/
    fused_linear_cross_entropy_loss.py): the gradients of the hidden states, and of the head where
    it is trained, are computed in the forward pass; the backward pass only scales them.
    """
    model = session.model
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal.get_output_embeddings()
    head.forward = lambda hidden: hidden

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> Any:
        shifted = logits[..., :-1, :].contiguous()
        return _ChunkedLoss.apply(shifted.view(-1, shifted.shape[-1]), head.weight, labels)

    def forget(module: Any, inputs: Any, outputs: Any) -> None:
        outputs["logits"] = outputs.loss.detach()  # this loss leaves no logits to return

    causal.loss_function = loss
    causal.register_forward_hook(forget)


class _ChunkedLoss(torch.autograd.Function):
    """Allocations and products of the chunked loss. For traces: it needs no values."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        tokens, width = hidden.shape
        parts = -(-weight.shape[0] // width)
        chunk = 1 << (-(-tokens // parts) - 1).bit_length()  # the next power of two
        weight_gradient = torch.zeros_like(weight) if weight.requires_grad else None
        gradient = torch.zeros_like(hidden)
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for start in range(0, tokens, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()
            dtype = logits.dtype
            logits = logits.float()  # one kernel then turns them into their gradient in place
            logits = logits.to(dtype)
            scaled = logits * losses[0]
            gradient[start : start + chunk] = scaled @ weight
            if weight_gradient is not None:
                # In place: the trace counts its memory, not its FLOPs (1 % of a 7B model's step).
                weight_gradient.addmm_(logits.t(), part)
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None


_BUILDS: dict[str, Callable[[str], Any]] = {
    name: contextlib.contextmanager(way)
    for name, way in {
        "class": _class,
        "fused_attention": _fused_attention,
        "adapter": _adapter,
    }.items()
}
_SESSIONS: dict[str, Callable[[Any], None]] = {
    "keeps_cache": _keep_cache,
    "chunked_loss": _chunked_loss,
    "question_answering": _question_answering,
    "padded": _padded_texts,
    "loss_outside": _loss_outside,
    "cache_in_outputs": _cache_in_outputs,
    "gradients_until_next": _gradients_until_next,
    "master_weights": _master_weights,
    "bert_adam": _bert_adam,
    "adamw_hf": _adamw_hf,
    "plain_optimizer": _plain_optimizer,
}
