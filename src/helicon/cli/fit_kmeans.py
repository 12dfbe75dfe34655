"""`helicon fit-kmeans --data FOLDER -o OUT [--model mel|HUBERT|RUN] ...`: semantic tokens, or codes of what a MuLaN hears."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicon.cli.generate import check_writable
from helicon.cli.progress import percent

if TYPE_CHECKING:
    from helicon.models.musiclm.mulan import MuLaN
    from helicon.models.semantic.tokenizer import KmeansTokenizer

CLIP_SECONDS = 10.0  # recordings are cut into clips this long, and those are read in random order
MADE_UP_SECONDS = 2.0
LAYER = 9
CLUSTERS, HOURS = 500, 3.0
QUANTIZERS = 8
LEAST_USED = 0.9  # of the clusters, below which something is wrong with the sounds
SOUNDS_A_CLUSTER = 50  # are enough for the codes of a MuLaN, which hears each clip as one
MOST_MADE_UP = 5000  # of them, which are enough for CLUSTERS: made-up sounds never run out
MEL, SYNTHETIC = "mel", "synthetic"


def fit_kmeans(
    data: Annotated[str, typer.Option("--data", help="A folder or a manifest of sounds, or synthetic.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The tokenizer's folder, which must not exist yet.")],
    model: Annotated[
        str,
        typer.Option(
            help="mel, or the folder or hub name of a HuBERT, WavLM, wav2vec 2.0, w2v-BERT or MERT; or the run of a MuLaN."
        ),
    ] = "mel",
    layer: Annotated[
        int | None, typer.Option(help=f"The layer whose hidden states to cluster, {LAYER} by default; mel has none.")
    ] = None,
    clusters: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"How many different tokens there will be, {CLUSTERS} by default; fewer for a MuLaN where there are few sounds.",
        ),
    ] = None,
    quantizers: Annotated[
        int | None, typer.Option(min=1, help=f"For a MuLaN: how many codes describe a sound, {QUANTIZERS} by default.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            help=f"How much audio to read, if there is that much: {HOURS:g} by default, for a MuLaN {SOUNDS_A_CLUSTER} clips per cluster "
            f"(made-up ones up to {MOST_MADE_UP})."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help=f"How long clips are, {CLIP_SECONDS:g} by default (made-up ones {MADE_UP_SECONDS:g}). For a MuLaN: as long as "
            "the clips that the stages will be trained on; by default as in its own training, where that is known."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which audio is read, and where clusters begin.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Clips that go through the model at once.")] = 8,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read.")] = 0,
) -> None:
    """Cluster a frozen model's features of sounds into a semantic tokenizer; with a MuLaN, into the codes that condition MusicLM."""
    import torch

    from helicon.data.loader import Loader

    if hours is not None and hours <= 0:
        raise ValueError(f"--hours {hours}: it must be more than 0")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds {seconds:g}: it must be more than 0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: choose another folder, or remove it")
    check_writable(out)
    mulan = None if model == MEL else mulan_of(model)
    only_for = {"--layer": layer if mulan is not None else None, "--quantizers": quantizers if mulan is None else None}
    for option, value in only_for.items():
        if value is not None:
            raise ValueError(f"{option} {value} is nothing for {model}: leave it out")
    listener: Any = build(model, layer, clusters or CLUSTERS) if mulan is None else mulan
    listener = listener.to("cuda" if torch.cuda.is_available() else "cpu")
    seconds = seconds or usual_seconds(mulan, data == SYNTHETIC)
    most = clips_to_read(hours, seconds, None if mulan is None else clusters or CLUSTERS, data == SYNTHETIC)
    found = sounds(data, listener.sample_hz, most, seed, seconds)
    loader = Loader(found, batch_size=batch_size, seed=seed, num_workers=workers)
    if mulan is not None:
        count = min(len(found), most)
        fit_codes(listener, loader, out, model, clusters or clusters_for(count), quantizers or QUANTIZERS, count, seed)
    else:
        fit_tokens(listener, loader, out, model, hours or HOURS, seed)


def usual_seconds(mulan: "MuLaN | None", are_made_up: bool) -> float:
    """A MuLaN tells sounds apart best that are as long as those it learned from."""
    usual = MADE_UP_SECONDS if are_made_up else CLIP_SECONDS
    learned = None if mulan is None else mulan.longest_seconds
    if learned is None:
        return usual
    return min(learned, usual) if are_made_up else learned


def clips_to_read(hours: float | None, seconds: float, codes: int | None, are_made_up: bool) -> int:
    """At most; `codes` are those of a MuLaN."""
    if hours is None and codes is not None:
        return min(SOUNDS_A_CLUSTER * codes, MOST_MADE_UP) if are_made_up else SOUNDS_A_CLUSTER * codes
    return max(1, round((hours or HOURS) * 3600 / seconds))


def clusters_for(count: int) -> int:
    """The usual number, or what so many sounds are enough for."""
    from helicon.models.musiclm.conditioning import codes_for

    clusters = min(CLUSTERS, codes_for(count))
    if clusters < CLUSTERS:
        typer.echo(f"{count} sounds are few: {clusters} clusters in the place of {CLUSTERS} (--clusters)", err=True)
    return clusters


