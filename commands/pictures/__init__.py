"""Pictures and pages: one look for all verbs that make them."""
