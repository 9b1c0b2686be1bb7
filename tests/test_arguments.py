"""Flags: the command line, yaml recipes, and what is said about mistakes."""

import subprocess
import sys

import pytest

from tasks.classify import ClassifyArguments
from toolkit.arguments import Arguments, changed, parse
from toolkit.errors import UserError


def recipe(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def complaints(words, cls=Arguments):
    with pytest.raises(UserError) as stopped:
        parse(cls, words)
    return stopped.value.messages


def test_types():
    words = "--learning_rate 1e-3 --max_steps 1_000 --seed=7 --train_file a.csv --column_names a b --dropout 0"
    args = parse(Arguments, words.split())
    assert (args.learning_rate, args.max_steps, args.seed, args.train_file) == (1e-3, 1000, 7, "a.csv")
    assert args.column_names == ["a", "b"] and args.dropout == 0.0 and isinstance(args.dropout, float)
    assert parse(Arguments, []) == Arguments()


@pytest.mark.parametrize("words", [["a", "b"], ["a,b"], ["a,", "b"]])
def test_lists(words):
    assert parse(Arguments, ["--column_names", *words]).column_names == ["a", "b"]
    assert parse(Arguments, ["--column_names=a,b"]).column_names == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--gradient_checkpointing"], True),
        (["--gradient_checkpointing", "true"], True),
        (["--gradient_checkpointing=False"], False),
        (["--gradient_checkpointing", "no"], False),
        ([], False),
    ],
)
def test_booleans(words, value):
    assert parse(Arguments, [*words, "--seed", "1"]).gradient_checkpointing is value


def test_negative_numbers_are_values():
    assert parse(Arguments, ["--max_steps", "-1"]).max_steps == -1
    assert parse(Arguments, ["--learning_rate", "-0.5"]).learning_rate == -0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate. Did you mean `--learning_rate`?"),
        (["--lerning_rate=1"], "unknown flag --lerning_rate. Did you mean `--learning_rate`?"),
        (["--learning_rat", "1"], "unknown flag --learning_rat. Did you mean `--learning_rate`?"),  # no abbreviations
        (["--xyzzy"], "unknown flag --xyzzy."),
        (["--qqq"], "unknown flag --qqq."),
        (["--seed", "x"], "--seed 'x': expected a whole number."),
        (["--seed", "1.5"], "--seed '1.5': expected a whole number."),
        (["--learning_rate", "fast"], "--learning_rate 'fast': expected a number."),
        (["--gradient_checkpointing", "maybe"], "--gradient_checkpointing 'maybe': expected true or false."),
        (["--optim", "adam"], "--optim 'adam': expected one of adamw, sgd. Did you mean `adamw`?"),
        (["--seed", "1", "2"], "unexpected word '2' on the command line: every value belongs behind a --flag."),
    ],
)
def test_mistakes_name_what_is_wrong_and_the_nearest(words, said):
    assert complaints(words) == [said]


def test_a_missing_value():
    (said,) = complaints(["--learning_rate", "--seed", "1"])
    assert "--learning_rate" in said and "expected one argument" in said
    (said,) = complaints(["--column_names"])
    assert "--column_names" in said


def test_all_mistakes_at_once(tmp_path):
    path = recipe(tmp_path, "sed: 1\nmax_steps: many\n")
    found = complaints([path, "--lerning_rate", "1", "--optim", "adam"])
    assert len(found) == 4
    found = complaints([path, "--optim", "adam", "--seed"])
    assert len(found) == 4 and "expected one argument" in found[-1]


