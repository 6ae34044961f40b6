"""Liger's Triton kernels, where they are installed."""

from __future__ import annotations

from typing import Any

from tuner.core.errors import InputError
from tuner.predict.training.losses import CrossEntropy

_PACKAGE = "liger-kernel"


def apply_liger(model: Any) -> None:
    """Replace the model's norms, rotary embedding, MLP and loss by Liger's, as Trainer does.

    Trainer's argument is `use_liger_kernel`. Raises `InputError` where the package is not
    installed or has no kernels for this kind of model.
    """
    _require()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"Liger has no kernels for models of type {kind!r}",
            hint=f"it has them for {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}",
        )
    apply_liger_kernel(model, None)


def fused_cross_entropy() -> CrossEntropy:
    """Liger's cross entropy, which turns the logits into their gradient in place.

    Raises `InputError` where the package is not installed.
    """
    _require()
    from liger_kernel.transformers.functional import liger_cross_entropy

    kernel: CrossEntropy = liger_cross_entropy
    return kernel


def _require() -> None:
    from transformers.utils import is_liger_kernel_available

    if not is_liger_kernel_available():
        raise InputError(
            f"this configuration needs {_PACKAGE}, which is not installed",
            hint=f"pip install {_PACKAGE}",
        )
