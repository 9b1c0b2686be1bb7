"""`toolkit generate`: texts that a causal language model goes on with."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import flag, parse
from toolkit.data.demo import on_hub
from toolkit.errors import UserError, raise_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class GenerateArguments:
    """Flags of `toolkit generate`."""

    prompt: str | None = flag(None, "The text to go on with.")
    max_new_tokens: int = flag(128, "The most tokens to write.")
    temperature: float = flag(
        0.0, "0: always the likeliest token; above, draw from the distribution at this temperature."
    )
    top_p: float = flag(1.0, "Draw from the likeliest tokens that hold this probability together.")
    seed: int = flag(42, "Seed of the draws.")
    chat: bool = flag(False, "The prompt is what a user says, in the tokenizer's chat template.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `toolkit generate MODEL_DIR --prompt "…"`; the exit code. The text goes to stdout."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else None
    args = parse(GenerateArguments, argv, "toolkit generate MODEL_DIR: let a language model go on with a text.")
    raise_all(_problems(name, args))
    model, tokenizer = load(name)
    print(generate(model, tokenizer, args))
    return 0


def _problems(name: str | None, args: GenerateArguments) -> list[str]:
    problems = []
    if name is None:
        problems.append('toolkit generate: the model comes first: toolkit generate MODEL_DIR --prompt "…".')
    if not args.prompt:
        problems.append('--prompt is missing or empty: give the text to go on with, as --prompt "…".')
    if args.max_new_tokens < 1:
        problems.append(f"--max_new_tokens {args.max_new_tokens}: at least 1.")
    if not 0 <= args.temperature < float("inf"):
        problems.append(f"--temperature {args.temperature}: 0 or a number above it.")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top_p {args.top_p}: above 0 and at most 1.")
    return problems


def load(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model in evaluation mode, and its tokenizer. Code that comes with a model is never run.

    Raises:
        UserError: there is no such model, or it is no causal language model.
    """
    folder = Path(name)
    if not folder.is_dir() and not on_hub(name):
        raise UserError(
            f"model {name}: no such folder, and no model of the Hugging Face Hub that can be had from here."
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model {name}: the folder has no config.json. Give the --output_dir of a run that has ended.")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    from toolkit import adapters

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        kinds = AutoConfig.from_pretrained(name).architectures or []
        if kinds and not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
            raise UserError(f"model {name} is a {kinds[0]}, which writes no texts: give a causal language model.")
        model = adapters.from_pretrained(AutoModelForCausalLM, name, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model {name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def generate(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", args: GenerateArguments) -> str:
    """The prompt and what the model writes behind it; of a chat the answer alone.

    Raises:
        UserError: the prompt leaves no room, or there is no chat template.
    """
    import torch

    if args.chat and not tokenizer.chat_template:
        raise UserError("--chat: this model's tokenizer has no chat template; leave the flag out.")
    if args.chat:
        said = [{"role": "user", "content": args.prompt}]
        tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        tokens = tokenizer(args.prompt)["input_ids"]
        if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id:
            tokens = tokens[:-1]  # some tokenizers end every text, which is to go on here
    if not tokens:
        raise UserError("--prompt holds nothing that the tokenizer knows.")
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and len(tokens) >= room:
        raise UserError(f"--prompt has {len(tokens)} tokens, and the model takes {room} in all: shorten it.")
    count = args.max_new_tokens if room is None else min(args.max_new_tokens, room - len(tokens))
    how = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if args.temperature > 0:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    torch.manual_seed(args.seed)
    given = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        written = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **how,
        )[0]
    return tokenizer.decode(written[len(tokens) if args.chat else 0 :], skip_special_tokens=True)
