"""Which values count as arrived at the trainer."""

import pytest

from tuner.program.edit.place import is_same


@pytest.mark.parametrize(
    ("written", "arrived"),
    [
        (8, 8),
        (True, True),
        ("unsloth", True),
        ("offload", True),
        ("sdpa", "sdpa"),
        ("adamw_torch", "adamw_torch"),
        ("adamw_8bit", "adamw_bnb_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("lion_8bit", "lion_8bit"),
        ("flash_attention_2", "kernels-community/flash-attn2"),
    ],
)
def test_a_value_and_another_name_of_it_arrive(written, arrived):
    assert is_same(written, arrived)


@pytest.mark.parametrize(
    ("written", "arrived"),
    [
        (8, 4),
        (True, False),
        ("unsloth", False),
        ("false", True),
        ("run.sh", False),
        ("adamw_torch", "adamw_torch_fused"),
        ("adamw_torch_fused", "adamw_torch"),
        ("adamw_8bit", "paged_adamw_8bit"),
        ("paged_adamw_32bit", "paged_adamw_8bit"),
        ("adamw", "adamw_torch"),
        ("sdpa", "paged|sdpa"),
        ("lion_8bit", "paged_lion_8bit"),
        ("eager", "sdpa"),
    ],
)
def test_another_value_does_not_arrive(written, arrived):
    assert not is_same(written, arrived)
