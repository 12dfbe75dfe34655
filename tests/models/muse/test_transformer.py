from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

from helicon.models.muse.transformer import (
    MaskGitTransformer,
    SelfCritic,
    TokenCritic,
    Transformer,
    place_features,
)
from helicon.nn.network import load_network

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES: dict[str, Any] = {"num_tokens": 11, "dim": 20, "seq_len": 9, "depth": 2, "heads": 2, "dim_head": 6}
TEXTS = ["a red circle", "blue"]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"t5_name": BYTES}, {"texts": TEXTS}),
    "embedded text": ({"text_embed_dim": 5}, {"text_embeds": torch.randn(2, 4, 5)}),
    "class": ({"num_classes": 3}, {"classes": torch.tensor([0, 2])}),
    "text and class": (
        {"t5_name": BYTES, "num_classes": 3, "condition_on_text": True},
        {"texts": TEXTS, "classes": torch.tensor([0, 2])},
    ),
    "nothing": ({"condition_on_text": False}, {}),
    "low resolution": (
        {"condition_on_text": False, "cond_num_tokens": 7},
        {"conditioning_token_ids": torch.randint(7, (2, 4))},
    ),
    "text and low resolution": (
        {"t5_name": BYTES, "self_cond": True},
        {"texts": TEXTS, "conditioning_token_ids": torch.randint(11, (2, 2, 3))},
    ),
}
each_kind = pytest.mark.parametrize(("options", "given"), KINDS.values(), ids=KINDS.keys())


def build(kind: type[Transformer] = MaskGitTransformer, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**{**SIZES, **options}).eval()


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(1))


def differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool((first - second).abs().max() > 1e-4)


@each_kind
def test_every_kind_of_condition_is_seen_and_trains_every_weight(options: dict[str, Any], given: dict[str, Any]):
    """D-X9: in the reference text is mandatory, and the self-conditioning weights exist where nothing uses them."""
    network, x = build(**options), tokens()
    logits = network(x, **given)
    assert logits.shape == (2, 9, 11) and logits.isfinite().all()
    others = {"texts": ["x", "y"], "classes": torch.tensor([1, 1])}
    for name, value in given.items():
        changed = {**given, name: others.get(name, value.flip(0) if isinstance(value, torch.Tensor) else None)}
        assert differ(network(x, **changed), logits), name
    F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []
    assert (network.self_cond_to_init_embed is not None) == options.get("self_cond", False)


@each_kind
@torch.no_grad()
def test_dropped_text_and_class_are_as_none_at_all(options: dict[str, Any], given: dict[str, Any]):
    network, x = build(**options), tokens()
    low = {name: value for name, value in given.items() if name == "conditioning_token_ids"}
    nothing = network(x, cond_drop_prob=1.0, **low)
    torch.testing.assert_close(network(x, cond_drop_prob=1.0, **given), nothing)
    torch.manual_seed(0)
    kept = network.draw_keep(2, 0.5)
    torch.manual_seed(0)
    some = network(x, cond_drop_prob=0.5, **given)
    torch.testing.assert_close(some, torch.where(kept[:, None, None], network(x, **given), nothing))


@torch.no_grad()
def test_low_resolution_tokens_have_places():
    """D-X9: without positions a picture and its mirror image are one condition."""
    network, x = build(t5_name=BYTES), tokens(1)
    low = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]])
    given = {"texts": ["a"]}
    plain = network(x, conditioning_token_ids=low, **given)
    assert differ(plain, network(x, conditioning_token_ids=low.flip(2), **given))
    assert differ(plain, network(x, conditioning_token_ids=low.flip(1), **given))
    torch.testing.assert_close(plain, network(x, conditioning_token_ids=low.flatten(1), **given))
    with pytest.raises(ValueError, match="no square"):
        network(x, conditioning_token_ids=low.flatten(1)[:, :8], **given)


