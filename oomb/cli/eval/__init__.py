"""`oomb eval`."""
