"""The releases that a prediction stands for, and the releases between which predictions break."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from tuner import __version__

STACK = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")
"""Libraries whose releases a prediction stands for."""

CUDA = "CUDA"

_CUDA_OF_TORCH = re.compile(r"^cuda\b.*= *['\"]([\d.]+)['\"]", re.MULTILINE)
"""The line of torch/version.py; the build for processors has None there."""

EXPERTS = "quantised experts"
SFT = "SFTTrainer"
LOGITS = "logits"
FSDP2 = "FSDP2 of accelerate"


@dataclass(frozen=True, slots=True)
class Break:
    """A release of a library that changed memory, what it did `before`, and does since.

    It matters to a training that `concerns` one of the words above.
    """

    library: str
    release: str
    before: str
    since: str
    source: str
    concerns: str


BREAKS = (
    Break(
        "transformers",
        "5.0",
        "each expert is a linear layer, which bitsandbytes quantises",
        "experts are one parameter, which bitsandbytes leaves unquantised",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        EXPERTS,
    ),
    Break(
        "trl",
        "1.7",
        "SFTTrainer has the whole logits, and a copy of them in fp32",
        "SFTTrainer computes its loss in chunks, without the whole logits",
        "https://github.com/huggingface/trl/pull/5846",
        SFT,
    ),
    Break(
        "trl",
        "0.27",
        "SFTTrainer prepares quantised models for k-bit training",
        "SFTTrainer leaves quantised models as they are loaded",
        "https://github.com/huggingface/trl/blob/v0.27.0/trl/trainer/sft_trainer.py",
        SFT,
    ),
    Break(
        "trl",
        "0.22",
        "SFTConfig trains without gradient checkpointing by default",
        "SFTConfig turns gradient checkpointing on by default",
        "https://github.com/huggingface/trl/blob/v0.22.0/trl/trainer/sft_config.py",
        SFT,
    ),
    Break(
        "transformers",
        "4.46",
        "the model returns its logits in fp32",
        "the model returns its logits in its own type, and its loss widens them",
        "https://github.com/huggingface/transformers/pull/34147",
        LOGITS,
    ),
    Break(
        "transformers",
        "4.49",
        "the loss copies the logits in fp32 once more to shift them",
        "the loss shifts the labels, and does not copy the logits",
        "https://github.com/huggingface/transformers/pull/35646",
        LOGITS,
    ),
    Break(
        "accelerate",
        "1.13",
        "all weights are widened to fp32 under mixed precision, frozen ones too",
        "no weight is widened to fp32 in 1.13, by mistake",
        "https://github.com/huggingface/accelerate/issues/3979",
        FSDP2,
    ),
    Break(
        "accelerate",
        "1.14",
        "trainable weights stay as they are in 1.13, by mistake",
        "trainable weights are widened to fp32",
        "https://github.com/huggingface/accelerate/issues/3979",
        FSDP2,
    ),
)
"""Breaks that were read in the libraries' code or the pull request that made them."""


def predicted_stack() -> dict[str, str]:
    """The releases of tuner and of `STACK` that predictions of this process stand for.

    They are the installed ones, and without PyTorch those of the timelines that come with tuner.
    CUDA is that of the installed PyTorch; what is not known is left out.
    """
    if importlib.util.find_spec("torch") is None:
        from tuner.predict.shipped import shipped  # numpy

        return {"tuner": __version__, **shipped().versions}
    found = {"tuner": __version__}
    for name in STACK:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" and (cuda := _cuda()):
            found[CUDA] = cuda
    return found


def _cuda() -> str | None:
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(str(spec and spec.origin)).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = _CUDA_OF_TORCH.search(text)
    return found[1] if found else None


def other_releases(pinned: Mapping[str, str], stack: Mapping[str, str]) -> Iterator[str]:
    """The libraries whose release in `stack` is none that `pinned` allows, by their specifiers.

    A third number that differs ("5.12.1" for "==5.12.0") changes no results.
    """
    for library, specifier in pinned.items():
        if library in stack and not _allows(SpecifierSet(specifier), Version(stack[library])):
            yield library


def _allows(pinned: SpecifierSet, release: Version) -> bool:
    if pinned.contains(Version(release.public), prereleases=True):
        return True
    exact = [version for one in pinned if (version := _exact(one)) is not None]
    return bool(exact) and all(v.release[:2] == release.release[:2] for v in exact)


def _exact(one: Specifier) -> Version | None:
    if one.operator not in ("==", "===", "~=") or one.version.endswith("*"):
        return None
    try:
        return Version(one.version)
    except InvalidVersion:
        return None


def breaks_between(
    pinned: Mapping[str, str], stack: Mapping[str, str], concerns: Collection[str]
) -> Iterator[str]:
    """A sentence for each known break that lies between the pinned releases and the stack's."""
    for row in BREAKS:
        if row.concerns not in concerns or not {row.library} <= pinned.keys() & stack.keys():
            continue
        release = Version(row.release)
        theirs = is_before(pinned[row.library], release)
        ours = Version(stack[row.library]) < release
        if theirs is None or theirs == ours:
            continue
        when = f"before {row.library} {row.release}" if theirs else f"{row.library} {row.release}"
        what = row.before if theirs else row.since
        yield f"{when if theirs else f'since {when}'} {what}, unlike here ({row.source})"


def is_before(pinned: str, release: Version) -> bool | None:
    """True if all releases that the specifiers allow are older, False if none is, else None."""
    for one in SpecifierSet(pinned):
        try:
            version = Version(one.version.removesuffix(".*"))
        except InvalidVersion:  # "===" takes any text
            continue
        if one.operator in ("==", "===", "~="):
            return version < release
        if one.operator == "<" and version <= release:
            return True
        if one.operator == "<=" and version < release:
            return True
        if one.operator in (">", ">=") and version >= release:
            return False
    return None
