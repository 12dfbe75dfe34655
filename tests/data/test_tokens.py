"""Token caches, with a toy tokenizer whose tokens can be told by hand. (tests/cli/test_tokenize.py has the real ones.)"""

import itertools
import json
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import children
from helicon.data import tokenize as tokenize_module
from helicon.data import tokens
from helicon.data.dataset import BadFile, View
from helicon.data.files import find_files
from helicon.data.image import image_data
from helicon.data.loader import Loader
from helicon.data.split import Subset, split
from helicon.data.synthetic import SyntheticShapes
from helicon.data.tokenize import Tokenized, _Places, tokenize
from helicon.data.tokens import TokenCache, Tokenizer, is_token_cache, network_hash
from helicon.nn.network import Network, load_network


class Grey(Network):
    """The brightness of each 2 x 2 cell as one of so many codes."""

    def __init__(self, num_codes: int = 300, contrast: float = 1.0):
        super().__init__()
        self.num_codes = num_codes
        self.contrast = torch.nn.Parameter(torch.tensor(contrast))

    def forward(self, images: Tensor) -> Tensor:
        cells = torch.nn.functional.avg_pool2d(images.mean(dim=1), 2)
        return (cells * self.contrast * self.num_codes).long().clamp(max=self.num_codes - 1)


class Greys(Tokenizer):
    def __init__(self, network: Network, after: Callable[[int], object] = lambda count: None):
        self.networks, self.sizes, self.path = {"grey": network}, {"ids": network.num_codes}, network.source
        self.after, self.count = after, 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            found = {"ids": self.networks["grey"](batch["images"])}
        self.count += len(batch["images"])
        self.after(self.count)
        return {**found, "texts": batch["texts"]} if "texts" in batch else found


def write_picture(path: str | Path, seed: int, caption: str | None = None) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    if caption is not None:
        Path(path).with_suffix(".txt").write_text(caption)


@pytest.fixture
def pictures() -> Path:
    for number in range(7):
        write_picture(f"pictures/{number % 2}/{number}.png", number, f"picture {number}")
    return Path("pictures")


def data(source: str | Path = "pictures", **options: Any) -> Any:
    return image_data(source, 6, **{"captions": "beside", **options})


def make(
    dataset: Any = None, network: Network | None = None, folder: str = "cache", source: str = "pictures", **options: Any
) -> tuple[Tokenized, int]:
    """What was done, and how many items the tokenizer was shown."""
    tokenizer = Greys(network or Grey(), options.pop("after", lambda count: None))
    chosen = {"arguments": {"image_size": 6}, "batch_size": 3, "shard_items": 2, **options}
    return tokenize(data() if dataset is None else dataset, tokenizer, folder, source=source, **chosen), tokenizer.count


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


def content(cache: TokenCache) -> list[Any]:
    return [value for index in range(len(cache)) for value in cache[index].values()]


def expected(source: Any = None, network: Network | None = None) -> list[Any]:
    chosen = data(augment=False) if source is None else source
    samples = [chosen[index] for index in range(len(chosen))]
    with torch.no_grad():
        return [value for s in samples for value in ((network or Grey())(s["images"][None])[0], s["texts"])]


def shard_files(folder: str = "cache") -> list[Path]:
    return sorted(Path(folder, "shards").iterdir())


def test_what_is_read_is_what_the_tokenizer_made(pictures: Path) -> None:
    done, count = make()
    assert (done, count) == (Tokenized(encoded=7, kept=0, bad=0, gone=0), 7)
    cache = TokenCache("cache")
    assert same(content(cache), expected())
    assert cache[0]["ids"].dtype == torch.int64 and cache[0]["ids"].shape == (3, 3)
    assert cache.keys is not None and list(cache.keys) == data().keys
    assert cache.keys[-1] == data().keys[-1] and cache.keys[1:3] == data().keys[1:3]
    assert is_token_cache("cache") and not is_token_cache("pictures") and not is_token_cache(data())
    assert not Path("cache/bad_files.txt").exists()
    assert {path.name for path in shard_files()} == {Path(entry["file"]).name for entry in cache.index.files[1:]}
    with pytest.raises(IndexError):
        cache[7]


def test_augmentation_is_left_out(pictures: Path) -> None:
    dataset = data(augment=True, random_crop=True)
    make(dataset)
    assert same(content(TokenCache("cache")), expected()) and dataset.dataset.augment


