"""Load configs, models and tokenizers by name: a preset (random weights), a folder or a hub id."""

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
from oomb.utils.files import near_paths

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")


def check_model_name(name: str) -> None:
    """Raise ValueError if a name cannot be a preset, a model folder or a hub id. Uses no network."""
    if is_preset(name):
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if weight_files.holds_adapters(name):
            raise ValueError(
                f"{name} holds LoRA adapters without their base model. Merge them first, and save the tokenizer there: "
                f'peft.AutoPeftModelForCausalLM.from_pretrained("{name}").merge_and_unload().save_pretrained("merged")'
            )
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{name} has no config.json, so it is not a saved model: name a folder written by save_pretrained"
            )
        return
    if path.exists():
        raise ValueError(f"{name} is a file: name the folder that holds config.json and the weights")
    # The hub has a few old aliases without an owner, but a bare word is far more often a mistyped preset.
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
    if not looks_like_hub_id:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5) or near_paths(path)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{name!r} is not a preset, a folder here or a hub id (owner/name){hint} "
            f"The presets are {', '.join(PRESETS)}"
        )


def max_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions a model supports, including its RoPE scaling, or None if the config does not say."""
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    if own is None:
        return None
    positions = own
    rope = getattr(text, "rope_parameters", None) or {}
    # Some configs have one set of parameters, some one per layer type.
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type", "default") != "default":
            # Dynamic RoPE scales the positions of the config.
            is_dynamic = parameters["rope_type"] == "dynamic"
            original = parameters.get("original_max_position_embeddings") or (own if is_dynamic else 0)
            positions = max(positions, int(original * (parameters.get("factor") or 1)))
    return positions


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of a preset, a folder or a hub id.

    Args:
        name_or_path: Name of the model.
        trust_remote_code: Run Python code that comes with the model. Without it, a model that needs such code raises
            ValueError.

    Examples:
        >>> load_config("qwen2.5-7b").num_hidden_layers
        28
    """
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
    """Return a causal LM from a preset, a folder or a hub id.

    Args:
        name_or_path: Name of the model. Presets get random weights, created on the device.
        dtype: "auto" or the name of a dtype.
        device: "auto" or the name of a device.
        attn_implementation: Attention of the model's own forward, as in `from_pretrained`.
        num_layers: Keep only the first layers, to try a model that is too large for the machine.
        config: What `load_config` returned, to avoid loading it again.
        trust_remote_code: Run Python code that comes with the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = resolve_device(device)
    precision = resolve_dtype(dtype, place)
    config = load_config(name_or_path, trust_remote_code=trust_remote_code) if config is None else config
    if num_layers is not None:
        _keep_layers(config, num_layers)
    if attn_implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Some releases of transformers would pick SDPA, which ignores the soft cap.
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
    """Return a causal LM from a folder or a hub id, with every parameter loaded from its files.

    transformers would initialize missing parameters at random and only warn.

    Args:
        name_or_path: Folder or hub id.
        config: Config of the model.
        trust_remote_code: Run Python code that comes with the model.
        options: Other arguments of `from_pretrained`.

    Raises:
        ValueError: Files are missing or damaged, or do not match the config.
    """
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
        # safetensors, torch and pickle raise errors of any type; inspecting the files tells what is wrong.
        broken = weight_files.find_broken_file(weight_files.model_folder(name_or_path))
        if broken is None:
            raise
        raise ValueError(broken) from error
    wrong = {key: (list(saved), list(expected)) for key, saved, expected in found["mismatched_keys"]}
    # transformers does not compare shapes of weights that it quantizes while loading.
    if is_quantized:
        described = meta_model(config, trust_remote_code=trust_remote_code)
        wrong |= weight_files.mismatched_shapes(name_or_path, described)
    if wrong:
        key, (saved, expected) = min(wrong.items())
        holder = weight_files.saved_shapes(name_or_path).get(key, (name_or_path, None))[0]
        more = f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{holder} has {key} of shape {saved}, but config.json describes {expected}{more}: they belong to "
            "different models; download or copy both again"
        )
    # `named_parameters` lists tied parameters once.
    names = {key for key, _ in model.named_parameters()}
    missing = sorted(names & set(found["missing_keys"]))
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(
            f"the weights of {name_or_path} lack {len(missing)} of the {len(names)} parameters that its config.json "
            f"describes, which would be initialized at random: {listed}; download or copy both again"
        )
    return model


def load_tokenizer(name_or_path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or a hub id, or raise ValueError if it has none. Presets read bytes instead."""
    from transformers import AutoTokenizer

    if is_preset(name_or_path):
        raise ValueError(f"the preset {name_or_path!r} has no tokenizer: it reads bytes")
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        # A folder with only a tokenizer has no config.json, so `check_model_name` would refuse it.
        if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            raise ValueError(f"{name_or_path} has no tokenizer: name one with --tokenizer_name")
    else:
        check_model_name(name_or_path)
    try:
        return _from_hugging_face(AutoTokenizer, name_or_path, trust_remote_code)
    except Exception as error:
        # tokenizers raises a bare Exception for files of a later version.
        if type(error) not in (TypeError, KeyError, Exception):
            raise
        raise ValueError(f"{name_or_path} has no tokenizer that transformers can load ({error})") from error


def own_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer saved with a model, or None if there is none that loads."""
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
    # Always pass it: by default, transformers asks on standard input, and a stray "y" there would run the code.
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
            f"Name a local folder written by save_pretrained, or a preset: {', '.join(PRESETS)}"
        ) from error


def _reject_remote_code(
    auto_class: Any, name: str, *, trust_remote_code: bool, config: PretrainedConfig | None = None, **options: Any
) -> None:
    """Raise ValueError if loading failed because the model or tokenizer needs Python code of its own."""
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
    # transformers loads architectures it knows with its own code, even if other code is next to the files.
    is_known = described.get("model_type") in CONFIG_MAPPING
    if config is not None:
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if needs_code and not is_known:
        raise ValueError(
            f"{name} needs Python code that comes with it (auto_map in its {file}), and that code runs with all your "
            f"permissions. Read the .py files in {folder}, and pass --trust_remote_code if you trust them"
        )


@functools.cache
def _why_offline() -> str | None:
    """Return why the hub cannot be reached, or None if it can. Cached, because its client retries for every file."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of any type: the client may use any HTTP library
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}; HF_HUB_OFFLINE=1 skips the attempt)"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split(os.linesep)[0] or type(error).__name__
