"""Files of a Hugging Face folder besides the weights, and the index of shards."""
