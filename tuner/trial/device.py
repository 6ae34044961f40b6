"""The environment of a real training step: a CUDA device, or this machine's CPU.

`RealEnvironment` implements `tuner.predict.training.Environment` for a session, and notes the
peak memory of each phase. It is used in a separate process: only the exit of a process is sure to
free its memory.

Weights are synthetic: a model built on the meta device gets its tensors on a real one. Speed and
memory do not depend on their values, as long as they stay finite and small enough for LLM.int8() to
see no outliers. So nothing has to be downloaded. Every tensor is allocated on the device once, at
its final size, and filled in place.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.host import cpu_name, data_bytes, peak_resident_bytes, resident_bytes
from tuner.core.nvml import DeviceReader, DeviceUse, device_use, open_reader
from tuner.core.records import Configuration, Memory, Phase
from tuner.core.units import format_gib
from tuner.emulator.here import begin_phase, is_emulated
from tuner.predict.training import TrainingSession, Workload
from tuner.space.data import DataFacts
from tuner.space.gpus import match_device
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.ranks import Rank

_UNIFORM_STD = 1 / math.sqrt(3)
"""Standard deviation of a uniform value in [-1, 1]."""

_OUTPUT_STD = 0.5
"""Standard deviation of a quantised layer's output for inputs of 1: the gated products of an MLP
then stay below 6, the threshold above which LLM.int8() treats a column as an outlier."""

_FIRST_SCALE, _SCALE_RANGE = 1.0, 0.2
"""Double quantisation keeps the scale of a block as offset + code: here 1 plus or minus 20 %."""


def fill(model: nn.Module, device: str, *, on_host: Sequence[nn.Module] = ()) -> None:
    """Give every tensor of `model` (on the meta device) storage and values on `device`.

    Layers of transformers are initialised as their authors do, quantised ones hold random codes.
    Tied parameters stay tied. Modules in `on_host` are filled on the device one after the other,
    where that takes no time, and moved to host memory. Of a sharded model only this rank's shards
    are filled. Raises torch.OutOfMemoryError where the device is too small.
    """
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        _fill_shards(model, device)
        return
    for part in on_host:
        _fill_modules(model, list(part.modules()), device)
        part.to("cpu")
    done = {id(module) for part in on_host for module in part.modules()}
    _fill_modules(model, [m for m in model.modules() if id(m) not in done], device)


def _fill_shards(model: Any, device: str) -> None:
    """Give this rank's shards small random values; what no rank shares is as the model has it."""
    model.to_empty(device=device)
    packed = set()
    for module in model.modules():
        if "quant_state" in module.__dict__:
            _fill_scales(module.quant_state, device)
            packed.add(module.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            own = getattr(parameter, "_local_tensor", parameter)
            if parameter in packed:
                own.view(torch.uint8).random_(0, 256)
            else:
                _small_random(own)
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                _initialise(model, module, set())


def _fill_modules(model: nn.Module, modules: Sequence[nn.Module], device: str) -> None:
    moved: dict[int, Any] = {}
    for module in modules:
        _move(module._parameters, moved, device)
        _move(module._buffers, moved, device)
        if type(module).__name__ == "Linear4bit":
            module.quant_state = module.weight.quant_state  # type: ignore[union-attr]
    seen: set[int] = set()
    with torch.no_grad():
        for module in modules:
            _initialise(model, module, seen)


def _move(tensors: dict[str, Any], moved: dict[int, Any], device: str) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if id(tensor) not in moved:
            # The old tensor is kept beside the new one, so that its id is not used again.
            moved[id(tensor)] = (tensor, _on_device(tensor, device))
        tensors[name] = moved[id(tensor)][1]


def _on_device(tensor: Any, device: str) -> Any:
    if not tensor.is_meta:
        return tensor.to(device)
    data = torch.empty_like(tensor.data, device=device)
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _four_bit(tensor, data, device)
    if kind == "Int8Params":
        data.random_(-127, 128)
        scale = _OUTPUT_STD / math.sqrt(data.shape[-1]) / _UNIFORM_STD
        scales = torch.full_like(tensor.SCB, scale, device=device)
        return type(tensor)(data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def _four_bit(old: Any, codes: torch.Tensor, device: str) -> Any:
    """Random 4-bit codes with scales such that the layer's output has `_OUTPUT_STD`."""
    state = old.quant_state
    codes.random_(0, 256)
    _fill_scales(state, device)
    return type(old)(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
        module=old.module,
        bnb_quantized=True,
    )


def _fill_scales(state: Any, device: str) -> None:
    """Fill in the code table and scales of a 4-bit layer that was on the meta device."""
    from bitsandbytes.functional import get_4bit_type

    scale = _OUTPUT_STD / math.sqrt(state.shape[-1]) / _UNIFORM_STD
    state.code = get_4bit_type(state.quant_type, device=device)
    state.absmax = torch.empty_like(state.absmax, device=device)
    if state.nested:
        state.absmax.random_(0, 256)
        state.offset = torch.full_like(state.offset, _FIRST_SCALE * scale, device=device)
        second = state.state2
        second.absmax = torch.full_like(second.absmax, _SCALE_RANGE * scale, device=device)
        second.code = torch.linspace(-1, 1, 256, device=device)
    else:
        state.absmax.fill_(scale)


def _initialise(model: Any, module: nn.Module, seen: set[int]) -> None:
    """Fill the tensors that `module` itself holds and that no other module has filled."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    floats = [t for t in own if t.is_floating_point() and id(t) not in seen]
    seen.update(map(id, own))
    for tensor in own:
        if not tensor.is_floating_point() and not _is_quantised(tensor):
            _count_up(tensor)
    if not own or (not floats and any(map(torch.is_floating_point, own))):
        return  # it has nothing, or is tied to a module that was filled
    for tensor in floats:
        # Tensors that the model's own initialisation skips must not stay uninitialised.
        _small_random(tensor)
    initialise: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    if initialise is not None and not any(map(_is_quantised, own)):
        initialise(module)


def _is_quantised(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _count_up(tensor: torch.Tensor) -> None:
    """Positions 0, 1, 2, ... along the last dimension: what most integer buffers hold."""
    if tensor.dim() == 0 or tensor.dtype is torch.bool:
        tensor.fill_(1)
        return
    row = torch.arange(tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)
    tensor.copy_(row.expand_as(tensor))


def _small_random(tensor: torch.Tensor) -> None:
    tensor.uniform_(-0.02, 0.02)


class _CudaMeter:
    """PyTorch's own counters of its caching allocator, in bytes."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before, there are no counters
        self._device = device

    def allocated_bytes(self) -> int:
        """Bytes of live blocks."""
        return torch.cuda.memory_allocated(self._device)

    def peaks(self) -> tuple[int, int]:
        """The highest allocated and reserved bytes since the last `reset`."""
        return (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )

    def reset(self) -> None:
        """Restart both peaks."""
        torch.cuda.reset_peak_memory_stats(self._device)


class _HostMeter:
    """Resident memory of this process beyond what it held when the meter was made.

    The kernel keeps the peak (VmHWM) and resets it on request (proc(5), clear_refs).
    """

    def __init__(self) -> None:
        self._before_bytes = resident_bytes()

    def allocated_bytes(self) -> int:
        """Resident bytes now."""
        return max(0, resident_bytes() - self._before_bytes)

    def peaks(self) -> tuple[int, int]:
        """Peak resident bytes, twice: the host has no allocator that reserves."""
        peak = max(0, peak_resident_bytes() - self._before_bytes)
        return peak, peak

    def reset(self) -> None:
        """Restart the kernel's peak."""
        Path("/proc/self/clear_refs").write_text("5")


class RealEnvironment:
    """The environment of a real session; see `tuner.predict.training.Environment`.

    `phase` is the current phase; after an OOM, the phase in which memory ran out.
    `phase_peak_bytes` has the highest allocated memory of each phase while `recording`. Recording
    costs a fraction of a millisecond per phase, and is off during timed steps. While recording,
    `on_phase` is called when a phase begins. `on_enter`, if set, is called whenever the session
    announces a phase. `checkpoint`, `data` and `full_micro_steps` are those of
    `predict.training.base.Machine`. `rank` is this process's rank in a trial on several GPUs.
    """

    def __init__(
        self,
        device: str,
        *,
        checkpoint: str | None = None,
        data: DataFacts | None = None,
        full_micro_steps: int = 0,
        on_phase: Callable[[Phase], None] | None = None,
        rank: Rank | None = None,
    ) -> None:
        self.device = device
        self.rank = rank or Rank()
        self.checkpoint = checkpoint
        self.data = data
        self.full_micro_steps = full_micro_steps
        self._on_phase = on_phase
        self.on_enter: Callable[[Phase, int], None] | None = None
        self._torch_device = parse_device(device)
        self.meter: _CudaMeter | _HostMeter = (
            _CudaMeter(self._torch_device) if self._torch_device.type == "cuda" else _HostMeter()
        )
        self.phase: Phase | None = None
        self.phase_peak_bytes: dict[Phase, int] = {}
        self.peak_reserved_bytes = 0
        self.loaded_bytes: int | None = None
        self.recording = True
        self._trained = 0
        self._emulated = is_emulated() and self._torch_device.type == "cuda"

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest peak of all phases so far."""
        return max(self.phase_peak_bytes.values(), default=0)

    def materialize(self, model: Any, on_host: Sequence[Any] = ()) -> None:
        """Synthetic weights on the device; of the modules in `on_host`, in host memory."""
        fill(model, self.device, on_host=on_host)
        self._trained = sum(parameter.requires_grad for parameter in model.parameters())

    def autocast(self, dtype: Any) -> contextlib.AbstractContextManager[None]:
        """PyTorch's autocast for the device."""
        context: Any = torch.autocast(self._torch_device.type, dtype=dtype)
        return context  # type: ignore[no-any-return]

    def checkpoint_contexts(
        self, autocast_dtype: Any | None = None
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Nothing: PyTorch's checkpointing restores autocast by itself."""
        return contextlib.nullcontext(), contextlib.nullcontext()

    def enter(self, phase: Phase, micro_step: int) -> None:
        """A phase begins; the peak of the one before is noted."""
        if self._emulated:
            begin_phase(str(phase), 0, self._trained)
        if self.on_enter is not None:
            self.on_enter(phase, micro_step)
        if self.recording:
            self.note_peak()
            if self.loaded_bytes is None and phase is Phase.FORWARD:
                self.loaded_bytes = self.meter.allocated_bytes()
            if self._on_phase is not None and phase is not self.phase:
                self._on_phase(phase)
        self.phase = phase

    def note_peak(self) -> None:
        """Record the peak since the last call for the current phase, and reset it."""
        allocated, reserved = self.meter.peaks()
        if self.phase is not None:
            known = self.phase_peak_bytes.get(self.phase, 0)
            self.phase_peak_bytes[self.phase] = max(known, allocated)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        self.meter.reset()

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)


def parse_device(text: str) -> torch.device:
    """The torch device that "cuda:0" or "cpu" names. Raises `InputError` for anything else."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise InputError(f"device {text!r} is not one to train on", hint="write cuda:0 or cpu")
    return torch.device(text if ":" in text or text == "cpu" else f"{text}:0")


def alloc_retries(device: torch.device) -> int | None:
    """`num_alloc_retries` of PyTorch's allocator so far; None on the processor."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def open_session(
    workload: Workload,
    model_config: Any,
    configuration: Configuration,
    environment: RealEnvironment,
) -> TrainingSession:
    """Open a session on the environment's device, with matrix products in tf32 if requested.

    Raises `InputError` if the configuration can't be built, and torch.OutOfMemoryError if it
    doesn't fit.
    """
    uses_tf32 = configuration.get("precision") == "tf32"
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    return workload.open(model_config, configuration, environment)


def limit_memory(device: str, limit_bytes: int) -> None:
    """Let this process allocate at most `limit_bytes` on `device`: a stand-in for a smaller one.

    On CUDA the limit is on what PyTorch reserves; the CUDA context comes on top. On the CPU it is
    on private memory beyond what the process holds now (setrlimit(2), RLIMIT_DATA).
    """
    parsed = parse_device(device)
    if parsed.type == "cuda":
        total = torch.cuda.get_device_properties(parsed).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), parsed)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit_bytes, hard))


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Bytes on the device now: as counted by the driver, and beyond PyTorch's own.

    `context_bytes` is None if the driver gives no numbers.
    """

    process_bytes: int | None
    device_bytes: int | None
    context_bytes: int | None


class _Footprint:
    """Follows this process's memory on one CUDA device. Made before the device is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index or 0
        self._before = device_use(self._index)

    def read(self) -> _DeviceMemory:
        """The driver's memory numbers now.

        In a container the driver may not tell processes apart. Then the increase in the device's
        memory counts as this process's, which is right while no other process uses the device.
        """
        use = device_use(self._index)
        if use is None:
            return _DeviceMemory(None, None, None)
        own = self._own_bytes(use)
        reserved = torch.cuda.memory_reserved(self._device)
        context = None if own is None else max(0, own - reserved)
        return _DeviceMemory(use.process_bytes, use.used_bytes, context)

    def _own_bytes(self, use: DeviceUse) -> int | None:
        if use.process_bytes is not None:
            return use.process_bytes
        return use.used_bytes - self._before.used_bytes if self._before else None


