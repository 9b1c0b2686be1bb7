"""From files to the tokens of a language model: documents, targets, the cache."""

import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from tests.language import Flags, byte_tokenizer, word_tokenizer
from tests.runs import ROOT
from tests.tiny import LINES
from toolkit.errors import UserError
from toolkit.language import corpus as corpora
from toolkit.language import tokens as encoding
from toolkit.language.corpus import build
from toolkit.language.documents import TextFile
from toolkit.language.forms import Document
from toolkit.language.tokens import CAUSAL, MASKED, Encoder, special_tokens

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(bos=True)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)

    return write


@pytest.fixture
def make(tmp_path, tokenizer):
    def make(*files, tokenizer=tokenizer, **flags):
        return build(Flags(**{"train_file": list(files), "cache_dir": str(tmp_path / "cache"), **flags}), tokenizer)

    return make


def ids(text):
    return [byte + 4 for byte in text.encode()]


def documents(corpus):
    """(text without BOS and EOS, text of the targets without EOS) of every document."""
    read = lambda tokens: bytes(int(i) - 4 for i in tokens if i >= 4).decode(errors="replace")  # noqa: E731
    bounds = list(zip(corpus.starts, corpus.starts[1:]))
    return [(read(corpus.tokens[a:b]), read(corpus.tokens[a:b][corpus.target[a:b]])) for a, b in bounds]


def texts(corpus):
    return [text for text, _ in documents(corpus)]


def refusal(call, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- text files --------------------------------------------------------------------------------------------

POEM = "Roses are red,\n  violets blue.\n\n \t\nSugar is sweet,\nand so\n"


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("blank_line", ["Roses are red,\n  violets blue.", "Sugar is sweet,\nand so"]),
        ("line", ["Roses are red,", "  violets blue.", "Sugar is sweet,", "and so"]),
        ("file", [POEM]),
        (" is ", ["Roses are red,\n  violets blue.\n\n \t\nSugar", "sweet,\nand so"]),
        ("\\n  ", ["Roses are red,", "violets blue.\n\n \t\nSugar is sweet,\nand so"]),
    ],
)
def test_h07_line_breaks_are_kept(separator, expected, write, make):
    corpus = make(write("poem.txt", POEM), document_separator=separator)["train"]
    assert texts(corpus) == expected
    first = ids(expected[0])
    assert corpus.tokens[: len(first) + 2].tolist() == [BOS, *first, EOS]
    assert corpus.target[: len(first) + 2].tolist() == [False, *[True] * len(first), True]
    assert corpus.characters == corpus.bytes == sum(map(len, expected))


def test_a_separator_on_a_line_of_its_own(write, make):
    corpus = make(write("a.txt", "one\n<|end|>\n\ntwo\r\n<|end|>\r\nthree\n"), document_separator="<|end|>")["train"]
    assert texts(corpus) == ["one", "\ntwo", "three"]


def test_windows_line_ends_byte_order_mark_and_blank_lines_around(write, make):
    path = write("a.txt", b"\xef\xbb\xbf\r\n \r\na\r\nb\r\n\r\n\r\nc\r\n\r\n")
    assert texts(make(path)["train"]) == ["a\nb", "c"]
    assert texts(make(write("b.txt", "a"))["train"]) == ["a"]


def test_empty_documents_are_dropped_and_counted(write, make, capfd):
    path = write("a.txt", "a\n\n  \nb\n")
    assert texts(make(path, document_separator="line")["train"]) == ["a", "b"]
    said = capfd.readouterr().err
    assert "train: 2 documents, 6 tokens, 4 to predict" in said
    assert "train: left out: 2 empty documents" in said
    assert "nothing to learn in" in refusal(make, write("blank.txt", " \n \n"))
    assert "the file is empty" in refusal(make, write("empty.txt", ""))


def test_not_utf8_names_the_line(write, make):
    message = refusal(make, write("a.txt", b"good\n\nalso\nb\xe9d\n"))
    assert "a.txt:4: not UTF-8 (byte 0xe9)" in message


def test_unknown_files_are_all_named(write, make, tmp_path):
    message = refusal(make, write("a.md", "x"), str(tmp_path / "no.txt"))
    assert "unknown kind of file '.md'" in message and ".txt" in message and "no.txt: no such file" in message


