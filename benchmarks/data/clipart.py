"""Captioned pictures from Debian packages: about 7,000 drawings of Open Clip Art and 700 stamps of Tux Paint.

    apt-get download openclipart-png openclipart-svg tuxpaint-stamps-default
    for package in *.deb; do dpkg -x $package unpacked; done
    python benchmarks/data/clipart.py unpacked clipart           # writes clipart/manifest.jsonl and clipart/pictures/
    helicon train muse/vqgan data.source=clipart/manifest.jsonl  # or benchmarks/pictures.py --data clipart

The packages may also be unpacked and used one by one. A picture is laid on white, cut to what is drawn, put in the middle of
a square and made at most `--size` pixels a side (small ones stay small). Its text is the title and the keywords that the SVG
file of the same name carries, or the English sentence beside a stamp. What cannot be read, is blank or was there before is left
out and counted.

Open Clip Art is in the public domain; the stamps are under the GNU General Public License 2 or freer (see the packages'
`usr/share/doc/*/copyright`). Stamps that are SVG files only are left out: nothing here draws them.
"""

import argparse
import hashlib
import io
import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image, ImageChops

CLIP_ART, STAMPS = "usr/share/openclipart", "usr/share/tuxpaint/stamps"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
LIST_ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
MAX_SAME_TITLE = 3  # a title that more pictures have is that of their collection, and the file's name says more
MAX_TEXT = 96  # bytes
MIN_SIDE = 24  # pixels that are drawn
MAX_PIXELS = 2**25  # some drawings of a few lines were rendered at 13,000 pixels a side
MARGIN = 0.04  # of white around what is drawn
MEANINGLESS = {"hash", "unsorted", "special", "clipart", "duplicates", "svg", "png"}  # as keywords and in names
QUALITIES = (None, 95, 90, 80, 70)  # of WebP files; None is lossless

Source = tuple[Path, str, str]  # the file, its place in the packages, its text


@dataclass(frozen=True)
class Picture:
    """A picture ready to be written, with what it was made from."""

    source: str
    text: str
    image: Image.Image

    @property
    def name(self) -> str:
        """(From the source alone, so that a picture has the same name, and is held out or not, whatever else there is.)"""
        stem = re.sub(r"[^a-z0-9]+", "-", Path(self.source).stem.lower()).strip("-")
        return f"{stem[:40]}-{hashlib.sha256(self.source.encode()).hexdigest()[:8]}.webp"


def clip_art(packages: Path) -> Iterator[Source]:
    """The PNG files of Open Clip Art that have an SVG twin, with their texts."""
    drawings = packages / CLIP_ART / "svg"
    about = {svg: _metadata(svg) for svg in sorted(drawings.rglob("*.svg"))}
    shared = Counter(found[0] for found in about.values() if found)
    for svg, found in about.items():
        place = svg.relative_to(drawings).with_suffix(".png")
        png = packages / CLIP_ART / "png" / place
        if found is None or not png.is_file():
            continue
        title, keywords, authors = found
        if not title or shared[title] > MAX_SAME_TITLE or "clipart by" in title.lower():
            title = svg.stem
        yield png, f"openclipart/{place.as_posix()}", caption(title, keywords, authors)


def _metadata(svg: Path) -> tuple[str, list[str], set[str]] | None:
    """Title, keywords, and the words of the names of those who drew it; None for a file that is no XML."""
    try:
        root = ElementTree.parse(svg).getroot()
    except ElementTree.ParseError:
        return None
    titles = [(element.text or "").strip() for element in root.iter(f"{DUBLIN_CORE}title")]
    keywords = [(item.text or "") for subject in root.iter(f"{DUBLIN_CORE}subject") for item in subject.iter(LIST_ITEM)]
    # The first title is the picture's, the others are names of publisher, author and owner.
    return (titles[0] if titles else ""), keywords, {word for name in titles[1:] for word in words_of(name)}


def stamps(packages: Path) -> Iterator[Source]:
    """The PNG files of Tux Paint's stamps that have a text, whose first line is English."""
    folder = packages / STAMPS
    for png in sorted(folder.rglob("*.png")):
        beside = png.with_suffix(".txt")
        lines = beside.read_text(encoding="utf-8", errors="replace").splitlines() if beside.is_file() else []
        if lines and "=" not in lines[0]:
            place = png.relative_to(folder).as_posix()
            yield png, f"tuxpaint/{place}", lines[0].strip().rstrip(".").lower()


