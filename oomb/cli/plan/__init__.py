"""`oomb plan`."""
