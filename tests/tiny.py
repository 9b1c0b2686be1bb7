"""Tiny models, tokenizers and data sets that tests make for themselves."""

import random
from pathlib import Path

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a good film with a warm heart and sharp wit",
    "a bad film with a cold heart and dull wit",
    "nothing here is worth the price of a ticket",
    "one of the best stories told on screen this year",
    "one of the worst stories told on screen this year",
    "she sells sea shells by the sea shore every day",
    "it was the best of times it was the worst of times",
    "all that glitters is not gold but some of it is",
    "to be or not to be that is the question for him",
    "the rain in spain stays mainly in the plain",
    "how much wood would a woodchuck chuck if it could",
    "an apple a day keeps the doctor away they say",
    "time flies like an arrow fruit flies like a banana",
    "many hands make light work of a heavy load",
    "too many cooks spoil the broth in the kitchen",
    "early to bed and early to rise makes one wise",
    "the early bird catches the worm but the second mouse gets the cheese",
    "actions speak louder than words when words are cheap",
    "where there is smoke there is fire and where there is fire there is heat",
]
WORDS = sorted({word for line in LINES for word in line.split()})


def save_tokenizer(folder: Path):
    """A word-level tokenizer with BERT's special tokens, saved to `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    fast.save_pretrained(folder)
    return fast


def save_tiny_bert(folder: Path, **changes) -> Path:
    """BERT: 2 layers, hidden 32, 2 heads, 64 positions, dropout 0 (bare encoder, seeded)."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = save_tokenizer(folder)
    settings = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(**{**settings, **changes})).save_pretrained(folder)
    return folder


def save_tiny_classifier(folder: Path, labels=("neg", "pos"), **changes) -> Path:
    """The tiny BERT with a head for these labels, so that no weight is left to chance."""
    import torch
    from transformers import AutoModelForSequenceClassification

    # A wider initialisation tells texts apart; else the gradients of the two classes nearly cancel, and
    # relative differences of their sum mean little.
    save_tiny_bert(folder, **{"initializer_range": 0.2, **changes})
    torch.manual_seed(1)
    names = dict(enumerate(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, id2label=names, label2id={name: i for i, name in names.items()}
    )
    torch.nn.init.normal_(model.classifier.weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def write_csv(path: Path, rows: int, seed: int = 0, labels=("neg", "pos"), header: str = "text,label") -> Path:
    """Sentences of 2 to 30 known words; the label follows from a word, so that it can be learnt."""
    draw = random.Random(seed)
    lines = [header]
    for _ in range(rows):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 30))]
        label = labels[draw.randrange(len(labels))]
        lines.append(f"{' '.join([*words, 'good' if label == labels[0] else 'bad'])},{label}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
