"""`oomb train`."""
