"""A page about a training run, from the events in its `metrics.jsonl`: one JSON object a line.

    {"event": "start", "settings": {...}, "engine": {...}, "machine": {...}, "budget": {...}}
        One at each start; a run that was resumed has several. `settings` are those of `oomb train`, `engine` of
        `oomb.Config`, `machine` what `oomb.utils.metrics.machine` says. `budget` may be left out: "gpu_bytes" and
        "host_bytes" that pages may take there. The settings `gpu_memory` and `host_memory` stand in for it, and
        where those are "auto" the machine's memory does.
    {"event": "held_out", "step": 0, "loss": 5.5}
    {"event": "step", "step": 1, "loss": ..., "grad_norm": ..., "learning_rate": ..., "step_s": ...,
     "tokens_per_s": ..., "peak_memory_bytes": ..., "gpu_page_bytes": ..., "host_page_bytes": ...,
     "loaded_bytes": ..., "stored_bytes": ..., "waited_s": ..., "mfu": ..., "tokens": ...}
        All but `step` may be missing. `mfu` is a share, 0 to 1; `tokens` those of this step, where steps differ.
    {"event": "eval", "when": "before" or "after", "step": ..., "perplexity": {...}, "needle": {...}}
        What `oomb.eval.run.evaluate` returns; either part may be missing.
    {"event": "sample", "when": "before" or "after", "step": ..., "prompt": "...", "text": "..."}
    {"event": "end", "stopped": false, "steps": ..., "tokens": ..., "wall_s": ..., "peak_memory_bytes": ...}

Other events and fields are passed over. A line that is no JSON, the last one of a run that was killed for example, is
left out and counted. A run that was resumed goes back some steps: what it had done beyond is dropped. Of what was
evaluated before training the first counts, of what was evaluated after it the last.
"""
