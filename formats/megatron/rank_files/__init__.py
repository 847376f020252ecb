"""The files of single ranks in Megatron's legacy layout."""
