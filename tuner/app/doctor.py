"""Problems of this machine that stop or slow training, with a remedy for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from tuner.app.machine_facts import Finding, MachineFacts, differs, is_older
from tuner.core.setup.common import ALLOCATOR_OPTIONS
from tuner.core.units import GIB, format_gib, format_size

IDLE_BYTES = 1 * GIB
"""Device memory that may be in use on an idle GPU; trials use the same limit."""
SMALL_SHARED_BYTES = 1 * GIB
"""A container has 64 MiB unless it is told otherwise (docker run --shm-size), and workers of a
data loader end with a bus error once their batches fill it."""
SMALL_HOST_BYTES = 4 * GIB
"""A process that has imported torch, transformers, peft and bitsandbytes holds 0.4 GiB, and 0.6 GiB
once it has traced a model of 27 billion parameters (CPU build of torch 2.13); a search has several
of them and Ray's own."""

_ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)[a-z]?")


def examine(facts: MachineFacts) -> list[Finding]:
    """The findings of every check, most basic first."""
    return [finding for check in CHECKS for finding in check(facts)]


def _devices(facts: MachineFacts) -> Iterator[Finding]:
    for text in facts.lost:
        yield Finding.problem(
            "GPU",
            text,
            "the kernel log says why (dmesg | grep -i xid); nvidia-smi --gpu-reset or a reboot "
            "may bring it back",
        )
    if facts.lost and not facts.devices:
        return
    if not facts.devices:
        if facts.has_device_files:
            yield Finding.problem(
                "GPU",
                "there is an NVIDIA device, but its driver does not answer",
                "look at nvidia-smi; in a container, start it with --gpus all",
            )
            return
        yield Finding.warning(
            "GPU",
            "no NVIDIA GPU on this machine: all GPU numbers are predicted",
            "fine for predictions; trials need a machine with the GPU, or --gpu cpu",
        )
        return
    for device in facts.devices:
        text = f"{device.index}: {device.name}, {format_gib(device.total_bytes)}"
        if device.gpu is None:
            yield Finding.warning(
                "GPU",
                f"{text}, is not in the catalogue",
                "tuner calibrate measures it, in about a minute",
            )
        else:
            yield Finding.ok("GPU", f"{text}, known as {device.gpu.id}")


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.devices:
        return
    newest = ".".join(map(str, facts.driver_cuda)) if facts.driver_cuda else "unknown"
    text = f"{facts.driver or 'unknown'}, for CUDA up to {newest}"
    built = facts.probe.get("torch_cuda")
    if "error" in facts.probe:
        return
    if built is None:
        yield Finding.problem(
            "driver",
            "the installed PyTorch was built without CUDA and cannot use the GPU",
            "install a build of PyTorch for CUDA (pytorch.org/get-started)",
        )
        return
    if facts.driver_cuda and int(str(built).partition(".")[0]) > facts.driver_cuda[0]:
        yield Finding.problem(
            "driver",
            f"{text}, but PyTorch was built for CUDA {built}",
            "update the driver, or install a PyTorch for an older CUDA",
        )
        return
    if not facts.probe.get("cuda_available"):
        yield Finding.problem(
            "driver",
            f"{text}; PyTorch (CUDA {built}) sees no GPU",
            "check CUDA_VISIBLE_DEVICES and the output of python -c 'import torch; "
            "torch.cuda.init()'",
        )
        return
    yield Finding.ok("driver", f"{text}; PyTorch was built for CUDA {built}")
    yield from _architectures(facts)


def _architectures(facts: MachineFacts) -> Iterator[Finding]:
    built_for = [str(name) for name in facts.probe.get("architectures", [])]
    for device in facts.devices:
        if built_for and not any(_runs(name, device.compute_capability) for name in built_for):
            major, minor = device.compute_capability
            yield Finding.problem(
                "driver",
                f"PyTorch has no kernels for {device.name} (sm_{major}{minor}), only for "
                f"{', '.join(built_for)}",
                "install a PyTorch that has them",
            )


