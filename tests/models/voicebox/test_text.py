import os
import shutil
import stat
import sys

import pytest
import torch

import helicon
from helicon.models.voicebox.text import (
    CHARACTERS,
    PADDING,
    PHONEMES,
    CharacterTokenizer,
    PhonemeInventory,
    PhonemeTokenizer,
)


def test_characters_have_their_places_and_rows_are_padded():
    tokenizer = CharacterTokenizer("abc ")
    ids = tokenizer(["cab", "a  b\n", "", "z"])
    assert ids.tolist() == [[2, 0, 1], [0, 3, 1], [-1, -1, -1], [4, -1, -1]]
    assert tokenizer.num_tokens == 5 and ids.dtype == torch.int64
    assert tokenizer([]).shape == (0, 0) and tokenizer(["", ""]).shape == (2, 0)


def test_capitals_count_where_the_vocabulary_has_some():
    assert CharacterTokenizer("ab")(["AB"]).tolist() == [[0, 1]]
    assert CharacterTokenizer("abA")(["aAB"]).tolist() == [[0, 2, 3]]


def test_two_ways_to_write_a_letter_are_one():
    tokenizer = CharacterTokenizer()
    assert torch.equal(tokenizer(["café"]), tokenizer(["cafe\u0301"]))
    assert torch.equal(tokenizer(["Élan"]), tokenizer(["e\u0301lan"]))


def test_the_default_reads_european_languages():
    texts = [
        "The 3 dogs, 'well' — (they) ran!",
        "Où êtes-vous, garçon?",
        "¿Qué año?",
        "Größe",
        "Подъём, ещё.",
        "perché",
    ]
    tokenizer = CharacterTokenizer()
    ids = tokenizer(texts)
    assert not ids.eq(tokenizer.unknown).any()
    assert tokenizer(["汉"]).tolist() == [[tokenizer.unknown]]
    assert ids.max() < tokenizer.num_tokens == len(CHARACTERS) + 1


def test_fitted_knows_what_it_saw():
    tokenizer = CharacterTokenizer.fitted(["Ab c", "cd", "cafe\u0301"])
    assert tokenizer.arguments["characters"] == " abcdfé"
    assert tokenizer(["DB?"]).tolist() == [[4, 2, tokenizer.unknown]]
    with pytest.raises(ValueError, match="no characters"):
        CharacterTokenizer.fitted(["", " "])


def test_an_inventory_has_names_of_any_length():
    inventory = PhonemeInventory.fitted(["pau k ay", "sh' pau"])
    assert inventory.arguments["symbols"] == ["ay", "k", "pau", "sh'"]
    assert inventory(["sh' ay", "x"]).tolist() == [[3, 0], [4, -1]]
    with pytest.raises(ValueError, match="no phonemes"):
        PhonemeInventory.fitted([" "])
    with pytest.raises(ValueError, match="'a b' cannot be the name"):
        PhonemeInventory(["a b"])


def test_what_is_no_vocabulary_is_refused():
    with pytest.raises(ValueError, match="'a' twice"):
        CharacterTokenizer("aba")
    with pytest.raises(ValueError, match="is empty"):
        CharacterTokenizer("")
    with pytest.raises(ValueError, match="one text: give a list"):
        CharacterTokenizer()("hello")


@pytest.mark.parametrize(
    "tokenizer", [CharacterTokenizer("xyz"), PhonemeInventory(["a", "bb"]), PhonemeTokenizer("fr-fr")]
)
def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = helicon.load(tmp_path)
    assert type(loaded) is type(tokenizer) and loaded.ids == tokenizer.ids
    assert loaded.num_tokens == tokenizer.num_tokens
    if isinstance(tokenizer, PhonemeTokenizer):
        assert loaded.language == "fr-fr"
    else:
        assert torch.equal(loaded(["x a"]), tokenizer(["x a"]))


