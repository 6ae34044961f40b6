"""Planning, running and recording one search."""
