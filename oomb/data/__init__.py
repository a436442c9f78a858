"""Data: `open_dataset` turns what `--dataset` names into examples, `tokenizing` writes them to disk once and for all.

stdlib | file | folder | JSON lines | table  ->  records  ->  tokens  ->  windows or documents  ->  (held-out, train)
"""
