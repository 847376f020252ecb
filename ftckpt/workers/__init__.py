"""How work is carried out: threads, processes, and the bounds of both."""
