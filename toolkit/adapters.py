"""LoRA (Hu et al. 2021): small matrices beside those of the blocks are trained, all else stays as it was. By peft.

A model with adapters is the model that it was, with other layers inside: any strategy splits it, steps it and saves it
as it would without. What is trained, and so saved, are the adapters and parts that are trained whole: the head of a
classifier, and what the base model has no weights for.
"""

import importlib.util
import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.arguments import Arguments
from toolkit.errors import UserError, nearest, raise_all
from toolkit.report.console import say

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

NAME = "default"  # peft's, of a model's only adapter
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# peft's names of tasks; it has none for masked language models.
TASKS = {"AutoModelForSequenceClassification": "SEQ_CLS", "AutoModelForCausalLM": "CAUSAL_LM"}
MODELS = {"SEQ_CLS": "a classifier", "CAUSAL_LM": "a causal language model", None: "a masked language model"}


def problems(args: Arguments) -> list[str]:
    """What is wrong with the flags by themselves."""
    if not args.use_peft:
        names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "merge_adapter")
        given = getattr(args, "given", ())
        return [f"--{name} has no effect without --use_peft." for name in names if name in given]
    found = []
    if importlib.util.find_spec("peft") is None:
        found.append("--use_peft needs the library peft: pip install -e '.[peft]'.")
    if args.lora_r < 1:
        found.append(f"--lora_r {args.lora_r}: expected at least 1.")
    if not 0 < args.lora_alpha < float("inf"):
        found.append(f"--lora_alpha {args.lora_alpha}: expected a finite number above 0.")
    if not 0 <= args.lora_dropout < 1:
        found.append(f"--lora_dropout {args.lora_dropout}: expected a number from 0 to below 1.")
    if ALL_LINEAR in args.lora_target_modules and len(args.lora_target_modules) > 1:
        found.append(f"--lora_target_modules: {ALL_LINEAR} stands alone, or names of layers do.")
    if args.model_name_or_path is None and args.config_name is not None:
        found.append(
            "--use_peft: a model that is trained from scratch has no weights for an adapter to build on. Give a "
            "trained one: --model_name_or_path."
        )
    elif is_adapter(args.model_name_or_path):
        found.append(
            f"--use_peft: {args.model_name_or_path} is an adapter itself. Go on training it with "
            "--resume_from_checkpoint, or write a merged model with --merge_adapter and build on that."
        )
    return found


def check(auto_class: Any, args: Arguments, config: Any) -> None:
    """Raise a `UserError` where a model of this config has not all of the layers that are named; reads no weights."""
    if args.lora_target_modules != [ALL_LINEAR]:
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=args.trust_remote_code)
        _targets(model, args.lora_target_modules, _head(model, auto_class))


def add(model: nn.Module, auto_class: Any, args: Arguments, fresh: Collection[str]) -> None:
    """Put adapters into the model, in place, and freeze all but them and what is trained whole.

    Args:
        auto_class: transformers' class that the model was loaded by.
        fresh: names of parameters that were initialised anew.

    Raises:
        UserError: it has no such layers, or is a language model that lacks weights.
    """
    from peft import LoraConfig, inject_adapter_in_model

    whole = _head(model, auto_class)
    beside = sorted({name.rpartition(".")[0] for name in fresh if not _inside(name, whole)})
    if beside and not whole:
        raise UserError(
            f"--use_peft: {args.model_name_or_path} lacks weights of a {type(model).__name__} ({', '.join(beside)}), "
            "and an adapter needs a whole one to build on. Train it without adapters first."
        )
    whole += beside
    targets = _targets(model, args.lora_target_modules, whole)
    if not targets:
        raise UserError(f"--use_peft: the blocks of a {type(model).__name__} have no linear layers for adapters.")
    base = args.model_name_or_path
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=not isinstance(model.get_submodule(targets[0]), nn.Linear),
        task_type=TASKS.get(auto_class.__name__),
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
        revision=None if args.model_revision == "main" else args.model_revision,
    )
    torch.manual_seed(args.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model, NAME)
    config.modules_to_save = whole or None  # only now: peft would train copies of them
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    model.peft_config = {NAME: config}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    say(
        f"adapters of rank {args.lora_r} in {len(targets)} layers"
        + (f", {', '.join(whole)} trained whole" if whole else "")
        + f": {trained:,} of {everything:,} parameters are trained ({trained / everything:.2%})"
    )


def config_of(model: nn.Module) -> "LoraConfig | None":
    """The adapters' config; None: the model has none."""
    return getattr(model, "peft_config", {}).get(NAME)


