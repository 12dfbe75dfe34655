"""The index of sounds: what is read when, what is kept, and what fits."""

import fcntl
import json
import logging
import os
import threading
from pathlib import Path

import pytest
import soundfile
import torch
from torch import Tensor

from helicon.data.recording import SoundFile
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm import search
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.models.musiclm.mulan import begins_in
from helicon.models.musiclm.search import SoundIndex, mulan_in
from models.musiclm.tiny import HZ, mulan, pairs
from models.soundstream.tiny import tiny as codec

SECONDS = 0.5
NUM = 5


def write(path: str, wave: Tensor, hz: int = HZ) -> None:
    Path(path).parent.mkdir(exist_ok=True, parents=True)
    soundfile.write(path, wave.numpy().T, hz)


@pytest.fixture
def sounds() -> Tensor:
    """Files of one clip each, whose waves are returned."""
    waves, _ = pairs(NUM)
    for number, wave in enumerate(waves):
        write(f"sounds/{number}.wav", wave)
    return waves


def names(found: list[search.Found]) -> list[str]:
    return [Path(one.name).name for one in found]


def test_the_ranking_is_that_of_the_similarities(sounds: Tensor) -> None:
    network = mulan().eval()
    index = SoundIndex(network, seconds=SECONDS)
    assert index.update("sounds", batch_size=2).read == NUM == len(index)
    texts = ["a loud tone", "a soft chirp"]
    with torch.no_grad():
        expected = network(torch.round(sounds * 2**15) / 2**15, raw_texts=texts, return_pairwise_similarities=True)
    for column, found in zip(expected.T, index.search(texts, top=3), strict=True):
        assert names(found) == [f"{number}.wav" for number in column.argsort(descending=True)[:3].tolist()]
        ranked = column.sort(descending=True).values[:3]
        torch.testing.assert_close(torch.tensor([one.similarity for one in found]), ranked, atol=1e-5, rtol=0)


