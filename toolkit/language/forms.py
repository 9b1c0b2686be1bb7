"""What a row of a table says to a language model: a text, a prompt with its completion, or a conversation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.data.columns import absent, text_columns
from toolkit.data.tables import Table, first_line
from toolkit.data.values import is_broken, is_nothing
from toolkit.errors import UserError, raise_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION = "messages"
PROMPT, COMPLETION = "prompt", "completion"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template's own mark around what the assistant says


@dataclass(frozen=True)
class Document:
    """A text to learn, or parts of it."""

    text: str
    spans: tuple[tuple[int, int], ...] | None = None  # characters (start, end) to be predicted; None: all
    rendered: bool = False  # by a chat template, which writes the special tokens itself


class Form(Protocol):
    """How the rows of one table are read. A row is a mapping of column names to values."""

    columns: list[str]

    def fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""

    def empty(self, row: Mapping[str, Any]) -> bool:
        """Whether a row without fault has nothing to learn from."""

    def document(self, row: Mapping[str, Any]) -> Document:
        """The document of a row that is neither faulty nor empty. Raises a ValueError that says why there is none."""


def find_form(table: Table, args: Any, tokenizer: "PreTrainedTokenizerBase") -> Form:
    """What the flags name; else conversations in `messages`, `prompt` and `completion`, or the column of texts.

    Raises:
        UserError: columns that do not exist, more than one way to read the table, or no chat template.
    """
    asked = (args.prompt_column_name, args.completion_column_name)
    if any(asked) and args.text_column_names:
        raise UserError("--text_column_names and --prompt_column_name/--completion_column_name: give one or the other.")
    pair = (asked[0] or PROMPT, asked[1] or COMPLETION)
    if any(asked):
        flags = ("--prompt_column_name", "--completion_column_name")
        raise_all(absent(table, name, flag) for name, flag in zip(pair, flags) if name not in table.columns)
    if not args.text_column_names:
        if not any(asked) and CONVERSATION in table.columns:
            return Conversation(CONVERSATION, tokenizer, args.train_on_prompt)
        if set(pair) <= set(table.columns):
            return Answer(*pair, args.train_on_prompt)
    names = text_columns(table, args.text_column_names, None)
    if len(names) > 1:
        raise UserError(
            f"{table.name}: a language model reads one column of texts, found `{names[0]}` and `{names[1]}`. Name one "
            "with --text_column_names, or a prompt and its answer with --prompt_column_name and "
            "--completion_column_name."
        )
    return Text(names[0])


@dataclass(frozen=True)
class Text:
    """One column of texts."""

    column: str

    @property
    def columns(self) -> list[str]:
        return [self.column]

    def fault(self, row: Mapping[str, Any]) -> str | None:
        return _cell_fault(row, self.column)

    def empty(self, row: Mapping[str, Any]) -> bool:
        return not str(row[self.column]).strip()

    def document(self, row: Mapping[str, Any]) -> Document:
        return Document(str(row[self.column]))


@dataclass(frozen=True)
class Answer:
    """A prompt and its completion, one behind the other with nothing between them."""

    prompt: str
    completion: str
    learn_all: bool

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.completion]

    def fault(self, row: Mapping[str, Any]) -> str | None:
        return _cell_fault(row, self.prompt) or _cell_fault(row, self.completion)

    def empty(self, row: Mapping[str, Any]) -> bool:
        return not str(row[self.completion]).strip()

    def document(self, row: Mapping[str, Any]) -> Document:
        prompt, completion = str(row[self.prompt]), str(row[self.completion])
        text = prompt + completion
        return Document(text, None if self.learn_all else ((len(prompt), len(text)),))


class Conversation:
    """Messages of a role and a content each, written out by the tokenizer's chat template.

    What the assistant says is learnt, up to and including the mark that ends its turn. A template that
    marks it itself ({% generation %}) is followed. With any other, an answer is what the template adds
    to the turns before it, which is true only of templates that write a turn the same way whatever
    follows: that is checked in every conversation.
    """

    def __init__(self, column: str, tokenizer: "PreTrainedTokenizerBase", learn_all: bool) -> None:
        self.columns = [column]
        self.learn_all = learn_all
        self.special = tokenizer.special_tokens_map
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"column `{column}` holds conversations, and the tokenizer {tokenizer.name_or_path} has no chat "
                "template to write them out with. Take the tokenizer of a chat model (--tokenizer_name), or put a "
                "chat_template.jinja into the tokenizer's folder."
            ) from None

    def fault(self, row: Mapping[str, Any]) -> str | None:
        column = self.columns[0]
        messages = row.get(column)
        if is_nothing(messages):
            return f"column `{column}` holds no value."
        if not isinstance(messages, list):
            return f"column `{column}` holds a {type(messages).__name__}: expected a list of messages."
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return f'column `{column}`, message {number}: expected an object, {{"role": …, "content": …}}.'
            if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
                return f"column `{column}`, message {number}: its content is no text."
            if is_broken(str(message.get("content"))):
                return f"column `{column}`, message {number}: half a surrogate pair, which is not a character."
        return None

    def empty(self, row: Mapping[str, Any]) -> bool:
        return not row[self.columns[0]]

    def document(self, row: Mapping[str, Any]) -> Document:
        # Parquet gives every message all keys that any has.
        messages = [
            {key: value for key, value in message.items() if value is not None} for message in row[self.columns[0]]
        ]
        marked = bool(GENERATION.search(self.template)) and not self.learn_all
        text, spans = self._write(messages, mark=marked)
        if self.learn_all:
            spans = [(0, len(text))]
        elif not marked:
            spans = self._answers(messages, text)
        return Document(text, tuple(map(tuple, spans)), rendered=True)

    def _answers(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        spans = []
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._write(messages[:at], prompt=True)[0] if at else ""
            after = self._write(messages[: at + 1])[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    "the chat template writes a turn differently once others follow it, so that the assistant's "
                    "answers cannot be told from the rest. Mark them in the template with {% generation %} … "
                    "{% endgeneration %}, or add --train_on_prompt to learn all turns."
                )
            spans.append((len(before), len(after)))
        return spans

    def _write(
        self, messages: list[dict[str, Any]], mark: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the spans that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [messages],
                chat_template=self.template,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=prompt,
                **self.special,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template cannot write this conversation: {first_line(error)}") from None
        return texts[0], spans[0] if mark else []


def _cell_fault(row: Mapping[str, Any], column: str) -> str | None:
    value = row.get(column)
    if is_nothing(value):
        return f"column `{column}` holds no value."
    if isinstance(value, list | dict | bytes):
        return f"column `{column}` holds a {type(value).__name__}: expected a text."
    if isinstance(value, str) and is_broken(value):
        return f"column `{column}` holds half a surrogate pair, which is not a character."
    return None
