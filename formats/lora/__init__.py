"""LoRA adapters as PEFT saves them: `adapter_config.json` and the tensors beside it.

`config` reads what was trained and how it counts, `tensors` sorts the tensors by module, `fit`
finds the weight of a base that each belongs to, `arithmetic` computes the merged weights a few rows
at a time, `merging` shows a base with them. `patterns` matches the patterns of a configuration.
"""
