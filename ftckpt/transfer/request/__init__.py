"""The request of a transfer: part, names, types, layout."""
