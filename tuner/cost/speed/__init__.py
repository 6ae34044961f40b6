"""The time of a step: the roofline, device profiles, and what measures them."""
