"""Run `oomb plan`: the command, its table, its suggestions and its picture."""