def test_text_files_stay_on_the_disk(write):
    path = write("a.txt", "\n\n".join(f"document {i}\nof two lines" for i in range(1000)))
    file = TextFile(path, "blank_line")
    assert len(file) == 1000
    assert file[999] == Document("document 999\nof two lines")


def test_bytes_and_characters_of_other_alphabets(write, make):
    corpus = make(write("a.txt", "né🙂\n\nß"))["train"]
    assert (corpus.characters, corpus.bytes) == (4, 1 + 2 + 4 + 2)
    assert corpus.target.sum() == 9 + 2  # every byte, and two EOS


# --- tables ------------------------------------------------------------------------------------------------


def rows(*objects):
    return "\n".join(json.dumps(row) for row in objects) + "\n"


def test_text_columns_are_found_or_named(write, make):
    assert texts(make(write("a.jsonl", rows({"text": "a\nb", "id": "x"}, {"text": "c"})))["train"]) == ["a\nb", "c"]
    assert texts(make(write("a.csv", 'body,number\n"a\nb",1\nc,2\n'))["train"]) == ["a\nb", "c"]
    two = write("b.csv", "body,title\na,b\n")
    assert texts(make(two, text_column_names=["title"])["train"]) == ["b"]
    assert "more than one possible text column" in refusal(make, two)
    assert "no column `titel`. Did you mean `title`?" in refusal(make, two, text_column_names=["titel"])
    pair = write("c.csv", "sentence1,sentence2\na,b\n")
    assert "reads one column of texts" in refusal(make, pair)


def test_parquet_and_saved_folders(tmp_path, make):
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"text": ["a", "b", "c"]})
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "folder")
    DatasetDict({"train": data, "dev": data.select([0])}).save_to_disk(tmp_path / "both")
    assert texts(make(str(tmp_path / "a.parquet"))["train"]) == ["a", "b", "c"]
    assert texts(make(str(tmp_path / "folder"))["train"]) == ["a", "b", "c"]
    splits = make(dataset_name=str(tmp_path / "both"))
    assert {split: texts(corpus) for split, corpus in splits.items()} == {
        "train": ["a", "b", "c"],
        "validation": ["a"],
    }
    assert list(make()) == []


def test_missing_and_wrong_values_are_placed(write, make):
    path = write("a.jsonl", rows({"text": "a"}, {"text": None}, {"other": 1}, {"text": ["b"]}, {"text": 5}))
    message = refusal(make, path, text_column_names=["text"])
    assert "a.jsonl:2, " in message and "a.jsonl:3: column `text` holds no value" in message
    assert "a.jsonl:4: column `text` holds a list: expected a text" in message
    nan = write("b.json", '[{"text": "a"}, {"text": NaN}]')
    assert "b.json, row 2: column `text` holds no value" in refusal(make, nan)


