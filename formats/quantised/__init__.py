"""Quantised weights of a Hugging Face folder: which tensors belong together, and their values.

`config.json` says the method (`quantization_config`), ModelOpt's `hf_quant_config.json` too.
`method` reads it, `schemes` has a table of how each method names and shapes its tensors, `pairing`
finds them, `arithmetic` computes the weights, `encoding` the way back. Nothing is inferred from
names alone: without a method on record a tensor of codes is a tensor like others.
"""
