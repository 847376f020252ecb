"""Callbacks that seal the checkpoints of trainers; each module needs its framework.

from ftckpt.trainers.transformers import SealTransformers   # Hugging Face's Trainer
from ftckpt.trainers.lightning import SealLightning      # Lightning's Trainer
"""
