"""One module a verb: parse, call, render."""
