import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import helicon
from helicon.models.muse.maskgit import Masked, MaskGit, cosine_schedule
from helicon.models.muse.transformer import MaskGitTransformer, SelfCritic, TokenCritic, Transformer
from helicon.models.muse.vqgan import VQGanVAE

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES: dict[str, Any] = {"num_tokens": 64, "dim": 20, "seq_len": 16, "depth": 2, "heads": 2, "dim_head": 6}
TEXTS = ["a red circle", "blue", "green"]


def tokenizer(**changes: Any) -> VQGanVAE:
    torch.manual_seed(0)
    return VQGanVAE(**{"dim": 8, "layers": 2, "encdec_resnet_groups": 4, "codebook_size": 64, **changes})


def transformer(kind: type[Transformer] = MaskGitTransformer, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**{**SIZES, **({} if options else {"condition_on_text": False}), **options})


def build(image_size: int = 16, transformer_options: dict[str, Any] | None = None, **options: Any) -> MaskGit:
    return MaskGit(image_size, transformer(**(transformer_options or {})), **options)


def pictures(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (3, 3, 16, 16)), generator=torch.Generator().manual_seed(1))


def token_ids(rows: int = 3, n: int = 16) -> torch.Tensor:
    return torch.randint(64, (rows, n), generator=torch.Generator().manual_seed(2))


