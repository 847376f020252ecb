"""`ftckpt replay`: is a restart exact? Verbs of two words: `run`, `compare`, `audit`."""
