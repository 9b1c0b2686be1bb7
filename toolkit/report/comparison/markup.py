"""HTML, built so that nothing from outside can break out of its place."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from toolkit.report.comparison.words import printable

SHORT = 24  # letters of a word that has room on the narrowest screen


def text(value: Any) -> str:
    """Any text as markup."""
    return escape(printable(value))


def tag(name: str, *content: str, **attributes: Any) -> str:
    """An element around content that is markup already.

    Attributes are escaped, None and False left out; `class_` and `data_value` stand for class and data-value.
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return f"<{name}{shown}>{''.join(content)}</{name}>"


def name(value: str) -> str:
    """A name whose words (`--pipeline_stages`) break only where they are long."""
    return " ".join(tag("span", text(w), class_="word") if len(w) <= SHORT else text(w) for w in value.split())


class Cell(NamedTuple):
    """What a cell shows, and the number behind it."""

    markup: str
    value: float | None = None


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], sortable: bool = False) -> str:
    """A table that scrolls by itself where the screen is narrow. The first cell of a row names it."""
    head = tag("tr", *(tag("th", text(heading), scope="col") for heading in headings))
    body = [
        tag("tr", tag("th", first.markup, scope="row"), *(tag("td", c.markup, data_value=c.value) for c in rest))
        for first, *rest in rows
    ]
    whole = tag(
        "table",
        tag("caption", text(caption)),
        tag("thead", head),
        tag("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)
