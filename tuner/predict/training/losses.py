"""Losses that differ from the model's own: of older transformers, fused, chunked, and Liger's.

Liger's other kernels are here too: the real ones for trials, and for traces their memory and
traffic. The shapes follow liger-kernel 0.8 (ops/rms_norm.py, ops/rope.py, ops/swiglu.py). Each
kernel takes the place of several of PyTorch's, keeps its input alone, and writes gradients where
what it reads in its backward pass was.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.core.errors import InputError, unknown
from tuner.predict.compiler.structure import TILE_TOKENS
from tuner.space.models.trainable import LIGER_TYPES

_IGNORE_INDEX = -100

CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A mean loss over (tokens, vocabulary) logits and (tokens,) labels."""


def use_loss(model: Any, name: str, *, fused: bool, kernel: CrossEntropy | None = None) -> None:
    """Make a transformers model compute its loss as `name`, one of `LOSSES`, says.

    With `fused` one kernel takes the place of log-softmax and its gradient: it keeps a number a
    token and turns its input into the gradient in place, as the Triton kernels of unsloth and
    fms-acceleration do: `kernel`, or without it one that has the memory and the traffic of such
    a kernel and no values, for traces. Raises `InputError` for other names.
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    if name == "transformers" and not fused:
        return
    plain = partial(nn.functional.cross_entropy, ignore_index=_IGNORE_INDEX)
    LOSSES[name](model, (kernel or _fused_shapes) if fused else plain)


def use_padded(model: Any, cross_entropy: CrossEntropy) -> None:
    """The labels are shifted, and the fp32 logits are used as they are."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float()
        targets = nn.functional.pad(labels, (0, 1), value=_IGNORE_INDEX)[..., 1:]
        return cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))

    model.loss_function = loss


def use_shifted(model: Any, cross_entropy: CrossEntropy, *, widen: bool = True) -> None:
    """The logits are shifted, which copies them: in fp32, or unless `widen` in their precision."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float() if widen else logits
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        return cross_entropy(shifted, labels[..., 1:].reshape(-1))

    model.loss_function = loss


_AFTER_THE_HEAD = {"logits_scaling": 1, "logit_scale": 1, "final_logit_softcapping": None}
"""Changes of some models to their logits, with the values that do nothing."""


def use_widened(model: Any, cross_entropy: CrossEntropy) -> None:
    """As up to 4.45: the model also widened the logits that it returns.

    Raises `InputError` where it did something to the logits before: what stands in for it here
    widens what the output head returns.
    """
    config = model.config.get_text_config()
    for name, nothing in _AFTER_THE_HEAD.items():
        value = getattr(config, name, nothing)
        if value is not None and value != nothing:
            raise InputError(
                f"loss transformers_4_45 is not known for models with {name} (here {value})",
                hint="take transformers_4_46 or transformers",
            )
    use_shifted(model, cross_entropy)
    model.get_output_embeddings().register_forward_hook(lambda *called: called[-1].float())


LOSSES: dict[str, Callable[[Any, CrossEntropy], None]] = {
    "transformers": use_padded,
    "transformers_4_46": use_shifted,
    "transformers_4_45": use_widened,
    "unwidened": partial(use_shifted, widen=False),
}
"""As the installed version does, since 4.49 without a copy, and as older ones did.

`chunked_loss` and `use_liger_loss` have no logits at all.
"""


def _fused_shapes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _FusedCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """Allocations and traffic of a fused kernel. For traces: it needs no values."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.logsumexp(logits.detach()[:, :1].float(), 1)
        ctx.save_for_backward(logits, losses)
        return losses.sum() / labels.numel()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _ = ctx.saved_tensors
        return logits.mul_(gradient), None


TILE_WORDS = 32768
"""`_CHUNKED_LOGPROB_CHUNK_SIZE` of trl/trainer/utils.py, TRL 1.16."""

_STATISTICS = 7
"""Numbers in fp32 that its forward pass keeps of each token."""

_IGNORED = -100


def use_chunked_loss(model: Any, *, real: bool) -> None:
    """Make a transformers model return a loss and no logits, computed in tiles.

    Without labels it returns its logits. Raises `InputError` where TRL is to run and is not
    installed.
    """
    log_probabilities: Any = _kernel_of_trl() if real else _ChunkedShapes.apply

    def forward(self: Any, *, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is None:
            return type(self).forward(self, **inputs)
        # A model of text, cut from one of images, names its base as that does (MllamaForCausalLM).
        base = self.model if self.base_model is self else self.base_model
        hidden = base(**inputs).last_hidden_state[:, :-1]
        targets = labels[:, 1:].reshape(-1)
        head = self.get_output_embeddings()
        # As `hidden_states[mask]` of tokens that all count: a copy, and one of its gradient.
        rows = torch.arange(targets.numel(), device=hidden.device)
        chosen = torch.index_select(hidden.reshape(-1, hidden.shape[-1]), 0, rows)
        weight, bias = _gathered(head.weight), _gathered(head.bias)
        found: torch.Tensor = log_probabilities(chosen, weight, bias, targets.clamp(min=0))
        counted = targets != _IGNORED
        loss = -(found * counted).sum() / counted.sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=loss)

    model.forward = types.MethodType(forward, model)


