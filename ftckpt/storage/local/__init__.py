"""Local files: reading, atomic writing, renaming, and the page cache."""
