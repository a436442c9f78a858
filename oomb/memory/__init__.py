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

from oomb.memory.chosen import NUM_BUFFERS, Choosing, buffer_bytes, most_chosen, table_bytes
from oomb.memory.pages import GPU, HOST, OutOfPages
from oomb.memory.past import LayerPast
from oomb.memory.rows import LayerSpec, Row, pair, pair_bytes, row_bytes, segment_bounds, staging_bytes
from oomb.memory.slabs import GAPS, Tiers, free_gpu_bytes, free_host_bytes, usable_gpu_bytes
from oomb.memory.store import PageStore

__all__ = [
    "GAPS",
    "GPU",
    "HOST",
    "NUM_BUFFERS",
    "Choosing",
    "LayerPast",
    "LayerSpec",
    "OutOfPages",
    "PageStore",
    "Row",
    "Tiers",
    "buffer_bytes",
    "free_gpu_bytes",
    "free_host_bytes",
    "most_chosen",
    "pair",
    "pair_bytes",
    "row_bytes",
    "segment_bounds",
    "staging_bytes",
    "table_bytes",
    "usable_gpu_bytes",
]
