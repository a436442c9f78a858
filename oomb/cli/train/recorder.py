"""Record every step of a run in its state and in metrics.jsonl."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.cli.train.state import RunInfo, RunState
from oomb.engine.engine import Engine
from oomb.utils.metrics import JsonLines, MemoryMeter


class StepRecorder(TrainerCallback):
    """Callback that records steps. It must come before the display and the trackers, which show what it records.

    Args:
        state: State to update.
        log: The run's metrics.jsonl.
        meter: Meter of peak memory.
        engine: Engine that trains.
        info: Facts about the run.
    """

    def __init__(self, state: RunState, log: JsonLines, meter: MemoryMeter, engine: Engine, info: RunInfo) -> None:
        self.state, self.log, self.meter, self.engine, self.info = state, log, meter, engine, info
        self._step_began = 0.0
        self._tokens_seen = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.state.first_step, self.state.max_steps = state.global_step, state.max_steps
        self.state.is_training = True
        self._tokens_seen = int(state.num_input_tokens_seen)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_began = time.monotonic()
        self.engine.reset_stats()
        self.engine.replicas.waited_s = 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.state.step_times.append(time.monotonic() - self._step_began)
        seen, self._tokens_seen = self._tokens_seen, int(state.num_input_tokens_seen)
        # The trainer counts tokens only if its arguments ask for it.
        self.state.step_tokens.append(self._tokens_seen - seen or self.info.tokens_per_step)
        if self.state.stop_requested:
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs or not self.state.step_times:
            return
        self.state.losses.append(float(logs["loss"]))
        speed, stats, ranks = self.state.last_speed, self.engine.stats, self._ranks()
        mfu = self.info.mfu(speed)
        self.log.write(
            event="step",
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            step_s=round(self.state.step_times[-1], 4),
            tokens=self.state.step_tokens[-1],
            tokens_per_s=round(speed, 1),
            mfu=None if mfu is None else round(mfu, 4),
            peak_memory_bytes=self.meter.peak_bytes,
            gpu_page_bytes=stats.gpu_peak_bytes,
            host_page_bytes=stats.host_peak_bytes,
            loaded_bytes=stats.loaded_bytes,
            stored_bytes=stats.stored_bytes,
            waited_s=round(stats.waited_seconds, 4),
            wall_s=round(self.state.elapsed_s, 2),
            **({"ranks": ranks} if ranks else {}),
        )
        # For the trackers.
        logs["tokens_per_second"] = round(speed, 1)
        if mfu is not None:
            logs["mfu"] = round(mfu, 4)

    def _ranks(self) -> list[dict[str, Any]]:
        """Return what the step took on each rank; nothing if there is only one."""
        replicas = self.engine.replicas
        if replicas.ranks.size == 1:
            return []
        found = replicas.ranks.gather(
            {
                "waited_for_ranks_s": round(replicas.waited_s, 4),
                "peak_memory_bytes": self.meter.peak_bytes,
                "host_page_bytes": self.engine.stats.host_peak_bytes,
            }
        )
        waits = [rank["waited_for_ranks_s"] for rank in found]
        self.state.slowest_rank, self.state.longest_wait_s = waits.index(min(waits)), max(waits)
        return found

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = kwargs.get("metrics", {}).get("eval_loss")
        if self.state.is_training and loss is not None:
            self.held_out_loss(state.global_step, float(loss))

    def held_out_loss(self, step: int, loss: float) -> None:
        """Record a held-out loss."""
        self.state.held_out[step] = loss
        self.log.write(event="held_out", step=step, loss=loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.state.is_training = False

    def fail(self, error: str, *, are_weights_lost: bool) -> None:
        """Record the error that ended training, at once: saving may fail as well."""
        self.state.error, self.state.are_weights_lost = error, are_weights_lost
        self.log.write(event="error", step=self.state.step, error=error)
