"""Configs, tokenizers and models from a folder or the Hub, as the flags say."""

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from toolkit import adapters, attention, dropout
from toolkit.arguments import Arguments
from toolkit.data.demo import on_hub
from toolkit.errors import UserError
from toolkit.report.console import say, warn

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def load_config(args: Arguments, **changes: Any) -> "PretrainedConfig":
    """The model's config with `changes`, and with `--dropout` in every dropout field."""
    from transformers import AutoConfig

    name = args.config_name or args.model_name_or_path
    config = _load("config", name, AutoConfig.from_pretrained, args, **changes)
    if args.dropout is not None:
        for key, value in config.to_dict().items():
            if ("dropout" in key or "pdrop" in key) and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(config, key, args.dropout)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # keys and values of the past are for generation
    return config


def check_adapter(auto_class: Any, args: Arguments) -> None:
    """Raise a `UserError` where `--model_name_or_path` is an adapter that cannot be used here; reads no weights."""
    name = args.model_name_or_path
    _explained("adapter", name, lambda: adapters.read_config(auto_class, name))


def load_tokenizer(args: Arguments) -> "PreTrainedTokenizerBase":
    """The tokenizer, padding on the right. One without a padding token pads with its end-of-text token.

    Raises:
        UserError: it cannot be read, is empty, or has no token to pad with.
    """
    from transformers import AutoTokenizer

    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    tokenizer = _load("tokenizer", name, AutoTokenizer.from_pretrained, args)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Without its files transformers makes a tokenizer that knows no word, and says nothing.
        raise UserError(f"{name} holds no tokenizer: every word would be unknown. Set --tokenizer_name.")
    tokenizer.padding_side = "right"  # as collate pads, so that the saved model is used as it was trained
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer.pad_token is None:
            raise UserError(f"the tokenizer {name} has no token that could stand for padding: set its pad_token.")
        say(f"the tokenizer has no padding token: {tokenizer.pad_token!r} is used")
    return tokenizer


def check_vocabulary(tokens: "np.ndarray", tokenizer: "PreTrainedTokenizerBase", config: "PretrainedConfig") -> None:
    """Raise a `UserError` where token ids, or the padding token's, are beyond the model's embeddings."""
    size = getattr(config, "vocab_size", None)
    highest = max(int(tokens.max(initial=0)), tokenizer.pad_token_id)
    if size is not None and highest >= size:
        raise UserError(
            f"the tokenizer gives token id {highest}, but the model has only {size} embeddings: tokenizer and model "
            "do not belong together. Check --tokenizer_name."
        )


def load_model(
    auto_class: Any,
    args: Arguments,
    config: "PretrainedConfig",
    start: Callable[[nn.Module, Collection[str]], None] | None = None,
    resumes: bool = False,
    **how: Any,
) -> nn.Module:
    """The model, in the dtype that `how` says, with freshly initialised parts named.

    Parts that the files do not have, or have in another shape (a head for another number of labels), are
    initialised from `--seed` alike on every rank. Without files, which is `--config_name` alone, that is all of them.

    Args:
        start: called with the model and the names of its parts that were initialised anew.
        resumes: a checkpoint replaces the weights, so what was initialised anew is not worth a word.

    Raises:
        UserError: the files cannot be read, or do not fit the config outside the head.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.attn_implementation:
        how["attn_implementation"] = args.attn_implementation
    if args.use_peft:
        adapters.check(auto_class, args, config)
    if args.model_name_or_path is None:
        model = _from_scratch(auto_class, args, config, **how)
        fresh: Collection[str] = {name for name, _ in model.named_parameters()}
    else:
        model, fresh = _from_files(auto_class, args, config, resumes, **how)
    if start is not None:
        start(model, fresh)
    if args.use_peft:
        adapters.add(model, auto_class, args, fresh)
    if not args.torch_compile:  # which fuses dropout into its neighbours
        dropout.install(model)
        if args.attn_implementation is None and not torch.accelerator.is_available():
            attention.install(model)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def save_config(model: nn.Module, folder: Path) -> None:
    """Write what `from_pretrained` reads beside the weights."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _from_scratch(
    auto_class: Any, args: Arguments, config: "PretrainedConfig", device_map: str = "cpu", **how: Any
) -> nn.Module:
    """A model of this config with random weights, those of a seed."""
    how["trust_remote_code"] = args.trust_remote_code
    torch.manual_seed(args.seed)
    with torch.device(device_map):
        model = _explained("model", args.config_name, lambda: auto_class.from_config(config, **how))
    say(f"a new {type(model).__name__} of {model.num_parameters():,} parameters is trained from scratch")
    return model.eval()


