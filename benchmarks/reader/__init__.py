"""How many programs the reader reads, and how many of them rightly."""
