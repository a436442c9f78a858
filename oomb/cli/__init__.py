"""The `oomb` command line."""
