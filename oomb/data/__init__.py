"""Data: `dataset.open_dataset` turns `--dataset` into examples; `tokenize.tokenize` writes the tokens to disk once.

stdlib | file | folder | JSON lines | table  ->  records  ->  tokens  ->  examples  ->  (held-out, train)
"""
