"""Programs of five kinds with planted faults, run through `tuner check`."""
