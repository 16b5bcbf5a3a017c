"""One document as console text, Markdown and HTML."""

from html.parser import HTMLParser

from memcallback.core.document import (
    Code,
    Document,
    Heading,
    Paragraph,
    Table,
    num_cells,
    size_text,
)

TABLE = Table(
    title="Memory of <a step>\nmeasured",
    columns=("", "size", "made at"),
    rows=(
        ("group", "", ""),
        ("  a|b", "1.00 MiB", "net.py:1\nx = <y>"),
        ("c", "2.00 MiB", ""),
        ("all", "3.00 MiB", ""),
    ),
    left_columns=frozenset({"made at"}),
    totals=True,
    rules_after=frozenset({0}),
)
DOCUMENT = Document(
    Heading("Out of memory", 1),
    Paragraph("word " * 30, 1),
    TABLE,
    "A plain string.",
    Document("Another document.", Heading("To paste")),
    Code("x = 1\ny = 2", 2),
)


def test_text_is_filled_and_tables_and_headings_are_set_off():
    lines = DOCUMENT.text().splitlines()
    words = ["word"] * 30
    assert lines[:3] == [
        "Out of memory",
        "  " + " ".join(words[:19]),
        "    " + " ".join(words[19:]),
    ]
    assert lines[3:12] == [
        "",
        "Memory of <a step>",
        "measured",
        "",
        "            size  made at",
        " ─────────────────────────",
        " group",
        "",
        "   a|b  1.00 MiB  net.py:1",
    ]
    assert lines[-9:] == [
        "",
        " all    3.00 MiB",
        "",
        "A plain string.",
        "Another document.",
        "",
        "To paste",
        "    x = 1",
        "    y = 2",
    ]
    assert DOCUMENT.text().endswith("y = 2\n")


def test_markdown_has_bold_groups_and_totals_and_keeps_cells_in_one_line():
    markdown = DOCUMENT.markdown()
    assert markdown.startswith("# Out of memory\n\nword word")
    assert "**Memory of <a step>**\n\nmeasured\n\n|  | size | made at |\n" in markdown
    assert "| **group** |  |  |" in markdown
    assert "| a\\|b | 1.00 MiB | net.py:1<br>x = <y> |" in markdown
    assert "| **all** | **3.00 MiB** |  |" in markdown
    assert markdown.endswith("## To paste\n\n```\nx = 1\ny = 2\n```")


class Tags(HTMLParser):
    """What a browser would see: tags that are open, and all text."""

    def __init__(self):
        super().__init__()
        self.open, self.names, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_html_is_well_formed_and_every_text_is_escaped():
    html = DOCUMENT.html()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.names.count("tbody") == 3
    assert "Memory of <a step>" in tags.words
    assert "x = <y>" in tags.words
    assert "a" not in tags.names
    assert '<th class="left" colspan="3">group</th>' in html
    assert '<td>1.00 MiB</td><td class="left">net.py:1<br>' in html


def test_an_unknown_size_is_no_number():
    assert size_text(None) == "n/a"
    assert size_text(None, "") == ""
    assert size_text(2**20) == "1024.00 KiB"


def test_wide_letters_fill_two_columns_and_accents_none():
    assert num_cells("net") == 3
    assert num_cells("記憶 b") == 6
    assert num_cells("e\u0301a") == 2