class Codes(Tokenizer):
    """Passes on what the samples hold, without the padding of the batch."""

    def __init__(self, **sizes: int):
        self.networks, self.sizes = {}, sizes

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        codes, lengths = batch["codes"], batch.get("codes_lengths", [batch["codes"].shape[1]] * len(batch["codes"]))
        cut = [row[:length] for row, length in zip(codes, lengths, strict=True)]
        return {"codes": cut, "semantic": [row[:, 0] for row in cut], "faces": batch["faces"], "name": batch["name"]}


class Items(list):
    """A user's own dataset."""


TEXTS = ["", "déjà vu", "half a character \ud83d", "name \udcff of a file", "two\nlines", "\0"]


@pytest.mark.parametrize("size", [4, 256, 257, 65536, 65537, 2**31 + 1])
def test_shapes_may_differ_and_integers_are_stored_as_small_as_they_can_be(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [
        {"codes": torch.randint(size, (length, 3), generator=generator), "faces": length, "name": text}
        for length, text in zip((2, 0, 5, 1, 1, 3), TEXTS, strict=True)
    ]
    samples[0]["codes"][0, 0] = size - 1
    made = tokenize(
        Items(samples), Codes(codes=size, semantic=size, faces=9), "cache", source="a list", arguments={}, shard_items=4
    )
    assert made.encoded == 6
    cache = TokenCache("cache")
    for sample, read in zip(samples, (cache[index] for index in range(6)), strict=True):
        assert set(read) == {"codes", "semantic", "faces", "name"}
        assert torch.equal(read["codes"], sample["codes"]) and torch.equal(read["semantic"], sample["codes"][:, 0])
        assert (read["faces"].tolist(), read["faces"].shape, read["name"]) == (sample["faces"], (), sample["name"])
    smallest = {4: np.uint8, 256: np.uint8, 257: np.uint16, 65536: np.uint16, 65537: np.int32, 2**31 + 1: np.int64}
    columns = tokens.mapped(shard_files()[0])
    assert columns["codes.values"].dtype == smallest[size] and columns["faces.values"].dtype == np.uint8
    assert cache.keys is None, "or a split would differ from the one on the fly"
    batch = next(iter(Loader(cache, batch_size=6, shuffle=False).validation()))
    assert batch["codes"].shape == (6, 5, 3) and batch["codes_lengths"].tolist() == [2, 0, 5, 1, 1, 3]


class Frames(Tokenizer):
    def __init__(self) -> None:
        self.networks, self.sizes = {}, {"frames": 0}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"frames": [row[:length] for row, length in zip(batch["frames"], batch["frames_lengths"], strict=True)]}


def test_numbers_that_are_no_codes_come_back_to_the_last_bit() -> None:
    scales = torch.tensor([1e-20, 1.0, -1e20])
    samples = [
        {"frames": torch.randn(length, 3, generator=torch.Generator().manual_seed(length)) * scales}
        for length in (5, 0, 2)
    ]
    tokenize(Items(samples), Frames(), "cache", source="a list", arguments={})
    cache = TokenCache("cache")
    for index, sample in enumerate(samples):
        assert cache[index]["frames"].dtype == torch.float32 and torch.equal(cache[index]["frames"], sample["frames"])


def test_wrong_tokens_are_not_stored() -> None:
    samples = Items([{"codes": torch.tensor([[5]]), "faces": 1, "name": "a"}])
    with pytest.raises(ValueError, match="the tokenizer gave codes from 5 to 5, and names 5 codes"):
        tokenize(samples, Codes(codes=5, semantic=9, faces=9), "cache", source="a list", arguments={})
    assert not shard_files()


@pytest.mark.parametrize("kind", ["folder", "synthetic"])
def test_the_split_and_the_batches_are_those_on_the_fly(pictures: Path, kind: str) -> None:
    dataset = data(augment=False) if kind == "folder" else SyntheticShapes(7, 6)
    make(dataset, source="synthetic" if kind == "synthetic" else "pictures")
    cache = TokenCache("cache")
    for ours, theirs in zip(split(cache, 0.4, 42), split(dataset, 0.4, 42), strict=True):
        assert ours is not None and theirs is not None and list(ours.indices) == list(theirs.indices)
    batches = [next(Loader(source, batch_size=4, seed=5).steps())[0] for source in (cache, dataset)]
    assert torch.equal(batches[0]["ids"], Grey()(batches[1]["images"])) and batches[0]["texts"] == batches[1]["texts"]