def test_prompts_are_context(write, make):
    path = write("a.jsonl", rows({"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "hi"}))
    corpus = make(path)["train"]
    assert documents(corpus) == [("2+2=4", "4"), ("hi", "hi")]
    assert corpus.target.tolist() == [*[False] * 5, True, True, False, True, True, True]
    assert corpus.tokens.tolist() == [BOS, *ids("2+2=4"), EOS, BOS, *ids("hi"), EOS]
    assert (corpus.bytes, corpus.characters) == (3, 3)
    assert documents(make(path, train_on_prompt=True)["train"])[0] == ("2+2=4", "2+2=4")


def test_prompt_columns_by_other_names(write, make):
    path = write("a.csv", "question,reply\nwho?,me\n")
    corpus = make(path, prompt_column_name="question", completion_column_name="reply")["train"]
    assert documents(corpus) == [("who?me", "me")]
    assert "no column `completion`" in refusal(make, path, prompt_column_name="question")
    flags = {"prompt_column_name": "question", "text_column_names": ["reply"]}
    assert "give one or the other" in refusal(make, path, **flags)


def test_a07_rows_without_an_answer_are_counted_or_refused(write, make, capfd):
    empty = [{"messages": [{"role": "user", "content": "hi"}]}] * 2
    chat = byte_tokenizer()
    chat.chat_template = PLAIN
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    corpus = make(write("a.jsonl", rows(empty[0], good, empty[1])), tokenizer=chat)["train"]
    assert documents(corpus) == [("[user]hi;[assistant]ho;", "ho;")] and len(corpus.tokens) == corpus.starts[-1]
    assert "warning: train: left out: 2 documents without an answer to predict" in capfd.readouterr().err
    assert "2 without an answer to predict" in refusal(make, write("b.jsonl", rows(*empty)), tokenizer=chat)


# --- conversations -----------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] if loop.last else '…' }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]
WHOLE = "[system]be kind;[user]hi;[assistant]hello;[user]bye;[assistant]so long;"


def chat(make, write, template, messages=TALK, **flags):
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = template
    return make(write("chat.jsonl", rows({"messages": messages})), tokenizer=tokenizer, **flags)["train"]


def test_answers_are_what_a_template_adds(make, write):
    corpus = chat(make, write, PLAIN)
    assert documents(corpus) == [(WHOLE, "hello;so long;")]
    assert corpus.tokens[0] == ids("[")[0]  # the template writes no BOS, so there is none
    assert corpus.tokens[-1] == EOS and corpus.target[-1]  # it writes no EOS, without which no answer would end
    assert (corpus.bytes, corpus.characters) == (14, 14)
    assert documents(chat(make, write, PLAIN, train_on_prompt=True)) == [(WHOLE, WHOLE[1:])]


def test_a_template_that_marks_answers_is_followed(make, write):
    corpus = chat(make, write, MARKED)
    assert documents(corpus) == [("[system]be kind[user]hi[assistant]hello[user]bye[assistant]so long", "helloso long")]
    ends = corpus.tokens == EOS
    assert ends.sum() == 2 and corpus.target[ends].all()  # the template's own, and no third
    assert corpus.bytes == len("helloso long")  # what an EOS stands for is no text


def test_a_conversation_that_ends_with_a_question(make, write):
    corpus = chat(make, write, PLAIN, TALK[:4])
    assert documents(corpus) == [(WHOLE.removesuffix("[assistant]so long;"), "hello;")]
    assert corpus.tokens[-1] == EOS and not corpus.target[-1]


def test_a_template_that_rewrites_earlier_turns_is_refused(make, write):
    message = refusal(chat, make, write, FORGETFUL)
    assert "chat.jsonl:1: the chat template writes a turn differently" in message and "--train_on_prompt" in message
    assert chat(make, write, FORGETFUL, train_on_prompt=True).documents == 1


def test_messages_must_be_messages(make, write):
    tokenizer = byte_tokenizer()
    path = write("a.jsonl", rows({"messages": [{"role": "user", "content": "x"}]}))
    assert "no chat template" in refusal(make, path, tokenizer=tokenizer)
    tokenizer.chat_template = "{{ raise_exception('only pairs') }}"
    assert "cannot write this conversation: only pairs" in refusal(make, path, tokenizer=tokenizer)
    wrong = rows({"messages": "x"}, {"messages": [{"content": "x"}]}, {"messages": [{"role": "a", "content": 1}]})
    message = refusal(make, write("b.jsonl", wrong), tokenizer=tokenizer)
    assert "b.jsonl:1: column `messages` holds a str: expected a list of messages" in message
    assert "b.jsonl:2: column `messages`, message 1: expected an object" in message
    assert "b.jsonl:3: column `messages`, message 1: its content is no text" in message


def test_a_real_template_from_parquet(make, tmp_path):
    """ChatML, whose end of turn is the end-of-text token; Parquet fills absent keys with None."""
    from datasets import Dataset

    tokenizer = byte_tokenizer(eos="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<bos>' + message['role'] + '\\n' + message['content'] + '<eos>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<bos>assistant\\n' }}{% endif %}"
    )
    talk = [TALK[1], {**TALK[2], "name": "bot"}]
    Dataset.from_dict({"messages": [talk]}).to_parquet(tmp_path / "a.parquet")
    corpus = make(str(tmp_path / "a.parquet"), tokenizer=tokenizer)["train"]
    expected = [BOS, *ids("user\nhi"), EOS, *ids("\n"), BOS, *ids("assistant\n")]
    answer = [*ids("hello"), EOS, *ids("\n")]
    assert corpus.tokens.tolist() == expected + answer
    assert corpus.target.tolist() == [False] * len(expected) + [True] * len(answer)


# --- special tokens ----------------------------------------------------------------------------------------


def encode(tokenizer, text, objective=CAUSAL, **document):
    (encoded,) = Encoder(tokenizer, objective)([Document(text, **document)])
    return encoded


def test_without_a_first_special_token_the_first_of_the_text_is_context():
    encoded = encode(byte_tokenizer(), "éab")
    assert encoded.tokens.tolist() == [*ids("éab"), EOS]
    assert encoded.target.tolist() == [False, True, True, True, True]
    assert (encoded.characters, encoded.bytes) == (2, 2)  # é, of which the first byte is known


def test_i05_an_end_that_is_there_is_not_doubled():
    encoded = encode(byte_tokenizer(), "hi<eos>")
    assert encoded.tokens.tolist() == [*ids("hi"), EOS]
    assert encoded.target.tolist() == [False, True, True]


def test_a_tokenizer_without_an_end_is_refused_unless_it_closes_texts():
    assert "no end-of-text token" in refusal(Encoder, byte_tokenizer(eos=None), CAUSAL)
    closing = byte_tokenizer(mask=True)
    assert special_tokens(closing) == ([BOS], [EOS])
    assert encode(closing, "ab").tokens.tolist() == [BOS, *ids("ab"), EOS]


def test_masked_corpora_hold_the_texts_own_tokens():
    encoded = encode(byte_tokenizer(mask=True), "ab", MASKED)
    assert encoded.tokens.tolist() == ids("ab") and encoded.target.all()
    assert (encoded.bytes, encoded.characters) == (2, 2)


def test_nothing_is_said_about_long_texts(write, make, caplog, capfd):
    make(write("a.txt", "x" * 500))  # the tokenizer's limit is 64
    assert "longer than" not in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize("spaces", [True, False])
def test_h17_long_texts_in_windows_give_the_same_tokens(spaces, write, make):
    """Also where a tokenizer knows no word boundaries, and where a seam would fall into a long word."""
    tokenizer = word_tokenizer(LINES, spaces=spaces)
    text = "\n".join(LINES[i * 7 % len(LINES)] for i in range(600)) + " " + "thethe" * 300 + " " + " ".join(LINES)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    with mock.patch.multiple(encoding, WINDOW=1000, REACH=200):
        windows = encode(tokenizer, text)
        parts = encode(tokenizer, text, spans=((5000, 5200), (len(text) - 3, len(text))))
    assert windows.tokens.tolist() == parts.tokens.tolist() == [*expected, tokenizer.eos_token_id]
    whole = encode(tokenizer, text, spans=((5000, 5200), (len(text) - 3, len(text))))
    assert parts.target.tolist() == whole.target.tolist() and 20 < parts.target.sum() < 200
    assert (parts.bytes, windows.bytes) == (whole.bytes, encode(tokenizer, text).bytes)


def test_windows_of_any_length_are_joined_rather_than_given_up():
    """The last window may end anywhere; a text without a seam is tokenised in one go."""
    tokenizer = word_tokenizer(LINES)
    for text in (*((" ".join(LINES) * 9)[:length] for length in range(3190, 3215)), "ha" * 3000):
        with (
            mock.patch.multiple(encoding, WINDOW=1000, REACH=200),
            mock.patch.object(Encoder, "_tokenise", autospec=True, side_effect=Encoder._tokenise) as tokenise,
        ):
            encoded = encode(tokenizer, text)
        assert encoded.tokens.tolist()[:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]
        longest = max(len(part) for call in tokenise.call_args_list for part in call.args[1])
        assert longest <= 1200 or text.startswith("haha")


def test_h17_one_huge_line(tmp_path):
    """5 MB in one line: under a minute and under 1 GB, in a process of its own."""
    script = f"""
import resource, sys, time
sys.path.insert(0, ".")
from tests.language import Flags, word_tokenizer
from tests.tiny import LINES
from toolkit.language.corpus import build
tokenizer = word_tokenizer(LINES)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open({str(tmp_path / "a.txt")!r}, "w") as file:
    file.write(" ".join(LINES) * (5_000_000 // len(" ".join(LINES))))
start = time.process_time()
flags = Flags(train_file=[{str(tmp_path / "a.txt")!r}], cache_dir={str(tmp_path / "cache")!r})
corpus = build(flags, tokenizer)["train"]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(corpus.documents, time.process_time() - start, grown / 1024)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    count, seconds, grown = map(float, result.stdout.split())
    assert count == 1 and seconds < 60 and grown < 500


# --- splits ------------------------------------------------------------------------------------------------


def numbered(count, first=0):
    return "".join(f"document {i}\n" for i in range(first, first + count))


def test_e15_limits_count_documents(write, make, capfd):
    path = write("a.txt", "".join("word " * 20 + "\n" for _ in range(50)))
    splits = make(path, document_separator="line", max_train_samples=1, validation_file=path, max_eval_samples=3)
    assert splits["train"].documents == 1 and splits["validation"].documents == 3
    assert "train: 1 document, 102 tokens, 101 to predict" in capfd.readouterr().err


def test_d17_held_out_documents_are_at_least_one(write, make):
    path = write("a.txt", numbered(10))
    splits = make(path, document_separator="line", validation_split_percentage=5)
    assert len(texts(splits["train"])) == 9 and len(texts(splits["validation"])) == 1
    assert sorted(texts(splits["train"]) + texts(splits["validation"])) == sorted(numbered(10).splitlines())
    other = make(path, document_separator="line", validation_split_percentage=5, seed=1)
    assert texts(other["validation"]) != texts(splits["validation"])
    message = refusal(make, path, validation_split_percentage=5)  # no blank line: one document
    assert "nothing can be held out" in message and "--document_separator" in message
    message = refusal(make, path, validation_file=path, validation_split_percentage=5)
    assert "give one of them" in message


def test_files_have_weights(write, make):
    files = [write("a.txt", numbered(4)), write("b.txt", numbered(10, 100)), write("c.txt", numbered(2, 200))]
    flags = {"document_separator": "line", "train_file_weights": [2, 0.5, 1.5]}
    train = texts(make(*files, **flags)["train"])
    assert train[:8] == [line for line in numbered(4).splitlines() for _ in range(2)]
    assert len(set(train[8:13])) == 5 and set(train[8:13]) <= set(numbered(10, 100).splitlines())
    assert len(train) == 8 + 5 + 3 and set(train[13:]) == set(numbered(2, 200).splitlines())
    assert texts(make(*files, **flags, seed=7)["train"])[8:13] != train[8:13]
    held = make(*files, **flags, validation_split_percentage=25)
    assert not set(texts(held["train"])) & set(texts(held["validation"]))  # repeated only after holding out
    assert len(texts(held["validation"])) == 4
    assert "expected one weight for each --train_file" in refusal(make, *files, train_file_weights=[1])
    assert "above 0" in refusal(make, files[0], train_file_weights=[0])


def test_d07_a_split_reads_the_same_as_training_data(write, make):
    path = write("a.txt", POEM)
    splits = make(path, validation_file=path, test_file=[path])
    assert list(splits) == ["train", "validation", "test"]
    assert len({corpus.fingerprint() for corpus in splits.values()}) == 1


def test_data_flags_are_checked(write, make):
    path = write("a.txt", "a")
    assert "give one of them" in refusal(make, path, dataset_name="x")
    assert "without training data" in refusal(make, train_file=None, validation_file=path)
    assert "--max_train_samples 0" in refusal(make, path, max_train_samples=0)


# --- the cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def encodings():
    """The splits that are encoded rather than found."""
    made = []

    def watch(folder, encoder, split, selection):
        made.append(split)
        return write(folder, encoder, split, selection)

    write = corpora._write
    with mock.patch.object(corpora, "_write", watch):
        yield made


def test_what_is_known_is_not_encoded_again(write, make, encodings, capfd):
    path, other = write("a.txt", POEM), write("b.txt", "other\n")
    first = make(path, validation_file=other)
    said = capfd.readouterr().err
    again = make(path, validation_file=other)
    assert encodings == ["train", "validation"]
    assert capfd.readouterr().err == "".join(line + "\n" for line in said.splitlines() if "encoding" not in line)
    assert again["train"].fingerprint() == first["train"].fingerprint() != first["validation"].fingerprint()
    make(path, validation_file=path)
    assert encodings == ["train", "validation", "validation"]  # the training split is not touched by it


@pytest.mark.parametrize("change", ["content", "kind", "separator", "objective", "tokenizer", "limit", "order"])
def test_what_has_changed_is_encoded_again(change, write, make, encodings):
    files = [write("a.txt", "a\n\nb\n"), write("b.txt", "c\n")]
    make(*files)
    flags = {}
    if change == "content":
        old = os.stat(files[0])
        write("a.txt", "a\n\nc\n")
        os.utime(files[0], ns=(old.st_atime_ns, old.st_mtime_ns))  # by content, not by date
    elif change == "kind":
        files[0] = write("a.csv", "a\n\nb\n")
    elif change == "tokenizer":
        flags["tokenizer"] = byte_tokenizer()
    elif change == "order":
        files.reverse()
    else:
        values = {"separator": ("document_separator", "line"), "objective": ("objective", "masked")}
        name, value = values.get(change, ("max_train_samples", 1))
        flags[name] = value
    make(*files, **flags)
    assert encodings == ["train", "train"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "no counts", "no json"])
def test_a_damaged_entry_is_made_anew(damage, write, make, tmp_path, encodings):
    path = write("a.txt", POEM)
    fingerprint = make(path)["train"].fingerprint()
    (entry,) = (tmp_path / "cache").iterdir()
    tokens = entry / "tokens.bin"
    if damage == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "changed":
        tokens.write_bytes(b"\7" + tokens.read_bytes()[1:])
    elif damage == "no counts":
        (entry / "corpus.json").unlink()
    else:
        (entry / "corpus.json").write_text("{")
    corpus = make(path)["train"]
    assert corpus.fingerprint() == fingerprint and len(texts(corpus)) == 2
    assert encodings == ["train", "train"]
    assert list((tmp_path / "cache").iterdir()) == [entry]


def test_a_failed_encoding_leaves_nothing(write, make, tmp_path):
    refusal(make, write("a.txt", b"good\n\nb\xe9d\n"))
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    assert "--cache_dir" in refusal(make, write("a.txt", "a"), cache_dir=str(tmp_path / "file" / "cache"))


def test_the_fingerprint_does_not_depend_on_the_cache(write, make):
    corpus = make(write("a.txt", POEM))["train"]
    plain = corpora.Corpus(*(np.array(a) for a in (corpus.tokens, corpus.target, corpus.starts)), 0, 0)
    assert plain.fingerprint() == corpus.fingerprint()


RANK = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, ".")
from tests.language import Flags, byte_tokenizer
from toolkit.language import corpus
folder, rank = Path(sys.argv[1]), os.environ["LOCAL_RANK"]
write = corpus._write
def slow(*arguments):
    with open(folder / "calls", "a") as calls:
        calls.write(rank + "\\n")
    time.sleep(2)
    write(*arguments)
corpus._write = slow
flags = Flags(train_file=[str(folder / "a.txt")], cache_dir=str(folder / "cache"))
made = corpus.build(flags, byte_tokenizer())["train"]
(folder / f"rank{sys.argv[2]}").write_text(f"{made.fingerprint()} {made.tokens.tolist()}")
"""


def test_one_rank_encodes_the_others_wait_and_two_runs_do_not_disturb_each_other(tmp_path):
    (tmp_path / "a.txt").write_text(POEM)
    ranks = [("1", "b"), ("0", "a"), ("0", "c")]  # two runs at once: both may encode, one result stays
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), name], cwd=ROOT, env={**os.environ, "LOCAL_RANK": rank}
        )
        for rank, name in ranks
    ]
    assert [process.wait(timeout=90) for process in processes] == [0, 0, 0]
    assert set((tmp_path / "calls").read_text().split()) == {"0"}
    assert len({(tmp_path / f"rank{name}").read_text() for name in "abc"}) == 1
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [""]  # nothing half-written


