"""Catalogs of messages that benchmarks learn from: read as Python's own gettext reads them, each message once."""

import gettext
import io
import struct

import pytest

from benchmarks.finetune_messages import is_sentence, messages, read_catalog, split_of, write_messages

ENTRIES = {
    "": "Content-Type: text/plain; charset={charset}\n",
    "The file is too large": "Die Datei ist zu gro\u00df",
    "menu\4Open the file now": "Die Datei jetzt \u00f6ffnen",
    "%d file\0%d files": "%d Datei\0%d Dateien",
    "Not translated yet": "",
}


def catalog(order="<", charset="utf-8", entries=ENTRIES):
    """The bytes of a compiled catalog."""
    pairs = sorted((key.encode(), text.format(charset=charset).encode(charset)) for key, text in entries.items())
    start, tables, body = 28 + 16 * len(pairs), ([], []), b""
    for pair in pairs:
        for table, text in zip(tables, pair, strict=True):
            table.append((len(text), start + len(body)))
            body += text + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + b"".join(struct.pack(f"{order}2I", *entry) for table in tables for entry in table) + body


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
def test_a_catalog_is_read_as_gettext_reads_it(tmp_path, order, charset):
    content = catalog(order, charset)
    (tmp_path / "a.mo").write_bytes(content)
    theirs = gettext.GNUTranslations(io.BytesIO(content))
    found = dict(read_catalog(tmp_path / "a.mo"))
    assert found == {
        "The file is too large": theirs.gettext("The file is too large"),
        "Open the file now": theirs.pgettext("menu", "Open the file now"),
    }


def test_a_message_comes_once_whatever_its_case_and_marks_and_names_are_left_out(tmp_path):
    again = {
        "": "charset={charset}",
        "the FILE is too large.": "Zu gro\u00df",
        "Cannot open it": "die datei ist zu gro\u00df!",
    }
    (tmp_path / "a.mo").write_bytes(catalog())
    (tmp_path / "b.mo").write_bytes(catalog(entries=again))
    (tmp_path / "iso_639.mo").write_bytes(catalog(entries={"": "charset={charset}", "The old language": "Altes"}))
    assert [source for source, _ in messages(tmp_path)] == ["The file is too large", "Open the file now"]


@pytest.mark.parametrize("source", ["Open %s now please", "Two words", "use --all for all", "a\nb c d", "1 2 3 4 5 6"])
def test_what_is_no_sentence_is_left_out(source):
    assert not is_sentence(source, "Etwas anderes steht hier")


def test_splits_go_by_the_letters_of_a_message():
    assert split_of("Cannot open file 7!") == split_of("cannot open FILE")
    drawn = [split_of(f"message {'a' * number}") for number in range(2000)]
    assert 40 <= drawn.count("test") <= 110 and 20 <= drawn.count("validation") <= 65


def test_a_machine_without_catalogs_is_told_so(tmp_path):
    with pytest.raises(SystemExit, match="0 messages to learn from: install German catalogs"):
        write_messages(tmp_path, tmp_path)
