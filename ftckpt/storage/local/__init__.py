"""Files of this machine: reading, atomic writing, renaming, and the page cache."""