def test_the_best_clip_of_a_recording_counts_and_its_moment_is_told(sounds: Tensor) -> None:
    """Recordings of any rate, length and number of channels; the last clip ends where its recording does."""
    long = torch.cat([torch.zeros(HZ), sounds[1], torch.zeros(HZ // 4), sounds[3]])
    write("long/one.wav", torch.stack([long, long]))
    write("long/two.flac", sounds[0].repeat_interleave(2), 2 * HZ)
    write("long/short.wav", sounds[2][: HZ // 8])
    index = SoundIndex(mulan(), seconds=SECONDS)
    index.update("long")
    assert index.begins == [[0.0, 0.5, 1.0, 1.5, 1.75], [0.0], [0.0]]
    for number, begin in ((1, 1.0), (3, 1.75)):
        best = index.like(f"sounds/{number}.wav", top=1)[0]
        assert best.name == str(Path("long/one.wav").absolute()) and best.begin == begin
        assert best.similarity > 0.9999
    network = index.mulan.eval()
    with torch.no_grad():
        latent = network.get_audio_latents(torch.round(sounds[2][None, : HZ // 8] * 2**15) / 2**15)
    short = index.nearest(latent)[0][0]
    assert short.similarity == pytest.approx(1, abs=1e-5) and short.seconds == 1 / 8


@pytest.mark.parametrize(
    ("duration", "begins"), [(0.1, [0]), (4, [0]), (8.1, [0, 4]), (9, [0, 4, 5]), (12, [0, 4, 8]), (3.9, [0])]
)
def test_clips_lie_end_to_end_and_the_last_is_whole(duration: float, begins: list[float]) -> None:
    assert begins_in(duration, 4) == begins


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened, as they are."""
    names: list[str] = []
    part = search.FilePart.open

    def noted(self: search.FilePart, *where: float) -> object:
        names.append(Path(self.path).name)
        return part(self, *where)

    monkeypatch.setattr(search.FilePart, "open", noted)
    return names


def test_only_what_is_new_or_changed_is_read_again(sounds: Tensor, opened: list[str]) -> None:
    index = lambda: SoundIndex(mulan(), "index", SECONDS)
    assert index().update("sounds").read == NUM and len(set(opened)) == NUM
    whole = index()
    opened.clear()
    done = whole.update("sounds")
    assert (done.read, done.kept, opened) == (0, NUM, [])
    write("sounds/1.wav", sounds[4])
    os.utime("sounds/1.wav", (1, 1))
    Path("sounds/2.wav").unlink()
    write("sounds/new.wav", sounds[2])
    done = index().update("sounds")
    assert (done.read, done.kept, set(opened)) == (2, NUM - 2, {"1.wav", "new.wav"})
    anew = SoundIndex(mulan(), seconds=SECONDS)
    anew.update("sounds")
    ranked = [(found.name, round(found.similarity, 5)) for found in anew.search(["a tone"])[0]]
    assert [(found.name, round(found.similarity, 5)) for found in index().search(["a tone"])[0]] == ranked
    assert len(ranked) == NUM and len(list(Path("index").glob("latents-*"))) == 1
    other = mulan()
    with torch.no_grad():
        other.audio_to_latents.weight.add_(0.1)
    assert SoundIndex(other, "index", SECONDS).update("sounds").read == NUM, "of another network nothing is kept"


def test_what_was_heard_before_an_interruption_is_kept(sounds: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of which all clips were heard, however few; and a process that read ahead does not hold the folder."""
    write("sounds/1.wav", sounds[1].repeat(4))
    batches: list[Tensor] = []
    embed = SoundIndex._embed

    def stop(self: SoundIndex, waves: Tensor, lengths: Tensor) -> Tensor:
        batches.append(waves)
        if len(batches) in (3, 6):
            raise KeyboardInterrupt
        return embed(self, waves, lengths)

    monkeypatch.setattr(SoundIndex, "_embed", stop)
    index = lambda: SoundIndex(mulan(), "index", SECONDS)
    with pytest.raises(KeyboardInterrupt):
        index().update("sounds", batch_size=2, num_workers=1)
    assert index().begins == [[0.0]], "three of the four clips of 1.wav are not all"
    monkeypatch.setattr(search, "CLIPS_AT_ONCE", 2)
    with pytest.raises(KeyboardInterrupt):
        index().update("sounds", batch_size=2)
    done = index().update("sounds", batch_size=2)
    assert (done.read, done.kept) == (NUM - 2, 2), "the second block was stopped"
    assert [len(begins) for begins in index().begins] == [1, 4, 1, 1, 1]
    anew = SoundIndex(mulan(), seconds=SECONDS)
    anew.update("sounds")
    torch.testing.assert_close(index().latents, anew.latents, atol=1e-5, rtol=0)


def test_how_far_it_is_is_told_by_batches(sounds: Tensor) -> None:
    told: list[tuple[int, int]] = []
    SoundIndex(mulan(), seconds=SECONDS).update("sounds", batch_size=2, progress=lambda *numbers: told.append(numbers))
    assert list(dict.fromkeys(told)) == [(2, NUM), (4, NUM), (NUM, NUM)]


def test_one_process_waits_for_another_and_goes_on_from_what_that_left(sounds: Tensor) -> None:
    early = SoundIndex(mulan(), "index", SECONDS)
    SoundIndex(mulan(), "index", SECONDS).update("sounds")
    assert early.update("sounds").kept == NUM
    write("sounds/new.wav", sounds[0])
    waits = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: waits.set() if "waiting for it" in record.getMessage() else None  # type: ignore[method-assign]
    search.logger.addHandler(handler)
    thread = threading.Thread(target=early.update, args=["sounds"])
    before = Path("index/index.json").read_bytes()
    try:
        with Path("index/.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            thread.start()
            assert waits.wait(20) and len(early) == NUM and Path("index/index.json").read_bytes() == before
    finally:
        search.logger.removeHandler(handler)
    thread.join(20)
    assert len(SoundIndex(mulan(), "index", SECONDS)) == NUM + 1


def test_what_others_write_is_neither_deleted_nor_missed(sounds: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    SoundIndex(mulan(), "index", SECONDS).update("sounds")
    (first,) = Path("index").glob("latents-*")
    others = [Path("index/latents-0.safetensors"), Path("index/.latents-1.safetensors.partial")]
    for path in others:
        path.write_bytes(b"of another process")
    write("sounds/new.wav", sounds[0])
    load = search.load_state

    def late(path: Path) -> dict[str, Tensor]:
        monkeypatch.setattr(search, "load_state", load)
        SoundIndex(mulan(), "index", SECONDS).update("sounds")
        return load(path)

    monkeypatch.setattr(search, "load_state", late)
    assert len(SoundIndex(mulan(), "index", SECONDS)) == NUM + 1, "though the latents it was to read are gone"
    assert not first.exists() and all(path.exists() for path in others)


def test_folders_that_cannot_be_written(sounds: Tensor) -> None:
    with pytest.raises(OSError, match=r"0.wav/index cannot be written \(Not a directory\): choose another folder"):
        SoundIndex(mulan(), "sounds/0.wav/index", SECONDS).update("sounds")
    SoundIndex(mulan(), "index", SECONDS).update("sounds")
    Path("index/.lock").unlink()
    Path("index/.lock").mkdir()
    assert SoundIndex(mulan(), "index", SECONDS).update("sounds").kept == NUM, "what is there can be used"


def test_an_index_of_an_earlier_version_is_made_anew(sounds: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    SoundIndex(mulan(), "index", SECONDS).update("sounds")
    known = json.loads(Path("index/index.json").read_text())
    del known["bad"]
    for row in known["recordings"]:
        del row["heard"]
    Path("index/index.json").write_text(json.dumps({**known, "format": 1}))
    assert SoundIndex(mulan(), "index", SECONDS).update("sounds").read == NUM
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_cannot_be_read_is_tried_again_only_if_it_changes(
    sounds: Tensor, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sounds/0.wav").write_bytes(b"no sound")
    soundfile.write("sounds/1.wav", torch.full((HZ,), torch.nan).numpy(), HZ, subtype="FLOAT")
    index = lambda: SoundIndex(mulan(), "index", SECONDS)
    bad = index().update("sounds").bad
    written = Path("index/index.json").stat()
    opened.clear()
    again = index().update("sounds")
    assert (opened, again.bad, again.read, len(bad)) == ([], bad, 0, 2)
    assert Path("index/index.json").stat() == written, "nothing has changed"
    write("sounds/0.wav", sounds[0])
    assert index().update("sounds").read == 1 and set(opened) == {"0.wav"}
    with monkeypatch.context() as without_rights:
        without_rights.setattr(os, "access", lambda path, mode: Path(path).name != "3.wav")
        assert "cannot be opened (Permission denied)" in index().update("sounds").bad.values()
    assert index().update("sounds").read == 1, "the rights of a file are no change of it"


def test_a_damaged_index_is_made_anew(sounds: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    SoundIndex(mulan(), "index", SECONDS).update("sounds")
    known = json.loads(Path("index/index.json").read_text())
    damages = {
        "latents": lambda: next(Path("index").glob("latents-*")).write_bytes(b"x"),
        "rows": lambda: Path("index/index.json").write_text(
            json.dumps({**known, "recordings": known["recordings"][1:]})
        ),
        "json": lambda: Path("index/index.json").write_text("{"),
    }
    for damage in damages.values():
        damage()
        caplog.clear()
        assert SoundIndex(mulan(), "index", SECONDS).update("sounds").read == NUM
        assert "index is damaged" in caplog.text
    Path("other").mkdir()
    Path("other/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other is there already and no index of sounds"):
        SoundIndex(mulan(), "other", SECONDS)


def test_files_that_cannot_be_read_are_named_and_skipped(sounds: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    Path("sounds/0.wav").write_bytes(b"no sound")
    Path("sounds/1.wav").unlink()
    write("sounds/cut.flac", sounds[1].repeat(6))
    content = Path("sounds/cut.flac").read_bytes()
    Path("sounds/cut.flac").write_bytes(content[: len(content) // 2])
    index = SoundIndex(mulan(), "index", SECONDS)
    with caplog.at_level(logging.WARNING):
        done = index.update("sounds", batch_size=2)
    assert (done.read, [Path(name).name for name in done.bad]) == (NUM - 1, ["0.wav"])
    assert "sounds/0.wav: not a readable sound file" in caplog.text
    begins = dict(zip((Path(part.name).name for part in index.parts), index.begins, strict=True))
    assert "heard in part" in caplog.text and "cut.flac" in caplog.text
    assert begins["cut.flac"][:2] == [0.0, 0.5] and len(begins["cut.flac"]) < 6, "of what was cut off, what is left"
    assert len(index.latents) == sum(map(len, index.begins))
    assert f"holds no sound from {begins['cut.flac'][-1] + SECONDS:.2f} s on" in caplog.text
    left = SoundFile(Path("sounds/cut.flac"), "cut.flac")
    assert left.shorten()
    durations = dict(zip(begins, index.durations, strict=True))
    assert durations["cut.flac"] == pytest.approx(left.num_frames / HZ) and durations["2.wav"] == 0.5
    for path in Path("sounds").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"none of the {NUM} files can be read, for example"):
        SoundIndex(mulan(), seconds=SECONDS).update("sounds")


def test_what_has_no_finite_latent_cannot_be_read(
    sounds: Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange, embed = torch.full((HZ // 2,), -0.5), SoundIndex._embed
    for name, wave in {"0": strange, "1": torch.cat([strange, sounds[1]])}.items():
        write(f"sounds/{name}.wav", wave)

    def broken(self: SoundIndex, waves: Tensor, lengths: Tensor) -> Tensor:
        is_strange = (waves == -0.5).all(dim=1, keepdim=True)
        return embed(self, waves, lengths).masked_fill(is_strange, torch.nan)

    monkeypatch.setattr(SoundIndex, "_embed", broken)
    index = SoundIndex(mulan(), "index", SECONDS)
    with caplog.at_level(logging.WARNING):
        done = index.update("sounds", batch_size=2)
    assert (done.read, [Path(name).name for name in done.bad]) == (NUM - 1, ["0.wav"])
    assert "0.wav: what the network makes of it is not finite" in caplog.text
    assert f"heard in part {Path('sounds/1.wav').absolute()}: what the network makes of it" in caplog.text
    assert index.begins[0] == [0.5] and index.latents.isfinite().all()
    assert len(index.latents) == sum(map(len, index.begins)) == NUM - 1
    best = index.like("sounds/2.wav", top=1)[0]
    assert best.similarity <= 1
    with pytest.raises(ValueError, match=r"0\.wav: what the network makes of it is not finite"):
        index.like("sounds/0.wav")


def test_a_manifest_names_parts_of_files(sounds: Tensor) -> None:
    write("whole.wav", torch.cat([*sounds]))
    rows = [{"path": "whole.wav", "start": 0.5 * number, "duration": 0.4} for number in range(NUM)]
    rows.append({"path": "gone.wav", "start": 0, "duration": 1})
    Path("parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = SoundIndex(mulan(), seconds=SECONDS)
    done = index.update("parts.jsonl")
    assert done.read == NUM and [Path(name).name for name in done.bad] == ["gone.wav"]
    with torch.no_grad():
        exact = torch.round(sounds[3][None, : int(0.4 * HZ)] * 2**15) / 2**15
        latent = index.mulan.eval().get_audio_latents(exact)
    found = index.nearest(latent, top=1)[0][0]
    assert found.begin == 1.5 and found.similarity > 0.9999, "and nothing beyond the part was heard"


def test_made_up_sounds_have_their_captions_as_names() -> None:
    made_up = SyntheticSounds(4, HZ, 0.6)
    index = SoundIndex(mulan(), "index", SECONDS)
    assert index.update(made_up).read == 4 and not Path("index").exists()
    assert {found.name for found in index.search(["a tone"])[0]} == {
        f"{made_up[number]['texts']} ({number})" for number in range(4)
    }


def test_a_sound_is_not_like_itself_and_its_mode_stays(sounds: Tensor) -> None:
    network = mulan().train()
    index = SoundIndex(network, seconds=SECONDS)
    index.update("sounds")
    found = index.like("sounds/2.wav")
    assert len(found) == NUM - 1 and "2.wav" not in names(found) and network.training and network.audio.training


def test_as_many_sounds_are_like_another_though_it_has_many_parts(sounds: Tensor) -> None:
    write("whole.wav", sounds[0].repeat(4))
    rows = [{"path": "whole.wav", "start": 0.5 * number, "duration": 0.5} for number in range(4)]
    rows += [{"path": f"sounds/{number}.wav"} for number in (1, 2, 3)]
    Path("parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = SoundIndex(mulan(), seconds=SECONDS)
    index.update("parts.jsonl")
    assert len(index.like("whole.wav", top=2)) == 2 and len(index.like("whole.wav")) == 3


def test_what_stands_on_a_mulan_holds_one_and_others_do_not() -> None:
    network = mulan()
    assert mulan_in(network) is network and mulan_in(MuLaNEmbedQuantizer(network, 4)) is network
    with pytest.raises(ValueError, match="a SoundStream holds no MuLaN"):
        mulan_in(codec())
    with pytest.raises(ValueError, match="cannot hear sounds"):
        mulan_in(mulan(audio={"accept_spec": True}))


def test_mistakes(sounds: Tensor) -> None:
    with pytest.raises(ValueError, match="seconds=0 must be more than 0"):
        SoundIndex(mulan(), seconds=0)
    index = SoundIndex(mulan(), seconds=SECONDS)
    with pytest.raises(ValueError, match="this index is empty: fill it with update"):
        index.search(["a tone"])
    index.update("sounds")
    for texts in ([], [" "], "a tone"):
        with pytest.raises(ValueError, match="give a list of texts that have words in them"):
            index.search(texts)
    with pytest.raises(ValueError, match="top=0 must be at least 1"):
        index.search(["a tone"], top=0)
    with pytest.raises(FileNotFoundError, match=r"gone.wav is not there: name a sound file"):
        index.like("gone.wav")
    Path("bad.wav").write_bytes(b"no sound")
    with pytest.raises(ValueError, match=r"bad.wav: not a readable sound file"):
        index.like("bad.wav")
    Path("nothing").mkdir()
    with pytest.raises(ValueError, match="nothing holds no flac, wav"):
        index.update("nothing")
