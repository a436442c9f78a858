"""A trainer whose evaluations return given scores."""

from __future__ import annotations

from typing import Any

import oomb

BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


class Scores(oomb.Trainer):
    """A trainer whose n-th evaluation returns the n-th score."""

    scores = (5.0, 1.0, 4.0, 3.0, 2.0, 2.5)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": self.scores[self.state.global_step - 1]}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
