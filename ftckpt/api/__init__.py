"""Loading into memory: `ftckpt.load`, and what `ftckpt.torch.Reader` is made of."""
