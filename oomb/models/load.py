"""Named model shapes and the one way to a model: a preset (random weights), a folder, or a hub id."""

from __future__ import annotations

import difflib
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomb.models import weight_files
from oomb.models.presets import PRESETS, is_preset, preset_config
from oomb.utils.dtypes import resolve_device, resolve_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")


def check_model_name(name: str) -> None:
    """Refuse a name that can be neither a preset, nor a model folder, nor a hub id. Touches no network."""
    if is_preset(name):
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if weight_files.holds_adapters(name):
            raise ValueError(
                f"{name} holds LoRA adapters without their base model; merge them first, with their tokenizer: "
                f'peft.AutoPeftModelForCausalLM.from_pretrained("{name}").merge_and_unload().save_pretrained("merged")'
            )
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{name} is a folder without a config.json, so it is no saved model; name a folder that "
                "save_pretrained has written"
            )
        return
    if path.exists():
        raise ValueError(f"{name} is a file; a model is a folder with a config.json and weights")
    # Hub ids are "owner/name". A bare word is a mistyped preset far more often than one of the hub's old aliases.
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
    if not looks_like_hub_id:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5) or near_paths(path)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{name!r} is not a preset, not a folder here and not a hub id (owner/name){hint} "
            f"The presets are {', '.join(PRESETS)}"
        )


def near_paths(path: Path) -> list[str]:
    """Return existing paths spelled much like `path`, closest first."""
    try:
        names = [other.name for other in path.parent.iterdir()]
    except OSError:
        return []
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3)]


