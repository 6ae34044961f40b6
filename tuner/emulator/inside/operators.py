"""Classifies operators, once per overload, by schema and name."""

from __future__ import annotations

from typing import Any

import torch

# Operators whose integer outputs are not used (dropout masks, seeds, positions of maxima), or that
# would cost too much on the CPU. Small float outputs are made up.
NOT_COMPUTED = frozenset({
    "aten::native_dropout", "aten::native_dropout_backward", "aten::_fused_dropout",
    "aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward", "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices", "aten::_embedding_bag", "aten::_int_mm", "aten::_grouped_mm",
    "aten::_scaled_mm", "aten::_scaled_grouped_mm", "aten::_cudnn_rnn",
    "aten::_thnn_fused_lstm_cell",
})  # fmt: skip

# Operators without values, or whose values must not change (a scaler's found_inf stays 0).
PASSED = frozenset(
    {
        "aten::_unsafe_view",
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
        "aten::record_stream",
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        "aten::_assert_async",
        "aten::is_pinned",
        "aten::_pin_memory",
        "aten::_cudnn_init_dropout_state",
        "aten::_has_compatible_shallow_copy_type",
        # Sparse tensors that are put together from others.
        "aten::_sparse_coo_tensor_with_dims_and_tensors",
        "aten::_sparse_coo_tensor_unsafe",
        "aten::_sparse_compressed_tensor_unsafe",
        "aten::_coalesced_",
    }
)

# Operators that write into lists of floats, which are left as they are.
LEFT = frozenset({f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")})

# Operators whose kernels call other operators and read their results.
OPENED = frozenset(
    {f"aten::linalg_{name}" for name in ("eig", "eig.out", "matrix_exp")}
    | {f"aten::_linalg_{name}" for name in ("svd", "eigh", "eigvals")}
    | {"aten::isin.Tensor_Tensor", "aten::segment_reduce"}
)

# Operators that overwrite their first argument without reading it.
OVERWRITING = frozenset({
    "aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_",
    "aten::bernoulli_", "aten::exponential_", "aten::geometric_", "aten::log_normal_",
    "aten::cauchy_",
})  # fmt: skip
FILLING = frozenset({"aten::fill_", "aten::zero_"})

# Operators that use a tensor's shape but not its values.
LIKE = frozenset({
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like",
    "aten::randint_like", "aten::new_zeros", "aten::new_ones", "aten::new_full",
})  # fmt: skip
EMPTY = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
    "aten::new_empty", "aten::new_empty_strided",
})  # fmt: skip
# Operators that return a tensor with one value everywhere.
CONSTANT = frozenset(
    {
        f"aten::{prefix}{name}{suffix}"
        for name in ("zeros", "ones", "full")
        for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
    }
)
# Comparisons, element by element.
COMPARISONS = frozenset(
    {f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")}
    | {"aten::isposinf", "aten::isneginf", "aten::signbit"}
)
ORDERING = frozenset({f"aten::{name}" for name in ("lt", "le", "gt", "ge", "signbit")})
FINITE = frozenset(
    {f"aten::{name}" for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf")}
)
# Operators whose result is uniform if their booleans are.
REDUCTIONS = frozenset({"aten::any", "aten::all"})
LOGIC = REDUCTIONS | frozenset(
    {f"aten::logical_{name}" for name in ("and", "or", "not", "xor")}
    | {f"aten::bitwise_{name}" for name in ("and", "or", "not", "xor")}
    | {"aten::mul", "aten::eq", "aten::ne", "aten::clone", "aten::__and__", "aten::__or__"}
)
# Operators whose result never shrinks if more booleans are true or integers are larger.
GROWING = frozenset(
    {f"aten::logical_{name}" for name in ("and", "or")}
    | {f"aten::bitwise_{name}" for name in ("and", "or")}
    | {f"aten::{name}" for name in ("any", "all", "sum", "cumsum", "count_nonzero", "amax")}
    | {f"aten::{name}" for name in ("__and__", "__or__", "_to_copy", "clone", "copy", "cat")}
    | {f"aten::{name}" for name in ("stack", "index", "index_select", "gather", "masked_select")}
    | {f"aten::{name}" for name in ("nonzero", "repeat", "flip", "roll", "tril", "triu", "add")}
    | {f"aten::{name}" for name in ("_unsafe_index", "split_with_sizes_copy", "unfold_copy")}
)
# Operators whose result is uniform if their floats are.
COPYING = frozenset({"aten::_to_copy", "aten::clone"})
POINTWISE = COPYING | frozenset({f"aten::{name}" for name in ("neg", "mul", "add", "sub", "div")})
# Operators that choose indices among floats.
CHOOSING = frozenset(
    {f"aten::{name}" for name in ("topk", "sort", "argmax", "argmin", "max", "min", "median")}
    | {f"aten::{name}" for name in ("nanmedian", "mode", "multinomial", "kthvalue", "argsort")}
)
LARGEST = frozenset({"aten::amax", "aten::max", "aten::amin", "aten::min"})
# Operators whose number of true elements depends on which of two tensors' elements meet.
MEETING = frozenset(
    {"aten::eq", "aten::ne", "aten::logical_or", "aten::bitwise_or", "aten::__or__", "aten::add"}
)
SMALLER = frozenset({"aten::lt", "aten::le"})
# Messages between devices: the communication library decides the received values.
MESSAGES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


# Dispatch keys for the own code of an operator that takes functions, in order of precedence.
_INNER = ("BackendSelect", "CompositeExplicitAutograd", "CUDA")


def inner_of(func: Any) -> Any:
    """The code of an operator that takes functions (a higher-order one), or None."""
    if not isinstance(func, torch._ops.HigherOrderOperator):
        return None
    keys = [getattr(torch._C.DispatchKey, name) for name in _INNER]
    return next((func.py_kernels[key] for key in keys if key in func.py_kernels), None)


def is_composite(func: Any) -> bool:
    """True if this operator runs as other operators, which have their own kernels.

    Some operators can be taken apart and still have a kernel on the device (silu_backward). They
    count as one operator, without the memory of the parts.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return inner_of(func) is not None
    name = func.name()  # type: ignore[no-untyped-call]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")


class Operator:
    """The properties of one overload that do not depend on a call."""

    def __init__(self, func: Any) -> None:
        self.func = func
        schema = func._schema
        self.name: str = schema.name
        self.full_name: str = func.name()  # with its overload: aten::index.Tensor
        arguments = schema.arguments
        written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written_names = frozenset(a.name for a in written)
        self.written_positions = frozenset(
            i for i, a in enumerate(arguments) if a.name in self.written_names and not a.kwarg_only
        )
        self.mutates = bool(written)
        self.functional_name = self.name.removesuffix("_") if written else self.name
        # Results of functions with `out=` are not read.
        self.overwrites = self.name in OVERWRITING or any(a.is_out for a in written)
        self.is_view = not written and any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.is_like = self.name in LIKE
        self.fills = self.name in FILLING
        self.compares = self.name in COMPARISONS
        self.orders = self.name in ORDERING
        self.is_logical = self.name in LOGIC
        self.is_constant = self.name in CONSTANT
        self.reduces = self.name in REDUCTIONS
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.takes_generator = any(a.name == "generator" for a in arguments)
        self.is_foreach = self.name.startswith("aten::_foreach_")
        self.leaves = self.name in LEFT or func.namespace in MESSAGES
        self.computes = (
            func.namespace == "aten"
            and self.name not in NOT_COMPUTED
            and torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.full_name, "CPU")
        )
        self.passes = (
            self.is_view or self.name in PASSED or func.namespace in {"prim", "prims", "profiler"}
        )
