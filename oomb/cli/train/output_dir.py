"""What a run leaves behind: its folder, its checkpoints, the saved model, and what it says at the end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from oomb.cli.train import yaml_file
from oomb.cli.train.settings import AUTO, DEMO, LATEST, TYPES, Settings
from oomb.cli.train.yaml_file import CONFIG, METRICS
from oomb.config import Config
from oomb.data.discover import STDLIB
from oomb.models import load
from oomb.trainers import checkpoints

MODEL = "model"
"""In the folder of a run, beside its settings, metrics and checkpoints."""
BESIDE_BYTES = 32 << 20
"""Of a model beside its weights: a tokenizer of a large vocabulary, settings, metrics."""


class CannotSave(ValueError):
    """A trained model could not be written. Nothing of it is left, and what was there before is still there."""


def output_dir_of(settings: Settings) -> Path:
    """Where the run writes. Refuses, before any work, what cannot be written."""
    if settings.output_dir is not None:
        chosen = Path(settings.output_dir).expanduser()
        if chosen.exists() and not chosen.is_dir():
            raise ValueError(f"--output_dir {chosen} is a file; name a folder")
        parent = next(p for p in (chosen, *chosen.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise ValueError(f"--output_dir {chosen} cannot be made: {parent} is a file; name another")
        if not os.access(parent, os.W_OK):
            raise ValueError(f"--output_dir {chosen} cannot be written: {parent} is read-only for you")
        return chosen
    if settings.resume_from_checkpoint is not None:
        return Path(settings.resume_from_checkpoint).parent
    source = Path(settings.model_name_or_path)
    # A model that we saved ourselves is called "model"; its run has the telling name.
    name = source.parent.name if source.name == MODEL else source.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or MODEL
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


def refuse_used(settings: Settings, output_dir: Path, *, may_start_anew: bool = False) -> None:
    """Refuses a folder that holds another run. `may_start_anew`: but for one that has left metrics and nothing to go on
    from."""
    if settings.overwrite_output_dir or settings.resume_from_checkpoint is not None:
        return
    newest = checkpoints.latest(output_dir, in_full=False)
    if newest is not None:
        raise ValueError(
            f"{output_dir} already holds checkpoints; go on from the latest with --resume_from_checkpoint "
            f"{shlex.quote(str(newest))}, name another --output_dir, or pass --overwrite_output_dir"
        )
    remedy = "name another --output_dir, or pass --overwrite_output_dir"
    if (output_dir / MODEL).exists():
        raise ValueError(f"{output_dir} already holds a trained model; {remedy}")
    if checkpoints.find(output_dir):
        raise ValueError(f"{output_dir} already holds checkpoints, none of them whole; {remedy}")
    if (output_dir / METRICS).exists() and not is_broken_off(output_dir) and not may_start_anew:
        raise ValueError(f"{output_dir} already holds the metrics of a run; {remedy}")


def is_broken_off(output_dir: Path) -> bool:
    """Whether a run in this folder was started and ended before its first step. All that it left can be had again."""
    if (output_dir / MODEL).exists() or checkpoints.find(output_dir):
        return False
    events = _events(output_dir)
    return bool(events) and not any(map(_tells_of_a_step, events))


def _events(output_dir: Path) -> list[dict[str, Any] | None]:
    """What a run has told, line by line; None where a line cannot be read."""
    path = output_dir / METRICS
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n") if path.is_file() else []
    events: list[dict[str, Any] | None] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            # The last line is empty, or all that a kill has left of one.
            event = {} if number == len(lines) and '"step"' not in line else None
        events.append(event if isinstance(event, dict) else None)
    return events


def _tells_of_a_step(event: dict[str, Any] | None) -> bool:
    if event is None:
        return True  # who knows
    # With --logging_steps some steps are told of only by what follows them: a held-out loss, the end.
    return event.get("event") == "step" or any(event.get(name, 0) != 0 for name in ("step", "steps"))


def checkpoint_of(settings: Settings) -> str | None:
    """The checkpoint to resume from, by its path."""
    chosen = settings.resume_from_checkpoint
    if chosen not in (LATEST, AUTO):
        return chosen
    if settings.output_dir is None:
        raise ValueError(
            "--resume_from_checkpoint takes the latest checkpoint of --output_dir: name that, or the checkpoint itself"
        )
    newest = checkpoints.latest(Path(settings.output_dir).expanduser())
    if newest is None and chosen == AUTO:
        return None
    if newest is None:
        raise ValueError(
            f"--output_dir {settings.output_dir} holds no checkpoint to resume from: leave out "
            "--resume_from_checkpoint to start at the first step, or pass --resume_from_checkpoint auto"
        )
    return str(newest)


def first_step(settings: Settings) -> int:
    """Steps that the checkpoint to resume from has behind it."""
    if settings.resume_from_checkpoint is None:
        return 0
    folder = Path(settings.resume_from_checkpoint)
    try:
        checkpoints.check(folder)
    except checkpoints.BrokenCheckpoint as error:
        raise ValueError(f"--resume_from_checkpoint {error}") from error
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter != settings.use_peft:
        what = "adapters: add --use_peft" if is_adapter else "whole weights: leave out --use_peft"
        raise ValueError(f"--resume_from_checkpoint {folder} holds {what}")
    if not is_adapter:
        load.check_model_name(settings.resume_from_checkpoint)
    return int(json.loads((folder / checkpoints.STATE).read_text())["global_step"])


def portable(settings: Settings) -> Settings:
    """As config.yaml has them: paths that are there in full, so that the run can be gone on with from any folder."""
    # These words are taken as such even where a folder is called so.
    is_word = {"model_name_or_path": load.is_preset, "dataset": lambda name: name == STDLIB}
    paths: dict[str, Any] = {}
    for key in ("model_name_or_path", "tokenizer_name", "dataset", "output_dir"):
        path = getattr(settings, key)
        if path is not None and Path(path).expanduser().exists() and not is_word.get(key, lambda _: False)(path):
            paths[key] = os.path.abspath(Path(path).expanduser())
    return replace(settings, **paths)


DATA_KEYS = (
    "dataset", "dataset_join", "packing", "max_length", "seed", "per_device_train_batch_size",
    "gradient_accumulation_steps",
)  # fmt: skip
"""Settings that decide which tokens a step reads. A checkpoint's place in the data is a number of batches."""


