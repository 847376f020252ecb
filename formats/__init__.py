"""One module a format; each parses into the data model of `ftckpt.checkpoint`."""
