"""Where K, V, their gradients and kept attention outputs live between chunks: pages in two tiers.

pages.py     which page belongs to whom: integers
slabs.py     the bytes behind the pages, on the GPU and in pinned host memory
transfer.py  copies between the tiers, ahead of need
store.py     the pages of one sequence, as attention sees them
rounding.py  adding to gradients at rest
"""

from oomb.memory.pages import GPU, HOST, OutOfPages
from oomb.memory.rounding import accumulate_, accumulate_reference
from oomb.memory.slabs import Tiers, free_gpu_bytes, free_host_bytes
from oomb.memory.store import LayerPast, LayerSpec, PageStore, Row, row_bytes, segment_bounds, staging_bytes

__all__ = [
    "GPU",
    "HOST",
    "LayerPast",
    "LayerSpec",
    "OutOfPages",
    "PageStore",
    "Row",
    "Tiers",
    "accumulate_",
    "accumulate_reference",
    "free_gpu_bytes",
    "free_host_bytes",
    "row_bytes",
    "segment_bounds",
    "staging_bytes",
]
