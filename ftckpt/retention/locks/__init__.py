"""Lock roots while they are changed: locks, leases, and several roots at once."""
