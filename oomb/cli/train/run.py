"""The run behind `oomb train`: check everything, load, train on `oomb.Trainer`, save, sum up."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from transformers import PrinterCallback

from oomb.cli.errors import EXIT_INTERRUPTED, EXIT_NOT_AS_ASKED
from oomb.cli.progress import bytes_bar
from oomb.cli.report.page import write_report
from oomb.cli.train import output_dir as output_dir_module
from oomb.cli.train import prepare, save, summary, yaml_file
from oomb.cli.train.before_after import BeforeAfterEval
from oomb.cli.train.display import RunInfo, TrainingDisplay
from oomb.cli.train.prepare import Precision
from oomb.cli.train.save_timer import KEPT, SaveTimer
from oomb.cli.train.settings import AUTO, TrainSettings
from oomb.cli.train.signals import StopRequested
from oomb.cli.train.yaml_file import CONFIG, METRICS
from oomb.config import Config
from oomb.data.discover import STDLIB, find_documents
from oomb.data.tokens import Examples, Split
from oomb.memory.host import free_host_bytes
from oomb.models import load
from oomb.models.probe import model_shape
from oomb.planner.flops import step_flops
from oomb.planner.hardware import peak_flops
from oomb.planner.request import Placement, host_budget
from oomb.trainers import checkpoints
from oomb.trainers.finite import NonFiniteError
from oomb.trainers.trainer import Trainer
from oomb.utils import dtypes, files
from oomb.utils.lock import locked
from oomb.utils.metrics import JsonLines, MemoryMeter, machine
from oomb.utils.units import count, gib


def run(settings: TrainSettings, console: Console) -> int:
    """Train. Returns the exit code. Everything that can be wrong with the settings is raised before the first step."""
    config = Config.from_dict(settings.engine)
    prepare.check_packages(settings)
    load.check_model_name(settings.model_name_or_path)
    device = prepare.device_of(settings)
    dtypes.resolve_dtype(settings.dtype, device)
    if settings.dataset != STDLIB:
        find_documents(settings.dataset)
    is_auto = settings.resume_from_checkpoint == AUTO
    settings = replace(settings, resume_from_checkpoint=output_dir_module.checkpoint_of(settings))
    first_step = output_dir_module.first_step(settings)
    output_dir = output_dir_module.output_dir_of(settings)
    with locked(output_dir):
        output_dir_module.check_unused(settings, output_dir, may_start_anew=is_auto)
        if is_auto:
            found = f"going on from {settings.resume_from_checkpoint}"
            found = found if first_step else f"no checkpoint in {output_dir}: starting at the first step"
            console.print(escape(found), highlight=False, soft_wrap=True)
        return _run(settings, config, device, output_dir, first_step, console)


def _run(
    settings: TrainSettings, config: Config, device: torch.device, output_dir: Path, first_step: int, console: Console
) -> int:
    """In a folder that no other run writes to."""
    started, resume = time.monotonic(), settings.resume_from_checkpoint
    for said in (
        prepare.what_a_preset_is(settings),
        prepare.unused_settings(settings),
        prepare.skipped_check(settings),
    ):
        if said is not None:
            console.print(f"[yellow]{escape(said)}[/]", highlight=False, soft_wrap=True)

    # Text is cheaper to find fault with than weights are to load.
    model_config = load.load_config(settings.model_name_or_path, trust_remote_code=settings.trust_remote_code)
    if settings.use_peft:
        prepare.check_targets(settings, model_config)
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    precision = prepare.precision_of(settings, gpu_bytes, model_config)
    tokenizer = prepare.load_tokenizer(settings, model_config)
    vocab_size = model_config.get_text_config().vocab_size
    with bytes_bar(console, "checking the dataset", "checked", transient=True) as report_check:
        split = prepare.load_examples(settings, tokenizer, vocab_size, device, report_check)
    probe = BeforeAfterEval(settings, split, tokenizer)
    told = prepare.resolved(replace(settings, packing=split.packing), output_dir, device, split.num_examples)
    for change in output_dir_module.data_changes(replace(told, resume_from_checkpoint=resume)):
        console.print(f"[yellow]{escape(change)}[/]", highlight=False, soft_wrap=True)
    arguments = prepare.arguments_of(told, device, precision.mixed)
    if first_step >= arguments.max_steps:
        raise ValueError(
            f"{resume} is at step {first_step} and --max_steps is {arguments.max_steps}: "
            "there is nothing left to train; raise --max_steps"
        )
    model = prepare.load_model(settings, model_config, precision.dtype, device)
    trainer = prepare.trainer_of(told, model, arguments, config, split)
    trainer.remove_callback(PrinterCallback)
    trainer.keep_free_bytes = checkpoints.weight_bytes(model) + save.BESIDE_BYTES
    if settings.save_minutes:
        timed = SaveTimer(settings.save_minutes)
        trainer.add_callback(timed)
        if settings.save_total_limit is None:
            trainer.about_to_delete = lambda: timed.about_to_delete(output_dir)
    host_limit = host_budget(config, free_host_bytes())
    with console.status("taking memory for K, V and their gradients"), trainer.accelerator.autocast():
        # Fails here, with the numbers, if a step will not fit.
        placement = trainer.engine.reserve(settings.per_device_train_batch_size, prepare.longest(settings, split))

    save.check_room(model, output_dir)
    if resume is None and output_dir_module.never_started(output_dir):
        text = escape(f"overwriting what a start that was broken off before its first step left in {output_dir}")
        console.print(text, highlight=False, soft_wrap=True)
    if resume is None:
        # Before the settings of this run replace those of the run that wrote them.
        checkpoints.set_aside(output_dir, None)
    config_text = yaml_file.write(output_dir_module.with_absolute_paths(told))
    files.write_text(output_dir / CONFIG, config_text)
    meter = MemoryMeter(device)
    log = JsonLines(output_dir / METRICS, append=resume is not None)
    facts = _facts(told, trainer, split, placement, gpu_bytes, host_limit)
    display = TrainingDisplay(console, log, meter, trainer.engine, facts)
    with display.interrupts as interrupts:
        saved_to: Path | None = None
        try:
            with log:
                # Before the trackers, which report what it adds.
                trainer.callback_handler.callbacks.insert(0, display)
                trainer.engine.progress = display.chunk_done
                log.write(
                    event="start",
                    settings=asdict(settings),
                    engine=asdict(config),
                    machine=machine(),
                    output_dir=os.path.abspath(output_dir),
                    budget={"gpu_bytes": placement.gpu_bytes, "host_bytes": host_limit},
                )
                display.print(_describe(told, model, split, trainer, device, config, placement, precision))

                before = _held_out_loss(trainer, split.held_out, display)
                if before is not None:
                    log.write(event="held_out", step=first_step, loss=before)
                    when = "before training" if resume is None else f"of the checkpoint, step {first_step}"
                    display.print(f"held-out loss {when}: {before:.4f}")
                if resume is None:
                    probe.run("before", trainer, display, first_step)
                ended = "stopped" if interrupts.terminated else _train(trainer, display, resume)
                stopped = ended != "whole"
                if display.step_times and ended != "lost":
                    interrupts.protect("saving; the program ends after that. Ctrl-C again ends it without saving")
                    if stopped:
                        _save_checkpoint(trainer, display)
                    saved_to = save.save_somewhere(model, tokenizer, output_dir, lambda line: _warn(line, display))
                    if saved_to.parent != output_dir:
                        _move(log, saved_to.parent, config_text, display)
                step = trainer.state.global_step
                after = display.held_out.get(step)
                if after is None and not stopped:
                    after = _held_out_loss(trainer, split.held_out, display)
                    if after is not None:
                        log.write(event="held_out", step=step, loss=after)
                if not stopped:
                    probe.run("after", trainer, display, step)
                log.write(
                    event="end",
                    stopped=stopped,
                    steps=step,
                    tokens=sum(display.step_tokens),
                    tokens_per_s=round(display.tokens_per_second, 1) if display.step_times else None,
                    peak_memory_bytes=meter.peak_bytes,
                    wall_s=round(time.monotonic() - started, 2),
                    **({} if display.error is None else {"error": display.error}),
                )
        except KeyboardInterrupt:
            display.close()
            files.remove_leftovers(output_dir)
            what = f"the trained model is in {saved_to}" if saved_to else _nothing_saved(output_dir)
            console.print(f"[bold red]ended by Ctrl-C[/]; {what}", highlight=False, soft_wrap=True)
            if output_dir_module.newest_checkpoint(output_dir) is not None:
                console.print(summary.resume_hint(output_dir), highlight=False, markup=False, soft_wrap=True)
            return EXIT_INTERRUPTED
        interrupts.release()
        if stopped:
            where = f"the model as of then is in {saved_to}" if saved_to else _nothing_saved(output_dir)
            text = escape(f"stopped after step {step} of {arguments.max_steps}; {where}")
            console.print(f"[yellow]{text}[/]", highlight=False, soft_wrap=True)
        if ended == "lost" and output_dir_module.newest_checkpoint(output_dir) is not None:
            console.print(summary.resume_hint(output_dir), highlight=False, markup=False, soft_wrap=True)
        if saved_to is not None:
            places = {"model": saved_to, "metrics": log.path, "settings": output_dir / CONFIG}
            if settings.report:
                places |= _reported(log.path.parent, display)
            title = "Stopped" if stopped else "Done"
            console.print(display.summary(title, (before, after), time.monotonic() - started, places))
            next_steps = (
                (summary.resume_hint(output_dir) if output_dir_module.newest_checkpoint(output_dir) is not None else "")
                if stopped
                else summary.what_next(settings, split.num_tokens, model, saved_to)
            )
            console.print(next_steps, highlight=False, markup=False, soft_wrap=True)
        if ended in ("failed", "lost") or (saved_to is not None and saved_to.parent != output_dir):
            return EXIT_NOT_AS_ASKED
        return interrupts.exit_code if stopped or interrupts.terminated else 0


def _move(log: JsonLines, folder: Path, config_text: str, display: TrainingDisplay) -> None:
    """What belongs to a model that had to be saved elsewhere goes with it."""
    with suppress(OSError):
        files.write_text(folder / CONFIG, config_text)
    try:
        log.move_to(folder / METRICS)
    except OSError as error:
        _warn(f"{log.path} could not be copied to {folder} ({error.strerror or error})", display)


def _reported(run_dir: Path, display: TrainingDisplay) -> dict[str, Path]:
    """A page about a finished run is not worth the run."""
    try:
        return {"report": write_report(run_dir)}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        again = f"{summary.program()} report {shlex.quote(str(run_dir))}"
        _warn(f"the report was not written ({reason}); to try again: {again}", display)
        return {}


def _nothing_saved(output_dir: Path) -> str:
    again = "; the same command starts anew" if output_dir_module.never_started(output_dir) else ""
    return f"nothing was saved{again}"


def _facts(
    settings: TrainSettings,
    trainer: Trainer,
    split: Split,
    placement: Placement,
    gpu_bytes: int | None,
    host_limit: int,
) -> RunInfo:
    on_gpu = gpu_bytes is not None
    length, engine = settings.max_length, trainer.engine
    # What 4-bit layers hold is not what they multiply with.
    flops = (
        None
        if settings.load_in_4bit
        else step_flops(model_shape(engine.model.lm), length, engine.config.keys_read(length))
    )
    held_out = len(split.held_out) if split.held_out is not None else 0
    return RunInfo(
        title=f"{settings.model_name_or_path} on {settings.dataset}, {settings.tokens_per_step:,} tokens a step",
        tokens_per_step=settings.tokens_per_step,
        num_eval_batches=-(-held_out // settings.per_device_train_batch_size),
        flops_per_step=None if flops is None else flops * settings.examples_per_step,
        peak_flops=peak_flops(torch.cuda.get_device_name(0)) if on_gpu else None,
        device_bytes=gpu_bytes if on_gpu else psutil.virtual_memory().total,
        gpu_page_bytes=placement.gpu_bytes,
        host_page_bytes=host_limit,
    )


def _train(
    trainer: Trainer, display: TrainingDisplay, resume: str | None
) -> Literal["whole", "stopped", "failed", "lost"]:
    """Train; "stopped" where a signal ended it early, "failed" where an error did and the weights are those of a step,
    "lost" where the weights are not finite. A signal ends it between two chunks, never inside an optimizer step."""
    notice = "stopping at the next chunk and saving; Ctrl-C again ends without saving"
    display.interrupts.stop(notice)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except StopRequested:
        return "stopped"
    except checkpoints.CheckpointNotSaved as error:
        # Of the last step: all is trained. The model takes a third of a checkpoint's room, and may still find it.
        _warn(str(error), display)
    except Exception as error:
        if not isinstance(error, NonFiniteError) and (trainer.is_stepping or not display.step_times):
            raise
        is_lost = isinstance(error, NonFiniteError) and error.weights_lost
        display.fail(error)
        return "lost" if is_lost else "failed"
    finally:
        display.close()
    is_cut_short = display.interrupts.stop_requested and trainer.state.global_step < trainer.state.max_steps
    return "stopped" if is_cut_short else "whole"


def _save_checkpoint(trainer: Trainer, display: TrainingDisplay) -> None:
    try:
        trainer.save_checkpoint()
    except OSError as error:  # `NotSaved`, or of a tracker that was told of it
        _warn(str(error), display)


def _warn(line: str, display: TrainingDisplay) -> None:
    display.close()
    display.print(f"[yellow]{escape(line)}[/]")


def _held_out_loss(trainer: Trainer, held_out: Examples | None, display: TrainingDisplay) -> float | None:
    """The held-out loss, or None where there is none. Nothing that happens here is worth a trained model."""
    if held_out is None or display.interrupts.terminated:
        return None
    display.interrupts.stop("skipping the held-out loss at the next chunk; Ctrl-C again ends the program")
    num_batches = -(-len(held_out) // trainer.args.per_device_eval_batch_size)
    try:
        with display.evaluating("held-out loss", num_batches):
            return float(trainer.evaluate(held_out)["eval_loss"])
    except StopRequested:
        return None
    except Exception as error:
        if not display.step_times:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        text = escape(f"the held-out loss failed and is left out ({reason})")
        display.print(f"[yellow]{text}[/]")
        return None


def _describe(
    settings: TrainSettings,
    model: Any,
    split: Split,
    trainer: Trainer,
    device: torch.device,
    config: Config,
    placement: Placement,
    precision: Precision,
) -> str:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    adapters = f" (trained: {trained / 1e6:,.2f}M in adapters)" if settings.use_peft else ""
    steps = trainer.args.max_steps
    thing = "window" if split.packing == "windows" else "example"
    numbers = "4 bits" if settings.load_in_4bit else precision.dtype
    numbers += " computed in bfloat16" if precision.mixed and precision.dtype != "bfloat16" else ""
    model_name, dataset = escape(settings.model_name_or_path), escape(settings.dataset)
    optimizer = ", AdamW's states on the host" if settings.optim == "offloaded_adamw" else ""
    lines = [
        f"[bold]{model_name}[/]: {sum(p.numel() for p in parameters) / 1e6:,.2f}M parameters{adapters}, {numbers}, "
        f"on {device}",
        f"[bold]{dataset}[/]: {_what_is_read(settings, split, steps, thing)}; {_held_out(settings, split, thing)}",
        f"{count(steps, 'step')} of {count(settings.examples_per_step, thing)}, learning rate "
        f"{trainer.args.learning_rate:g}, chunks of {config.chunk_size:,} tokens{optimizer}",
        _when_saved(settings),
    ]
    if placement.capacity:
        kept = "" if placement.out_tokens == placement.capacity else f" of {placement.out_tokens:,} tokens"
        what = "K, V and their gradients" + (f", attention outputs{kept}" if placement.keep_attention else "")
        host = f", {gib(placement.host_bytes)} on the host" if placement.host_bytes else ""
        lines.append(f"{what}: {gib(placement.gpu_bytes)} on {device}{host}")
    if precision.warning is not None:
        lines.append(f"[yellow]{escape(precision.warning)}[/]")
    positions = load.max_positions(model.config)
    if positions is not None and settings.max_length > positions:
        lines.append(
            f"[yellow]--max_length {settings.max_length:,} is more than the {positions:,} positions this model was "
            "made for (max_position_embeddings): lower it, or scale RoPE, with YaRN for example, by rope_parameters "
            "in the model's config.json (docs/quickstart.md)[/]"
        )
    lines += [f"[yellow]{escape(note)}[/]" for note in split.notes]
    return "\n".join(lines)


def _when_saved(settings: TrainSettings) -> str:
    every = [] if settings.save_steps is None else [count(settings.save_steps, "step")]
    every += [f"{settings.save_minutes:g} minutes"] if settings.save_minutes else []
    if not every:
        return "no checkpoints, by --save_minutes 0"
    kept, which = settings.save_total_limit, ""
    if kept is None and settings.save_minutes:
        kept, which = KEPT, " of the latter" if len(every) == 2 else ""
    rest = "" if kept is None else f"; the newest {kept:,}{which} are kept"
    return f"a checkpoint every {' and every '.join(every)}{rest}"


def _what_is_read(settings: TrainSettings, split: Split, steps: int, thing: str) -> str:
    """How many windows there are, how many of them the run reads, and how often."""
    there, read = split.num_examples, len(split.train)
    passes = steps * settings.examples_per_step / read
    often = f"{passes:.1f} times" if passes > 1.05 else "once"
    least = "" if split.is_all_read else "at least "
    size = f" of {settings.max_length:,} tokens"
    if split.packing != "windows":
        size = f" (from {count(split.num_documents, 'document')}, long ones in pieces), "
        size += f"the longest of {prepare.longest(settings, split):,} tokens,"
    found = f"{least}{count(there, thing)}{size} to train on"
    if read == there and split.is_all_read:
        return f"{found}, each read {often}"
    return f"{found}, of which {count(steps, 'step')} read the first {read:,}, {often}"


def _held_out(settings: TrainSettings, split: Split, thing: str) -> str:
    if split.held_out is not None:
        asked, held_out = settings.max_eval_samples, len(split.held_out)
        why = f" of --max_eval_samples {asked:,}: a fifth of the data at most" if held_out < asked else ""
        return f"{count(held_out, thing)} held out{why}"
    if settings.max_eval_samples == 0:
        return "none held out, by --max_eval_samples 0"
    return f"none held out: the data is a single {thing}, a smaller --max_length would make more of it"