def test_i03_every_token_of_a_file_arrives_whatever_the_batches(write, make):
    """3,000 lines of three bytes: no batch, block or worker loses any."""
    path = write("a.txt", "abc\n" * 3000)
    whole = make(path, document_separator="line")["train"]
    assert len(whole.tokens) == 3000 * 5 and whole.target.sum() == 3000 * 4
    with mock.patch.object(encoding, "BATCH", 100):
        small = list(Encoder(byte_tokenizer(bos=True), CAUSAL, workers=1)([Document("abc")] * 3000))
    assert np.concatenate([document.tokens for document in small]).tolist() == whole.tokens.tolist()


def test_real_text(real_data, tmp_path):
    """State of the Union, read and parted here by hand."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_data.parent / "models" / "stories260K" / "hf")
    path = real_data / "state_union" / "valid.txt"
    flags = Flags(train_file=[str(path)], document_separator="line", cache_dir=str(tmp_path))
    corpus = build(flags, tokenizer)["train"]
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    expected = [tokenizer(line)["input_ids"] + [tokenizer.eos_token_id] for line in lines]
    assert [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts, corpus.starts[1:])] == expected
    assert corpus.target.sum() == sum(len(tokens) - 1 for tokens in expected)
    assert corpus.bytes == sum(len(line.encode()) for line in lines)
