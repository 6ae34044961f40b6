"""A few traces compiled into polynomials in micro-batch, length and rank."""
