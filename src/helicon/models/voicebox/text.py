"""Texts to ids: of characters, of phonemes that the program espeak-ng finds, or of symbols that a data set has already.

All three are networks without weights, so that a model saves the one it was trained with. Called with texts, they give ids
`[b, m]` from 0 to `num_tokens` - 1, the last of which stands for whatever is not known, padded with -1.

Letters: b texts, m tokens.
"""

import re
import shutil
import subprocess
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helicon.nn.network import Network

PADDING = -1

LATIN = "abcdefghijklmnopqrstuvwxyzàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿßāăąćčďđēėęěğīįıłńňőœřśšşťūůűųźżžșț"
CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюяёіїєґ"
CHARACTERS = " .,;:!?¿¡…'’\"“”«»()-–—+*#&/%0123456789" + LATIN + CYRILLIC

# What espeak-ng writes phonemes of any language with: letters, signs of stress, length and tone, marks above and below.
MARKS = "".join(map(chr, (0x303, 0x306, 0x308, 0x30A, 0x318, 0x319, 0x31A, 0x31C, 0x31D, 0x31E, 0x31F, 0x320, 0x324)))
MARKS += "".join(map(chr, (0x325, 0x327, 0x329, 0x32A, 0x32C, 0x32F, 0x330, 0x33A, 0x33B, 0x33C, 0x361)))
IPA = (
    "abcdefghijklmnopqrstuvwxyzæðøħŋœβεθχ"
    + "".join(map(chr, range(0x250, 0x2B0)))
    + "ˈˌːˑ˞ʰʲʷˠˤⁿˡ˥˦˧˨˩↗↘12345-"
    + MARKS
)
CLAUSE_ENDS = ".,;:!?"
PHONEMES = " " + CLAUSE_ENDS + IPA

MOST_BYTES = 800  # of a line: espeak-ng breaks longer ones wherever they are
MOST_KEPT = 200_000  # texts whose phonemes are kept
INSTALL = "install it (apt-get install espeak-ng, brew install espeak-ng), or read characters with a CharacterTokenizer (model.tokenizer=characters)"


class SymbolTokenizer(Network):
    """Ids of symbols, in the order in which they are given."""

    vocabulary: Tensor

    def __init__(self, symbols: Sequence[str]):
        super().__init__()
        self.ids = {symbol: number for number, symbol in enumerate(symbols)}
        if not symbols:
            raise ValueError("the list of symbols is empty: give at least one")
        if len(self.ids) < len(symbols):
            doubled = next(symbol for symbol in symbols if list(symbols).count(symbol) > 1)
            raise ValueError(f"the list of symbols has {doubled!r} twice: give each symbol once")
        self.unknown = len(symbols)
        self.num_tokens = len(symbols) + 1
        # All there is in its weights: without it, tokenizers of different symbols would have the same hash.
        points = [ord(character) for character in "\n".join(symbols)]
        self.register_buffer("vocabulary", torch.tensor(points, dtype=torch.int32))

    def symbols_of(self, texts: Sequence[str]) -> list[Sequence[str]]:
        raise NotImplementedError

    def forward(self, texts: Sequence[str]) -> Int[Tensor, "b m"]:
        if isinstance(texts, str):
            raise ValueError(f"{texts!r} is one text: give a list of texts")
        rows = [
            torch.tensor([self.ids.get(symbol, self.unknown) for symbol in symbols], dtype=torch.long)
            for symbols in self.symbols_of(texts)
        ]
        if not rows:
            return torch.empty(0, 0, dtype=torch.long, device=self.vocabulary.device)
        return pad_sequence(rows, batch_first=True, padding_value=PADDING).to(self.vocabulary.device)


class CharacterTokenizer(SymbolTokenizer):
    """Each character of a text is a token. Runs of white space are one space, and where `characters` has no capital letters there is no
    difference between these and small ones."""

    def __init__(self, characters: str = CHARACTERS):
        self.is_lower = characters == characters.lower()
        super().__init__(list(characters))

    @classmethod
    def fitted(cls, texts: Iterable[str]) -> Self:
        """One that knows every character of these texts (as small letters)."""
        found = {character for text in texts for character in plain(text.lower())}
        if not found:
            raise ValueError("there are no characters in these texts: give some that are not empty")
        return cls("".join(sorted(found)))

    def symbols_of(self, texts: Sequence[str]) -> list[Sequence[str]]:
        return [plain(text.lower() if self.is_lower else text) for text in texts]