INTERVAL_S = 0.1


class GpuWatch:
    """Watches CUDA device `index` between `__enter__` and `__exit__`; None watches nothing."""

    def __init__(self, index: int | None) -> None:
        self._reader: DeviceReader | None = open_reader(index) if index is not None else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shares: list[float] = []

    def __enter__(self) -> GpuWatch:
        if self._reader is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True, name="gpu-watch")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._reader is None or self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._reader.close()

    @property
    def utilization(self) -> float | None:
        """Mean share of the time in which a kernel ran, 0 to 1; None if it is unknown."""
        return fmean(self._shares) if self._shares else None

    def _sample(self) -> None:
        assert self._reader is not None
        while True:
            share = self._reader.utilization()
            if share is not None:
                self._shares.append(share)
            if self._stop.wait(INTERVAL_S):
                return


class ProcessDevice:
    """The device of a trial: its name, the GPU type it really is (if known), and its memory."""

    def __init__(self, job: TrialJob, options: MeasureOptions) -> None:
        self._device = parse_device(options.device)
        self._job = job
        self._footprint: _Footprint | None = None
        self.notes: list[str] = []
        if self._device.type == "cuda":
            self._footprint = _Footprint(self._device)
            torch.zeros(1, device=self._device)  # creates the context
            self.name = torch.cuda.get_device_name(self._device)
            self.gpu: Gpu | None = job.gpu
            if self.name not in job.gpu.device_names:
                total = torch.cuda.get_device_properties(self._device).total_memory
                self.gpu = match_device(self.name, total)
        else:
            self.name = cpu_name()
            self.gpu = job.gpu
        if options.memory_limit_bytes is not None:
            # Memory of the driver and of the context is part of the device's memory.
            context = self._context_bytes() if self._footprint else 0
            if options.memory_limit_bytes <= context:
                raise InputError(
                    f"a memory limit of {format_gib(options.memory_limit_bytes)} leaves nothing "
                    f"beside the CUDA context, which takes {format_gib(context)}"
                )
            limit_memory(options.device, options.memory_limit_bytes - context)

    def memory(self, environment: RealEnvironment) -> tuple[Memory, _DeviceMemory]:
        """Peaks of all steps so far, and the driver's numbers now."""
        peaks = peaks_of(environment)
        reserved = peaks["peak_reserved_bytes"]
        phases = peaks["phase_peak_bytes"]
        known = self._footprint.read() if self._footprint else _DeviceMemory(None, None, None)
        context = self._context_bytes(known) if self._footprint else 0
        memory = Memory(
            peak_allocated_bytes=peaks["peak_allocated_bytes"],
            peak_reserved_bytes=reserved,
            device_bytes=reserved + context,
            loaded_bytes=environment.loaded_bytes or 0,
            phase_peak_bytes=phases,
            peak_phase=max(phases, key=lambda name: int(phases[name]), default=""),
            breakdown={},
        )
        return memory, known

    def device_bytes(self, environment: RealEnvironment) -> int:
        """The highest device memory so far, in bytes; each call reads the driver once."""
        context = self._context_bytes() if self._footprint else 0
        return int(peaks_of(environment)["peak_reserved_bytes"]) + context

    def alloc_retries(self) -> int | None:
        """The number of times the allocator freed its cached blocks; None on the processor."""
        return alloc_retries(self._device)

    def _context_bytes(self, known: _DeviceMemory | None = None) -> int:
        assert self._footprint is not None
        known = known or self._footprint.read()
        if known.context_bytes is not None:
            return known.context_bytes
        note = (
            "the driver does not report what the CUDA context takes: the catalogue's size is used"
        )
        if note not in self.notes:
            self.notes.append(note)
        return self._job.gpu.context_bytes


def peaks_of(environment: RealEnvironment) -> dict[str, Any]:
    """The highest memory so far in bytes, overall and by phase."""
    allocated, reserved = environment.meter.peaks()
    return {
        "loaded_bytes": environment.loaded_bytes,
        "phase_peak_bytes": {str(p): n for p, n in environment.phase_peak_bytes.items()},
        "peak_allocated_bytes": max(environment.peak_allocated_bytes, allocated),
        "peak_reserved_bytes": max(environment.peak_reserved_bytes, reserved),
    }
