"""`ftckpt delta`: store what changed. Verbs of two words: `pack`, `unpack`, `info`, `rebase`."""