class PhonemeInventory(SymbolTokenizer):
    """The phonemes of a data set, under the names they have there. A text is those names, with spaces between them: "s a k e"."""

    def __init__(self, symbols: Sequence[str]):
        spaced = [symbol for symbol in symbols if symbol.split() != [symbol]]
        if spaced:
            raise ValueError(f"{spaced[0]!r} cannot be the name of a phoneme: a name has no spaces, and is not empty")
        super().__init__(list(symbols))

    @classmethod
    def fitted(cls, texts: Iterable[str]) -> Self:
        """One that knows every phoneme of these texts."""
        found = {symbol for text in texts for symbol in text.split()}
        if not found:
            raise ValueError("there are no phonemes in these texts: give some that are not empty")
        return cls(sorted(found))

    def symbols_of(self, texts: Sequence[str]) -> list[Sequence[str]]:
        return [text.split() for text in texts]


class PhonemeTokenizer(SymbolTokenizer):
    """Each character of a text's phonemes, in the international phonetic alphabet, is a token; so is the punctuation between clauses.

    They are found by the program espeak-ng, which is run once for all new texts of a call: those of texts that come again, as in
    training, are kept. `language` is one of its voices (`espeak-ng --voices` lists them). The tokens are the same for all languages.
    """

    def __init__(self, language: str = "en-us"):
        self.language = language
        super().__init__(list(PHONEMES))
        self._kept: dict[str, str] = {}

    def symbols_of(self, texts: Sequence[str]) -> list[Sequence[str]]:
        return list(self.phonemes(texts))

    def phonemes(self, texts: Sequence[str]) -> list[str]:
        """The phonemes of each text: "həlˈoʊ, wˈɜːld." """
        if len(self._kept) + len(texts) > MOST_KEPT:
            self._kept.clear()
        new = [text for text in dict.fromkeys(texts) if text not in self._kept]
        self._kept.update(zip(new, self._found(new), strict=True))
        return [self._kept[text] for text in texts]

    def _found(self, texts: Sequence[str]) -> list[str]:
        clauses = [_clauses(text) for text in texts]
        spoken = iter(self._spoken([words for text in clauses for words, _ in text if words]))
        return [" ".join(f"{next(spoken) if words else ''}{end}" for words, end in text).strip() for text in clauses]

    def _spoken(self, clauses: Sequence[str]) -> list[str]:
        if not clauses:
            return []
        # espeak-ng writes one line or more for each line it reads, and an empty one for an empty one: that is where clauses end.
        written = self._run("".join(f"{clause}\n\n" for clause in clauses)).split("\n\n")
        if len(written) != len(clauses) + 1:  # of something it has no sound for, it writes nothing
            written = [self._run(f"{clause}\n") for clause in clauses]
        return [_cleaned(lines) for lines in written[: len(clauses)]]

    def _run(self, text: str) -> str:
        program = shutil.which("espeak-ng")
        if program is None:
            raise OSError(
                f"the program espeak-ng, which finds the phonemes of a text, is not on this machine: {INSTALL}"
            )
        command = [program, "-q", "--ipa", "-v", self.language]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}"
            raise ValueError(
                f"espeak-ng could not read texts as language={self.language!r} ({said}): `espeak-ng --voices` lists what it speaks"
            )
        return done.stdout.decode(errors="replace")


def plain(text: str) -> str:
    """In one of the ways in which unicode can write it (NFC), with single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _clauses(text: str) -> list[tuple[str, str]]:
    """The words of each clause, and the punctuation that ends it. (A point or comma inside of a number ends nothing.)"""
    pieces = re.split(rf"([{re.escape(CLAUSE_ENDS)}…]+)(?=\s|$)", plain(text))
    found: list[tuple[str, str]] = []
    for words, end in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        lines = _lines(words.strip() if re.search(r"\w", words) else "")
        end = end.replace("…", ".")[:1]
        if lines[-1] or end:
            found += [(line, "") for line in lines[:-1]] + [(lines[-1], end)]
    return found


def _lines(words: str) -> list[str]:
    """Lines that are not too long, of whole words."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(longer.encode()) > MOST_BYTES and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _cleaned(lines: str) -> str:
    """One line, marks apart from their letters, without the signs of another language: "(en)wiːkˈɛnd(fr)"."""
    return " ".join(unicodedata.normalize("NFD", re.sub(r"\([a-z-]+\)", "", lines)).split())
