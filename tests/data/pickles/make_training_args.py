"""Write `training_args.bin` as a transformers Trainer does (transformers 5.23.0, torch 2.13).

python make_training_args.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="out", use_cpu=True, report_to=[], lr_scheduler_type="cosine", eval_strategy="steps",
    eval_steps=3, hub_strategy="end", learning_rate=3e-4,
)  # fmt: skip
torch.save(arguments, Path(__file__).with_name("training_args.bin"))
