"""What to change, and why: explanations, comparisons, the state of the machine."""
