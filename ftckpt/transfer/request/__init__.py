"""What is asked of a transfer: which part, which names, which types, which layout."""