def test_the_features_of_a_place_are_alike_in_grids_of_any_fineness():
    coarse, fine = place_features(4, 5, 32), place_features(8, 10, 32)
    nearest = (fine @ coarse.T).argmax(dim=1).view(8, 10)
    expected = (torch.arange(8) // 2)[:, None] * 5 + torch.arange(10) // 2
    assert (nearest == expected).all()
    assert torch.equal(place_features(3, 3, 20), build(t5_name=BYTES).layers.positions.weight)
    assert place_features(3, 2, 7).shape == (6, 7)


def test_token_zero_is_learned_like_any_other():
    """D-X9: the reference leaves label 0, a real token, out of the loss."""
    network, x = build(condition_on_text=False), tokens()
    labels = torch.zeros_like(x)
    expected = F.cross_entropy(network(x).flatten(0, 1), labels.flatten())
    loss, logits = network(x, labels=labels, return_logits=True)
    torch.testing.assert_close(loss, expected)
    assert logits.shape == (2, 9, 11)
    labels[:, 3:] = -1
    torch.testing.assert_close(
        network(x, labels=labels), F.cross_entropy(network(x)[:, :3].flatten(0, 1), x[:, :3].flatten() * 0)
    )
    torch.testing.assert_close(network(x, labels=labels, ignore_index=-1), network(x, labels=labels + 0))


@each_kind
@torch.no_grad()
def test_guidance_is_one_pass_over_both(options: dict[str, Any], given: dict[str, Any]):
    network, x, passes = build(**options), tokens(), []
    low = {name: value for name, value in given.items() if name == "conditioning_token_ids"}
    cond, null = network(x, **given), network(x, cond_drop_prob=1.0, **low)
    network.layers.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    guided, embed = network.forward_with_cond_scale(x, cond_scale=2.5, return_embed=True, **given)
    torch.testing.assert_close(guided, null + 2.5 * (cond - null), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embed, network.embed(x, **given), rtol=1e-4, atol=1e-5)
    assert passes[0] == (4 if network.is_conditional else 2) and len(passes) == 2
    torch.testing.assert_close(network.forward_with_cond_scale(x, cond_scale=1, **given), cond)


@pytest.mark.parametrize("as_strings", [True, False])
@torch.no_grad()
def test_negative_prompts_work(as_strings: bool):
    """D-X2: in the reference they always crash."""
    network, x = build(t5_name=BYTES), tokens()
    negative = ["something much longer", "x"]
    cond, null = network(x, texts=TEXTS), network(x, texts=negative)
    if as_strings:
        guided = network.forward_with_neg_prompt(x, texts=TEXTS, negative_texts=negative, cond_scale=2.0)
    else:
        embedded = network.encode_text(TEXTS), network.encode_text(negative)
        guided = network.forward_with_neg_prompt(x, *embedded, 2.0)
    torch.testing.assert_close(guided, null + 2 * (cond - null), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="one of them"):
        network.forward_with_neg_prompt(x, texts=TEXTS)


@torch.no_grad()
def test_texts_may_be_given_embedded_and_padded():
    network, x = build(t5_name=BYTES), tokens()
    expected = network(x, texts=TEXTS)
    torch.testing.assert_close(network(x, text_embeds=network.encode_text(TEXTS)), expected)
    torch.testing.assert_close(network(x, **network.read_texts(TEXTS, multiple_of=16)), expected)
    assert network.read_texts(TEXTS, multiple_of=16)["text_mask"].shape == (2, 16)
    torch.testing.assert_close(network(x[1:], texts=TEXTS[1:]), expected[1:])


@torch.no_grad()
def test_attention_is_scaled_dot_product_attention(monkeypatch: pytest.MonkeyPatch):
    """D-X6: the reference always runs a tiled loop in Python."""
    network, calls, real = build(num_classes=2), [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    network(tokens(), classes=torch.tensor([0, 1]))
    assert len(calls) == 4  # two layers, each attending to the tokens and to the context


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=6, d_model=16, d_kv=8, d_ff=20, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "circle"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def test_texts_are_read_where_the_network_is(t5_folder: Path):
    """D-X7: the reference drops the move to the device asked for, moves T5 to CUDA unasked, and calls what T5 no longer has."""
    frozen = build(t5_name=str(t5_folder))
    assert {p.dtype for p in frozen.text_encoder.backbone.parameters()} == {torch.float32}
    frozen.double()
    read = frozen.read_texts(["a red circle", "a"])
    assert read["text_embeds"].dtype == torch.float64 and read["text_mask"].tolist() == [
        [True] * 3,
        [True, False, False],
    ]
    assert frozen(tokens(), **read).dtype == torch.float64
    elsewhere = build(t5_name=BYTES).to("meta")
    assert {value.device.type for value in elsewhere.read_texts(TEXTS).values()} == {"meta"}


def test_texts_that_were_read_before_come_out_where_the_network_is_now(t5_folder: Path):
    """D-X7: what is remembered is in main memory, and follows the network to any device."""
    frozen = build(t5_name=str(t5_folder))
    frozen.read_texts(["a red circle", "a"])
    frozen.to("meta")
    assert {value.device.type for value in frozen.read_texts(["a", "a red circle"]).values()} == {"meta"}


def test_a_pretrained_encoder_is_neither_trained_nor_saved(t5_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(t5_folder.parent)
    network = build(t5_name=t5_folder.name)
    names = [name for name, _ in network.named_parameters()]
    assert not any("encoder" in name for name in names)
    network.save_pretrained("saved")
    monkeypatch.chdir("saved")  # the folder was given by a relative path
    loaded = load_network(Path())
    with torch.no_grad():
        assert torch.equal(loaded(tokens(), texts=["a", "red"]), network(tokens(), texts=["a", "red"]))


@torch.no_grad()
def test_self_conditioning_starts_from_nothing():
    network, x = build(condition_on_text=False, self_cond=True), tokens()
    first, embed = network(x, return_embed=True)
    torch.testing.assert_close(network(x, self_cond_embed=torch.zeros_like(embed)), first)
    assert differ(network(x, self_cond_embed=embed), first)
    with pytest.raises(ValueError, match="self_cond=True"):
        build(condition_on_text=False)(x, self_cond_embed=embed)


def test_the_critics_judge_each_token():
    x, labels = tokens(), tokens() % 2
    transformer = build(t5_name=BYTES)
    for critic in (build(TokenCritic, t5_name=BYTES), SelfCritic(transformer)):
        logits = critic(x, texts=TEXTS)
        assert logits.shape == (2, 9, 1)
        loss = critic(x, texts=TEXTS, labels=labels)
        torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits[..., 0], labels.float()))
        with torch.no_grad():
            null, negative = critic(x, cond_drop_prob=1.0), critic(x, texts=["z", "z"])
            guided = critic.forward_with_cond_scale(x, cond_scale=3.0, texts=TEXTS)
            away = critic.forward_with_neg_prompt(x, texts=TEXTS, negative_texts=["z", "z"], cond_scale=3.0)
        torch.testing.assert_close(guided, null + 3 * (logits.detach() - null), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(away, negative + 3 * (logits.detach() - negative), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(critic.forward_with_cond_scale(x, cond_scale=1.0, texts=TEXTS), logits)


def test_mask_token_and_outputs_are_the_class_s_own():
    assert (build(t5_name=BYTES).mask_id, build(Transformer, t5_name=BYTES).mask_id) == (11, None)
    assert build(Transformer, t5_name=BYTES, add_mask_id=True, dim_out=4)(
        torch.full((1, 2), 11), texts=["a"]
    ).shape == (1, 2, 4)
    with pytest.raises(ValueError, match="has a mask token"):
        build(t5_name=BYTES, add_mask_id=False)


def test_options_of_the_layers_reach_them():
    network = build(condition_on_text=False, ff_mult=2, dropout=0.5, flash=False, checkpoint_activations=True)
    layer = network.layers.layers[0]
    assert layer.feed_forward.block.to_out.in_features == 64 and layer.attention.block.to_out.in_features == 12
    network.train()
    assert differ(network(tokens()), network(tokens())) and network.layers.checkpoint_activations


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({"t5_name": BYTES}, {}, "reads texts"),
        ({"num_classes": 2}, {}, "conditioned on classes"),
        ({"num_classes": 2}, {"classes": torch.tensor([0, 1]), "texts": TEXTS}, "does not take texts"),
        ({"text_embed_dim": 3}, {"texts": TEXTS}, "give text_embeds"),
        ({"t5_name": BYTES}, {"texts": TEXTS, "classes": torch.tensor([0, 1])}, "does not take classes"),
        ({"t5_name": BYTES}, {"texts": TEXTS, "text_embeds": torch.ones(2, 1, 12)}, "not both"),
        (
            {"condition_on_text": False},
            {"conditioning_token_ids": torch.zeros(2, 4, dtype=torch.long)},
            "cond_num_tokens",
        ),
        (
            {"condition_on_text": False, "cond_num_tokens": 5},
            {"conditioning_token_ids": torch.full((2, 4), 5)},
            "no low-resolution token 5: known are 0 to 4",
        ),
    ],
)
def test_conditions_that_do_not_fit_are_refused(options: dict[str, Any], given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        build(**options)(tokens(), **given)


@pytest.mark.parametrize(
    "options", [{"t5_name": BYTES, "condition_on_text": False}, {"t5_name": BYTES, "text_embed_dim": 3}]
)
def test_senseless_options_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="t5_name"):
        build(**options)