def words_of(text: str) -> list[str]:
    """Lower-case words; what is no word (numbers, single letters, `star_22pt07step`) is left out."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    found = re.findall(r"[^\W_]+(?:'[a-z]+)?", apart.lower())
    return [word for word in found if len(word) > 1 and not any(map(str.isdigit, word))]


def caption(title: str, keywords: Iterable[str], authors: set[str]) -> str:
    """The title and the keywords that add a word to it, without authors' names; at most MAX_TEXT bytes of whole keywords."""
    text, said = "", set(MEANINGLESS)
    for phrase in (title, *keywords):
        words = [word for word in words_of(phrase) if word not in MEANINGLESS and not _is_author(word, authors)]
        longer = f"{text}, {' '.join(words)}" if text else " ".join(words)
        if set(words) <= said or len(longer.encode()) > MAX_TEXT:
            continue
        text, said = longer, said | set(words)
    return text


def _is_author(word: str, authors: set[str]) -> bool:
    """(File names are cut, and so are the names in them: `dino_architetto_francesc_01`.)"""
    return word in authors or (len(word) > 3 and any(author.startswith(word) for author in authors))


def prepared(path: Path, size: int) -> Image.Image | None:
    """The picture on a white square of at most `size` pixels a side; None if next to nothing is drawn."""
    with Image.open(path) as image:
        image = image.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    box = ImageChops.invert(image).point(lambda value: 255 * (value > 4)).getbbox()
    if box is None or max(box[2] - box[0], box[3] - box[1]) < MIN_SIDE:
        return None
    image = image.crop(box)
    if min(extremes := [high - low for low, high in image.getextrema()]) == max(extremes) == 0:
        return None  # one colour from edge to edge
    side = round(max(image.size) * (1 + 2 * MARGIN))
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square if side <= size else square.resize((size, size), Image.Resampling.LANCZOS, reducing_gap=3.0)


def gather(sources: Iterable[Source], size: int, max_same: int) -> tuple[list[Picture], Counter[str]]:
    """The pictures to keep, and how many were left out for which reason."""
    kept: list[Picture] = []
    counts: Counter[str] = Counter()
    contents: set[bytes] = set()
    texts: Counter[str] = Counter()
    # In an order that has nothing to do with names: of a series of like pictures, those kept are spread over it.
    for path, place, text in sorted(sources, key=lambda source: hashlib.sha256(source[1].encode()).digest()):
        try:
            image = prepared(path, size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombWarning, Image.DecompressionBombError):
            counts["unreadable or huge"] += 1
            continue
        content = b"" if image is None else hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
        if image is None:
            counts["blank or tiny"] += 1
        elif content in contents:
            counts["duplicate"] += 1
        elif not text:
            counts["without text"] += 1
        elif texts[text] == max_same:
            counts["same text as many others"] += 1
        else:
            contents.add(content)
            texts[text] += 1
            kept.append(Picture(place, text, image))
    return sorted(kept, key=lambda picture: picture.source), counts


def encode(pictures: list[Picture], max_mb: float) -> tuple[list[bytes], str]:
    """All files, at the best quality at which they have at most `max_mb` MiB together."""
    for quality in QUALITIES:
        files = [_webp(picture.image, quality) for picture in pictures]
        total = sum(map(len, files)) / 2**20
        if total <= max_mb:
            return files, "lossless" if quality is None else f"quality {quality}"
    raise SystemExit(
        f"{len(pictures)} pictures need {total:.1f} MiB even at quality {quality}: lower --size or raise --max-mb"
    )


def _webp(image: Image.Image, quality: int | None) -> bytes:
    file = io.BytesIO()
    image.save(file, "webp", lossless=quality is None, quality=100 if quality is None else quality, method=4)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="the folder the packages were unpacked to (it holds usr/share)")
    parser.add_argument("out", type=Path, help="a folder to make")
    parser.add_argument("--size", type=int, default=128, help="the most pixels a side")
    parser.add_argument("--max-mb", type=float, default=50.0, help="MiB for all pictures; their quality follows")
    parser.add_argument("--max-same", type=int, default=40, help="the most pictures with one text")
    arguments = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    found = [*clip_art(arguments.packages), *stamps(arguments.packages)]
    if not found:
        parser.error(
            f"{arguments.packages} holds neither {CLIP_ART} (with png and svg) nor {STAMPS}: unpack the packages there"
        )
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder, or remove it")
    pictures, left_out = gather(found, arguments.size, arguments.max_same)
    files, quality = encode(pictures, arguments.max_mb)
    try:
        (arguments.out / "pictures").mkdir(parents=True)
        rows = []
        for picture, file in zip(pictures, files, strict=True):
            (arguments.out / "pictures" / picture.name).write_bytes(file)
            rows.append({"path": f"pictures/{picture.name}", "text": picture.text, "source": picture.source})
        (arguments.out / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError:
        shutil.rmtree(arguments.out, ignore_errors=True)
        raise
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    print(
        f"{len(pictures)} of {len(found)} pictures, {sum(map(len, files)) / 2**20:.1f} MiB ({quality}), "
        f"{len({picture.text for picture in pictures})} texts, in {arguments.out}; left out: {reasons or 'none'}"
    )


if __name__ == "__main__":
    main()