def test_several_processes_make_and_read_the_same(pictures: Path) -> None:
    make()
    make(folder="other", num_workers=2)
    assert [path.name for path in shard_files()] == [path.name for path in shard_files("other")]
    cache = TokenCache("cache")
    fresh = len(pickle.dumps(cache))
    alone, together = (list(Loader(cache, batch_size=2, num_workers=n).validation()) for n in (0, 2))
    assert all(same(a.values(), b.values()) for a, b in zip(alone, together, strict=True)) and len(alone) == 4
    assert len(pickle.dumps(cache)) == fresh, "what is mapped here, another process maps for itself"
    assert same(content(pickle.loads(pickle.dumps(cache))), content(cache))


# ---------------------------------------------------------------------- bad files


def test_bad_files_are_listed_and_give_way_as_they_do_on_the_fly(
    pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("pictures/0/2.png").write_bytes(b"no picture")
    Path("pictures/1/3.txt").unlink()
    done, _ = make()
    assert (done.encoded, done.kept, done.bad) == (5, 0, 2)
    listed = [line.split("\t") for line in Path("cache/bad_files.txt").read_text().splitlines()]
    paths = [str(Path(name).resolve()) for name, _ in listed]
    assert paths == [str(Path("pictures/0/2.png").resolve()), str(Path("pictures/1/3.png").resolve())]
    assert "not a readable picture" in listed[0][1] and "3.txt" in listed[1][1]
    assert [record.levelname for record in caplog.records if "skipped" in record.message] == ["WARNING"] * 2
    cache = TokenCache("cache")
    assert len(cache) == 7
    with pytest.raises(BadFile, match="not a readable picture"):
        cache[1]
    ours, theirs = (Loader(source, batch_size=4, seed=1) for source in (cache, data(augment=False)))
    texts = [[batch["texts"] for batch in itertools.islice(loader.validation(), 2)] for loader in (ours, theirs)]
    assert texts[0] == texts[1] and len(ours.bad) == 2

    write_picture("pictures/0/2.png", 2)
    Path("pictures/1/3.txt").write_text("picture 3")
    assert make() == (Tokenized(encoded=2, kept=5, bad=0, gone=0), 2)
    assert same(content(TokenCache("cache")), expected()) and not Path("cache/bad_files.txt").exists()


def test_where_nothing_can_be_read_the_cache_stays_as_it_was(pictures: Path, caplog: pytest.LogCaptureFixture) -> None:
    make()
    before = content(TokenCache("cache"))
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"none of the 7 items can be read, for example .*0\.png"):
        make()
    assert same(content(TokenCache("cache")), before) and "skipped" not in caplog.text


# ---------------------------------------------------------------------- again


def test_only_what_is_new_or_changed_is_encoded(pictures: Path) -> None:
    make()
    names = [path.name for path in shard_files()]
    assert make() == (Tokenized(encoded=0, kept=7, bad=0, gone=0), 0)
    assert [path.name for path in shard_files()] == names, "nothing is written again"
    os.utime("pictures/0/0.png", (1, 1))
    assert make()[1] == 0, "another date alone is no change"

    write_picture("pictures/1/5.png", 50)
    assert make() == (Tokenized(encoded=1, kept=6, bad=0, gone=0), 1)
    Path("pictures/0/4.txt").write_text("another caption")
    assert make() == (Tokenized(encoded=1, kept=6, bad=0, gone=0), 1)
    write_picture("pictures/0/00.png", 8, "new, and in the middle")
    Path("pictures/1/1.png").unlink()
    assert make() == (Tokenized(encoded=1, kept=6, bad=0, gone=1), 1)
    assert same(content(TokenCache("cache")), expected())
    assert make(network=Grey(contrast=0.5))[1] == 7, "another tokenizer makes other tokens"
    assert make(network=Grey(contrast=0.5), arguments={"image_size": 6, "channels": 3})[1] == 7
    assert same(content(TokenCache("cache")), expected(network=Grey(contrast=0.5)))