def max_positions(config: PretrainedConfig) -> int | None:
    """How many positions a model was made for: those of its config, or what its RoPE is scaled to, if that is more."""
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    if own is None:
        return None
    positions = own
    rope = getattr(text, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type", "default") != "default":
            # Dynamic RoPE counts from the positions of the config.
            is_dynamic = parameters["rope_type"] == "dynamic"
            original = parameters.get("original_max_position_embeddings") or (own if is_dynamic else 0)
            positions = max(positions, int(original * (parameters.get("factor") or 1)))
    return positions


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a preset, a folder or a hub id, without its weights. Python code that comes with it runs only with
    `trust_remote_code`; a model that needs it is refused otherwise, here and in the functions below."""
    check_model_name(name_or_path)
    if is_preset(name_or_path):
        return preset_config(name_or_path)
    from transformers import AutoConfig

    return _from_hugging_face(AutoConfig, name_or_path, trust_remote_code)


def load_model(
    name_or_path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str | None = None,
    num_layers: int | None = None,
    config: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM from a preset (random weights, made on the device itself), a folder or a hub id.

    `num_layers` keeps only the first layers, to try a model that is too large for the machine. `config` is what
    `load_config` returned, where that has been called already. Attention is PyTorch's own (SDPA) where the model's is
    plain, and the model's where it has a soft cap: some releases of transformers would take SDPA and leave it out.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = resolve_device(device)
    precision = resolve_dtype(dtype, place)
    config = load_config(name_or_path, trust_remote_code=trust_remote_code) if config is None else config
    if num_layers is not None:
        _keep_layers(config, num_layers)
    if attn_implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        attn_implementation = "eager"
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if is_preset(name_or_path):
        with torch.device(place):
            return AutoModelForCausalLM.from_config(config, dtype=precision, **options)
    options |= {"dtype": precision, "trust_remote_code": trust_remote_code}
    return load_weights(name_or_path, config=config, **options).to(place)


def meta_model(
    config: PretrainedConfig, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the causal LM of a config on the meta device: parameter shapes without weights or memory."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def load_weights(
    name_or_path: str, *, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """A causal LM from a folder or a hub id, all of whose parameters come from there. `options` are those of
    `from_pretrained`. Raises ValueError where files are missing or damaged, or do not hold what the config describes:
    what is missing transformers would make at random, with a warning."""
    from transformers import AutoModelForCausalLM

    is_quantized = getattr(config, "quantization_config", None) is None and options.get("quantization_config")
    try:
        model, found = _from_hugging_face(
            AutoModelForCausalLM,
            name_or_path,
            trust_remote_code,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:
        # Of any type: of safetensors, of torch, of pickle. The files are a better witness than its words.
        broken = weight_files.find_broken_file(weight_files.model_folder(name_or_path))
        if broken is None:
            raise
        raise ValueError(broken) from error
    wrong = {key: (list(there), list(here)) for key, there, here in found["mismatched_keys"]}
    # Weights that are quantised as they are loaded transformers takes in any shape.
    if is_quantized:
        described = meta_model(config, trust_remote_code=trust_remote_code)
        wrong |= weight_files.mismatched_shapes(name_or_path, described)
    if wrong:
        key, (there, here) = min(wrong.items())
        holder = weight_files.saved_shapes(name_or_path).get(key, (name_or_path, None))[0]
        more = f" ({len(wrong) - 1} more are of other shapes too)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{holder} has {key} of the shape {there}, and config.json asks for {here}{more}: they are of different "
            "models; download or copy both again"
        )
    # Tied parameters are there once, under the first of their names.
    expected = {key for key, _ in model.named_parameters()}
    missing = sorted(expected & set(found["missing_keys"]))
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(
            f"the weights of {name_or_path} lack {len(missing)} of the {len(expected)} parameters that its config.json "
            f"describes, and these would start at random: {names}; download or copy both again"
        )
    return model


def load_tokenizer(name_or_path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id. Presets have none: they read bytes (see `oomb.data`)."""
    from transformers import AutoTokenizer

    if is_preset(name_or_path):
        raise ValueError(f"the preset {name_or_path!r} has no tokenizer; it reads bytes")
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        # A folder of a tokenizer alone has no config.json, so it is not checked as a model is.
        if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            raise ValueError(f"{name_or_path} holds no tokenizer; name one with --tokenizer_name")
    else:
        check_model_name(name_or_path)
    try:
        return _from_hugging_face(AutoTokenizer, name_or_path, trust_remote_code)
    except Exception as error:
        # A file of a later version is a bare Exception to tokenizers.
        if type(error) not in (TypeError, KeyError, Exception):
            raise
        raise ValueError(f"{name_or_path} holds no tokenizer that transformers can load ({error})") from error


def own_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that was saved with a model, or None if there is none that can be read."""
    if is_preset(model):
        return None
    try:
        return load_tokenizer(model, trust_remote_code=trust_remote_code)
    except ValueError:
        return None


def _keep_layers(config: PretrainedConfig, num_layers: int) -> None:
    text = config.get_text_config()
    if not 1 <= num_layers <= text.num_hidden_layers:
        raise ValueError(f"--layers {num_layers} is out of range; this model has {text.num_hidden_layers} layers")
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = list(text.layer_types)[:num_layers]


def _from_hugging_face(auto_class: Any, name: str, trust_remote_code: bool, **options: Any) -> Any:
    # Left out, transformers would ask on standard input, and run what a stray "y" there allows.
    options["trust_remote_code"] = trust_remote_code
    path = Path(name).expanduser()
    if path.is_dir():
        try:
            return auto_class.from_pretrained(str(path), **options)
        except (OSError, ValueError) as error:
            _reject_remote_code(auto_class, name, **options)
            raise ValueError(f"the folder {name!r} could not be loaded: {_first_line(error)}") from error
    offline = _why_offline()
    try:
        return auto_class.from_pretrained(name, local_files_only=offline is not None, **options)
    except (OSError, ValueError) as error:
        _reject_remote_code(auto_class, name, **options)
        if offline is None:
            raise ValueError(f"the hub id {name!r} could not be loaded: {_first_line(error)}") from error
        raise ValueError(
            f"the hub id {name!r} could not be loaded: {offline}, and it is not in the local cache. "
            f"Name a local folder that save_pretrained wrote, or a preset: {', '.join(PRESETS)}"
        ) from error


def _reject_remote_code(
    auto_class: Any, name: str, *, trust_remote_code: bool, config: PretrainedConfig | None = None, **options: Any
) -> None:
    """Raise ValueError if something could not be loaded because that takes Python code of its own."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    folder = weight_files.model_folder(name)
    kind = auto_class.__name__
    file = "tokenizer_config.json" if kind == "AutoTokenizer" else "config.json"
    if trust_remote_code or folder is None or not (folder / file).is_file():
        return
    try:
        described = json.loads((folder / file).read_text(encoding="utf-8"))
        needs_code = kind in described["auto_map"] or isinstance(described["auto_map"], list)
    except (ValueError, KeyError, TypeError):
        return
    # What transformers knows itself it loads with its own code, whatever comes with the files.
    is_known = described.get("model_type") in CONFIG_MAPPING
    if config is not None:
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if needs_code and not is_known:
        raise ValueError(
            f"{name} needs Python code that comes with it (auto_map in its {file}), and such code can do anything that "
            f"you can. Read the .py files in {folder}, and pass --trust_remote_code if you trust them"
        )


@functools.cache
def _why_offline() -> str | None:
    """Why the hub cannot be asked, or None if it can. Asked once: its client would try each file again and again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of whichever HTTP library the client uses
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}; HF_HUB_OFFLINE=1 skips the attempt)"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split(os.linesep)[0] or type(error).__name__
