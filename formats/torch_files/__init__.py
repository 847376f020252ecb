"""What `torch.save` writes: archives, streams, storages, and the tensors in them."""
