"""docs/compatibility.md answers for every keyword and member of the reference packages, and its answers are true."""

import inspect
import re
from pathlib import Path

import pytest

import helicon
from helicon.engine.options import ALIASES

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"

# What the reference packages' constructors take and their objects offer.
SURFACE = {
    "VQGanVAETrainer": (
        "vae folder num_train_steps batch_size image_size lr grad_accum_every max_grad_norm discr_max_grad_norm save_results_every "
        "save_model_every results_folder valid_frac random_split_seed use_ema ema_beta ema_update_after_step ema_update_every "
        "apply_grad_penalty_every accelerate_kwargs",
        "save load print device is_distributed is_main is_local_main train_step train",
    ),
    "VQGanVAE": (
        "dim channels layers l2_recon_loss use_hinge_loss vgg lookup_free_quantization codebook_size vq_kwargs lfq_kwargs "
        "use_vgg_and_gan discr_layers encdec_layer_mults encdec_num_resnet_blocks encdec_resnet_groups encdec_first_conv_kernel_size",
        "device vgg encoded_dim get_encoded_fmap_size copy_for_eval state_dict load_state_dict save load encode decode_from_ids decode forward",
    ),
    "ImageDataset": ("folder image_size exts", ""),
    "Transformer": (
        "num_tokens dim seq_len dim_out t5_name self_cond add_mask_id depth dim_head heads ff_mult flash",
        "forward_with_cond_scale forward_with_neg_prompt forward",
    ),
    "MaskGitTransformer": (
        "num_tokens dim seq_len dim_out t5_name self_cond depth dim_head heads ff_mult flash",
        "forward",
    ),
    "TokenCritic": ("num_tokens dim seq_len t5_name self_cond depth dim_head heads ff_mult flash", "forward"),
    "SelfCritic": ("net", "forward_with_cond_scale forward_with_neg_prompt forward"),
    "MaskGit": (
        "image_size transformer noise_schedule token_critic self_token_critic vae cond_vae cond_image_size cond_drop_prob "
        "self_cond_prob no_mask_token_prob critic_loss_weight",
        "save load generate forward",
    ),
    "Muse": ("base superres", "forward"),
}
FORWARD = {
    "VQGanVAE": "img return_loss return_discr_loss return_recons add_gradient_penalty",
    "Transformer": "x return_embed return_logits labels ignore_index self_cond_embed cond_drop_prob conditioning_token_ids texts text_embeds",
    "MaskGit": "images_or_ids ignore_index cond_images cond_token_ids texts text_embeds cond_drop_prob train_only_generator "
    "sample_temperature",
    "Muse": "texts cond_scale temperature timesteps superres_timesteps return_lowres return_pil_images",
}


def verdicts(name: str) -> dict[str, tuple[str, str]]:
    """The rows of one class: keyword or `member()` -> verdict and note."""
    section = re.search(rf"### {name}\n(.*?)(?=\n##|\Z)", PAGE.read_text(), re.DOTALL)
    assert section is not None, f"{name} is not in {PAGE.name}"
    rows = re.findall(r"^\| `([^`]+)`(?: \(member\))? \| ([^|]+) \| ?([^|]*)\|$", section[1], re.MULTILINE)
    return {row.removesuffix("()"): (verdict.strip(), note.strip()) for row, verdict, note in rows}


@pytest.mark.parametrize("name", SURFACE)
def test_every_keyword_and_member_has_a_verdict(name: str) -> None:
    keywords, members = SURFACE[name]
    missing = {*keywords.split(), *members.split()} - verdicts(name).keys()
    assert not missing


@pytest.mark.parametrize("name", SURFACE)
def test_honoured_keywords_are_in_the_signature_and_members_exist(name: str) -> None:
    keywords, members = SURFACE[name]
    found, table = getattr(helicon, name), verdicts(name)
    parameters = inspect.signature(found).parameters
    for keyword in keywords.split():
        if table[keyword][0] in ("honoured", "no effect"):
            assert ALIASES.get(keyword, keyword) in parameters, keyword
    if name == "VQGanVAE":
        vae = found(dim=8, layers=2, discr_layers=1, encdec_resnet_groups=2, codebook_size=16, vq_decay=0.9)
        assert all(hasattr(vae, member) for member in members.split())
    else:
        assert all(hasattr(found, member) for member in members.split())


@pytest.mark.parametrize("name", FORWARD)
def test_forward_takes_what_it_took(name: str) -> None:
    expected = FORWARD[name].split()
    assert not set(expected) - inspect.signature(getattr(helicon, name).forward).parameters.keys()


@pytest.mark.parametrize("name", SURFACE)
def test_refused_keywords_raise_the_sentence_of_the_page(name: str) -> None:
    for keyword, (verdict, sentence) in verdicts(name).items():
        if verdict == "refused":
            with pytest.raises(TypeError, match=re.escape(sentence)):
                getattr(helicon, name)(dim=8, **{keyword: 1})
