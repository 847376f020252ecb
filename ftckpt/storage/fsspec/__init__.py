"""Every other store that fsspec reaches: gs://, az://, and what else is installed."""
