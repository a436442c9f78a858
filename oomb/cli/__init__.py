"""The `oomb` command line: thin commands, and the larger apps `train`, `plan` and `report` in folders of their own."""