def present(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return config_of(model) is not None


def own(model: nn.Module, name: str) -> bool:
    """Whether a tensor of the model is saved: any, but of a model with adapters only what is trained of it."""
    config = config_of(model)
    return config is None or ".lora_" in name or _inside(name, config.modules_to_save or ())


def save(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapter as peft reads it.

    Args:
        tensors: full ones, by the model's own names.
    """
    from safetensors.torch import save_file

    contents = {_peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contents, folder / WEIGHTS, metadata={"format": "pt"})
    config = deepcopy(config_of(model))
    config.target_modules = sorted(config.target_modules)
    config.inference_mode = True
    kind = type(model)
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else mapping)


def complete(folder: Path, model: nn.Module) -> None:
    """Make a checkpoint's folder, whose tensors are written, one that peft reads."""
    from safetensors.torch import load_file

    save(folder, model, {name: t for file in sorted(folder.glob("model-*")) for name, t in load_file(file).items()})


def merged(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain model: W + B A alpha / r in place of each W.

    Args:
        tensors: all of the model's, full ones, by its own names.
    """
    config = config_of(model)
    plain = {name.replace(".base_layer.", "."): t for name, t in tensors.items() if ".lora_" not in name}
    for name, down in tensors.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            change = tensors[name.replace(".lora_A.", ".lora_B.")] @ down * (config.lora_alpha / config.r)
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + (change.T if config.fan_in_fan_out else change)
    return plain


def is_adapter(name: str | None) -> bool:
    """Whether a model's name is that of a folder with an adapter."""
    return name is not None and (Path(name) / CONFIG).is_file()


def read_config(auto_class: Any, name: str | None) -> "PeftConfig | None":
    """The config of a folder with an adapter that can be used here; None: `name` is no such folder.

    Raises:
        UserError: the base model is not there, peft is not, the folder holds a pickle, or it is another task's.
    """
    if not is_adapter(name):
        return None
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{name} is an adapter, which needs the library peft: pip install -e '.[peft]'.")
    from peft import PeftConfig

    if not (Path(name) / WEIGHTS).is_file():
        raise UserError(f"{name}: an adapter without {WEIGHTS}; other files may hold code and are not read.")
    config = PeftConfig.from_pretrained(name)
    is_of, wanted = MODELS.get(config.task_type or ""), MODELS[TASKS.get(auto_class.__name__)]
    if is_of and is_of != wanted:
        raise UserError(f"{name} is an adapter of {is_of}, and {wanted} is needed here.")
    base = config.base_model_name_or_path or ""
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(f"{name} is an adapter of the model {base}, which is not there: put it back.")
    return config


def from_pretrained(auto_class: Any, name: str, **how: Any) -> Any:
    """As `auto_class.from_pretrained`; of a folder with an adapter, its base model with the adapter merged into it.

    Raises:
        UserError: the base model is not there, peft is not, the folder holds a pickle, or it is another task's.
    """
    config = read_config(auto_class, name)
    if config is None:
        return auto_class.from_pretrained(name, **how)
    from peft import PeftModel
    from safetensors import safe_open
    from transformers import AutoConfig

    base = config.base_model_name_or_path or ""
    info = how.pop("output_loading_info", False)
    how = {"config": how.pop("config", None) or AutoConfig.from_pretrained(name), **how}
    how |= {"revision": config.revision or "main", "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, found = auto_class.from_pretrained(base, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model, name).merge_and_unload().requires_grad_(True)
    with safe_open(Path(name) / WEIGHTS, "pt") as file:
        brought = {key.removeprefix("base_model.model.") for key in file.keys()}  # noqa: SIM118
    found["missing_keys"] = set(found["missing_keys"]) - brought
    found["mismatched_keys"] = []  # of a head, which the adapter brings in its own shape
    return (model, found) if info else model


def _head(model: nn.Module, auto_class: Any) -> list[str]:
    """The modules around the base model of a classifier; a language model's head is part of what it has learnt."""
    if TASKS.get(auto_class.__name__) != "SEQ_CLS":
        return []
    return [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and next(module.parameters(), None) is not None
    ]


def _targets(model: nn.Module, names: Collection[str], whole: Collection[str]) -> list[str]:
    """The layers that get an adapter, by their full names.

    Raises:
        UserError: a name is none of a linear layer that can have one.
    """
    from transformers.pytorch_utils import Conv1D

    from toolkit.strategy.blocks import blocks  # here, since strategies ask this module what a checkpoint holds

    output = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and not _inside(f"{name}.", whole)
    ]
    if list(names) == [ALL_LINEAR]:
        path, _ = blocks(model)
        return [name for name in linear if name.startswith(f"{path}.")]
    known = sorted({name.rpartition(".")[2] for name in linear})
    found = {name: [full for full in linear if f".{full}".endswith(f".{name}")] for name in names}
    raise_all(
        f"--lora_target_modules {name}: {type(model).__name__} has no linear layer of this name that could have an "
        f"adapter.{nearest(name, known)} It has: {', '.join(known)}."
        for name, layers in found.items()
        if not layers
    )
    return [full for full in linear if any(full in layers for layers in found.values())]


def _inside(name: str, modules: Collection[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules))


def _peft_name(name: str) -> str:
    """The name of a tensor in the file of an adapter."""
    return f"base_model.model.{name.replace(f'.{NAME}.', '.') if '.lora_' in name else name}"
