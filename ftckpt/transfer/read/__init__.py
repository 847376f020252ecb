"""Reading a source in the order and the pieces that its result needs."""