def test_a_file_that_keeps_its_size_and_date_is_not_read(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    read: list[Path] = []
    for module in (tokens, tokenize_module):
        monkeypatch.setattr(module, "content_of", lambda paths: read.extend(paths) or bytes(16))
    make()
    TokenCache("cache").check_source()
    assert not read


def test_what_is_gone_is_gone_from_the_files(pictures: Path) -> None:
    Path("pictures/0/2.txt").write_text("nobody may read this")
    make(shard_items=4)
    assert any(b"nobody may read this" in path.read_bytes() for path in shard_files())
    Path("pictures/0/2.png").unlink()
    make(shard_items=4)
    assert not any(b"nobody may read this" in path.read_bytes() for path in shard_files())
    assert [len(tokens.mapped(path)["fingerprints"]) for path in shard_files()] in ([4, 2], [2, 4])
    TokenCache("cache").verify()


def test_many_small_changes_do_not_leave_many_small_files(pictures: Path) -> None:
    for number in range(7, 14):
        write_picture(f"pictures/0/{number}.png", number, "later")
        make(shard_items=5)
        assert len(shard_files()) == -(-(number + 1) // 5)
    assert same(content(TokenCache("cache")), expected())
    assert len(list(Path("cache").iterdir())) == 4, "tokens.json, one table of items, the shards and the lock"


def test_rows_of_a_manifest_that_name_one_file(pictures: Path) -> None:
    rows = [{"path": "0/0.png", "text": "a"}, {"path": "0/0.png", "text": "b"}, {"path": "1/1.png", "text": "c"}]

    def write() -> Any:
        Path("pictures/list.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return data("pictures/list.jsonl", captions="column", augment=False)

    assert make(write(), source="pictures/list.jsonl")[1] == 3
    assert [TokenCache("cache")[index]["texts"] for index in range(3)] == ["a", "b", "c"]
    rows[2]["text"] = "changed"
    dataset = write()
    with pytest.raises(ValueError, match=r"stale, as .*list\.jsonl has changed: bring it up to date with `helicon"):
        TokenCache("cache").check_source()
    assert make(dataset, source="pictures/list.jsonl")[1] == 1
    assert same(content(TokenCache("cache")), expected(dataset))
    TokenCache("cache").check_source()
    for number, text in enumerate("ab"):
        make(Subset(dataset, [number]), source="pictures/list.jsonl")
        assert TokenCache("cache")[0]["texts"] == text, "not taken for the other row of that file"


def test_items_that_are_no_files_are_known_by_what_they_hold(pictures: Path) -> None:
    shapes = lambda count, seed=0: make(
        SyntheticShapes(count, 6, seed), source="synthetic", arguments={"num_samples": count}
    )
    assert shapes(6)[1] == 6
    assert shapes(9) == (Tokenized(encoded=3, kept=6, bad=0, gone=0), 3)
    assert shapes(4) == (Tokenized(encoded=0, kept=4, bad=0, gone=5), 0)
    assert shapes(4, seed=1)[1] == 4
    assert make(Subset(data(), [4, 1]), folder="part")[1] == 2, "some of the files, in another order"
    assert TokenCache("part")[0]["texts"] == data()[4]["texts"]


class Halves(View):
    """Two items of each file, as segments of recordings are."""

    def __len__(self) -> int:
        return 2 * len(self.dataset)

    @property
    def keys(self) -> list[str]:
        return [key for key in self.dataset.keys for _ in range(2)]

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        pixels = torch.from_numpy(np.array(Image.open(self.dataset.paths[index // 2]))).permute(2, 0, 1) / 255
        return {"images": pixels.chunk(2, dim=2)[index % 2][..., :2]}


def test_items_that_share_a_file(pictures: Path) -> None:
    assert make(Halves(find_files(pictures, ["png"])))[1] == 14
    cache = TokenCache("cache")
    assert cache.index.source.root == str(pictures.resolve()) and list(cache.keys or ())[:3] == ["0/0.png"] * 2 + [
        "0/2.png"
    ]
    halves = Halves(find_files(pictures, ["png"]))
    assert all(torch.equal(cache[i]["ids"], Grey()(halves[i]["images"][None])[0]) for i in range(14))
    write_picture("pictures/0/0.png", 99)
    with pytest.raises(ValueError, match=r"0\.png is not what it was and 1 more"):
        cache.check_source()
    assert make(halves)[1] == 2


# ---------------------------------------------------------------------- stale


def test_a_changed_file_is_refused_and_then_encoded_alone(pictures: Path) -> None:
    make()
    TokenCache("cache").made_by(Greys(Grey()))
    os.utime("pictures/0/0.png", (1, 1))
    TokenCache("cache").made_by(Greys(Grey()))
    write_picture("pictures/1/3.png", 33)
    with pytest.raises(ValueError, match=r"cache is stale, as .*pictures/1/3\.png is not what it was: bring it up"):
        TokenCache("cache").made_by(Greys(Grey()))
    assert make()[1] == 1
    TokenCache("cache").made_by(Greys(Grey()))
    Path("pictures/1/5.txt").write_text("another caption")
    with pytest.raises(ValueError, match=r"pictures/1/5\.png is not what it was"):
        TokenCache("cache").check_source()


def test_a_source_that_is_not_there_is_not_missed(pictures: Path) -> None:
    make()
    Path("pictures/0/0.png").rename("aside.png")
    with pytest.raises(ValueError, match=r"stale, as .*pictures/0/0\.png is gone"):
        TokenCache("cache").check_source()
    Path("aside.png").rename("pictures/0/0.png")
    pictures.rename("elsewhere")
    cache = TokenCache("cache").made_by(Greys(Grey()))
    assert len(content(cache)) == 14
    assert make(data("elsewhere"), source="elsewhere")[1] == 0, "the same files in another place"


def test_of_very_many_files_some_are_looked_at(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    looked_at: list[int] = []
    monkeypatch.setattr(tokens, "MAX_LOOKED_AT", 3)
    monkeypatch.setattr(TokenCache, "_is_changed", lambda self, index, paths: looked_at.append(index) or False)
    TokenCache("cache").check_source()
    assert looked_at == [0, 3, 6]


def test_another_tokenizer_is_refused_with_both_names(pictures: Path) -> None:
    for name, contrast in (("one", 1.0), ("two", 0.5)):
        Grey(contrast=contrast).save(name)
    one, two = (load_network(Path(name)) for name in ("one", "two"))
    make(network=one, arguments={"image_size": 6, "captions": "beside"})
    cache = TokenCache("cache")
    cache.made_by(Greys(one))
    with pytest.raises(ValueError) as refused:
        cache.made_by(Greys(two))
    said = str(refused.value)
    assert all(str(Path(name).resolve()) in said for name in ("one", "two"))
    assert all(network_hash(network)[:12] in said for network in (one, two))
    source, out = Path("pictures").resolve(), "cache-new"
    command = f"helicon tokenize {Path('two').resolve()} --data {source} -o {out} image_size=6 captions=beside"
    assert said.endswith(f"make a new one with `{command}`")
    with pytest.raises(ValueError, match="made with ids=300, not 200"):
        other = Greys(one)
        other.sizes = {"ids": 200}
        cache.made_by(other)


def test_a_network_has_the_same_hash_wherever_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Grey()
    known = network_hash(network)
    network.save("saved")
    assert network_hash(load_network(Path("saved"))) == known
    monkeypatch.setattr("helicon.__version__", "99")
    assert network_hash(network) == known
    assert known != network_hash(Grey(num_codes=299)) != network_hash(Grey(contrast=1.0001)) != known
    assert network_hash(Grey().to(torch.bfloat16)) != known, "tokens depend on the precision"


# ---------------------------------------------------------------------- interrupted


def stopped_after(count: int) -> Callable[[int], object]:
    """Waits for a signal once so many items are encoded."""
    return lambda done: signal.pause() if done > count else None


def test_a_kill_loses_what_was_not_written_and_nothing_else(pictures: Path) -> None:
    child = children.start(lambda: make(after=stopped_after(6), batch_size=1))
    children.wait_for(lambda: Path("cache/shards").is_dir() and len(list(Path("cache/shards").glob("[!.]*"))) == 3)
    assert children.kill(child) == -signal.SIGKILL
    assert is_token_cache("cache")
    with pytest.raises(ValueError, match=r"cache was never finished: go on with `helicon tokenize RUN --data"):
        TokenCache("cache")
    assert make() == (Tokenized(encoded=1, kept=6, bad=0, gone=0), 1)
    assert same(content(TokenCache("cache")), expected())


def test_a_kill_during_an_update_leaves_the_cache_there_was(pictures: Path) -> None:
    make()
    before = content(TokenCache("cache"))
    for number in range(7):
        write_picture(f"pictures/{number % 2}/{number}.png", 100 + number)
    old = len(shard_files())
    child = children.start(lambda: make(after=stopped_after(5), batch_size=1))
    children.wait_for(lambda: len(list(Path("cache/shards").glob("[!.]*"))) == old + 2)
    children.kill(child)
    assert same(content(TokenCache("cache")), before)
    assert make() == (Tokenized(encoded=3, kept=4, bad=0, gone=0), 3)
    assert same(content(TokenCache("cache")), expected())


def test_an_interrupt_keeps_everything_that_is_encoded(pictures: Path) -> None:
    def after(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    assert children.run(lambda: make(after=after, batch_size=1, shard_items=100)) == 130
    assert make() == (Tokenized(encoded=3, kept=4, bad=0, gone=0), 3)
    assert same(content(TokenCache("cache")), expected())


def test_a_full_disk_is_one_sentence_and_costs_nothing(pictures: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1100, resource.RLIM_INFINITY))
        try:
            make(after=lambda count: None, batch_size=1)
        except OSError as error:
            Path("said").write_text(str(error))

    assert children.run(work) == 0
    said = Path("said").read_text()
    assert said.endswith(
        "cannot be written (File too large): put that right and do the same again, which goes on from here"
    )
    written = len(shard_files())
    assert written == 4, "a table of seven items is larger than two of them"
    assert make() == (Tokenized(encoded=0, kept=7, bad=0, gone=0), 0)


def test_two_at_once_are_refused(pictures: Path) -> None:
    def after(count: int) -> None:
        with pytest.raises(BlockingIOError, match="another process is making cache"):
            make()

    make(after=after)


# ---------------------------------------------------------------------- damaged, and other things in the way


def test_damage_is_named_and_mended(pictures: Path) -> None:
    make()
    path = shard_files()[1]
    whole, held = path.read_bytes(), len(tokens.mapped(path)["fingerprints"])
    path.write_bytes(whole[:-3])
    with pytest.raises(
        ValueError, match=rf"{path.name} has {len(whole) - 3} bytes instead of {len(whole)}: put it back"
    ):
        TokenCache("cache")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"the content of .*{path.name} has changed: put it back, or mend"):
        TokenCache("cache").verify()
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(ValueError, match=rf"{path.name} cannot be read"):
        content(TokenCache("cache"))
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        TokenCache("cache")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert make() == (Tokenized(encoded=held, kept=7 - held, bad=0, gone=0), held)
    TokenCache("cache").verify()
    (items,) = Path("cache").glob("items-*")
    items.write_bytes(b"\xff" * items.stat().st_size)
    assert make()[1] == 0
    assert same(content(TokenCache("cache")), expected())
    Path("cache/tokens.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokens\.json is damaged"):
        TokenCache("cache")
    Path("cache/tokens.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        TokenCache("cache")


def test_nothing_else_is_overwritten(pictures: Path) -> None:
    with pytest.raises(ValueError, match="no token cache"):
        TokenCache("pictures")
    with pytest.raises(FileExistsError, match="pictures is there already and no token cache"):
        make(folder="pictures")
    with pytest.raises(FileExistsError, match="is there already"):
        make(folder="pictures/0/0.png")
    with pytest.raises(OSError, match=r"pictures/0/0\.png/x cannot be written"):
        make(folder="pictures/0/0.png/x")
    with pytest.raises(ValueError, match="nothing of it holds no items"):
        make(Items(), source="nothing of it")
    make()
    write_picture("others/9.png", 9, "nine")
    with pytest.raises(FileExistsError, match=r"was made from .*pictures, and nothing of that is in .*others"):
        make(data("others"), source="others")
    with pytest.raises(FileExistsError, match="nothing of that is in synthetic"):
        make(SyntheticShapes(4, 6), source="synthetic")
    assert same(content(TokenCache("cache")), expected())
    shutil.rmtree("cache")
    Path("cache").mkdir()
    assert make()[1] == 7, "an empty folder will do"


def test_hashes_are_found_to_the_last_byte() -> None:
    """(numpy compares words without their trailing zeros.)"""
    hashes = np.random.default_rng(0).integers(0, 3, (200, 16), dtype=np.uint8)
    hashes[:50, 8:] = 0
    known = {row.tobytes(): None for row in hashes[::2]}
    places = _Places(hashes[::2])
    for row, found in zip(hashes, places.rows(hashes), strict=True):
        assert (row.tobytes() in known) == (found >= 0)
        assert found < 0 or (hashes[::2][found] == row).all()
    assert _Places(hashes[:0]).rows(hashes[:2]).tolist() == [-1, -1]