def fit_tokens(tokenizer: "KmeansTokenizer", loader: Any, out: Path, model: str, hours: float, seed: int) -> None:
    """A semantic tokenizer."""
    num_frames = round(hours * 3600 * tokenizer.sample_hz / tokenizer.downsample_factor)
    report = tokenizer.fit(
        clips(loader),
        num_frames=max(num_frames, 1),
        seed=seed,
        reading=percent("reading"),
        clustering=percent("clustering"),
    )
    tokenizer.save(out)
    minutes = report.num_frames * tokenizer.downsample_factor / tokenizer.sample_hz / 60
    read = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
    typer.echo(
        f"{out}: {tokenizer.codebook_size} clusters of {report.num_frames} frames ({read}) of {model}; in use: {report.num_used} "
        f"(as if {report.perplexity:.0f} were used equally). They leave {report.unexplained:.0%} of the variance."
    )
    if report.num_used < LEAST_USED * tokenizer.codebook_size:
        typer.echo(
            f"WARNING: only {report.num_used} of {tokenizer.codebook_size} clusters are in use: the sounds are too much alike (silence, or "
            "copies), so give others, or fewer --clusters",
            err=True,
        )
    typer.echo(f'Use it: helicon.load("{out}")(audio) gives tokens of audio [b, n] at {tokenizer.sample_hz} Hz.')


def mulan_of(model: str) -> "MuLaN | None":
    """The MuLaN of a run or a saved folder; None where `model` is something else to hear with."""
    from helicon.engine.checkpoint import CHECKPOINTS_FOLDER, resolve
    from helicon.models.musiclm.mulan import MuLaN
    from helicon.nn.network import load_network, read_config

    folder = Path(model).expanduser()
    is_run = (folder / CHECKPOINTS_FOLDER).is_dir()
    try:
        kind = read_config(resolve(folder))["class"] if is_run else read_config(folder)["class"]
    except (FileNotFoundError, ValueError):
        if is_run:
            raise
        return None
    if kind.partition(":")[2] != MuLaN.__name__:
        raise ValueError(f"--model {model} holds a {kind.partition(':')[2]}: give the run of a MuLaN, mel or a HuBERT")
    network = load_network(resolve(folder))
    assert isinstance(network, MuLaN)
    return network


def fit_codes(
    mulan: "MuLaN", loader: Any, out: Path, model: str, clusters: int, quantizers: int, most: int, seed: int
) -> None:
    """The quantizer of a MuLaN's latents, which stages of AudioLM are conditioned on."""
    from helicon.engine.runtime import seed_everything
    from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer

    seed_everything(seed)  # its embeddings are random
    quantizer = MuLaNEmbedQuantizer(mulan, mulan.dim_latent, quantizers, codebook_size=clusters).to(mulan.device)
    report = quantizer.fit(
        clips(loader), seed=seed, max_sounds=most, reading=percent("reading"), clustering=percent("clustering")
    )
    quantizer.save(out)
    kept = f" of {report.num_kept} others" if report.num_kept else ""
    typer.echo(
        f"{out}: {quantizers} codes of {clusters} for what {model} hears, fitted to {report.num_frames} sounds; they leave "
        f"{report.unexplained:.0%} of the variance{kept}. Of the first, {report.num_used} are used (as if {report.perplexity:.0f} were used equally)."
    )
    typer.echo(
        f"Use it: helicon tokenize CODEC --semantic KMEANS --conditioner {out}, and model.audio_conditioner={out}."
    )


def build(model: str, layer: int | None, clusters: int) -> "KmeansTokenizer":
    from helicon.models.semantic.tokenizer import HubertWithKmeans, MelKmeans

    if model == MEL:
        if layer is not None:
            raise ValueError(f"--layer {layer} is for a model: mel has no layers")
        return MelKmeans(clusters)
    is_here = Path(model).expanduser().exists()
    if not is_here:  # the hub can take minutes to answer
        typer.echo(f"there is no folder {model} here; looking for it on the hub", err=True)
    try:
        return HubertWithKmeans(model, output_layer=LAYER if layer is None else layer, codebook_size=clusters)
    except ValueError as error:
        if is_here or error.__cause__ is None:  # (it was read, and does not fit)
            raise
        raise ValueError(f"there is no folder {model} here, and on the hub {error}") from error


def sounds(data: str, sample_hz: int, most: int, seed: int, seconds: float) -> Any:
    """Clips of all recordings; or so many made-up sounds."""
    from helicon.data.audio import audio_data
    from helicon.data.synthetic_sounds import SyntheticSounds

    if data == SYNTHETIC:
        return audio_data(SyntheticSounds(most, sample_hz, seconds, seed), sample_hz)
    return audio_data(data, sample_hz, max_length_seconds=seconds, segments=True)


def clips(loader: Any) -> Iterator[tuple[Any, Any]]:
    for batch in loader.validation():  # each clip once, in the order of the seed
        yield batch["audio"], batch["audio_lengths"]