# A program that answers as espeak-ng does: a line for each line, and for each comma that it meets inside of one. What it has no
# sound for ("%") gives no line at all; each run is noted down.
PROGRAM = """#!{python}
import sys
language = sys.argv[sys.argv.index("-v") + 1]
open({log!r}, "a").write("run\\n")
if language == "xx":
    sys.exit("Error: The specified espeak-ng voice does not exist.")
for line in sys.stdin.buffer.read().decode().splitlines():
    for part in line.split(","):
        if part.strip() == "%x":
            continue
        print(" ".join("(en)" + word.lower() + "(fr)" if word == "Weekend" else word.lower() + "ː" for word in part.split()))
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """espeak-ng as it would be found; gives the number of its runs."""
    log, program = tmp_path / "log", tmp_path / "bin" / "espeak-ng"
    log.touch()
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return lambda: len(log.read_text().splitlines())


def test_phonemes_keep_their_texts_and_their_punctuation(runs):
    tokenizer = PhonemeTokenizer()
    texts = ["Hi there, You. Pay 3.5 now", "", "Weekend!", "...", "so a,b"]
    found = tokenizer.phonemes(texts)
    assert found == ["hiː thereː, youː. payː 3.5ː nowː", "", "weekend!", ".", "soː aː bː"]
    assert runs() == 1
    ids = tokenizer(texts)
    assert [(row >= 0).sum().item() for row in ids] == [len(text) for text in found]
    assert ids[1].eq(PADDING).all() and ids[2, 0] == PHONEMES.index("w")


def test_phonemes_of_a_text_are_found_once(runs, monkeypatch):
    tokenizer = PhonemeTokenizer()
    assert tokenizer.phonemes(["a", "b", "a"]) == tokenizer.phonemes(["a", "b", "a"]) == ["aː", "bː", "aː"]
    assert runs() == 1
    assert tokenizer.phonemes(["b", "c"]) == ["bː", "cː"] and runs() == 2
    monkeypatch.setattr("helicon.models.voicebox.text.MOST_KEPT", 4)
    assert tokenizer.phonemes(["b", "d"]) == ["bː", "dː"] and len(tokenizer._kept) == 2


def test_a_clause_without_sound_moves_no_other(runs):
    assert PhonemeTokenizer().phonemes(["a. %x. b", "c"]) == ["aː. . bː", "cː"]
    assert runs() == 1 + 4  # then one by one


def test_long_texts_are_read_in_lines_of_whole_words(runs):
    text = "word " * 1000
    assert PhonemeTokenizer().phonemes([text, "b"]) == [("wordː " * 1000).strip(), "bː"]
    assert runs() == 1


def test_what_espeak_cannot_read_is_told(runs):
    with pytest.raises(ValueError, match=r"language='xx' \(Error: The specified .*`espeak-ng --voices`"):
        PhonemeTokenizer("xx")(["a"])


def test_without_espeak_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    tokenizer = PhonemeTokenizer()  # may be built, and loaded
    assert tokenizer([""]).shape == (1, 0)
    with pytest.raises(OSError, match=r"espeak-ng, .* is not on this machine: install it .*CharacterTokenizer"):
        tokenizer(["a"])


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="the program espeak-ng is not installed")
def test_espeak_itself():
    tokenizer = PhonemeTokenizer("en-us")
    texts = ["Hello world, this is it. It costs 3.5 pounds!", "Dr. Smith", "yes"]
    found = tokenizer.phonemes(texts)
    assert found[0].startswith("həlˈoʊ wˈɜːld, ðɪs") and found[0].endswith("!")
    assert found == [tokenizer.phonemes([text])[0] for text in texts]
    for language, text in {
        "fr-fr": "Un bon weekend, garçon.",
        "de": "Größe und Übung",
        "ru": "Привет, мир!",
        "cmn": "你好",
    }.items():
        other = PhonemeTokenizer(language)
        assert not other([text]).eq(other.unknown).any(), other.phonemes([text])
    with pytest.raises(ValueError, match="language='xx'"):
        PhonemeTokenizer("xx")(["a"])
