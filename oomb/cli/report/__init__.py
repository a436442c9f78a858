"""Turn the events of a run's `metrics.jsonl`, one JSON object per line, into an HTML page.

    {"event": "start", "settings": {...}, "engine": {...}, "machine": {...}, "budget": {...}}
        Written at each start, so a resumed run has several. `settings` are those of `oomb train`, `engine` those of
        `oomb.Config`, `machine` comes from `oomb.utils.metrics.machine`. `budget` is optional: the "gpu_bytes" and
        "host_bytes" that pages may take. Without it the report uses the settings `gpu_memory` and `host_memory`, and
        where these are "auto", the machine's memory.
    {"event": "held_out", "step": 0, "loss": 5.5}
    {"event": "step", "step": 1, "loss": ..., "grad_norm": ..., "learning_rate": ..., "step_s": ...,
     "tokens_per_s": ..., "peak_memory_bytes": ..., "gpu_page_bytes": ..., "host_page_bytes": ...,
     "loaded_bytes": ..., "stored_bytes": ..., "waited_s": ..., "mfu": ..., "tokens": ..., "ranks": [...]}
        Every field except `step` is optional. `mfu` is between 0 and 1; `tokens` counts this step, for runs whose steps
        differ. `ranks` has an object per rank of a run on several: "waited_for_ranks_s", "peak_memory_bytes" and
        "host_page_bytes". Other memory and traffic are those of rank 0.
    {"event": "eval", "when": "before" or "after", "step": ..., "perplexity": {...}, "needle": {...}}
        The result of `oomb.eval.run.evaluate`; either part is optional.
    {"event": "sample", "when": "before" or "after", "step": ..., "prompt": "...", "text": "..."}
    {"event": "error", "step": ..., "error": "..."}
    {"event": "end", "stopped": false, "steps": ..., "tokens": ..., "wall_s": ..., "peak_memory_bytes": ...}

Unknown events and fields are ignored. A line that is not JSON, such as the last line of a killed run, is skipped and
counted. When a run resumes from an earlier step, the steps after it are dropped. Of the evaluations before training the
first counts, of those after training the last.
"""
