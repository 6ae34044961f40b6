"""Traces real training steps on tensors without data: what they allocate and compute.

The workload's own code runs on the meta device: transformers' model, peft's adapters,
bitsandbytes' layers and optimizers. `Recorder` notes every allocation, `CudaPath` takes the
kernel choices that CUDA would take. No GPU, no weights, no data.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointError

from tuner.core.errors import InputError, TunerError
from tuner.core.meanwhile import without_collection
from tuner.core.records import Configuration, MemoryCategory, Phase
from tuner.core.setup.causal_lm import WITHOUT_CHECKPOINTING
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.operators.timeline import Timeline
from tuner.cost.traced import EMBEDDING, Parameter, Trace
from tuner.predict.tracing.cuda_path import CudaPath, library_calls_on_meta
from tuner.predict.tracing.fake_ranks import fake_ranks
from tuner.predict.tracing.recorder import Recorder
from tuner.predict.training import Workload
from tuner.predict.training.known_values import KnownValues
from tuner.predict.training.quantized import logical_numel, quantized_tensors, remarks
from tuner.predict.training.session import build_optimizer, unscale_without_data


class _MetaEnvironment:
    """The environment of a trace; see `tuner.predict.training.Environment`."""

    device = "meta"

    def __init__(self, recorder: Recorder, path: CudaPath) -> None:
        self._recorder = recorder
        self._path = path
        self.optimizer_step = 0

    def autocast(self, dtype: Any) -> contextlib.AbstractContextManager[None]:
        """The device's autocast, emulated by `CudaPath`."""
        return self._path.autocast(dtype)

    def checkpoint_contexts(
        self, autocast_dtype: Any | None = None
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Nothing around the forward; precision and bookkeeping around the recomputation."""
        return contextlib.nullcontext(), self._recomputation(autocast_dtype)

    def materialize(self, model: Any) -> None:
        """All weights are in memory as a checkpoint leaves them."""
        self._recorder.start()
        for tensor in (*model.parameters(), *model.buffers(), *quantized_tensors(model)):
            self._recorder.label(tensor, MemoryCategory.WEIGHTS)

    def enter(self, phase: Phase, micro_step: int) -> None:
        """A phase begins; see `Environment.enter`."""
        self._recorder.enter(phase, self.optimizer_step, micro_step)

    def communicate(self, bucket: Any) -> Any:
        """Stands in for the exchange of a bucket of gradients; see `predict.training.parallel`."""
        self._recorder.label(bucket.buffer(), MemoryCategory.GRADIENTS)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    @contextlib.contextmanager
    def _recomputation(self, autocast_dtype: Any | None) -> Iterator[None]:
        precision = (
            self._path.autocast(autocast_dtype) if autocast_dtype else contextlib.nullcontext()
        )
        # The autograd engine restores dispatch modes but not function modes: enter it again.
        with self._recorder.recompute(), self._path, precision:
            yield


def trace(
    workload: Workload,
    model_config: Any,
    configuration: Configuration,
    *,
    compute_capability: tuple[int, int],
) -> Trace:
    """Trace two optimizer steps of `configuration`, and its evaluation if it has one.

    `model_config` is a transformers configuration. Takes seconds of CPU for a model of
    27 billion parameters and needs no more memory than its Python objects. Each block says in
    which module's forward it was made.
    """
    recorder, path, environment = _setup(model_config, configuration, compute_capability)
    rounds = int(str(configuration.get("grad_accum", 1)))
    accumulates = rounds > 1
    parallelism = Parallelism.of(configuration)
    packages = _packages_on_meta(recorder, path)
    # Models of images, classifiers and packed rows ask for values; those of text are traced faster
    # without.
    asks = configuration.get("images", 0) or configuration.get("num_labels", 0)
    asks = asks or configuration.get("padding") == "packed"
    known = KnownValues() if asks else contextlib.nullcontext()
    with (
        without_collection(),
        _model_faults(model_config),
        fake_ranks(parallelism, recorder.enter_stream),
        _labelled_unsharded(recorder) if parallelism.is_sharded else contextlib.nullcontext(),
        packages,
        recorder,
        path,
        known,
    ):
        session = workload.open(model_config, configuration, environment)
        reached = _label_trainable(recorder, session)
        # DeepSpeed keeps buffers from one micro-step to the next, which leave their gaps.
        session.optimizer_step(min(rounds, ZERO_ROUNDS) if parallelism.zero_stage else 1)
        _label_optimizer_state(recorder, session.optimizer)
        environment.optimizer_step = 1
        session.optimizer_step(2 if accumulates else 1)
        if configuration.get("eval_batch"):
            environment.optimizer_step = 2
            session.evaluate()
    return Trace(
        timeline=recorder.timeline,
        micro_steps=2 if accumulates else 1,
        trainable_params=session.trainable_params,
        total_params=session.total_params,
        gradient_bytes=tuple(p.nbytes for p in session.model.parameters() if p.requires_grad),
        remarks=remarks(session.model),
        parameters=_parameters(session, reached),
    )


def _parameters(session: Any, reached: set[torch.Tensor]) -> tuple[Parameter, ...]:
    embeddings = set(getattr(session, "embeddings", ()))
    return tuple(
        Parameter(
            p.numel() if p.requires_grad else logical_numel(p),
            str(p.dtype).removeprefix("torch.") + EMBEDDING * (p in embeddings),
            p.requires_grad,
            p in reached,
        )
        for p in session.model.parameters()
    )


ZERO_ROUNDS = 3
"""Micro-steps from which on DeepSpeed reserves no more: of an emulated Llama with buckets of
40,000,000 numbers, three and four reserve 5 % more than two (docs/notebook/several-gpus.md)."""


def trace_optimizer(
    name: str, trainable: Sequence[tuple[int, str]], *, clip: bool, scaled: bool = False
) -> Timeline:
    """Trace two optimizer steps on parameters of these sizes and kinds alone.

    `scaled` gradients, those of a loss that was scaled for fp16, are divided by the scale first.

    Parameters and gradients are labelled as such, so that they can be told from what the
    optimizer adds. An optimizer does not see the model, only its parameters.
    """
    recorder = Recorder(workspace_bytes=0)
    with _optimizers_on_meta(recorder), recorder:
        recorder.start()
        parameters, embeddings = [], []
        for numel, kind in trainable:
            dtype = getattr(torch, kind.removesuffix(EMBEDDING))
            parameter = torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
            embeddings += [parameter] if kind.endswith(EMBEDDING) else []
            parameter.grad = torch.empty_like(parameter)
            recorder.label(parameter, MemoryCategory.ADAPTERS)
            recorder.label(parameter.grad, MemoryCategory.GRADIENTS)
            parameters.append(parameter)
        optimizer = build_optimizer(name, parameters, embeddings)
        for step in range(2):
            recorder.enter(Phase.OPTIMIZER, step, 0)
            if scaled:
                unscale_without_data(parameters)
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            _label_optimizer_state(recorder, optimizer)
    return recorder.timeline


def _setup(
    model_config: Any, configuration: Configuration, compute_capability: tuple[int, int]
) -> tuple[Recorder, CudaPath, _MetaEnvironment]:
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    recorder = Recorder(
        workspace_bytes=cublas_workspace_bytes(compute_capability),
        vocab_size=vocab_size,
        padded=configuration.get("padding") == "max_length",
    )
    path = CudaPath(compute_capability)
    return recorder, path, _MetaEnvironment(recorder, path)


def _label_trainable(recorder: Recorder, session: Any) -> set[torch.Tensor]:
    """Label parameters, and gradients as they come. Returns the parameters that have had one."""
    reached: set[torch.Tensor] = set()
    is_full = session.trainable_params == session.total_params
    category = MemoryCategory.WEIGHTS if is_full else MemoryCategory.ADAPTERS

    def label_gradient(parameter: torch.Tensor) -> None:
        reached.add(parameter)
        if parameter.grad is not None:  # DeepSpeed has taken it already
            recorder.label(parameter.grad, MemoryCategory.GRADIENTS)

    for parameter in session.model.parameters():
        if parameter.requires_grad:
            recorder.label(parameter, category)
            parameter.register_post_accumulate_grad_hook(label_gradient)
    return reached


@contextlib.contextmanager
def _labelled_unsharded(recorder: Recorder) -> Iterator[None]:
    """Inside, the gradients that FSDP2 keeps whole are labelled: it comes here without a sync."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    keep = FSDPParam.to_accumulated_grad_if_needed

    def keep_labelled(param: Any) -> None:
        keep(param)
        whole = getattr(param, "_unsharded_param", None)  # of a module that didn't run: none
        for kept in (param.unsharded_accumulated_grad, getattr(whole, "grad", None)):
            if kept is not None:
                recorder.label(kept, MemoryCategory.UNSHARDED_GRADIENTS)

    with mock.patch.object(FSDPParam, "to_accumulated_grad_if_needed", keep_labelled):
        yield


def _label_optimizer_state(recorder: Recorder, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_meta:
                recorder.label(value, MemoryCategory.OPTIMIZER_STATE)


@contextlib.contextmanager
def _packages_on_meta(recorder: Recorder, path: CudaPath) -> Iterator[None]:
    with _optimizers_on_meta(recorder), flash_attention_on_meta(path), library_calls_on_meta(path):
        yield


@contextlib.contextmanager
def _optimizers_on_meta(recorder: Recorder) -> Iterator[None]:
    """Optimizers with their device calls replaced, for tensors without data.

    Fused and bitsandbytes' optimizers check that tensors are on a GPU; the latter synchronise
    it and take paged state from CUDA's managed memory. None of this exists here. Paged state is
    recorded as such. Gradients are clipped by the kernels over lists of tensors, as on a GPU.
    """
    import bitsandbytes.functional as bnb_functional
    import bitsandbytes.optim.optimizer as bnb_optimizer

    # torch.optim removes its submodules from its names.
    torch_adam = importlib.import_module("torch.optim.adam")
    clipping = importlib.import_module("torch.nn.utils.clip_grad")

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = torch.empty(*shape, dtype=dtype, device=device)
        buffer.is_paged = True  # type: ignore[attr-defined]
        recorder.mark_paged(buffer)
        return buffer

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def has_kernels_of_lists(*_: Any) -> bool:
        return True

    replacements = [
        (bnb_functional, "is_on_gpu", nothing),
        (bnb_functional, "get_paged", get_paged),
        (bnb_functional, "fill", nothing),
        (bnb_functional, "prefetch_tensor", nothing),
        (bnb_optimizer, "sync_gpu", nothing),
        (torch_adam, "_device_dtype_check_for_fused", nothing),
        (clipping, "_has_foreach_support", has_kernels_of_lists),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, replacement in replacements:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


_MODEL_CODE = ("transformers", "models")
"""The folder of transformers in which each kind of model has its code."""


@contextlib.contextmanager
def _model_faults(model_config: Any) -> Iterator[None]:
    """Raise `InputError` for what fails inside of a model's forward or backward pass.

    Some classes of transformers cannot be trained as they are, some ask for values, which tensors
    without data do not have, and some need images. What fails anywhere else is a bug, and stays as
    it is.
    """
    try:
        yield
    except TunerError:
        raise
    except CheckpointError as error:
        raise InputError(
            f"a training step of this {model_config.model_type} model cannot be traced with "
            "gradient checkpointing: its recomputation is not what its forward pass was",
            hint=WITHOUT_CHECKPOINTING,
        ) from error
    except Exception as error:
        place = _in_model_code(error.__traceback__) or _in_signature(error)
        if place is None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"a training step of this {model_config.model_type} model cannot be traced: "
            f"{type(error).__name__} in {place}: {reason}",
            hint="`tuner emulate` and `tuner check` run a program of yours that trains it",
        ) from error


def _in_model_code(trace: TracebackType | None) -> str | None:
    """The innermost line of a model's code that was running, as file:line."""
    for frame in reversed(traceback.extract_tb(trace)):
        path = Path(frame.filename)
        if path.parts[-4:-2] == _MODEL_CODE:
            return f"{path.name}:{frame.lineno}"
    return None


def _in_signature(error: Exception) -> str | None:
    """The forward method that was called without an argument that it needs."""
    method, found, _ = str(error).partition("() missing ")
    return (
        method if isinstance(error, TypeError) and found and method.endswith(".forward") else None
    )


_aten = torch.ops.aten


@contextlib.contextmanager
def flash_attention_on_meta(path: CudaPath) -> Iterator[None]:
    """Inside, transformers models with `flash_attention_2` can be built and traced.

    The flash-attn package, which needs a CUDA compiler, is not: PyTorch bundles the same kernels.
    `path` knows the precision of autocast, to which fp32 queries are narrowed.
    """
    from transformers import modeling_utils
    from transformers.integrations import flash_attention

    def accept(*_: Any, **__: Any) -> bool:
        return True

    def can_dispatch(model: Any, *_: Any, **__: Any) -> bool:
        # As `_flash_attn_can_dispatch`, without its questions about packages and devices.
        if not model._supports_flash_attn:
            raise ValueError(f"{type(model).__name__} does not support flash attention")
        return True

    def target_dtype(query: torch.Tensor, module: Any) -> torch.dtype | None:
        # As transformers' get_target_dtype, which asks torch for autocast on a real device.
        if query.dtype is not torch.float32:
            return None
        if path.autocast_dtype is not None:
            return path.autocast_dtype
        dtype: torch.dtype = module.config.dtype
        return dtype

    replacements = [
        (modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch),
        (modeling_utils, "lazy_import_flash_attention", accept),
        (flash_attention, "get_target_dtype", target_dtype),
        (flash_attention, "_flash_attention_forward", _forward),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Transformers' `_flash_attention_forward` for full batches, [batch, length, heads, dim].

    A sliding window is not counted: it saves time, not memory. fp32 inputs (k-bit preparation)
    become `target_dtype`, as there.
    """
    target_dtype = options.get("target_dtype")
    if target_dtype is not None and query.dtype is torch.float32:
        query, key, value = (tensor.to(target_dtype) for tensor in (query, key, value))
    output: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        options.get("dropout", 0.0),
        options["is_causal"],
        False,
        scale=options.get("softmax_scale"),
    )[0]
    return output.transpose(1, 2)
