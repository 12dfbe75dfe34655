"""Defects of the reference package's VoiceBox, of the flow around it, of its feature spaces and its trainer (A: 47 to 58)."""

from defect_list.entry import Defect, Edit

MODEL, FLOW, SOLVING = "models/voicebox/model.py", "models/voicebox/flow.py", "models/voicebox/solving.py"
DURATIONS, FEATURES = "models/voicebox/durations.py", "models/voicebox/features.py"
TASK, TRAINERS = "models/voicebox/task.py", "models/voicebox/trainers.py"
TRAINER, OPTIM, FEED = "engine/trainer.py", "engine/optim.py", "engine/feed.py"
NORMS, TRANSFORMER, METRICS, AUDIO = "nn/norms.py", "nn/transformer.py", "metrics/audio.py", "data/audio.py"

TESTS = "models/voicebox"
NETWORK, OF_FLOW, DRAWING = f"{TESTS}/test_model.py", f"{TESTS}/test_flow.py", f"{TESTS}/test_drawing.py"
OF_DURATIONS, SPACES = f"{TESTS}/test_durations.py", f"{TESTS}/test_features.py"
OF_TASK, TRAINING = f"{TESTS}/test_task.py", f"{TESTS}/test_trainer_defects.py"
RATES = f"{DRAWING}::test_lengths_are_right_for_any_pair_of_rates"

