"""Reading models: prefixes, pickles, heads, dtypes; and the saved model is the trained one."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.runs import run_here
from tests.tiny import save_tiny_classifier, save_tokenizer, write_csv
from toolkit.arguments import Arguments
from toolkit.errors import UserError
from toolkit.models import load_config, load_model, load_tokenizer


def classifier(folder, **flags):
    from transformers import AutoModelForSequenceClassification

    args = Arguments(model_name_or_path=str(folder), **flags)
    return load_model(AutoModelForSequenceClassification, args, load_config(args), dtype=torch.float32)


def copy(source, target, *without):
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*without))
    return target


def flags(model, data, out, *more):
    words = ["--model_name_or_path", model, "--train_file", data, "--output_dir", out, "--max_steps", 2]
    return [str(word) for word in [*words, "--eval_strategy", "no", "--learning_rate", "1e-2", *more]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("data") / "train.csv", 24, seed=3)


@pytest.mark.parametrize("kind", ["safetensors", "bin", "old bin"])
def test_names_that_start_with_module_are_read(kind, tiny_classifier, tmp_path, capfd):
    folder = copy(tiny_classifier, tmp_path / "model", "*.safetensors")
    original = load_file(tiny_classifier / "model.safetensors")
    state = {f"module.{name}": tensor for name, tensor in original.items()}
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    loaded = classifier(folder).state_dict()
    assert set(loaded) == set(original)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())
    said = capfd.readouterr().err
    assert "start with `module.`" in said and "initialised anew" not in said


def test_a_pytorch_file_without_prefix_is_read(tiny_classifier, tmp_path, capfd):
    folder = copy(tiny_classifier, tmp_path / "model", "*.safetensors")
    original = load_file(tiny_classifier / "model.safetensors")
    torch.save(original, folder / "pytorch_model.bin")
    loaded = classifier(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())
    assert "module." not in capfd.readouterr().err


class HasModule(nn.Module):
    base_model_prefix = "body"

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_only_the_leading_prefix_goes(wrapped, tmp_path):
    from toolkit.models import _without_module_prefix

    state = {"module.weight": torch.ones(2), "other.module.bias": torch.ones(1)}
    names = {f"module.{name}": tensor for name, tensor in state.items()} if wrapped else state
    save_file(names, tmp_path / "model.safetensors")
    found = _without_module_prefix(str(tmp_path))
    assert found is None if not wrapped else set(found) == set(state)


class Malicious:
    """A pickle that writes a file when it is read."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return (open, (str(self.sentinel), "w"))


@pytest.mark.parametrize("plain", [True, False])
def test_n05_a_pickle_that_runs_code_is_refused(plain, tiny_classifier, tmp_path):
    sentinel = tmp_path / "sentinel"
    folder = copy(tiny_classifier, tmp_path / "model", "*.safetensors")
    content = {"module.weight": Malicious(sentinel)}
    if plain:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot be read safely.*safetensors"):
        classifier(folder)
    assert not sentinel.exists()


