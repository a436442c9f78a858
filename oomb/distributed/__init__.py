"""Let several ranks work on one training run: the mesh, collectives, data parallelism, and failures of ranks."""
