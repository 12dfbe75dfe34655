"""`helicon fit-kmeans --data FOLDER -o OUT [--model mel|HUBERT] ...`"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from helicon.models.semantic.tokenizer import KmeansTokenizer

CLIP_SECONDS = 10.0  # recordings are cut into clips this long, and those are read in random order
LAYER = 9


def fit_kmeans(
    data: Annotated[str, typer.Option("--data", help="A folder or a manifest of sounds, or synthetic.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The tokenizer's folder, which must not be there yet.")],
    model: Annotated[
        str, typer.Option(help="mel, or the folder or hub name of a HuBERT, WavLM, wav2vec 2.0, w2v-BERT or MERT.")
    ] = "mel",
    layer: Annotated[
        int | None, typer.Option(help=f"Whose hidden states to cluster, {LAYER} by default; mel has none.")
    ] = None,
    clusters: Annotated[int, typer.Option(min=2, help="How many different tokens there will be.")] = 500,
    hours: Annotated[float, typer.Option(help="How much audio to read, if there is so much.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Decides which audio is read, and where clusters begin.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Clips that go through the model at once.")] = 8,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read.")] = 0,
) -> None:
    """Make a semantic tokenizer: clusters of what a frozen model hears in sounds."""
    import torch

    from helicon.data.loader import Loader

    if hours <= 0:
        raise ValueError(f"--hours {hours}: it must be more than 0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: choose another folder, or remove it")
    tokenizer = build(model, layer, clusters).to("cuda" if torch.cuda.is_available() else "cpu")
    loader = Loader(
        sounds(data, tokenizer.sample_hz, hours, seed), batch_size=batch_size, seed=seed, num_workers=workers
    )
    num_frames = round(hours * 3600 * tokenizer.sample_hz / tokenizer.downsample_factor)
    report = tokenizer.fit(
        clips(loader),
        num_frames=max(num_frames, 1),
        seed=seed,
        reading=percent("reading"),
        clustering=percent("clustering"),
    )
    tokenizer.save(out)
    read = report.num_frames * tokenizer.downsample_factor / tokenizer.sample_hz / 3600
    typer.echo(
        f"{out}: {clusters} clusters of {report.num_frames} frames ({read:.2f} hours) of {model}, of which {report.num_used} are "
        f"used (as if {report.perplexity:.0f} were used equally); they leave {report.unexplained:.0%} of the variance."
    )
    typer.echo(f'Use it: helicon.load("{out}")(audio) gives tokens of audio [b, n] at {tokenizer.sample_hz} Hz.')


def build(model: str, layer: int | None, clusters: int) -> "KmeansTokenizer":
    from helicon.models.semantic.tokenizer import HubertWithKmeans, MelKmeans

    if model != "mel":
        return HubertWithKmeans(model, output_layer=LAYER if layer is None else layer, codebook_size=clusters)
    if layer is not None:
        raise ValueError(f"--layer {layer} is for a model: mel has no layers")
    return MelKmeans(clusters)


def sounds(data: str, sample_hz: int, hours: float, seed: int) -> Any:
    """Clips of all recordings; or so many made-up sounds."""
    from helicon.data.audio import audio_data
    from helicon.data.synthetic_sounds import SyntheticSounds

    if data == "synthetic":
        seconds = 2.0
        return audio_data(SyntheticSounds(max(1, round(hours * 3600 / seconds)), sample_hz, seconds, seed), sample_hz)
    return audio_data(data, sample_hz, max_length_seconds=CLIP_SECONDS, segments=True)


def clips(loader: Any) -> Iterator[tuple[Any, Any]]:
    for batch in loader.validation():  # each clip once, in the order of the seed
        yield batch["audio"], batch["audio_lengths"]


def percent(what: str, step: int = 10) -> Callable[[int, int], None]:
    """Tells on stderr how far something is, now and then."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if 100 * done // total >= told + step:
            told = 100 * done // total // step * step
            typer.echo(f"{what} {told} %", err=True)

    return tell
