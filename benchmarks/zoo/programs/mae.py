"""MAE's main_pretrain.py with names that newer libraries dropped: python mae.py SOURCE ..."""

import collections.abc
import runpy
import sys
import types

import numpy as np

six = types.ModuleType("torch._six")
six.container_abcs = collections.abc
six.inf = float("inf")
six.string_classes = (str,)
sys.modules["torch._six"] = six
np.float = float
source = sys.argv[1]
sys.path.insert(0, source)
sys.argv = [f"{source}/main_pretrain.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