DEFECTS = [
    Defect(
        "A-47",
        "the context is the target of the flow, of which the noise is a part, and not the clean sound",
        (
            Edit(
                FLOW,
                "            cond=context,\n            cond_mask=hidden,\n",
                "            cond=clean - left * noise,\n            cond_mask=hidden,\n",
            ),
        ),
        (f"{OF_FLOW}::test_the_context_is_the_clean_sound_and_the_target_the_path",),
    ),
    Defect(
        "A-47",
        "a network that is given no context takes the target for it",
        (
            Edit(
                MODEL,
                "self._unsaid_mask(is_frame, cond is not None, target is not None, generator)\n",
                "self._unsaid_mask(is_frame, target is not None, target is not None, generator)\n",
            ),
            Edit(MODEL, 'given = {"cond": cond, ', 'given = {"cond": target if cond is None else cond, '),
        ),
        (f"{NETWORK}::test_nothing_said_and_nothing_given",),
    ),
    Defect(
        "A-48",
        "without a cond_mask the prompt is hidden as a whole",
        (
            Edit(
                SOLVING,
                "    hidden = (place >= prompt.frames[:, None]) & mask\n",
                "    hidden = mask.expand(max(len(mask), len(prompt.frames)), -1)\n",
            ),
        ),
        (f"{DRAWING}::test_the_prompt_is_kept_and_changes_what_follows",),
    ),
    Defect(
        "A-48",
        "the prompt is put in front of what is made, and the network does not hear it",
        (Edit(FLOW, "        if bool((blank.mask & ~blank.hidden).any()):\n", "        if False:\n"),),
        (f"{DRAWING}::test_the_prompt_is_kept_and_changes_what_follows",),
    ),
    Defect(
        "A-49",
        "queries and keys of unit root mean square are multiplied by 80 in all: attention is one-hot at first",
        (
            Edit(
                NORMS,
                "self.weight = nn.Parameter(torch.ones(heads, 1, dim_head))",
                "self.weight = nn.Parameter(torch.full((heads, 1, dim_head), 80**0.5))",
            ),
        ),
        (f"{NETWORK}::test_attention_is_nearly_even_at_first",),
    ),
    Defect(
        "A-50",
        "durations are compared with hidden states: what makes durations of these never learns",
        (
            Edit(
                DURATIONS,
                "        return self.to_duration(self.transformer(x, is_phoneme))[..., 0].float()\n",
                "        return self.transformer(x, is_phoneme).mean(dim=-1).float()\n",
            ),
        ),
        (
            f"{OF_DURATIONS}::test_every_weight_learns",
            f"{OF_DURATIONS}::test_before_learning_everything_lasts_the_usual_time",
        ),
    ),
    Defect(
        "A-50",
        "what is hidden is drawn in evaluation too: the same phonemes last differently each time",
        (
            Edit(
                DURATIONS, "            learns = target is not None and self.training\n", "            learns = True\n"
            ),
        ),
        (f"{OF_DURATIONS}::test_evaluation_is_the_same_twice_even_with_dropout",),
    ),
    Defect(
        "A-50",
        "the context is frames of sound, cut to as many as there are phonemes: durations that are known are not seen",
        (
            Edit(
                DURATIONS,
                "        known = known.masked_fill(hidden | ~is_phoneme, 0.0)\n",
                "        known = torch.zeros_like(known)\n",
            ),
        ),
        (f"{OF_DURATIONS}::test_known_durations_are_context_and_hidden_ones_are_not",),
    ),
    Defect(
        "A-51",
        "the rates are the wrong way round: 100 tokens at 50 a second are 67 frames at 75 a second, not 150",
        (Edit(FLOW, "(self.frame_hz / self.semantic_hz)", "(self.semantic_hz / self.frame_hz)"),),
        (RATES,),
    ),
    Defect(
        "A-51",
        "tokens are taken for frames: what is made is too short by the ratio of their rates",
        (Edit(FLOW, " * (self.frame_hz / self.semantic_hz)).round().long()\n", " * 1.0).round().long()\n"),),
        (RATES,),
    ),
    Defect(
        "A-52",
        "p_drop_prob is never used: nothing is learned without any context",
        (Edit(MODEL, "    return (spans | dropped) & is_real\n", "    return spans & is_real\n"),),
        (
            f"{NETWORK}::test_whole_contexts_are_dropped_at_their_rate",
            f"{OF_DURATIONS}::test_what_is_hidden_while_learning",
        ),
    ),
    Defect(
        "A-52",
        "cond_drop_prob is 0 where nothing is said: guidance leads away from what was never learned",
        (Edit(FLOW, "        cond_drop_prob: float = 0.2,\n", "        cond_drop_prob: float = 0.0,\n"),),
        (f"{OF_FLOW}::test_guidance_is_learned_unless_someone_says_otherwise",),
    ),
    Defect(
        "A-52",
        "guidance looks for the token of nothing in networks that read no tokens",
        (
            Edit(
                MODEL,
                "        if self.tokens is not None:\n            ids = cond_token_ids\n",
                "        if self.tokens is not None or keep is not None:\n            ids = cond_token_ids\n",
            ),
        ),
        (
            f"{NETWORK}::test_guidance_in_one_batch_is_two_calls",
            f"{DRAWING}::test_sounds_without_any_condition",
        ),
    ),
    Defect(
        "A-52",
        "nothing can be made without a text or a prompt",
        (
            Edit(
                FLOW,
                "            how = replace(how, cond_scale=1.0)\n",
                '            raise ValueError("give a prompt or a text")\n',
            ),
        ),
        (f"{DRAWING}::test_sounds_without_any_condition",),
    ),
    Defect(
        "A-53",
        "the loss puts the network into training mode, in validation too",
        (
            Edit(
                FLOW,
                "        noise, times, hidden, keep = randomness\n",
                "        noise, times, hidden, keep = randomness\n        self.voicebox.train()\n",
            ),
        ),
        (f"{OF_FLOW}::test_validation_repeats_itself_and_changes_no_mode",),
    ),
    Defect(
        "A-53",
        "every validation has noise, times and hidden frames of its own: their losses cannot be compared",
        (
            Edit(
                TASK,
                "self._drawn(framed, generator, cond_drop_prob=0.0)",
                "self._drawn(framed, cond_drop_prob=0.0)",
            ),
        ),
        (f"{OF_TASK}::test_validation_is_always_the_same",),
    ),
    Defect(
        "A-54",
        "MelVoco does not say how many features a frame has",
        (
            Edit(
                FEATURES,
                "self.sample_hz, self.downsample_factor, self.latent_dim = sampling_rate, hop_length, n_mels\n",
                "self.sample_hz, self.downsample_factor = sampling_rate, hop_length\n",
            ),
        ),
        (
            f"{SPACES}::test_the_contract",
            f"{SPACES}::test_the_defaults_are_those_of_speech_at_24_khz",
        ),
    ),
    Defect(
        "A-54",
        "nor how many samples a frame stands for",
        (
            Edit(
                FEATURES,
                "self.sample_hz, self.downsample_factor, self.latent_dim = sampling_rate, hop_length, n_mels\n",
                "self.sample_hz, self.latent_dim = sampling_rate, n_mels\n",
            ),
        ),
        (
            f"{SPACES}::test_the_contract",
            f"{SPACES}::test_the_defaults_are_those_of_speech_at_24_khz",
        ),
    ),
    Defect(
        "A-54",
        "the bands are made anew at every call",
        (Edit(METRICS, "    if key not in _constants:\n", "    if True:\n"),),
        (f"{SPACES}::test_the_bands_are_made_once",),
    ),
    Defect(
        "A-54",
        "and so is their inverse",
        (Edit(FEATURES, "@functools.lru_cache(maxsize=16)\n", ""),),
        (f"{SPACES}::test_the_filters_are_inverted_once",),
    ),
    Defect(
        "A-54",
        "frames are in decibels, and the vocoder reads natural logarithms",
        (
            Edit(
                FEATURES,
                "frames = self.mel.log_mel(audio) if self.log",
                "frames = 8.685889638 * self.mel.log_mel(audio) if self.log",
            ),
        ),
        (f"{SPACES}::test_log_mel_is_its_formula", f"{SPACES}::test_griffin_lim_makes_the_same_sound_audible"),
    ),
    Defect(
        "A-54",
        "frames are 160 samples long where nothing is said, and those of vocoders for this rate 256",
        (Edit(FEATURES, "        hop_length: int = 256,\n", "        hop_length: int = 160,\n"),),
        (f"{SPACES}::test_the_defaults_are_those_of_speech_at_24_khz",),
    ),
    Defect(
        "A-54",
        "and a vocoder takes frames of any settings for its own",
        (
            Edit(
                FEATURES,
                "        if vocoder is not None and vocoder.mel != self.mel:\n",
                "        if vocoder is not None and vocoder.mel.n_mels != self.mel.n_mels:\n",
            ),
        ),
        (f"{SPACES}::test_a_vocoder_of_other_frames_is_refused",),
    ),
    Defect(
        "A-55",
        "generate calls a method that is not there",
        (Edit(TRAINERS, "self.unwrapped_cfm.sample(**keywords)", "self.unwrapped_cfm.generate(**keywords)"),),
        (f"{TRAINING}::test_generate_speaks_with_the_averaged_weights",),
    ),
    Defect(
        "A-55",
        "the trainer knows waves alone: no texts",
        (Edit(TRAINERS, '    "texts": TEXT,\n', ""),),
        (f"{TRAINING}::test_texts_come_with_the_waves",),
    ),
    Defect(
        "A-55",
        "and no durations, nor phonemes that stand where they are said",
        (
            Edit(
                TRAINERS,
                '    "durations": Field(by_name_only, "a float tensor [b, m] of seconds; by name only"),\n',
                "",
            ),
        ),
        (f"{TRAINING}::test_phonemes_and_durations_come_with_the_waves",),
    ),
    Defect(
        "A-55",
        "padding is learned from",
        (
            Edit(
                TASK,
                "        mask = None if lengths is None else before(lengths, n)\n",
                "        mask = None\n",
            ),
        ),
        (
            f"{TRAINING}::test_padding_is_no_sound_to_learn_from",
            f"{OF_TASK}::test_a_batch_weighs_its_hidden_frames",
        ),
    ),
    Defect(
        "A-55",
        "files of all rates are taken for files of one",
        (Edit(AUDIO, "            if recording.hz != self.rates[name]:\n", "            if False:\n"),),
        (f"{TRAINING}::test_files_of_any_rate_sound_alike",),
    ),
    Defect(
        "A-56",
        "the schedule moves on before the optimizer's step: no step has the first rate",
        (
            Edit(
                TRAINER,
                "            optimizer.schedule.catch_up(self.step)\n",
                "            optimizer.schedule.catch_up(self.step + 1)\n",
            ),
        ),
        (
            f"{TRAINING}::test_the_rate_rises_to_lr_and_falls_to_nothing",
            f"{TRAINING}::test_without_a_warm_up_the_first_step_has_the_full_rate",
        ),
    ),
    Defect(
        "A-56",
        "the cosine, as long as the run, starts when the warm-up is over: the rate never gets to 0",
        (
            Edit(
                OPTIM,
                "            for _ in range(self.step, step):\n",
                "            for _ in range(max(self.step, self.settings.warmup_steps), step):\n",
            ),
        ),
        (f"{TRAINING}::test_the_rate_rises_to_lr_and_falls_to_nothing",),
    ),
    Defect(
        "A-56",
        "the schedule moves on once for each process: with several the rate is at 0 long before the end",
        (
            Edit(
                OPTIM,
                "        self.updates += updates\n",
                "        updates *= torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1\n"
                "        self.updates += updates\n",
            ),
        ),
        (f"{TRAINING}::test_two_processes_share_an_epoch_and_end_at_the_same_rate",),
    ),
    Defect(
        "A-56",
        "num_epochs counts what is held out for validation",
        (Edit(FEED, "    if is_split and options.valid_frac > 0:\n", "    if False:\n"),),
        (f"{TRAINING}::test_epochs_are_of_what_is_learned_from_and_count_the_accumulation",),
    ),
    Defect(
        "A-56",
        "and not how many micro-batches a step has",
        (
            Edit(
                FEED,
                "    size = options.batch_size * options.grad_accum_every * (",
                "    size = options.batch_size * (",
            ),
        ),
        (f"{TRAINING}::test_epochs_are_of_what_is_learned_from_and_count_the_accumulation",),
    ),
    Defect(
        "A-56",
        "nor how many processes there are",
        (Edit(FEED, "(1 if options.split_batches else processes)", "1"),),
        (f"{TRAINING}::test_two_processes_share_an_epoch_and_end_at_the_same_rate",),
    ),
    Defect(
        "A-57",
        "the optimizer holds the weights of the feature space, too",
        (
            Edit(
                MODEL,
                '        self.__dict__["audio_enc_dec"] = audio_enc_dec  #',
                "        self.audio_enc_dec = audio_enc_dec  #",
            ),
        ),
        (
            f"{TRAINING}::test_frozen_networks_are_neither_optimised_nor_saved",
            f"{OF_TASK}::test_a_stage_is_neither_trained_nor_saved",
        ),
    ),
    Defect(
        "A-57",
        "and those of what makes semantic tokens",
        (
            Edit(
                FLOW,
                '        self.__dict__["text_to_semantic"] = text_to_semantic\n',
                "        self.text_to_semantic = text_to_semantic\n",
            ),
        ),
        (f"{TRAINING}::test_frozen_networks_are_neither_optimised_nor_saved",),
    ),
    Defect(
        "A-57",
        "and those of the duration predictor",
        (
            Edit(
                FLOW,
                '        self.__dict__["duration_predictor"] = duration_predictor\n',
                "        self.duration_predictor = duration_predictor\n",
            ),
        ),
        (f"{TRAINING}::test_frozen_networks_are_neither_optimised_nor_saved",),
    ),
    Defect(
        "A-57",
        "the output of every layer is kept, where no skip ever asks for it",
        (Edit(TRANSFORMER, "            if self.skips and index < self.depth // 2:\n", "            if True:\n"),),
        (f"{NETWORK}::test_what_a_layer_gives_lives_as_long_as_it_is_needed",),
    ),
    Defect(
        "A-58",
        "EnCodec decodes one sound after another",
        (
            Edit(
                FEATURES,
                "        return self.codec.decode(self.decode_to_codes(features, lengths))[:, 0]\n",
                "        codes = self.decode_to_codes(features, lengths)\n"
                "        return torch.cat([self.codec.decode(row[None])[:, 0] for row in codes])\n",
            ),
        ),
        (f"{SPACES}::test_encodec_decodes_a_batch_at_once_and_as_the_nearest_codes",),
    ),
]