def _gathered(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The module that FSDP2 shards as a whole, for all tiles at once (as TRL 1.16 does)."""
    from torch.distributed.tensor import DTensor

    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _kernel_of_trl() -> Any:
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError:
        raise InputError(
            "loss chunked is computed by TRL's kernel, and trl 1.16 or newer is not installed",
            hint="pip install 'trl>=1.16'",
        ) from None

    def log_probabilities(*tensors: Any) -> Any:
        found = ChunkedLogProbFunction.apply(*tensors, 1.0, TILE_WORDS)  # type: ignore[no-untyped-call]
        return found[0]

    return log_probabilities


class _ChunkedShapes(torch.autograd.Function):
    """Allocations, products and traffic of the kernel. For traces: it needs no values.

    It goes through the tokens in tiles, one after the other in the same memory. Here one tile has
    that memory, and the work of all of them, so that a trace has as many events at every length.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        tokens = hidden.shape[0]
        kept = [hidden.new_empty(tokens, dtype=torch.float32) for _ in range(_STATISTICS)]
        # Autocast decides the dtype of a product, which a trace emulates for products alone.
        ctx.dtype = nn.functional.linear(hidden[:1], hidden[:1]).dtype
        for tile, _, _ in _tiles(hidden, weight, ctx.dtype):
            kept[0].copy_(tile[:, 0])  # reads it once: the fold
        normaliser = kept[0] + kept[1]
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        return kept[-1] - normaliser

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, _, _ = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor, dtype=torch.float32) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        words = 0
        for tile, some, part in _tiles(hidden, weight, ctx.dtype):
            tile.mul_(gradient[:, None])
            if of_hidden is not None:
                _add_product(of_hidden, tile, part)
            if of_weight is not None:
                _add_product(of_weight[words : words + part.shape[0]], tile.t(), some)
            words += part.shape[0]
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            of_bias if of_bias is None or bias is None else of_bias.to(bias.dtype),
            None,
        )


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The logits of all tokens and some words at a time, and what they are the product of."""
    tokens, rows = hidden.shape[0], min(hidden.shape[0], TILE_TOKENS)
    buffer = hidden.new_empty((rows, TILE_WORDS), dtype=dtype)
    some = part = None
    if tokens > rows and weight.shape[0] <= TILE_WORDS:
        # In TRL's loop, what one tile is the product of stays until that of the next is there.
        some, part = (_converted(tensor, dtype, 0) for tensor in (hidden[:rows], weight))
    for word in range(0, weight.shape[0], TILE_WORDS):
        some = _converted(hidden[:rows], dtype, tokens)
        part = _converted(weight[word : word + TILE_WORDS], dtype, tokens)
        inputs = _as_tall(some, tokens, some.shape[1])
        tile = _as_tall(buffer, tokens, part.shape[0])
        torch.mm(inputs, part.t(), out=tile)
        yield tile, inputs, part


def _as_tall(tile: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A view of this shape, whose rows lie over one another where the tile has fewer."""
    same = rows <= tile.shape[0]
    return tile[:rows, :columns] if same else tile.as_strided((rows, columns), (1, 1))


