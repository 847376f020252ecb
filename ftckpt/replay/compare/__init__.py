"""Compare records: the first difference of two runs, and its component."""