def _runs(built_for: str, capability: tuple[int, int]) -> bool:
    """True when code built for "sm_86" or "compute_90" runs on a device.

    Machine code runs on the same major version, from its own minor version on; intermediate code
    on anything newer (CUDA C++ Programming Guide, "Application Compatibility").
    """
    match = _ARCHITECTURE.fullmatch(built_for)
    if match is None:
        return False
    version = (int(match["major"]), int(match["minor"]))
    if match["kind"] == "compute":
        return version <= capability
    return version[0] == capability[0] and version[1] <= capability[1]


def _libraries(facts: MachineFacts) -> Iterator[Finding]:
    for name, version in facts.versions.items():
        least, tested = facts.least.get(name), facts.tested.get(name)
        if version is None:
            yield Finding.problem(name, "not installed", f"pip install {name}")
        elif least and is_older(version, least):
            yield Finding.problem(
                name,
                f"{version} is older than {least}, the oldest that works",
                f"pip install -U '{name}>={least}'",
            )
        elif tested and differs(version, tested):
            yield Finding.warning(
                name,
                f"{version}; tested with {tested}",
                "if something fails, install with -c constraints.txt",
            )
        else:
            yield Finding.ok(name, f"{version}{', as tested' if tested else ''}")


def _working(facts: MachineFacts) -> Iterator[Finding]:
    if "error" in facts.probe:
        yield Finding.problem(
            "torch works",
            f"importing it failed: {facts.probe['error']}",
            "reinstall it in a fresh environment with -c constraints.txt",
        )
        return
    wrong = facts.probe.get("bitsandbytes")
    if wrong is None:
        return
    where = "on the GPU" if facts.probe.get("cuda_available") else "on the processor"
    if wrong:
        yield Finding.problem(
            "bitsandbytes works",
            f"four-bit quantisation failed {where}: {wrong}",
            "python -m bitsandbytes says more; precision=nf4 and 8-bit optimizers need it",
        )
    else:
        yield Finding.ok("bitsandbytes works", f"quantised to four bits and back {where}")


