"""Who may change a root: locks, leases, and holding several roots at once."""