def changes(settings: Settings) -> list[str]:
    """What is not as the run that wrote the checkpoint had it, and moves the place in the data. Of settings that are
    resolved, but for the checkpoint to resume from; asked before config.yaml is written anew."""
    if settings.resume_from_checkpoint is None:
        return []
    path = Path(settings.resume_from_checkpoint).parent / CONFIG
    try:
        stored = portable(
            Settings(**{key: value for key, value in yaml_file.read(path).values.items() if key in TYPES})
        )
    except ValueError:
        return []  # no file, or one that another version has written
    now = portable(settings)
    keys = [key for key in DATA_KEYS if getattr(now, key) != getattr(stored, key)]
    if stored.packing == "auto":
        keys = [key for key in keys if key != "packing"]
    if now.windows_per_step == stored.windows_per_step:
        # Four windows at once, or two and two, are the same four.
        keys = [key for key in keys if key not in DATA_KEYS[-2:]]
    return [
        f"this run goes on with {key} {_shown(getattr(now, key))}; the checkpoint was trained with "
        f"{_shown(getattr(stored, key))}: its place in the data is not the same"
        for key in keys
    ]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def saved_bytes(model: Any) -> int:
    """What `save` writes, about: the weights, of adapters theirs alone."""
    is_adapter = hasattr(model, "peft_config")
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not is_adapter)


