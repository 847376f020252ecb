"""The version, alone, so that what records it need not import the Python API."""

__version__ = "0.1.0"
