"""bitsandbytes is imported without PyTorch's compiler, which it gets once it needs it."""

from unittest import mock

import torch

from tuner.core.meanwhile import compiled_at_first_call


def test_a_decorated_function_is_compiled_once_it_is_called():
    asked = mock.Mock(side_effect=lambda function, **how: function)
    with mock.patch.object(torch, "compile", asked):
        with compiled_at_first_call():

            @torch.compile(dynamic=False)
            def double(number: int) -> int:
                return 2 * number

        assert not asked.called
        assert (double(2), double(3)) == (4, 6)
    asked.assert_called_once()
    assert asked.call_args.kwargs == {"dynamic": False}
