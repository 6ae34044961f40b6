"""The contract of a workload, as its author tests it."""

from tuner.testing import WorkloadContract


class TestToy(WorkloadContract):
    workload = "toy_workload:Toy"
    configuration = {"micro_batch": 4, "width": 16, "grad_accum": 2}