def test_f13_a_head_for_other_labels_is_made_anew(tiny_classifier, tmp_path, capfd):
    train = write_csv(tmp_path / "train.csv", 24, labels=("a", "b", "c"))
    run_here(flags(tiny_classifier, train, tmp_path / "out", "--learning_rate", 0))
    said = capfd.readouterr().err
    assert "initialised anew, since the file has another shape" in said
    assert "classifier.weight" in said and "classifier.bias" in said
    assert "labels neg, pos give way to the data's a, b, c" in said
    before, after = load_file(tiny_classifier / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    body = [name for name in before if name.startswith("bert.")]
    assert body and all(torch.equal(before[name], after[name]) for name in body)
    assert after["classifier.weight"].shape[0] == 3
    head = after["classifier.weight"]
    assert 0.005 < head.std() < 0.5, "the new head should be drawn from the model's own distribution"


def test_a_new_head_is_the_same_in_every_run_of_a_seed(tiny_bert, data, tmp_path):
    heads = []
    for run, seed in enumerate((1, 1, 2)):
        torch.rand(run)  # what was drawn before does not matter
        run_here(flags(tiny_bert, data, tmp_path / f"out{run}", "--learning_rate", 0, "--seed", seed))
        heads.append(load_file(tmp_path / f"out{run}/model.safetensors")["classifier.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_an_existing_heads_order_of_labels_is_respected(data, tmp_path):
    model = save_tiny_classifier(tmp_path / "model", labels=("pos", "neg"))  # not the sorted order
    run_here(flags(model, data, tmp_path / "out", "--learning_rate", 0))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["id2label"] == {"0": "pos", "1": "neg"}
    head = load_file(tmp_path / "out/model.safetensors")["classifier.weight"]
    assert torch.equal(head, load_file(model / "model.safetensors")["classifier.weight"])


def test_f11_labels_are_saved_as_inverse_maps(tiny_bert, data, tmp_path):
    run_here(flags(tiny_bert, data, tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["id2label"] == {"0": "neg", "1": "pos"}
    assert config["label2id"] == {"neg": 0, "pos": 1}
    assert config["problem_type"] == "single_label_classification"


def trained_model(words):
    """The trained module itself, as the run exports it, beside what is on disk."""
    from unittest import mock

    from toolkit.report.run import Run

    kept = {}
    export = Run.export

    def keep(self, strategy, *rest):
        kept["model"] = strategy.model
        return export(self, strategy, *rest)

    with mock.patch.object(Run, "export", keep):
        run_here(words)
    return kept["model"]


@pytest.mark.parametrize("more", [[], ["--data_parallel", "--data_parallel_replicas", 2]])
def test_the_saved_model_is_the_trained_one(more, tiny_bert, data, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / "out"
    model = trained_model(flags(tiny_bert, data, out, *more)).eval()
    saved, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not any(name.startswith("module.") for name in load_file(out / "model.safetensors"))
    inputs = AutoTokenizer.from_pretrained(out)(["a good film", "a bad heart"], return_tensors="pt", padding=True)
    with torch.no_grad():
        difference = (model(**inputs).logits - saved.eval()(**inputs).logits).abs().max()
    assert difference < 1e-6
    start = load_file(tiny_bert / "model.safetensors")
    moved = load_file(out / "model.safetensors")["bert.encoder.layer.0.attention.self.query.weight"]
    assert not torch.equal(moved, start["encoder.layer.0.attention.self.query.weight"])


@pytest.mark.parametrize(("stored", "precision"), [(torch.float16, "fp16"), (torch.bfloat16, "no")])
def test_k01_f09_half_stored_weights_are_trained_and_saved_in_fp32(stored, precision, tiny_classifier, data, tmp_path):
    from transformers import AutoModelForSequenceClassification

    folder = copy(tiny_classifier, tmp_path / "half", "*.safetensors", "config.json")
    AutoModelForSequenceClassification.from_pretrained(tiny_classifier, dtype=stored).save_pretrained(folder)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {stored}
    model = trained_model(flags(folder, data, tmp_path / "out")) if precision == "no" else None
    if precision == "fp16":
        rows = run_here(flags(folder, data, tmp_path / "out"), precision)
        assert all(row["applied"] for row in rows)
    else:
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    saved = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("kind", ["bert", "gpt2", "distilbert", "llama"])
def test_dropout_reaches_every_layer(kind, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "distilbert":
        small = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    elif kind == "gpt2":
        small = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    elif kind == "llama":
        small["num_key_value_heads"] = 2
    for rate in (0.0, 0.37):
        args = Arguments(model_name_or_path=str(tmp_path), dropout=rate)
        model = AutoModelForSequenceClassification.from_config(load_config(args, **small))
        rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
        rates |= {
            value for module in model.modules() for name, value in vars(module).items() if name == "attention_dropout"
        }
        assert {float(value) for value in rates if isinstance(value, int | float)} <= {rate}
    assert rates


def save_tiny_decoder(kind, folder):
    """A decoder with a two-label head, whose tokenizer has no padding token of its own."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("pad_token", None)
    settings |= {"eos_token": "[SEP]", "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    sizes = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "llama": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
            **{"intermediate_size": 64, "max_position_embeddings": 64},
        },
    }[kind]
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), initializer_range=0.2, pad_token_id=None, **sizes)
    config.eos_token_id = tokenizer.convert_tokens_to_ids("[SEP]")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_g15_a_decoder_pools_the_last_real_token(kind, data, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = save_tiny_decoder(kind, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    out = tmp_path / "out"
    # No row is alone in its micro-batch: without a padding token the model refuses.
    still = ["--dropout", 0, "--test_file", data, "--learning_rate", 0]
    rows = run_here(flags(folder, data, out, *still))
    assert all(np.isfinite(row["loss"]) for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert tokenizer.pad_token == "[SEP]" and model.config.pad_token_id == tokenizer.pad_token_id
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "an", "apple"]
    texts = [" ".join(words[:count]) for count in (3, 7, 12)]
    with torch.no_grad():
        single = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        together = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    assert (single - together).abs().max() < 1e-5
    # One micro-batch of rows of many lengths gives each row's own logits in evaluation too.
    run_here(flags(out, data, tmp_path / "alone", *still, "--per_device_eval_batch_size", 1))
    batched, alone = (
        np.genfromtxt(folder / "predictions.csv", delimiter=",", skip_header=1)[:, 1:]
        for folder in (out, tmp_path / "alone")
    )
    assert np.abs(batched - alone).max() < 1e-5


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "a/b/c"])
def test_a_missing_folder(name):
    with pytest.raises(UserError, match="no such folder"):
        load_config(Arguments(model_name_or_path=name))


def test_an_unknown_hub_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the config of nobody-here/nothing cannot be loaded"):
        load_config(Arguments(model_name_or_path="nobody-here/nothing"))


def test_a_folder_without_weights(tiny_classifier, tmp_path):
    folder = copy(tiny_classifier, tmp_path / "model", "*.safetensors")
    with pytest.raises(UserError, match=r"the model of .* cannot be loaded"):
        classifier(folder)


def test_a_truncated_weights_file(tiny_classifier, tmp_path):
    folder = copy(tiny_classifier, tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError):
        classifier(folder)


def test_a_tokenizer_of_another_model(tiny_classifier, data, tmp_path):
    small = save_tiny_classifier(tmp_path / "small", vocab_size=20)
    with pytest.raises(UserError, match=r"token id \d+, .* only 20 embeddings.*--tokenizer_name"):
        run_here(flags(small, data, tmp_path / "out"))


def test_weights_of_another_kind_of_model(tiny_classifier, tmp_path):
    folder = copy(tiny_classifier, tmp_path / "model", "*.safetensors")
    save_file({"some.layer.weight": torch.ones(3, 3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="holds none of the weights"):
        classifier(folder)


def test_a_config_that_does_not_fit_the_weights(tiny_classifier, tmp_path):
    from transformers import AutoConfig

    other = AutoConfig.from_pretrained(tiny_classifier)
    other.intermediate_size = 48
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"do not have the shapes that its config gives.*--config_name"):
        classifier(tiny_classifier, config_name=str(tmp_path / "other"))


def test_a_model_that_cannot_classify(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(UserError):
        classifier(tmp_path)


def test_a_tokenizer_is_missing(tmp_path, tiny_classifier):
    folder = copy(tiny_classifier, tmp_path / "model", "tokenizer*", "special*")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(Arguments(model_name_or_path=str(folder)))