def test_a_recipe_gives_flags_and_the_command_line_wins(tmp_path):
    text = """\
# a comment
train_file: data/é.csv
learning_rate: 1e-3
max_steps: 100
--seed: 3
column_names: [a, b]
gradient_checkpointing: yes
push_to_hub: off
dropout:
"""
    args = parse(Arguments, [recipe(tmp_path, text), "--max_steps", "5"])
    assert args.train_file == "data/é.csv" and args.learning_rate == 1e-3 and args.seed == 3
    assert args.max_steps == 5 and args.column_names == ["a", "b"] and args.dropout is None
    assert args.gradient_checkpointing is True and args.push_to_hub is False
    assert set(changed(args)) == {
        *("train_file", "learning_rate", "max_steps", "seed", "column_names", "gradient_checkpointing")
    }
    # Also where the flag says what is the default anyway.
    assert parse(Arguments, [recipe(tmp_path, text), "--seed", "42"]).seed == 42
    assert parse(Arguments, [recipe(tmp_path, text), "--gradient_checkpointing", "no"]).gradient_checkpointing is False


def test_a_list_in_a_recipe_may_be_words(tmp_path):
    for text in ("column_names: a,b", "column_names: a, b", "column_names: [a, b]"):
        assert parse(Arguments, [recipe(tmp_path, text)]).column_names == ["a", "b"]


def test_an_unquoted_no_in_a_recipe(tmp_path):
    assert parse(Arguments, [recipe(tmp_path, "eval_strategy: no")]).eval_strategy == "no"
    assert parse(Arguments, [recipe(tmp_path, "eval_strategy: 'no'")]).eval_strategy == "no"
    assert parse(Arguments, [recipe(tmp_path, "train_file: 'no'")]).train_file == "no"


@pytest.mark.parametrize("text", ["train_file: no", "label_column_name: on", "column_names: [text, yes]"])
def test_an_unquoted_yes_or_no_that_is_meant_as_a_word_is_an_error(text, tmp_path):
    path = recipe(tmp_path, text)
    (said,) = complaints([path], ClassifyArguments)
    assert str(path) in said and text.split(":")[0] in said and "quote" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lerning_rate: 1", "unknown key `lerning_rate`. Did you mean `learning_rate`?"),
        ("seed: [1, 2]", "key `seed`: expected one value, found [1, 2]."),
        ("optim: {name: sgd}", "key `optim`: expected one value"),
        ("max_steps: many", "--max_steps 'many': expected a whole number."),
        ("max_steps: true", "--max_steps 'True': expected a whole number."),
        ("optim: adam", "expected one of adamw, sgd. Did you mean `adamw`?"),
        ("- a\n- b", "expected `flag: value` lines, found a list."),
        ("a: b: c", "is not valid yaml"),
        ("a: \xff\udcff", "is not valid yaml"),
    ],
)
def test_mistakes_in_a_recipe(text, said, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (message,) = complaints([str(path)])
    assert said in message and f"recipe {path}" in message


def test_a_recipe_that_is_not_there():
    assert "no such file" in complaints(["recipe.yml", "--seed", "1"])[0]


def test_an_empty_recipe_and_a_bom(tmp_path):
    assert parse(Arguments, [recipe(tmp_path, "")]) == Arguments()
    assert parse(Arguments, [recipe(tmp_path, "\ufeffseed: 3")]).seed == 3


def test_values_with_odd_characters():
    assert parse(Arguments, ["--delimiter", "\t"]).delimiter == "\t"
    assert parse(Arguments, ["--delimiter=;"]).delimiter == ";"
    assert parse(Arguments, ["--train_file", "a=b.csv"]).train_file == "a=b.csv"


def test_help_is_quick_and_names_every_flag():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "tasks/classify.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    for name in ClassifyArguments.__dataclass_fields__:
        assert f"--{name}" in result.stdout
    assert "default: 5e-05" in result.stdout
    imported = [line.split("|")[-1].strip() for line in result.stderr.splitlines() if "|" in line]
    assert not {"torch", "transformers", "datasets"} & set(imported)


def test_flags_of_hf_scripts_are_told_where_they_went():
    with pytest.raises(UserError) as caught:
        parse(Arguments, ["--bf16", "--warmup_ratio", "0.1", "--do_train"])
    bf16, warmup, train = caught.value.messages
    assert "accelerate config" in bf16 and "--warmup_steps" in warmup and "leave it out" in train
