"""Stores reached through fsspec: gs://, az://, and other installed filesystems."""
