"""What a person should change, and why: explanations, comparisons, the state of the machine."""
