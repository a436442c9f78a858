"""`oomb eval`: the command and its terminal output."""
