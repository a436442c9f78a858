"""`oomb train`: its settings, where they come from, the run itself, and what it leaves behind."""
