"""docs/compatibility.md answers for every keyword and member of the reference packages, and its answers are true."""

import inspect
import re
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import helicon
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.engine.options import ALIASES
from models.audiolm.tiny import ALL_CODES, IDS, KINDS
from models.meshgpt.test_autoencoder import tiny as tiny_autoencoder
from models.musiclm.tiny import audio_tower, text_tower
from models.musiclm.tiny import mulan as tiny_mulan
from models.semantic.builders import write
from models.soundstream.test_codecs import encodec as small_encodec
from models.soundstream.tiny import HZ, tiny
from models.voicebox.test_features import saved

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
    "SoundStreamTrainer": (
        "soundstream num_train_steps batch_size data_max_length data_max_length_seconds folder dataset val_dataset train_dataloader "
        "val_dataloader lr grad_accum_every wd warmup_steps scheduler scheduler_kwargs discr_warmup_steps discr_scheduler "
        "discr_scheduler_kwargs max_grad_norm discr_max_grad_norm save_results_every save_model_every log_losses_every results_folder "
        "valid_frac random_split_seed use_ema ema_beta ema_update_after_step ema_update_every apply_grad_penalty_every dl_num_workers "
        "accelerator accelerate_kwargs init_process_group_timeout_seconds dataloader_drop_last split_batches use_wandb_tracking "
        "force_clear_prev_results",
        "ema_tokenizer tokenize set_model_as_ema_model_ save unwrapped_soundstream load multiscale_discriminator_iter "
        "multiscale_discriminator_optim_iter print log wandb_tracker device is_distributed is_main is_local_main train_step train",
    ),
    "SoundStream": (
        "channels strides channel_mults codebook_dim codebook_size finite_scalar_quantizer_levels rq_num_quantizers "
        "rq_commitment_weight rq_ema_decay rq_quantize_dropout_multiple_of rq_groups rq_stochastic_sample_codes rq_rotation_trick "
        "rq_kwargs use_lookup_free_quantizer use_finite_scalar_quantizer input_channels discr_multi_scales stft_normalized "
        "enc_cycle_dilations dec_cycle_dilations multi_spectral_window_powers_of_two multi_spectral_n_ffts multi_spectral_n_mels "
        "recon_loss_weight multi_spectral_recon_loss_weight adversarial_loss_weight feature_loss_weight quantize_dropout_cutoff_index "
        "target_sample_hz use_local_attn attn_window_size attn_dim_head attn_heads attn_depth attn_xpos_scale_base "
        "attn_dynamic_pos_bias use_gate_loop_layers squeeze_excite complex_stft_discr_logits_abs pad_mode stft_discriminator "
        "complex_stft_discr_kwargs",
        "device configs decode_from_codebook_indices decode save init_and_load_from load load_from_trainer_saved_obj "
        "non_discr_parameters seq_len_multiple_of downsample_factor process_input tokenize forward",
    ),
    "AudioLMSoundStream": ("strides target_sample_hz rq_num_quantizers", ""),
    "MusicLMSoundStream": ("strides target_sample_hz rq_num_quantizers", ""),
    "EncodecWrapper": (
        "target_sample_hz strides num_quantizers bandwidth",
        "seq_len_multiple_of downsample_factor forward decode_from_codebook_indices get_emb_from_indices decode",
    ),
    "HubertWithKmeans": (
        "checkpoint_path kmeans_path target_sample_hz seq_len_multiple_of output_layer",
        "groups codebook_size downsample_factor forward",
    ),
    "FairseqVQWav2Vec": (
        "checkpoint_path target_sample_hz seq_len_multiple_of",
        "groups downsample_factor codebook_size forward",
    ),
    "SoundDataset": ("folder target_sample_hz exts max_length seq_len_multiple_of", ""),
    "get_dataloader": ("ds pad_to_longest", ""),
    "AudioDataset": ("folder audio_extension", ""),
}
OF_STAGES = (
    "dim depth heads attn_dropout ff_dropout t5_name cond_dim has_condition audio_text_condition "
    "cond_as_self_attn_prefix cond_drop_prob grad_shrink_alpha rel_pos_bias flash_attn add_value_residual num_residual_streams"
)
OF_STAGE_TRAINERS = (
    "num_train_steps batch_size audio_conditioner dataset valid_dataset data_max_length data_max_length_seconds "
    "folder lr grad_accum_every wd max_grad_norm valid_frac random_split_seed save_results_every save_model_every "
    "results_folder accelerate_kwargs init_process_group_timeout_seconds use_wandb_tracking split_batches drop_last "
    "force_clear_prev_results average_valid_loss_over_grad_accum_every"
)
MEMBERS_OF_STAGE_TRAINERS = (
    "save load print generate device is_distributed is_main is_local_main wandb_tracker train_step train"
)
STAGE_MEMBERS = "device load forward_with_cond_scale forward"
SURFACE |= {
    "SemanticTransformerTrainer": (
        f"wav2vec transformer {OF_STAGE_TRAINERS}",
        f"{MEMBERS_OF_STAGE_TRAINERS} data_tuple_to_kwargs",
    ),
    "CoarseTransformerTrainer": (f"transformer codec wav2vec ds_fields {OF_STAGE_TRAINERS}", MEMBERS_OF_STAGE_TRAINERS),
    "FineTransformerTrainer": (
        f"transformer codec dataset_normalize {OF_STAGE_TRAINERS}",
        f"{MEMBERS_OF_STAGE_TRAINERS} data_tuple_to_kwargs",
    ),
    "SemanticTransformer": (f"num_semantic_tokens {OF_STAGES}", STAGE_MEMBERS),
    "CoarseTransformer": (
        f"codebook_size num_coarse_quantizers num_semantic_tokens project_semantic_logits {OF_STAGES}",
        STAGE_MEMBERS,
    ),
    "FineTransformer": (
        f"num_coarse_quantizers num_fine_quantizers codebook_size project_coarse_logits pad_id {OF_STAGES}",
        STAGE_MEMBERS,
    ),
    "SemanticTransformerWrapper": (
        "transformer wav2vec audio_conditioner pad_id unique_consecutive mask_prob",
        "device embed_text generate forward",
    ),
    "CoarseTransformerWrapper": (
        "transformer codec wav2vec audio_conditioner pad_id unique_consecutive semantic_cross_entropy_loss_weight mask_prob",
        "device generate forward",
    ),
    "FineTransformerWrapper": (
        "transformer codec audio_conditioner coarse_cross_entropy_loss_weight pad_id mask_prob",
        "device generate forward",
    ),
    "AudioLM": (
        "wav2vec codec semantic_transformer coarse_transformer fine_transformer audio_conditioner unique_consecutive",
        "device forward",
    ),
}
OF_MESH_TRAINERS = (
    "model dataset num_train_steps batch_size grad_accum_every val_dataset val_every val_num_batches learning_rate "
    "weight_decay max_grad_norm ema_kwargs scheduler scheduler_kwargs accelerator_kwargs optimizer_kwargs checkpoint_every "
    "checkpoint_folder data_kwargs warmup_steps use_wandb_tracking"
)
MEMBERS_OF_MESH_TRAINERS = (
    "log device is_main unwrapped_model is_local_main wait print save load next_data_to_forward_kwargs forward"
)
SURFACE |= {
    "MeshAutoencoderTrainer": (OF_MESH_TRAINERS, f"ema_tokenizer tokenize {MEMBERS_OF_MESH_TRAINERS}"),
    "MeshTransformerTrainer": (OF_MESH_TRAINERS, MEMBERS_OF_MESH_TRAINERS),
    "MeshAutoencoder": (
        "num_discrete_coors coor_continuous_range dim_coor_embed num_discrete_area dim_area_embed num_discrete_normals "
        "dim_normal_embed num_discrete_angle dim_angle_embed encoder_dims_through_depth init_decoder_conv_kernel "
        "decoder_dims_through_depth dim_codebook num_quantizers codebook_size use_residual_lfq rq_kwargs rvq_kwargs rlfq_kwargs "
        "rvq_stochastic_sample_codes sageconv_kwargs commit_loss_weight bin_smooth_blur_sigma attn_encoder_depth "
        "attn_decoder_depth local_attn_kwargs local_attn_window_size linear_attn_kwargs use_linear_attn pad_id flash_attn "
        "attn_dropout ff_dropout resnet_dropout checkpoint_quantizer quads",
        "device save load init_and_load encode quantize decode decode_from_codes_to_faces tokenize forward",
    ),
    "MeshTransformer": (
        "autoencoder dim max_seq_len flash_attn attn_depth attn_dim_head attn_heads attn_kwargs cross_attn_num_mem_kv dropout "
        "coarse_pre_gateloop_depth coarse_post_gateloop_depth coarse_adaptive_rmsnorm fine_pre_gateloop_depth "
        "gateloop_use_heinsen fine_attn_depth fine_attn_dim_head fine_attn_heads fine_cross_attend_text pad_id num_sos_tokens "
        "condition_on_text text_cond_with_film text_condition_model_types text_condition_model_kwargs "
        "text_condition_cond_drop_prob quads",
        "device save load init_and_load embed_texts generate forward forward_on_codes",
    ),
    "DatasetFromTransforms": ("folder transforms data_kwargs augment_fn", ""),
    "custom_collate": ("data pad_id", ""),
    "derive_face_edges_from_faces": ("faces pad_id neighbor_if_share_one_vertex include_self", ""),
}
OF_SPEECH_NETWORKS = (
    "audio_enc_dec dim depth dim_head heads ff_mult ff_dropout conv_pos_embed_kernel_size conv_pos_embed_groups attn_dropout "
    "attn_flash attn_qk_norm use_gateloop_layers p_drop_prob frac_lengths_mask"
)
SURFACE |= {
    "VoiceBoxTrainer": (
        "cfm_wrapper batch_size dataset num_train_steps num_warmup_steps num_epochs lr initial_lr grad_accum_every wd max_grad_norm "
        "valid_frac random_split_seed log_every save_results_every save_model_every results_folder force_clear_prev_results "
        "split_batches drop_last accelerate_kwargs",
        "save load print generate device is_distributed is_main is_local_main warmup train_step train",
    ),
    "VoiceBox": (
        f"num_cond_tokens dim_in dim_cond_emb time_hidden_dim num_register_tokens condition_on_text {OF_SPEECH_NETWORKS}",
        "device forward_with_cond_scale forward",
    ),
    "ConditionalFlowMatcherWrapper": (
        "voicebox text_to_semantic duration_predictor sigma ode_atol ode_rtol use_torchode torchdiffeq_ode_method "
        "torchode_method_klass cond_drop_prob",
        "device load sample forward",
    ),
    "DurationPredictor": (
        f"tokenizer num_phoneme_tokens dim_phoneme_emb aligner_kwargs {OF_SPEECH_NETWORKS}",
        "device align_phoneme_ids_with_durations forward_with_cond_scale forward_aligner forward",
    ),
    "MelVoco": (
        "log n_mels sampling_rate f_max n_fft win_length hop_length pretrained_vocos_path",
        "downsample_factor latent_dim encode decode",
    ),
    "EncodecVoco": (
        "sampling_rate pretrained_vocos_path bandwidth_id",
        "downsample_factor latent_dim encode decode_to_codes decode",
    ),
}
SURFACE |= {
    "MuLaNTrainer": (
        "mulan dataset num_train_steps batch_size data_max_length folder lr grad_accum_every betas max_grad_norm valid_frac "
        "random_split_seed save_model_every results_folder accelerate_kwargs use_lion force_clear_prev_results",
        "save load print device is_distributed is_main is_local_main data_tuple_to_kwargs train_step train",
    ),
    "AudioSpectrogramTransformer": (
        "dim depth patch_size dim_head heads attn_dropout ff_mult ff_dropout accept_spec accept_spec_time_first spec_n_fft spec_power "
        "spec_win_length spec_hop_length spec_pad spec_center spec_pad_mode spec_aug_stretch_factor spec_aug_freq_mask "
        "spec_aug_time_mask patch_dropout_prob",
        "forward",
    ),
    "TextTransformer": (
        "dim depth num_tokens max_seq_len dim_head heads attn_dropout ff_dropout ff_mult pad_id",
        "device forward",
    ),
    "MuLaN": (
        "audio_transformer text_transformer dim_latent decoupled_contrastive_learning hierarchical_contrastive_loss "
        "hierarchical_contrastive_loss_layers sigmoid_contrastive_loss",
        "get_audio_latents get_text_latents forward",
    ),
    "MuLaNEmbedQuantizer": (
        "mulan conditioning_dims rq_num_quantizers rq_ema_decay codebook_size namespaces",
        "parameters set_default_namespace forward",
    ),
    "MusicLM": ("audio_lm mulan_embed_quantizer", "device forward"),
}
FORWARD = {
    "VQGanVAE": "img return_loss return_discr_loss return_recons add_gradient_penalty",
    "Transformer": "x return_embed return_logits labels ignore_index self_cond_embed cond_drop_prob conditioning_token_ids texts text_embeds",
    "MaskGit": "images_or_ids ignore_index cond_images cond_token_ids texts text_embeds cond_drop_prob train_only_generator "
    "sample_temperature",
    "Muse": "texts cond_scale temperature timesteps superres_timesteps return_lowres return_pil_images",
    "SoundStream": "x target is_denoising return_encoded return_codes_only return_discr_loss return_discr_losses_separately "
    "return_loss_breakdown return_recons_only input_sample_hz apply_grad_penalty curtail_from_left",
    "EncodecWrapper": "x input_sample_hz return_encoded",
    "HubertWithKmeans": "wav_input flatten input_sample_hz",
    "FairseqVQWav2Vec": "wav_input flatten input_sample_hz",
    "SemanticTransformer": "ids text text_embeds cond_drop_prob",
    "CoarseTransformer": "semantic_token_ids coarse_token_ids text text_embeds cond_drop_prob return_only_coarse_logits",
    "FineTransformer": "coarse_token_ids fine_token_ids text text_embeds cond_drop_prob return_only_fine_logits",
    "SemanticTransformerWrapper": "semantic_token_ids raw_wave text text_embeds return_loss",
    "CoarseTransformerWrapper": "semantic_token_ids raw_wave raw_wave_for_codec text text_embeds coarse_token_ids return_loss",
    "FineTransformerWrapper": "raw_wave text text_embeds token_ids coarse_token_ids fine_token_ids return_loss",
    "AudioLM": "batch_size text text_embeds prime_wave prime_wave_input_sample_hz prime_wave_path max_length "
    "return_coarse_generated_wave mask_out_generated_fine_tokens",
    "MeshAutoencoder": "vertices faces face_edges return_codes return_loss_breakdown return_recon_faces only_return_recon_faces "
    "rvq_sample_codebook_temp",
    "MeshTransformer": "vertices faces face_edges codes cache",
    "VoiceBox": "x times cond_token_ids self_attn_mask cond_drop_prob target cond cond_mask",
    "ConditionalFlowMatcherWrapper": "x1 mask semantic_token_ids phoneme_ids cond cond_mask input_sampling_rate",
    "DurationPredictor": "cond texts phoneme_ids cond_drop_prob target cond_mask self_attn_mask",
    "AudioSpectrogramTransformer": "x force_no_patch_dropout return_all_layers",
    "TextTransformer": "x raw_texts mask return_all_layers",
    "MuLaN": "wavs texts raw_texts return_latents return_similarities return_pairwise_similarities",
    "MuLaNEmbedQuantizer": "wavs texts namespace",
    "MusicLM": "text num_samples",
}
# The values their keywords have where nothing is said. (A trainer's results_folder is named after it.)
DEFAULTS = {
    "SoundStreamTrainer": "data_max_length=None data_max_length_seconds=None folder=None dataset=None val_dataset=None train_dataloader=None "
    "val_dataloader=None lr=0.0002 grad_accum_every=4 wd=0.0 warmup_steps=1000 scheduler=None scheduler_kwargs={} "
    "discr_warmup_steps=None discr_scheduler=None discr_scheduler_kwargs={} max_grad_norm=0.5 discr_max_grad_norm=None "
    "save_results_every=100 save_model_every=1000 log_losses_every=1 valid_frac=0.05 random_split_seed=42 use_ema=True "
    "ema_beta=0.995 ema_update_after_step=500 ema_update_every=10 apply_grad_penalty_every=4 dl_num_workers=0 "
    "accelerator=None accelerate_kwargs={} init_process_group_timeout_seconds=1800 dataloader_drop_last=True "
    "split_batches=False use_wandb_tracking=False force_clear_prev_results=None",
    "SoundStream": "channels=32 strides=(2,4,5,8) channel_mults=(2,4,8,16) codebook_dim=512 codebook_size=None "
    "finite_scalar_quantizer_levels=None rq_num_quantizers=8 rq_commitment_weight=1.0 rq_ema_decay=0.95 "
    "rq_quantize_dropout_multiple_of=1 rq_groups=1 rq_stochastic_sample_codes=False rq_rotation_trick=True rq_kwargs={} "
    "use_lookup_free_quantizer=False use_finite_scalar_quantizer=False input_channels=1 discr_multi_scales=(1,0.5,0.25) "
    "stft_normalized=False enc_cycle_dilations=(1,3,9) dec_cycle_dilations=(1,3,9) "
    "multi_spectral_window_powers_of_two=(6,7,8,9,10,11) multi_spectral_n_ffts=512 multi_spectral_n_mels=64 "
    "recon_loss_weight=1.0 multi_spectral_recon_loss_weight=1e-05 adversarial_loss_weight=1.0 feature_loss_weight=100 "
    "quantize_dropout_cutoff_index=1 target_sample_hz=16000 use_local_attn=True attn_window_size=128 attn_dim_head=64 "
    "attn_heads=8 attn_depth=1 squeeze_excite=False pad_mode='reflect' stft_discriminator=None complex_stft_discr_kwargs={}",
    "AudioLMSoundStream": "strides=(2,4,5,8) target_sample_hz=16000 rq_num_quantizers=12",
    "MusicLMSoundStream": "strides=(3,4,5,8) target_sample_hz=24000 rq_num_quantizers=12",
    "EncodecWrapper": "target_sample_hz=24000 strides=(2,4,5,8) num_quantizers=8 bandwidth=6.0",
    "HubertWithKmeans": "target_sample_hz=16000 seq_len_multiple_of=None output_layer=9",
    "FairseqVQWav2Vec": "target_sample_hz=24000 seq_len_multiple_of=None",
    "SoundDataset": "exts=('flac','wav','mp3','webm') max_length=None seq_len_multiple_of=None",
    "get_dataloader": "pad_to_longest=True",
    "AudioDataset": "audio_extension='.flac'",
}
DEFAULTS |= dict.fromkeys(
    ("SemanticTransformerTrainer", "CoarseTransformerTrainer", "FineTransformerTrainer"),
    "audio_conditioner=None dataset=None valid_dataset=None data_max_length=None data_max_length_seconds=None "
    "folder=None lr=0.0003 grad_accum_every=1 wd=0.0 max_grad_norm=0.5 valid_frac=0.05 random_split_seed=42 "
    "save_results_every=100 save_model_every=1000 accelerate_kwargs={} init_process_group_timeout_seconds=1800 "
    "split_batches=False drop_last=False use_wandb_tracking=False force_clear_prev_results=None "
    "average_valid_loss_over_grad_accum_every=True",
)
DEFAULTS |= {
    **dict.fromkeys(
        ("SemanticTransformer", "CoarseTransformer", "FineTransformer"),
        "heads=8 attn_dropout=0.0 ff_dropout=0.0 cond_dim=None has_condition=False audio_text_condition=False "
        "cond_as_self_attn_prefix=False cond_drop_prob=0.5 grad_shrink_alpha=0.1 rel_pos_bias=True flash_attn=False "
        "add_value_residual=True num_residual_streams=4",
    ),
    "SemanticTransformerWrapper": "wav2vec=None audio_conditioner=None pad_id=-1 unique_consecutive=True mask_prob=0.15",
    "CoarseTransformerWrapper": "codec=None wav2vec=None audio_conditioner=None pad_id=-1 unique_consecutive=True "
    "semantic_cross_entropy_loss_weight=1.0 mask_prob=0.15",
    "FineTransformerWrapper": "codec=None audio_conditioner=None coarse_cross_entropy_loss_weight=1.0 pad_id=-1 mask_prob=0.15",
    "AudioLM": "audio_conditioner=None unique_consecutive=True",
}
DEFAULTS |= {
    **dict.fromkeys(
        ("MeshAutoencoderTrainer", "MeshTransformerTrainer"),
        "val_dataset=None val_num_batches=5 weight_decay=0.0 scheduler=None scheduler_kwargs={} accelerator_kwargs={} "
        "optimizer_kwargs={} checkpoint_every=1000 warmup_steps=1000 use_wandb_tracking=False ",
    ),
    "MeshAutoencoder": "num_discrete_coors=128 coor_continuous_range=(-1.0,1.0) dim_coor_embed=64 num_discrete_area=128 dim_area_embed=16 "
    "num_discrete_normals=128 dim_normal_embed=64 num_discrete_angle=128 dim_angle_embed=16 "
    "encoder_dims_through_depth=(64,128,256,256,576) init_decoder_conv_kernel=7 "
    "decoder_dims_through_depth=(128,128,128,128,192,192,192,192,256,256,256,256,256,256,384,384,384) dim_codebook=192 "
    "num_quantizers=2 codebook_size=16384 use_residual_lfq=True "
    "rq_kwargs={'quantize_dropout':True,'quantize_dropout_cutoff_index':1,'quantize_dropout_multiple_of':1} "
    "rvq_kwargs={'kmeans_init':True,'threshold_ema_dead_code':2} "
    "rlfq_kwargs={'frac_per_sample_entropy':1.0,'soft_clamp_input_value':10.0,'experimental_softplus_entropy_loss':True} "
    "rvq_stochastic_sample_codes=True sageconv_kwargs={'normalize':True,'project':True} commit_loss_weight=0.1 "
    "bin_smooth_blur_sigma=0.4 attn_encoder_depth=0 attn_decoder_depth=0 local_attn_kwargs={'dim_head':32,'heads':8} "
    "local_attn_window_size=64 linear_attn_kwargs={'dim_head':8,'heads':16} use_linear_attn=True pad_id=-1 flash_attn=True "
    "attn_dropout=0.0 ff_dropout=0.0 resnet_dropout=0 checkpoint_quantizer=False quads=False",
    "MeshTransformer": "dim=512 max_seq_len=8192 flash_attn=True attn_depth=12 attn_dim_head=64 attn_heads=16 "
    "attn_kwargs={'ff_glu':True,'attn_num_mem_kv':4,'add_value_residual':True,'learned_value_residual_mix':True,"
    "'num_residual_streams':4} cross_attn_num_mem_kv=4 dropout=0.0 coarse_pre_gateloop_depth=2 coarse_post_gateloop_depth=0 "
    "coarse_adaptive_rmsnorm=False fine_pre_gateloop_depth=2 gateloop_use_heinsen=False fine_attn_depth=2 "
    "fine_attn_dim_head=32 fine_attn_heads=8 fine_cross_attend_text=False pad_id=-1 num_sos_tokens=None "
    "condition_on_text=False text_cond_with_film=False text_condition_model_types=('t5',) text_condition_model_kwargs=({},) "
    "text_condition_cond_drop_prob=0.25 quads=False",
    "DatasetFromTransforms": "data_kwargs=None augment_fn='identity'",
    "derive_face_edges_from_faces": "pad_id=-1 neighbor_if_share_one_vertex=False include_self=True",
}
DEFAULTS["MeshAutoencoderTrainer"] += (
    "val_every=100 learning_rate=0.0001 max_grad_norm=None ema_kwargs={'use_foreach':True} "
    "data_kwargs=['vertices','faces','face_edges']"
)
DEFAULTS["MeshTransformerTrainer"] += (
    "val_every=1 learning_rate=0.0002 max_grad_norm=0.5 ema_kwargs={} data_kwargs=['vertices','faces','face_edges','texts']"
)
OF_SPEECH_DEFAULTS = (
    "audio_enc_dec=None dim_head=64 ff_mult=4 ff_dropout=0.0 conv_pos_embed_kernel_size=31 conv_pos_embed_groups=None "
    "attn_dropout=0 attn_flash=False attn_qk_norm=True use_gateloop_layers=False "
)
DEFAULTS |= {
    "VoiceBoxTrainer": "num_train_steps=None num_warmup_steps=None num_epochs=None lr=0.0003 initial_lr=1e-05 grad_accum_every=1 wd=0.0 "
    "max_grad_norm=0.5 valid_frac=0.05 random_split_seed=42 log_every=10 save_results_every=100 save_model_every=1000 "
    "force_clear_prev_results=None split_batches=False drop_last=False accelerate_kwargs={}",
    "VoiceBox": f"{OF_SPEECH_DEFAULTS}num_cond_tokens=None dim_in=None dim_cond_emb=1024 dim=1024 depth=24 heads=16 "
    "time_hidden_dim=None num_register_tokens=16 p_drop_prob=0.3 frac_lengths_mask=(0.7,1.0) condition_on_text=True",
    "ConditionalFlowMatcherWrapper": "text_to_semantic=None duration_predictor=None sigma=0.0 ode_atol=1e-05 ode_rtol=1e-05 "
    "use_torchode=False torchdiffeq_ode_method='midpoint' cond_drop_prob=0.0",
    "DurationPredictor": f"{OF_SPEECH_DEFAULTS}tokenizer=None num_phoneme_tokens=None dim_phoneme_emb=512 dim=512 depth=10 heads=8 "
    "p_drop_prob=0.2 frac_lengths_mask=(0.1,1.0)",
    "MelVoco": "log=True n_mels=100 sampling_rate=24000 f_max=8000 n_fft=1024 win_length=640 hop_length=160",
    "EncodecVoco": "sampling_rate=24000 bandwidth_id=2",
}
DEFAULTS |= {
    "MuLaNTrainer": "num_train_steps=None data_max_length=None folder=None lr=0.0003 grad_accum_every=1 betas=(0.9,0.99) max_grad_norm=0.5 "
    "valid_frac=0.05 random_split_seed=42 save_model_every=1000 accelerate_kwargs={} use_lion=False force_clear_prev_results=None",
    "AudioSpectrogramTransformer": "patch_size=16 dim_head=64 heads=8 attn_dropout=0.0 ff_mult=4 ff_dropout=0.0 accept_spec=False "
    "accept_spec_time_first=True spec_n_fft=128 spec_power=2 spec_win_length=24 spec_hop_length=None spec_pad=0 spec_center=True "
    "spec_pad_mode='reflect' spec_aug_stretch_factor=0.8 spec_aug_freq_mask=80 spec_aug_time_mask=80 patch_dropout_prob=0.25",
    "TextTransformer": "num_tokens=49408 max_seq_len=256 dim_head=64 heads=8 attn_dropout=0.0 ff_dropout=0.0 ff_mult=4 pad_id=0",
    "MuLaN": "dim_latent=128 decoupled_contrastive_learning=True hierarchical_contrastive_loss=False "
    "hierarchical_contrastive_loss_layers=None sigmoid_contrastive_loss=False",
    "MuLaNEmbedQuantizer": "rq_num_quantizers=8 rq_ema_decay=0.9 codebook_size=1024 namespaces=('semantic','coarse','fine')",
}
# True for the others.
REFUSED_VALUES: dict[str, Any] = {
    "attn_xpos_scale_base": 512.0,
    "pretrained_vocos_path": "charactr/vocos",
    "aligner_kwargs": {"dim_in": 80, "attn_channels": 80},
}


