"""One module per command of `oomb`. Thin: torch comes once a command runs."""
