"""Which tokens a masked language model has to find, and what it sees in their place (Devlin et al. 2019, 3.1)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.errors import UserError
from toolkit.language.packing import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are
STARTS = ("Ġ", "▁", "Ċ", "ĉ", "č")  # a token that begins with one of these begins a word


class Masker:
    """Hides tokens of samples. What is hidden is a function of seed, epoch and chunk, and of nothing else.

    Args:
        probability: for each token or word to be chosen; where chance chooses none, one is.
        whole_words: choose all tokens of a word or none of them.

    Raises:
        UserError: a tokenizer without a mask token, or one whose tokens do not show where words begin.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", probability: float, whole_words: bool, seed: int) -> None:
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no mask token: it is no masked model's. "
                "Use --objective causal, or another model."
            )
        self.mask, self.probability, self.seed = tokenizer.mask_token_id, probability, seed
        self.special = np.zeros(len(tokenizer), bool)
        self.special[[i for i in tokenizer.all_special_ids if i < len(tokenizer)]] = True
        self.ordinary = np.flatnonzero(~self.special)
        self.continues = _continuing(tokenizer) if whole_words else None

    def __call__(self, sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The sample with some tokens hidden, and labels at those alone."""
        tokens, labels = sample["tokens"].copy(), np.full(len(sample["tokens"]), IGNORED, np.int64)
        starts = np.flatnonzero(sample["positions"] == 0)
        for chunk, start, end in zip(sample["chunks"].tolist(), starts, [*starts[1:], len(tokens)]):
            part = slice(start, end)
            # RandomState's streams are frozen for good, so that a mask means the same under every numpy.
            draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, epoch, chunk])))
            hidden = part.start + self._choose(sample["tokens"][part], sample["labels"][part], draw)
            labels[hidden] = tokens[hidden]
            chance = draw.random_sample(len(hidden))
            other = self.ordinary[draw.randint(len(self.ordinary), size=len(hidden))]
            tokens[hidden] = np.where(
                chance < MASKED, self.mask, np.where(chance < MASKED + REPLACED, other, tokens[hidden])
            )
        return {**sample, "tokens": tokens, "labels": labels}

    def _choose(self, tokens: np.ndarray, labels: np.ndarray, draw: np.random.RandomState) -> np.ndarray:
        """Positions in one chunk."""
        allowed = (labels != IGNORED) & ~self.special[tokens]
        chance = draw.random_sample(len(tokens))
        if self.continues is not None:
            chance = chance[np.maximum.accumulate(np.where(self._begins(tokens), np.arange(len(tokens)), 0))]
        chance = np.where(allowed, chance, np.inf)
        return np.flatnonzero(allowed & ((chance < self.probability) | (chance == chance.min())))

    def _begins(self, tokens: np.ndarray) -> np.ndarray:
        """Where a word begins: bool [len(tokens)]. Behind a special token one always does."""
        special = self.special[tokens]
        behind = np.concatenate([[True], special[:-1]])
        return special | behind | ~self.continues[tokens]


def _continuing(tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    """Whether a token goes on with the word before it, as its spelling shows: bool [vocabulary]."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if any(name.startswith("##") for name in names):
        return np.array([name.startswith("##") for name in names])
    if any(name.startswith(STARTS[:2]) for name in names):
        return np.array([not name.startswith(STARTS) for name in names])
    raise UserError(
        f"--whole_word_mask: the tokens of {tokenizer.name_or_path} do not show where words begin, as those of "
        "WordPiece (##) or byte-level BPE and SentencePiece (a mark for the space) do. Leave the flag out."
    )