def _converted(tensor: torch.Tensor, dtype: torch.dtype, tokens: int) -> torch.Tensor:
    """The tensor in another dtype, with the traffic of converting it for each tile of tokens."""
    if tensor.dtype == dtype:
        return tensor
    converted = torch.empty_like(tensor, dtype=dtype)
    if tokens > TILE_TOKENS:
        shape = tokens, tensor.numel() // TILE_TOKENS
        converted.as_strided(shape, (1, 1)).copy_(tensor.as_strided(shape, (1, 1)))
    elif tokens:
        converted.copy_(tensor)
    return converted


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right` where a GPU adds to fp32 without a copy of the product.

    A trace has no product with another dtype for its result: a view of `total` that has the same
    storage takes its place.
    """
    same = total if total.dtype == right.dtype else total.view(right.dtype)[:, : right.shape[1]]
    torch.addmm(same, left, right, out=same)


def use_liger_loss(model: Any) -> None:
    """Head and cross entropy in chunks, so that no logits of a whole batch exist: Liger's loss.

    As in fms-acceleration's fused-ops-and-kernels plugin (kernels/liger/
    fused_linear_cross_entropy_loss.py): the gradients of the hidden states, and of the head where
    it is trained, are computed in the forward pass; the backward pass only scales them.
    """
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> Any:
        shifted = logits[..., :-1, :].contiguous()
        flat = shifted.view(-1, shifted.shape[-1])
        return _LigerShapes.apply(flat, head.weight, labels)  # type: ignore[no-untyped-call]

    def forget(module: Any, inputs: Any, outputs: Any) -> None:
        outputs["logits"] = outputs.loss.detach()  # this loss leaves no logits to return

    model.loss_function = loss
    model.register_forward_hook(forget)


class _LigerShapes(torch.autograd.Function):
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


_PACKAGE = "liger-kernel"


def fused_cross_entropy() -> CrossEntropy:
    """Liger's cross entropy, which turns the logits into their gradient in place.

    Raises `InputError` where the package is not installed.
    """
    require_liger()
    from liger_kernel.transformers.functional import liger_cross_entropy

    kernel: CrossEntropy = liger_cross_entropy
    return kernel


def require_liger() -> None:
    """Raise `InputError` where Liger's package is not installed."""
    from transformers.utils import is_liger_kernel_available

    if not is_liger_kernel_available():
        raise InputError(
            f"this configuration needs {_PACKAGE}, which is not installed",
            hint=f"pip install {_PACKAGE}",
        )


NOT_IN_PLACE = ("gemma2", "gemma3_text")
"""Types of models whose norms follow one another: a gradient is needed after the norm's."""

PROCESSORS = 128
"""Multiprocessors of a GPU, each of which sums gradients of a norm's weights: 2 MB for a while."""


def apply_liger(model: Any) -> None:
    """Replace the model's norms, rotary embedding, MLP and loss by Liger's, as Trainer does.

    Trainer's argument is `use_liger_kernel`. Raises `InputError` where the package is not
    installed or has no kernels for this kind of model.
    """
    require_liger()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"Liger has no kernels for models of type {kind!r}",
            hint=f"it has them for {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}",
        )
    apply_liger_kernel(model, None)


def use_liger_shapes(model: Any, *, gated: bool = True) -> None:
    """Give a model of a trace the memory and traffic of Liger's norms, rotary and, `gated`, MLP.

    Raises `InputError` for a type of models whose kernels are not known.
    """
    kind = model.config.model_type
    if kind not in LIGER_TYPES:
        raise InputError(
            f"Liger's kernels are not predicted for models of type {kind!r}",
            hint=f"they are for {', '.join(LIGER_TYPES)}",
        )
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _norm(module, in_place=kind not in NOT_IN_PLACE)
        elif gated and hasattr(module, "gate_proj") and hasattr(module, "down_proj"):
            module.forward = types.MethodType(_mlp, module)
        elif hasattr(sys.modules[type(module).__module__], _ROTARY) and hasattr(module, "q_proj"):
            _rotate(module)


def _norm(module: Any, *, in_place: bool) -> None:
    def forward(hidden: torch.Tensor) -> Any:
        return _Norm.apply(hidden, module.weight, in_place)  # type: ignore[no-untyped-call]

    module.forward = forward


class _Norm(torch.autograd.Function):
    """LigerRMSNormFunction."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        normed.copy_(hidden)
        scale = hidden.new_empty(hidden.shape[:-1].numel(), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.in_place = in_place
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows = PROCESSORS if ctx.needs_input_grad[1] else 0
        parts = weight.new_empty((rows, weight.numel()), dtype=torch.float32)
        result = gradient if ctx.in_place else torch.zeros_like(gradient)
        result.mul_(hidden)
        return result, parts.sum(dim=0).to(weight.dtype) if rows else None, None


def _mlp(self: Any, hidden: torch.Tensor) -> Any:
    gate, up = self.gate_proj(hidden), self.up_proj(hidden)
    return self.down_proj(_Gated.apply(gate, up))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    """LigerSiLUMulFunction, and that of GELU."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        return gate.mul_(gradient), up.copy_(up)


_ROTARY = "apply_rotary_pos_emb"


def _rotate(module: Any) -> None:
    """Have a module call Liger's rotary embedding, which stands in the globals of its file."""
    names = vars(sys.modules[type(module).__module__])
    plain = names[_ROTARY]

    def begin(*_: Any) -> None:
        names[_ROTARY] = _Rotary.of

    def end(*_: Any) -> None:
        names[_ROTARY] = plain

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


class _Rotary(torch.autograd.Function):
    """LigerRopeFunction: queries and keys are turned where they are."""

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, **_: Any) -> Any:
        return _Rotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return _turned(q), _turned(k)

    @staticmethod
    def backward(ctx: Any, of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[Any, ...]:
        return _turned(of_q), _turned(of_k), None, None


def _turned(states: torch.Tensor) -> torch.Tensor:
    physical = states.transpose(1, 2).contiguous()
    physical.mul_(2)
    return physical.transpose(1, 2)
