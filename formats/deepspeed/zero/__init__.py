"""How ZeRO cuts parameters and their optimizer state over ranks."""