def _from_files(
    auto_class: Any, args: Arguments, config: "PretrainedConfig", resumes: bool, **how: Any
) -> tuple[nn.Module, Collection[str]]:
    """The model of `--model_name_or_path`, and the names of its parts that were initialised anew."""
    load = partial(adapters.from_pretrained, auto_class)
    state = _without_module_prefix(args.model_name_or_path)
    if state is not None:
        with torch.device("meta"):  # an auto class takes no state_dict, the class that it stands for does
            model_class = type(auto_class.from_config(config))
        load = lambda name, **more: model_class.from_pretrained(None, state_dict=state, **more)  # noqa: E731
    torch.manual_seed(args.seed)
    model, found = _load(
        "model",
        args.model_name_or_path,
        load,
        args,
        config=config,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **how,
    )
    return model, _check_found(model, found, args.model_name_or_path, resumes)


def _check_found(model: nn.Module, found: dict[str, Any], name: str, quiet: bool) -> set[str]:
    """The names of parts initialised anew, after saying so; raises a `UserError` where these are not the head's."""
    body = f"{model.base_model_prefix}."
    mismatched = sorted(
        str(entry[0]) if isinstance(entry, tuple | list) else str(entry) for entry in found["mismatched_keys"]
    )
    wrong = [key for key in mismatched if key.startswith(body)]
    if wrong:
        raise UserError(
            f"the weights of {name} do not have the shapes that its config gives: {', '.join(wrong[:5])}. "
            "Check --config_name."
        )
    missing = sorted(found["missing_keys"])
    own = [key for key, _ in model.named_parameters() if key.startswith(body)]
    if own and set(own) <= set(missing):
        raise UserError(f"{name} holds none of the weights of a {type(model).__name__}: is it a model of another kind?")
    if mismatched and not quiet:
        warn(f"initialised anew, since the file has another shape (another number of labels): {', '.join(mismatched)}")
    fresh = [key for key in missing if key not in mismatched]
    if fresh and not quiet:
        say(f"initialised anew: {', '.join(fresh[:6])}" + (f" and {len(fresh) - 6} more" if len(fresh) > 6 else ""))
    return {*missing, *mismatched}


def _load(what: str, name: str, load: Any, args: Arguments, **more: Any) -> Any:
    local = Path(name).exists()
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"--model_name_or_path {name}: no such folder.")
    if not local and not on_hub(name):
        raise UserError(
            f"the {what} of {name} cannot be loaded: it is no folder here, and no model of the Hugging Face Hub that "
            "can be had from here. Check the name and the connection."
        )
    hint = "" if local else " It is no folder here, so the Hub was asked: check the name and the connection."
    flags = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code, "cache_dir": args.cache_dir}
    return _explained(what, name, lambda: load(name, **flags, **more), hint)


def _explained(what: str, name: str, load: Callable[[], Any], hint: str = "") -> Any:
    """What `load` gives, or in one line why it cannot be had."""
    from safetensors import SafetensorError

    try:
        return load()
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise UserError(f"the {what} of {name} cannot be loaded: {reason}{hint}") from error


def _without_module_prefix(name: str) -> dict[str, Tensor] | None:
    """The weights of a wrapped model's file, whose names all start with `module.`, without that prefix.

    None for any other model. Only the leading prefix goes: a layer may rightly be called `module`.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    if any(folder.glob("*.safetensors")):
        from safetensors.torch import load_file

        files = sorted(folder.glob("*.safetensors"))
        if not all(_header_names(file) for file in files):
            return None
        read = lambda file: load_file(file)  # noqa: E731
        if not all(key.startswith("module.") for file in files for key in _header_names(file)):
            return None
    else:
        files = sorted(folder.glob("pytorch_model*.bin"))
        read = lambda file: torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))  # noqa: E731
    if not files:
        return None
    try:
        state = {key: tensor for file in files for key, tensor in read(file).items()}
    except Exception as error:
        raise UserError(
            f"the weights in {folder} cannot be read safely ({str(error).splitlines()[0]}). Save them with "
            "save_pretrained, which writes safetensors."
        ) from error
    if not state or not all(key.startswith("module.") for key in state):
        return None
    say(f"{name}: all names start with `module.` (the file of a wrapped model): the prefix is dropped")
    return {key.removeprefix("module."): tensor for key, tensor in state.items()}


def _header_names(file: Path) -> list[str]:
    """The tensor names in a safetensors file, from its header alone."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            return [name for name in json.loads(stream.read(size)) if name != "__metadata__"]
        except ValueError:
            return []