def _use(facts: MachineFacts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.used_bytes is None:
            continue
        free = device.total_bytes - device.used_bytes
        text = f"{device.index}: {format_gib(free)} of {format_gib(device.total_bytes)} free"
        names = ", ".join(f"{p.name} (process {p.pid})" for p in device.processes)
        if names:
            fix = "trials wait for it or refuse it; stop them or use another GPU"
            yield Finding.warning("free memory", f"{text}, in use by {names}", fix)
        elif device.used_bytes > IDLE_BYTES:
            yield Finding.warning(
                "free memory",
                f"{text}, held by processes that the driver does not name",
                "look for processes of other containers or users, or for a desktop",
            )
        else:
            yield Finding.ok("free memory", text)


def _tf32(facts: MachineFacts) -> Iterator[Finding]:
    override = facts.environment.get("NVIDIA_TF32_OVERRIDE")
    able = [d.gpu for d in facts.devices if d.gpu is not None and "tf32" in d.gpu.flops]
    if override == "0" and (able or not facts.devices):
        yield Finding.warning(
            "tf32",
            "NVIDIA_TF32_OVERRIDE=0 turns tf32 off for every program",
            "unset it if fp32 products need not be exact",
        )
    elif able and not facts.probe.get("tf32", True):
        gain = able[0].flops["tf32"] / able[0].flops["fp32"]
        yield Finding.warning(
            "tf32",
            f"off, which is PyTorch's default: fp32 products of {able[0].name} could be up to "
            f"{gain:.1f} x as fast",
            "torch.set_float32_matmul_precision('high'), or tf32=True of Trainer; bf16 and fp16 "
            "products are not affected",
        )


def _flash(facts: MachineFacts) -> Iterator[Finding]:
    able = [d for d in facts.devices if d.compute_capability >= (8, 0)]
    for device in facts.devices:
        if device not in able:
            yield Finding.warning(
                "flash attention",
                f"{device.name} is too old for it (compute capability 8.0 and newer have it)",
                "attention=sdpa takes PyTorch's memory-efficient kernel there",
            )
    if not able:
        return
    if facts.probe.get("flash_sdp") is False:
        yield Finding.warning(
            "flash attention",
            "turned off in PyTorch's sdpa",
            "torch.backends.cuda.enable_flash_sdp(True)",
        )
    else:
        package = "is" if facts.flash_attn else "is not"
        rest = "" if facts.flash_attn else ": attention=flash_attention_2 cannot run, sdpa can"
        text = f"in PyTorch's sdpa; the package flash_attn {package} installed{rest}"
        yield Finding.ok("flash attention", text)


def _loader(facts: MachineFacts) -> Iterator[Finding]:
    gpus = max(1, len(facts.devices))
    each = max(1, facts.cpus // gpus)
    if each < 4:
        yield Finding.warning(
            "data loader",
            f"{facts.cpus} processors for {gpus} training process{'es' if gpus > 1 else ''}: few "
            "for loader workers beside it",
            "tokenise before training, so that loading is cheap",
        )
    else:
        yield Finding.ok(
            "data loader",
            f"{facts.cpus} processors: dataloader_num_workers up to {min(8, each - 1)} a GPU (the "
            "default of Trainer, 0, loads in the training process)",
        )
    value = facts.environment.get("TOKENIZERS_PARALLELISM", "").lower()
    if value in ("false", "0", "off", "no") and facts.cpus > 1:
        yield Finding.warning(
            "TOKENIZERS_PARALLELISM",
            f"{value}: tokenisers use 1 of {facts.cpus} processors",
            "unset it, unless loader workers tokenise; tokenise before the loader is made",
        )
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads == "1" and facts.cpus > 2:
        yield Finding.warning(
            "OMP_NUM_THREADS",
            f"1: PyTorch computes with 1 of {facts.cpus} processors on the host",
            f"set it to the processors of one training process, here {each}",
        )


def _allocator(facts: MachineFacts) -> Iterator[Finding]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    set_to = {n: facts.environment[n] for n in names if facts.environment.get(n)}
    if len(set(set_to.values())) > 1:
        text = " but ".join(f"{name}={value}" for name, value in set_to.items())
        yield Finding.warning("allocator", text, "set both to the same, or one of them")
    for name, value in set_to.items():
        options = dict(part.partition(":")[::2] for part in value.split(","))
        strange = [option for option in options if option.strip() not in ALLOCATOR_OPTIONS]
        if strange:
            yield Finding.problem(
                "allocator",
                f"{name} names {', '.join(strange)}, which PyTorch does not know",
                f"options are {', '.join(ALLOCATOR_OPTIONS)}",
            )
        elif options.get("expandable_segments", "").lower() != "true":
            yield Finding.warning(
                "allocator",
                f"{name}={value}, without expandable_segments",
                "expandable_segments:True loses less memory to fragments",
            )
        else:
            yield Finding.ok("allocator", f"{name}={value}")
    if not set_to:
        yield Finding.ok(
            "allocator",
            "PyTorch's defaults; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True loses less "
            "memory to fragments",
        )


_SLOW_SETTINGS: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}


def _slow_settings(facts: MachineFacts) -> Iterator[Finding]:
    for name, meaning in _SLOW_SETTINGS.items():
        value = facts.environment.get(name, "")
        if value not in ("", "0"):
            yield Finding.warning(name, f"{value}: {meaning}", "unset it for training")


def _host(facts: MachineFacts) -> Iterator[Finding]:
    total, available = facts.host_total_bytes, facts.host_available_bytes
    free = "" if available is None else f", {format_gib(available)} available"
    text = f"{format_gib(total)}{free}"
    largest = max((d.total_bytes for d in facts.devices), default=0)
    if available is not None and available < SMALL_HOST_BYTES:
        fix = "end other programs, or use a machine with more memory"
        yield Finding.warning("host memory", text, fix)
    elif largest > total:
        yield Finding.warning(
            "host memory",
            f"{text}, less than the GPU's {format_gib(largest)}",
            "paged optimizers move to the host, and checkpoints are read through it",
        )
    else:
        yield Finding.ok("host memory", text)
    if facts.shared_bytes is None:
        return
    shared = format_size(facts.shared_bytes)
    if facts.shared_bytes < SMALL_SHARED_BYTES:
        fix = "docker run --shm-size=8g, or --ipc=host; else keep num_workers at 0"
        text = f"{shared}: loader workers hand batches over through it"
        yield Finding.warning("shared memory", text, fix)
    else:
        yield Finding.ok("shared memory", shared)


CHECKS: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    _devices,
    _driver,
    _use,
    _working,
    _libraries,
    _tf32,
    _flash,
    _loader,
    _allocator,
    _slow_settings,
    _host,
)
