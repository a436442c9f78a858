"""Where K, V, their gradients and kept attention outputs live between chunks: pages in two tiers.

pages.py     which page belongs to whom: integers
slabs.py     the bytes behind the pages, on the GPU and in pinned host memory
transfer.py  copies between the tiers, ahead of need
rows.py      how a token's bytes lie, and how a past is cut
store.py     the pages of one sequence
past.py      what a chunk sees of a layer's pages
chosen.py    those of them that sparse attention has chosen
known.py     what was chosen, for the CPU
batch.py     many copies in one call, by copy engines
"""
