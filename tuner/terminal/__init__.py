"""What is printed for people: fields, tables, progress, JSON."""