def seeded(maskgit: MaskGit, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return maskgit(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_cross_entropy_of_the_masked_tokens():
    maskgit, ids = build(transformer_options={"t5_name": BYTES}, cond_drop_prob=0.0).eval(), token_ids()
    losses = seeded(maskgit, ids, texts=TEXTS, return_losses=True)
    torch.manual_seed(5)
    masked = maskgit._mask(ids)
    assert (masked.x == torch.where(masked.mask, 64, ids)).all()
    logits = maskgit.transformer(masked.x, texts=TEXTS)
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
    torch.testing.assert_close(
        losses.total, (each * masked.mask).sum() / (ids.numel() * 2 / math.pi), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(losses.cross_entropy, each[masked.mask].mean())
    assert losses.accuracy == (logits.argmax(-1) == ids)[masked.mask].float().mean()
    assert not losses.cross_entropy.requires_grad and losses.critic is None
    torch.testing.assert_close(seeded(maskgit, ids, texts=TEXTS, ignore_index=-100), losses.total)


@pytest.mark.parametrize(("rows", "n"), [(1, 7), (2, 1), (5, 16), (8, 33)])
def test_masked_tokens_are_gathered_whole_into_a_fixed_size(rows: int, n: int):
    maskgit = build(transformer_options={"condition_on_text": False, "seq_len": 64})
    torch.manual_seed(0)
    for _ in range(200):
        masked = maskgit._mask(token_ids(rows, n))
        assert masked.mask.any(dim=1).all()
        assert len(masked.places) == maskgit.num_places(rows, n) <= rows * n
        assert torch.equal(masked.places[masked.is_real].sort().values, masked.mask.flatten().nonzero()[:, 0])


def test_every_row_masks_as_the_schedule_says():
    """The strata change how rows differ from each other, not what each of them does."""
    maskgit = build(transformer_options={"condition_on_text": False, "seq_len": 64})
    torch.manual_seed(0)
    counts = torch.stack([maskgit._mask(token_ids(4, 64)).mask.sum(dim=1) for _ in range(2000)]).float()
    torch.testing.assert_close(counts.mean(dim=0) / 64, torch.full((4,), 2 / math.pi), atol=0.02, rtol=0)
    for row in counts.T:
        for level in (0.1, 0.5, 0.9):  # P(cos(pi u / 2) < x) = 1 - 2 acos(x) / pi
            assert (row / 64 < level).float().mean() == pytest.approx(1 - 2 * math.acos(level) / math.pi, abs=0.04)
    assert counts.sum(dim=1).std() < 40  # of independent rows it would be 4^0.5 * 64 * 0.31


def test_the_head_sees_the_masked_tokens_alone(monkeypatch: pytest.MonkeyPatch):
    maskgit, seen = build(transformer_options={"condition_on_text": False, "seq_len": 64}), []
    to_logits = maskgit.transformer.to_logits
    monkeypatch.setattr(maskgit.transformer, "to_logits", lambda embed: seen.append(len(embed)) or to_logits(embed))
    maskgit(token_ids(16, 64))
    assert seen == [maskgit.num_places(16, 64)] and seen[0] < 0.75 * 16 * 64


def test_accumulated_batches_have_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    """Whatever number of tokens each masks: the reason for a constant in the denominator."""
    maskgit, ids = build().eval(), token_ids(4)

    def mask(some: torch.Tensor) -> Masked:
        wanted = some[:, :1] // 4 + 1  # another number of tokens in every row, and the same wherever the row stands
        hidden = torch.arange(16) < wanted
        places = hidden.flatten().int().argsort(descending=True, stable=True)
        return Masked(torch.where(hidden, 64, some), hidden, places, hidden.flatten()[places])

    monkeypatch.setattr(maskgit, "_mask", mask)
    counts = [mask(half).mask.sum() for half in ids.split(2)]
    assert counts[0] != counts[1]
    halves = torch.stack([maskgit(half) for half in ids.split(2)])
    torch.testing.assert_close(halves.mean(), maskgit(ids))


def test_some_tokens_to_predict_may_stay_visible():
    for probability, hidden in ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0)):
        maskgit = build(no_mask_token_prob=probability)
        torch.manual_seed(0)
        masked = maskgit._mask(token_ids(50))
        assert (masked.x == 64)[masked.mask].float().mean().item() == pytest.approx(hidden, abs=0.1)
        assert (masked.x == token_ids(50))[~masked.mask].all()


def test_every_weight_takes_part_in_each_step():
    """Distributed training waits for each of them."""
    options = {"t5_name": BYTES, "self_cond": True}
    critic = transformer(TokenCritic, t5_name=BYTES)
    for probability in (0.0, 0.5, 1.0):
        for extra in ({"self_token_critic": True}, {"token_critic": critic}):
            maskgit = build(transformer_options=options, self_cond_prob=probability, cond_drop_prob=1.0, **extra)
            maskgit(token_ids(), texts=TEXTS).backward()
            assert [name for name, p in maskgit.named_parameters() if p.grad is None] == []


def test_self_conditioning_sees_the_first_embeddings():
    always, never = (
        build(transformer_options={"self_cond": True, "condition_on_text": False}, self_cond_prob=p) for p in (1.0, 0.0)
    )
    passes: list[Any] = []
    for maskgit in (always, never):
        maskgit.transformer.self_cond_to_init_embed.register_forward_pre_hook(lambda _, x: passes.append(x[0]))
    seeded(always, token_ids())
    assert len(passes) == 2 and not passes[0].any() and passes[1].abs().amax(dim=(1, 2)).min() > 0
    assert not passes[1].requires_grad
    seeded(never, token_ids())
    assert len(passes) == 3 and not passes[2].any()


def test_the_critic_learns_which_tokens_are_not_the_true_ones():
    ids = token_ids(6)
    for extra in ({"self_token_critic": True}, {"token_critic": transformer(TokenCritic, condition_on_text=False)}):
        maskgit = build(critic_loss_weight=0.5, cond_drop_prob=0.0, **extra)
        losses = seeded(maskgit, ids, return_losses=True)
        alone = seeded(maskgit, ids, train_only_generator=True)
        torch.testing.assert_close(losses.total, alone + 0.5 * losses.critic)
        seen: list[torch.Tensor] = []
        maskgit.token_critic.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        torch.manual_seed(5)
        masked = maskgit._mask(ids)
        seeded(maskgit, ids, sample_temperature=1.0)
        assert torch.equal(seen[0][~masked.mask], ids[~masked.mask]), "what was not masked is shown as it is"
        assert (seen[0] != ids)[masked.mask].float().mean() > 0.5 and seen[0].max() < 64
        seeded(maskgit, ids, sample_temperature=0.0)
        likeliest = maskgit.transformer(masked.x).argmax(dim=-1)
        assert torch.equal(seen[1][masked.mask], likeliest[masked.mask])


@pytest.mark.parametrize("kind", ["text", "class"])
def test_the_condition_is_dropped_as_often_as_asked(kind: str):
    options = {"text": {"t5_name": BYTES}, "class": {"num_classes": 3}}[kind]
    first, second = (
        ({"texts": TEXTS}, {"texts": ["x", "y", "z"]})
        if kind == "text"
        else ({"classes": torch.tensor(c)} for c in ([0, 1, 2], [2, 0, 1]))
    )
    maskgit, ids = build(transformer_options=options), token_ids()
    assert seeded(maskgit, ids, cond_drop_prob=1.0, **first) == seeded(maskgit, ids, cond_drop_prob=1.0, **second)
    assert seeded(maskgit, ids, cond_drop_prob=0.0, **first) != seeded(maskgit, ids, cond_drop_prob=0.0, **second)
    assert build(transformer_options=options).cond_drop_prob == 0.5
    with pytest.raises(ValueError, match="give"):
        maskgit(ids)


# ---------------------------------------------------------------------------------------------- pictures and tokens


def test_it_learns_from_token_ids_without_a_vae():
    """D-X3: the reference needs a vae, always."""
    maskgit = build()
    assert maskgit.vae is None and maskgit.fmap_size == 4
    torch.testing.assert_close(seeded(maskgit, token_ids()), seeded(maskgit, token_ids().view(3, 4, 4)))
    assert maskgit.generate(batch_size=2, timesteps=2, return_ids=True).shape == (2, 4, 4)
    with pytest.raises(ValueError, match="return_ids=True"):
        maskgit.generate(batch_size=2)
    with pytest.raises(ValueError, match="without a vae"):
        maskgit(pictures())
    with pytest.raises(ValueError, match="neither token ids"):
        maskgit(torch.zeros(2, 3, 4, 4, dtype=torch.long))


def test_ids_that_are_no_tokens_are_refused():
    """(The mask is one: where it is not masked itself, nothing else would tell.)"""
    maskgit, grid = build(vae=tokenizer()), token_ids().view(3, 4, 4)
    for wrong in (64, -1):
        ids = grid.index_fill(1, torch.tensor([2]), wrong)
        with pytest.raises(ValueError, match=f"no token {wrong}: known are 0 to 63"):
            maskgit(ids)
        with pytest.raises(ValueError, match=f"no token {wrong}: known are 0 to 63"):
            maskgit.generate(images=ids, repaint=torch.ones(3, 4, 4, dtype=torch.bool))


def test_texts_and_classes_must_be_as_many_as_pictures():
    maskgit = build(transformer_options={"t5_name": BYTES})
    for count in (1, 2):
        with pytest.raises(ValueError, match=f"{count} texts cannot belong to 3 pictures"):
            maskgit(token_ids(), texts=TEXTS[:count])
    maskgit = build(transformer_options={"num_classes": 2}, class_names=["fox", "owl"])
    named = seeded(maskgit, token_ids(), classes=["owl", "fox", "owl"])
    torch.testing.assert_close(named, seeded(maskgit, token_ids(), classes=torch.tensor([1, 0, 1])))
    with pytest.raises(ValueError, match="no class 2: known are 0 to 1"):
        maskgit(token_ids(), classes=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="2 classes cannot belong to 3 pictures"):
        maskgit(token_ids(), classes=["owl", "fox"])


def test_it_learns_the_places_of_one_grid_alone():
    """Others' tokens would be learned at places that are not theirs."""
    maskgit = build(vae=tokenizer())
    said = "a picture of 2 x 2 tokens .* 4 x 4, those of image_size=16: give pictures of that size"
    for smaller in (pictures(3, 3, 8, 8), torch.zeros(3, 2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match=said):
            maskgit(smaller)
    for other, grid in ((pictures(3, 3, 8, 32), "2 x 8"), (token_ids(3, 15), "15")):
        with pytest.raises(ValueError, match=f"a picture of {grid} tokens"):
            maskgit(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pictures_of_any_precision_are_pictures(dtype: torch.dtype):
    """D-X8: the reference takes half precision pictures for token ids."""
    maskgit = build(vae=tokenizer())
    images = pictures().to(dtype)
    torch.testing.assert_close(seeded(maskgit, images), seeded(maskgit, images.float()))
    torch.testing.assert_close(seeded(maskgit, images), seeded(maskgit, maskgit.tokenize(images.float())))


def test_the_tokens_of_a_picture_do_not_depend_on_autocast():
    maskgit, images = build(vae=tokenizer()), pictures(8, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(maskgit.tokenize(images), maskgit.vae.copy_for_eval().encode(images)[1]) is False
        ids = maskgit.tokenize(images)
        assert seeded(maskgit, images).isfinite()
    assert torch.equal(ids, maskgit.tokenize(images))


def test_the_tokenizer_stays_frozen_and_in_evaluation_mode():
    """D-X4: in the reference generating in train mode switches it to train, where a codebook moves; and it takes gradients."""
    vae = tokenizer(lookup_free_quantization=False, vq_codebook_dim=4).train()
    maskgit = build(vae=vae).train()
    before = copy.deepcopy(maskgit.vae.state_dict())
    maskgit(pictures()).backward()
    maskgit.generate(batch_size=2, timesteps=2)
    maskgit.train()
    maskgit(pictures())
    assert not any(module.training for module in maskgit.vae.modules())
    assert all(torch.equal(value, before[name]) for name, value in maskgit.vae.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in maskgit.vae.parameters())
    own = {id(p) for p in maskgit.parameters()}
    assert not own & {id(p) for p in maskgit.vae.parameters()}
    assert all(m.training for m in maskgit.modules()), "and its own modules have the mode they had"
    assert vae.training and all(p.requires_grad for p in vae.parameters()), (
        "nor is the tokenizer that was given changed"
    )


def test_the_tokenizer_moves_along_and_keeps_its_precision():
    maskgit = build(vae=tokenizer())
    ids = maskgit.tokenize(pictures())
    maskgit.bfloat16()
    assert torch.equal(maskgit.tokenize(pictures()), ids)
    assert seeded(maskgit, pictures().bfloat16()).isfinite() and maskgit.cond_vae is None
    maskgit.to("meta")
    assert {value.device.type for value in maskgit.vae.state_dict().values()} == {"meta"}


# ---------------------------------------------------------------------------------------------- super-resolution


def superres(**options: Any) -> MaskGit:
    return build(32, {"t5_name": BYTES, "seq_len": 64}, vae=tokenizer(), cond_image_size=16, **options)


def test_super_resolution_learns_with_the_low_resolution_picture():
    """D-X1: in the reference the small picture goes to a variable that nothing reads."""
    maskgit, images = superres(), pictures(3, 3, 32, 32)
    loss = seeded(maskgit, images, texts=TEXTS)
    shown: list[torch.Tensor] = []
    maskgit.transformer.layers.register_forward_pre_hook(
        lambda module, inputs, given: shown.append(given["context_mask"]), with_kwargs=True
    )
    assert loss != seeded(maskgit, images, texts=TEXTS, cond_images=pictures(3, 3, 16, 16))
    small = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(seeded(maskgit, images, texts=TEXTS, cond_images=small), loss)
    ids, low = maskgit.tokenize(images), maskgit.tokenize_low_resolution(images)
    torch.testing.assert_close(seeded(maskgit, ids, texts=TEXTS, cond_token_ids=low), loss)
    assert low.shape == (3, 4, 4) and all(mask[:, -16:].all() for mask in shown), (
        "never dropped, as guidance is by text"
    )


def test_super_resolution_with_a_tokenizer_of_its_own_and_no_text():
    maskgit = build(
        32,
        {"condition_on_text": False, "seq_len": 64, "cond_num_tokens": 16},
        vae=tokenizer(),
        cond_vae=tokenizer(codebook_size=16, layers=3),
        cond_image_size=16,
    )
    assert maskgit.tokenize_low_resolution(pictures(2, 3, 20, 20)).shape == (2, 2, 2)
    maskgit(pictures(2, 3, 32, 32)).backward()
    assert maskgit.transformer.cond_emb.own.weight.grad.any()
    assert maskgit.generate(cond_images=pictures(2, 3, 16, 16), timesteps=2).shape == (2, 3, 32, 32)


def test_super_resolution_asks_for_its_picture():
    maskgit = superres()
    with pytest.raises(ValueError, match="cond_images or cond_token_ids"):
        maskgit(token_ids(3, 64), texts=TEXTS)
    with pytest.raises(ValueError, match="cond_images or cond_token_ids"):
        maskgit.generate(TEXTS)
    with pytest.raises(ValueError, match="build MaskGit with cond_image_size"):
        build(vae=tokenizer())(pictures(), cond_images=pictures())


# ---------------------------------------------------------------------------------------------- building and saving


def refusals() -> list[tuple[dict[str, Any], str]]:
    plain = {"condition_on_text": False}
    return [
        ({"vae": tokenizer(codebook_size=16)}, "16 codes and the transformer num_tokens=64"),
        ({"vae": tokenizer(layers=1)}, "64 tokens, more than seq_len=16"),
        ({"cond_vae": tokenizer()}, "give cond_image_size"),
        ({"vae": tokenizer(), "cond_image_size": 8}, "cond_num_tokens"),
        ({"token_critic": transformer(TokenCritic, num_classes=2)}, "its num_classes is 2"),
        ({"token_critic": transformer(TokenCritic), "self_token_critic": True}, "not both"),
        ({"token_critic": transformer(TokenCritic, condition_on_text=False, seq_len=4)}, "its seq_len is 4 and not 16"),
        ({"noise_schedule": torch.sin}, "must fall from 1 to 0"),
        ({"cond_drop_prob": 2.0}, "cond_drop_prob=2.0 is a probability"),
        ({"self_cond_prob": -0.1}, "self_cond_prob=-0.1"),
        ({"no_mask_token_prob": math.nan}, "no_mask_token_prob=nan"),
        (
            {
                "transformer_options": {**plain, "cond_num_tokens": 8},
                "vae": tokenizer(),
                "cond_image_size": 8,
            },
            "cond_num_tokens=64",
        ),
    ]


@pytest.mark.parametrize(("options", "said"), refusals())
def test_parts_that_do_not_fit_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        build(**options)


def test_a_transformer_without_a_mask_token_is_refused():
    with pytest.raises(ValueError, match="no mask token"):
        MaskGit(16, transformer(Transformer))


@pytest.mark.parametrize("critic", ["none", "own", "self", "given self"])
def test_saved_is_loaded(critic: str, tmp_path: Path):
    network = transformer(t5_name=BYTES)
    extra = {
        "none": {},
        "own": {"token_critic": transformer(TokenCritic, t5_name=BYTES)},
        "self": {"self_token_critic": True},
        "given self": {"token_critic": SelfCritic(network)},
    }[critic]
    maskgit = MaskGit(16, network, vae=tokenizer(), noise_schedule=cosine_schedule, **extra).eval()
    maskgit.save(tmp_path / "saved")
    loaded = helicon.load(tmp_path / "saved")
    assert isinstance(loaded, MaskGit) and loaded.noise_schedule is cosine_schedule
    assert seeded(loaded, pictures(), texts=TEXTS) == seeded(maskgit, pictures(), texts=TEXTS)
    options = {"seed": 3, "timesteps": 2}
    assert torch.equal(loaded.generate(TEXTS, **options), maskgit.generate(TEXTS, **options))
    other = MaskGit(
        16,
        transformer(t5_name=BYTES, dropout=0.1),
        vae=tokenizer(),
        **({"self_token_critic": True} if "self" in critic else extra),
    )
    other.load(tmp_path / "saved")
    assert torch.equal(other.generate(TEXTS, **options), maskgit.generate(TEXTS, **options))


COMPILED = """
import torch
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.transformer import MaskGitTransformer

torch.manual_seed(0)
text = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
transformer = MaskGitTransformer(
    num_tokens=64, dim=20, seq_len=16, depth=2, heads=2, dim_head=6, t5_name=text, self_cond=True
)
maskgit = MaskGit(16, transformer, self_token_critic=True, no_mask_token_prob=0.1, cond_image_size=8)
compiled = torch.compile(maskgit, backend="aot_eager", fullgraph=True)
ids, low = torch.randint(64, (4, 16)), torch.randint(64, (4, 2, 2))
read = transformer.read_texts(["a", "bb", "ccc", "d"], 16)
losses = compiled(ids, cond_token_ids=low, return_losses=True, **read)
losses.total.backward()
assert losses.total.isfinite() and all(p.grad is not None for p in maskgit.parameters())
"""


@pytest.mark.slow
def test_it_compiles_without_a_break():
    """In a process of its own, where no type checker wraps every function."""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", COMPILED], check=True, timeout=300)
