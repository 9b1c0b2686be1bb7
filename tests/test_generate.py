"""`toolkit generate` against transformers' own generation."""

import os
from pathlib import Path

import pytest
import torch

from toolkit.errors import UserError
from toolkit.generate import main


@pytest.fixture(scope="module")
def stories() -> Path:
    """A real Llama of 260,000 parameters."""
    root = os.environ.get("TOOLKIT_TEST_DATA")
    folder = Path(root or "") / "models" / "stories260K" / "hf"
    if not root or not folder.is_dir():
        pytest.skip("TOOLKIT_TEST_DATA does not name a folder with real models")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_bert) -> Path:
    """A GPT-2 with random weights and the tiny BERT's tokenizer."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("tiny_gpt")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, vocab_size=len(tokenizer))
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_likeliest_text(stories, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main([str(stories), "--prompt", "Once upon a time", "--max_new_tokens", "30"]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    tokens = tokenizer("Once upon a time", return_tensors="pt")
    for _ in range(30):  # by hand: append the likeliest token
        logits = model(**tokens).logits[0, -1]
        tokens["input_ids"] = torch.cat([tokens["input_ids"], logits.argmax().view(1, 1)], 1)
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    assert capsys.readouterr().out.strip() == tokenizer.decode(tokens["input_ids"][0], skip_special_tokens=True).strip()


def test_draws_repeat_by_their_seed_and_stop_at_the_models_end(tiny, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        words = ["--prompt", "the quick", "--temperature", "1", "--seed", seed, "--max_new_tokens", "1000"]
        assert main([str(tiny), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the model comes first"),
        (["MODEL"], "--prompt is missing"),
        (["MODEL", "--prompt", "a", "--temperature", "-1", "--top_p", "2"], "--temperature -1.0"),
        (["nowhere/at/all", "--prompt", "a"], "no such folder"),
        (["MODEL", "--prompt", "fox " * 40], "shorten it"),
        (["MODEL", "--prompt", "fox", "--chat"], "no chat template"),
    ],
)
def test_mistakes_are_told(words, said, tiny):
    with pytest.raises(UserError, match=said):
        main([str(tiny) if word == "MODEL" else word for word in words])


def test_a_classifier_writes_no_texts(tiny_classifier):
    with pytest.raises(UserError, match="BertForSequenceClassification, which writes no texts"):
        main([str(tiny_classifier), "--prompt", "a"])
