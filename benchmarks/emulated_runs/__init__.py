"""Published measuring programs, unmodified, on emulated GPUs, beside what was measured."""
