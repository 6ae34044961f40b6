"""What every room uses: words, units, errors, settings, records, GPU types and processes."""
