"""`oomb report`."""
