"""What a root holds, entry by entry, as a retention plan needs it."""