def check_room(model: Any, output_dir: Path) -> None:
    """Before training: a model that cannot be saved is found out now and not after hours."""
    try:
        free = checkpoints.free_bytes(output_dir)
    except OSError as error:
        raise ValueError(f"--output_dir {output_dir} cannot be made: {error.strerror}; name another") from error
    needed = saved_bytes(model)
    if needed > free:
        raise ValueError(
            f"the trained model takes {needed:,} bytes and {free:,} are free in --output_dir {output_dir}: make room, "
            "or name a folder on another disk"
        )


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write beside the place and rename: the folder is either the old model or the whole new one. Raises `CannotSave`
    where it cannot be written."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial)
        checkpoints.sync_files(partial)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Where the disk does not even do this, the next run does it: `checkpoints.clean`.
        with suppress(OSError):
            if old.exists() and not folder.exists():
                old.rename(folder)
        if isinstance(error, Exception) and checkpoints.is_failure_to_write(error):
            kept = "the one that was there before is as it was" if folder.exists() else "nothing of it is left"
            raise CannotSave(f"the trained model could not be saved in {folder} ({_reason(error)}): {kept}") from error
        raise
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save it with a model. Its files can be had again; the model that was trained cannot."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        warnings.warn(
            f"the tokenizer could not be saved with the model ({type(error).__name__}: {_reason(error)}): copy its "
            f"files from {tokenizer.name_or_path or 'where it was loaded from'} before you use the model",
            stacklevel=2,
        )


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest whole one, as far as the disk can be asked."""
    try:
        return checkpoints.latest(output_dir, in_full=False)
    except OSError:
        return None


def save_somewhere(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path, say: Callable[[str], None]
) -> Path:
    """Saves the model in the run's folder, or, where that cannot be written, in a new folder at another place that has
    room. Returns where; `say` is told of what failed. Raises `CannotSave` where no place takes it."""
    needed = saved_bytes(model)
    name = f"oomb-{output_dir.absolute().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    failed: list[str] = []
    for place in chain([output_dir], _other_places()):
        try:
            # A disk that is known to be too small is not filled first, to the harm of others.
            free = checkpoints.free_bytes(place)
        except OSError as error:
            failed.append(f"{place} ({_reason(error)})")
            continue
        if needed > free:
            failed.append(f"{place} ({free:,} bytes are free)")
            continue
        try:
            if place == output_dir:
                saved_to = save(model, tokenizer, output_dir / MODEL)
            else:
                saved_to = _save_in_new(place / name, model, tokenizer)
        except (CannotSave, OSError) as error:
            failed.append(f"{place} ({_reason(error.__cause__ or error)}; {free:,} bytes were free)")
            continue
        if failed:
            say(f"THE MODEL IS NOT IN {output_dir}, BUT IN {saved_to}. It could not be saved in {', '.join(failed)}")
        return saved_to
    newest = newest_checkpoint(output_dir)
    rest = (
        f"make room and go on from the newest checkpoint, {newest}, which from_pretrained reads as well"
        if newest
        else "make room, or name an --output_dir on another disk, and train again: there is no checkpoint"
    )
    raise CannotSave(
        f"the trained model takes {needed:,} bytes and could not be saved anywhere, in {', '.join(failed)}: {rest}"
    )


def _other_places() -> Iterator[Path]:
    """Where a model may be put for once. The folder for temporary files comes last: it may be in memory."""
    seen: set[Path] = set()
    for find in (Path.home, Path.cwd, lambda: Path(tempfile.gettempdir())):
        try:
            place = find()
            is_there = place.is_dir()
        except (OSError, RuntimeError):  # none that can be written or asked, deleted, no home
            continue
        if is_there and place not in seen:
            seen.add(place)
            yield place


def _save_in_new(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """The folder is taken away again if the model does not come into it."""
    folder.mkdir()
    try:
        return save(model, tokenizer, folder / MODEL)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]


def how_to_go_on(output_dir: Path) -> str:
    """After a stop: the command that does the rest."""
    config = shlex.quote(str(output_dir / CONFIG))
    return f"To go on:\n  {program()} train {config} --resume_from_checkpoint"


def what_next(settings: Settings, num_tokens: int, model: Any, saved_to: Path) -> str:
    """After a whole run: commands worth a try."""
    if settings.use_peft:
        return _with_adapters(settings, saved_to)
    longer = settings.max_length * 2
    positions = load.positions_of(model.config)
    is_possible = num_tokens >= longer and (positions is None or longer <= positions)
    context = longer if is_possible else settings.max_length
    where = {"device": settings.device, "dtype": settings.dtype}
    engine = {key: value for key, value in settings.engine.items() if key in ("kernels", "fuse", "keep_attention")}
    go_on = {"model_name_or_path": str(saved_to), "dataset": settings.dataset, "learning_rate": settings.learning_rate}
    go_on |= {"packing": settings.packing, "dataset_join": settings.dataset_join}
    go_on |= {"max_length": context, "max_steps": 10, **where, **settings.engine}
    trust = " --trust_remote_code" if settings.trust_remote_code else ""
    verify = f"verify {shlex.quote(str(saved_to))}{_options({**where, **engine})}{trust}"
    commands = {
        verify: "check its gradients on this machine",
        f"train{_options(go_on)}{trust}": "go on at twice the context" if is_possible else "go on",
    }
    if settings.model_name_or_path == DEMO:
        commands["train --dataset FOLDER"] = "the same on your own text"
    return "\n".join(["Next:", *(f"  {program()} {command}\n      {what}" for command, what in commands.items())])


def _with_adapters(settings: Settings, saved_to: Path) -> str:
    if load.is_preset(settings.model_name_or_path):
        return (
            f"The adapters belong to random weights that are not saved: {settings.model_name_or_path} is a preset. "
            "They show speed and memory; name a folder or a hub id to train something to keep."
        )
    folder = repr(str(saved_to))
    merged = repr(str(saved_to.with_name("merged")))
    lines = [
        "To load the adapters on top of the model, or to merge them into it:",
        "  from peft import AutoPeftModelForCausalLM",
        f"  model = AutoPeftModelForCausalLM.from_pretrained({folder})",
        f"  model.merge_and_unload().save_pretrained({merged})",
    ]
    if any(saved_to.glob("tokenizer*")):
        lines += [
            "  from transformers import AutoTokenizer",
            f"  AutoTokenizer.from_pretrained({folder}).save_pretrained({merged})",
        ]
    return "\n".join(lines)


def _options(chosen: dict[str, Any]) -> str:
    """As they are typed; those that are the default anyway are left out."""
    defaults = {**asdict(Settings()), **asdict(Config())}
    text = ""
    for name, value in chosen.items():
        if value is not None and value != defaults[name]:
            text += f" --{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"
    return text


def program() -> str:
    """How this program is called from the user's shell: by its name where that is found, else by its path."""
    if shutil.which("oomb"):
        return "oomb"
    script = Path(sys.executable).parent / "oomb"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m oomb"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