def sound_trainer(**keywords: Any) -> Any:
    settings: dict[str, Any] = {"num_train_steps": 1, "batch_size": 1, "valid_frac": 0.0, "tensorboard": False}
    return helicon.SoundStreamTrainer(tiny(), dataset=[torch.zeros(HZ // 50)] * 4, **settings, **keywords)


def encodec(**keywords: Any) -> Any:
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=8, upsampling_ratios=[3, 2], num_lstm_layers=1, codebook_size=16, sampling_rate=800
    )
    transformers.EncodecModel(config).save_pretrained("encodec")
    return helicon.EncodecWrapper(model="encodec", num_quantizers=2, **keywords)


def stage_trainer(name: str, **keywords: Any) -> Any:
    kind = KINDS[name]
    settings: dict[str, Any] = {"num_train_steps": 1, "batch_size": 1, "valid_frac": 0.0, "tensorboard": False}
    trainer = getattr(helicon, f"{name.title()}TransformerTrainer")
    rows = {"semantic_token_ids": IDS[0], "token_ids": ALL_CODES[1]}
    return trainer(kind.stage(), dataset=[rows] * 4, **settings, **keywords)


def mesh_trainer(name: str, **keywords: Any) -> Any:
    settings: dict[str, Any] = {"num_train_steps": 1, "batch_size": 1, "valid_frac": 0.0, "tensorboard": False}
    trainer = getattr(helicon, f"Mesh{name}Trainer")
    return trainer(BUILDERS[f"Mesh{name}"](), SyntheticMeshes(4), **settings, **keywords)


SPEECH: dict[str, Any] = {"dim": 8, "depth": 2, "dim_head": 4, "heads": 2, "conv_pos_embed_kernel_size": 3}


def voicebox(**keywords: Any) -> Any:
    tokens = {"num_cond_tokens": 7, "dim_cond_emb": 6, "text_depth": 1, "alignment": "frames"}
    space = helicon.MelVoco(n_mels=5, sampling_rate=400, n_fft=32, hop_length=8)
    return helicon.VoiceBox(audio_enc_dec=space, **tokens, **SPEECH, **keywords)


def flow(**keywords: Any) -> Any:
    return helicon.ConditionalFlowMatcherWrapper(voicebox(), **{"semantic_hz": 25.0, **keywords})


def speech_trainer(**keywords: Any) -> Any:
    settings: dict[str, Any] = {"num_train_steps": 1, "batch_size": 1, "valid_frac": 0.0, "tensorboard": False}
    rows = {"audio": torch.randn(160), "semantic_token_ids": torch.arange(7)}
    return helicon.VoiceBoxTrainer(flow(), dataset=[rows] * 4, **{**settings, **keywords})


def mulan_trainer(**keywords: Any) -> Any:
    settings: dict[str, Any] = {"num_train_steps": 1, "batch_size": 2, "valid_frac": 0.0, "tensorboard": False}
    return helicon.MuLaNTrainer(tiny_mulan(), [(torch.randn(800), "a tone")] * 4, **settings, **keywords)


# Objects of the classes whose members are there once they are built, or that refuse keywords.
BUILDERS: dict[str, Callable[..., Any]] = {
    "VQGanVAE": lambda **keywords: helicon.VQGanVAE(
        dim=8, layers=2, discr_layers=1, encdec_resnet_groups=2, codebook_size=16, vq_decay=0.9, **keywords
    ),
    "SoundStreamTrainer": sound_trainer,
    "SoundStream": tiny,
    "EncodecWrapper": encodec,
    "HubertWithKmeans": lambda **keywords: helicon.HubertWithKmeans(
        write("hubert", Path("hubert")), output_layer=2, codebook_size=7, **keywords
    ),
    "FairseqVQWav2Vec": lambda **keywords: helicon.FairseqVQWav2Vec(write("wav2vec2", Path("wav2vec2")), **keywords),
    **{f"{name.title()}Transformer": kind.build for name, kind in KINDS.items()},
    **{f"{name.title()}TransformerWrapper": kind.stage for name, kind in KINDS.items()},
    **{f"{name.title()}TransformerTrainer": partial(stage_trainer, name) for name in ("semantic", "coarse", "fine")},
    "MeshAutoencoder": tiny_autoencoder,
    "MeshTransformer": lambda **keywords: helicon.MeshTransformer(
        tiny_autoencoder(), dim=8, attn_depth=1, attn_heads=1, fine_attn_heads=1, **keywords
    ),
    "MeshAutoencoderTrainer": partial(mesh_trainer, "Autoencoder"),
    "MeshTransformerTrainer": partial(mesh_trainer, "Transformer"),
    "VoiceBox": voicebox,
    "ConditionalFlowMatcherWrapper": flow,
    "DurationPredictor": lambda **keywords: helicon.DurationPredictor(num_phoneme_tokens=7, **SPEECH, **keywords),
    "MelVoco": helicon.MelVoco,
    "EncodecVoco": lambda **keywords: helicon.EncodecVoco(
        model=saved(small_encodec()), sampling_rate=800, bandwidth_id=1, **keywords
    ),
    "VoiceBoxTrainer": speech_trainer,
    "MuLaNTrainer": mulan_trainer,
    "AudioSpectrogramTransformer": audio_tower,
    "TextTransformer": text_tower,
    "MuLaN": tiny_mulan,
    "MuLaNEmbedQuantizer": lambda **keywords: helicon.MuLaNEmbedQuantizer(tiny_mulan(), 4, **keywords),
    "AudioLM": lambda: helicon.AudioLM(
        **{f"{name}_transformer": KINDS[name].build() for name in ("semantic", "coarse", "fine")},
        codec=tiny(codebook_size=7, rq_num_quantizers=5),
    ),
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
    owner = BUILDERS[name]() if name in BUILDERS else found
    assert all(hasattr(owner, member) for member in members.split() if table[member][0] != "refused")


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_the_reference_s_or_the_page_states_it(name: str) -> None:
    parameters, table = inspect.signature(getattr(helicon, name)).parameters, verdicts(name)
    for keyword, known in (pair.split("=") for pair in DEFAULTS[name].split()):
        own = parameters[ALIASES.get(keyword, keyword)].default
        stated = re.match(r"`([^`]+)` by default", table[keyword][1])
        assert own == literal_eval(stated[1] if stated else known), keyword


@pytest.mark.parametrize("name", FORWARD)
def test_forward_takes_what_it_took(name: str) -> None:
    expected = FORWARD[name].split()
    assert not set(expected) - inspect.signature(getattr(helicon, name).forward).parameters.keys()


def test_meshes_are_asked_for_as_they_were() -> None:
    asked = (
        "prompt batch_size filter_logits_fn filter_kwargs temperature return_codes texts text_embeds cond_scale cache_kv "
        "max_seq_len face_coords_to_file"
    )
    parameters = inspect.signature(helicon.MeshTransformer.generate).parameters
    assert [*parameters][1:13] == asked.split()  # in this order, for some may be given by place


def test_speech_is_asked_for_as_it_was() -> None:
    """Every keyword of the reference's `sample`, alone and with values of its own, changes what the page says it changes."""
    network = flow().eval()
    network.fit_normalisation(torch.randn(3, 9, 5))
    ids, prompt = torch.arange(6)[None], torch.randn(1, 5, 5)
    plain = {"semantic_token_ids": ids, "steps": 2, "decode_to_audio": False, "seed": 0}
    made = network.sample(**plain)
    assert made.shape == (1, 12, 5)  # 25 tokens and 50 frames a second
    for unheard in ({"spec_decode": True, "spec_decode_gamma": 3}, {"max_semantic_token_ids": 64}, {"cond_scale": 1.0}):
        assert torch.equal(network.sample(**plain, **unheard), made)
    hidden = torch.tensor([[False, True, True, False, False]])
    for heard in ({"cond_scale": 2.0}, {"steps": 3}, {"cond": prompt}, {"cond": prompt, "cond_mask": hidden}):
        found = network.sample(**{**plain, **heard})
        assert found.shape != made.shape or not torch.equal(found, made), heard
    for name in ("text_token_ids", "phoneme_ids"):
        given = {**plain, name: ids, "lengths": 12}
        del given["semantic_token_ids"]
        assert torch.equal(network.sample(**given), made)
    assert network.sample(**{**plain, "decode_to_audio": True}).shape == (1, 12 * 8)
    assert network.draw(semantic_token_ids=ids).evaluations == 2 * 16  # steps by default, of the midpoint method
    named = verdicts("ConditionalFlowMatcherWrapper")["sample"][1]
    asked = (
        "cond texts text_token_ids semantic_token_ids phoneme_ids cond_mask steps cond_scale decode_to_audio decode_to_codes "
        "max_semantic_token_ids spec_decode spec_decode_gamma"
    )
    assert all(f"`{name}`" in named for name in asked.split())
    adaptive = flow(use_torchode=True).solving.method
    assert adaptive == flow(torchdiffeq_ode_method="dopri5").solving.method == "adaptive"


def test_features_are_learned_and_made_without_a_space_of_features() -> None:
    """As in the reference's README: a network that hears no waves learns from features of `dim` numbers, and gives such."""
    network = helicon.ConditionalFlowMatcherWrapper(
        voicebox=helicon.VoiceBox(num_cond_tokens=500, condition_on_text=False, **SPEECH)
    )
    features = torch.randn(2, 9, SPEECH["dim"])
    network(features).backward()
    assert network.sample(cond=features, lengths=12, steps=1).shape == (2, 12, SPEECH["dim"])


def test_how_long_speech_is_learned_is_told_in_steps_or_epochs() -> None:
    assert speech_trainer().options.num_train_steps == 1
    told = {"num_train_steps": None, "results_folder": "epochs", "num_warmup_steps": None, "split_batches": True}
    assert speech_trainer(**told, num_epochs=3, grad_accum_every=2).options.num_train_steps == 6
    with pytest.raises(ValueError, match="Give num_train_steps or num_epochs, one of them"):
        speech_trainer(num_epochs=3)


REFUSED = [
    (name, refused, sentence)
    for name in SURFACE
    for refused, (verdict, sentence) in verdicts(name).items()
    if verdict == "refused"
]


@pytest.mark.parametrize(("name", "refused", "sentence"), REFUSED)
def test_what_is_refused_raises_the_sentence_of_the_page(name: str, refused: str, sentence: str) -> None:
    if refused in SURFACE[name][1].split():
        with pytest.raises(AttributeError, match=re.escape(sentence)):
            getattr(BUILDERS[name](), refused)
    else:
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            BUILDERS[name](**{refused: REFUSED_VALUES.get(refused, True)})


def test_a_name_without_a_counterpart_says_what_to_use_instead() -> None:
    section = PAGE.read_text().partition("## Names that have no counterpart")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows.keys() == helicon._instead.keys() and len(rows) > 4
    for name, sentence in rows.items():
        with pytest.raises(ImportError, match=re.escape(f"helicon has no {name}: {sentence}")):
            exec(f"from helicon import {name}")
