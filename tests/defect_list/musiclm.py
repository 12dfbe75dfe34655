"""Defects of the reference package's MuLaN, of its losses and its trainer, and of MusicLM (A: 59 to 66)."""

from defect_list.entry import Defect, Edit

SPECTROGRAM, TOWERS = "models/musiclm/spectrogram.py", "models/musiclm/towers.py"
CONTRASTIVE, CONDITIONING = "models/musiclm/contrastive.py", "models/musiclm/conditioning.py"
TRAINERS, GENERATE, AUDIO = "models/musiclm/trainers.py", "models/musiclm/generate.py", "data/audio.py"
STAGE, TRANSFORMERS = "models/audiolm/stage.py", "models/audiolm/transformers.py"

TESTS = "models/musiclm"
OF_SPECTRA, OF_TOWERS = f"{TESTS}/test_spectrogram.py", f"{TESTS}/test_towers.py"
LOSSES, NETWORK = f"{TESTS}/test_contrastive.py", f"{TESTS}/test_mulan.py"
TRAINING, DATA = f"{TESTS}/test_trainer.py", f"{TESTS}/test_data.py"
CODES, STAGES, MAKING = (f"{TESTS}/test_{name}.py" for name in ("conditioning", "conditioned_training", "generate"))
TRAINED_AND_SAVED = f"{STAGES}::test_embeddings_are_trained_and_saved_codebooks_stay_and_a_cache_is_as_good_as_sounds"
AT_ONCE = f"{MAKING}::test_all_candidates_are_made_at_once_or_in_pieces_and_lists_of_unequal_sounds_are_ranked"

DEFECTS = [
    Defect(
        "A-59",
        "stretching in time does nothing",
        (
            Edit(
                SPECTROGRAM,
                "        speed = self.stretch + (1 - self.stretch) * speed\n",
                "        speed = torch.ones_like(speed)\n",
            ),
        ),
        (f"{OF_SPECTRA}::test_stretching_changes_the_speed_of_each_clip_and_not_its_length",),
    ),
    Defect(
        "A-59",
        "a mask of bands may be wider than the spectrum, and hide all of it",
        (
            Edit(
                SPECTROGRAM,
                "        if not 0 <= self.freq_mask <= self.n_mels * LARGEST_MASK:\n",
                "        if self.freq_mask < 0:\n",
            ),
        ),
        (
            f"{OF_SPECTRA}::test_augmentation_that_cannot_be_is_refused",
            f"{OF_TOWERS}::test_audio_towers_that_cannot_be_are_refused",
        ),
    ),
    Defect(
        "A-59",
        "one mask and one speed for all clips of a batch",
        (
            Edit(
                SPECTROGRAM,
                "torch.rand(6, batch, 1, device=levels.device, **drawn_by(generator))",
                "torch.rand(6, 1, 1, device=levels.device, **drawn_by(generator)).expand(6, batch, 1)",
            ),
        ),
        (f"{OF_SPECTRA}::test_augmentation_differs_in_each_clip_and_is_its_generator_s",),
    ),
    Defect(
        "A-59",
        "spectra are powers without a logarithm: of everything but the loudest nothing is seen",
        (
            Edit(
                SPECTROGRAM,
                "        logarithms = bands.clamp(min=LOG_FLOOR**self.power).log() / self.power\n",
                "        logarithms = bands\n",
            ),
        ),
        (f"{OF_SPECTRA}::test_levels_lie_about_zero_whatever_the_sizes",),
    ),
    Defect(
        "A-60",
        "the loss is a logarithm of a sum of exponentials, one after the other: infinite at a temperature of 100",
        (
            Edit(
                CONTRASTIVE,
                "((others.logsumexp(dim=-1) - paired) * has_others).mean()",
                "(others.exp().sum(dim=-1).log() - paired.exp().log()).mean()",
            ),
        ),
        (f"{LOSSES}::test_nothing_overflows_at_the_highest_temperature",),
    ),
    Defect(
        "A-60",
        "and it is taken in the precision of the network: NaN or a coarse number in half precision",
        (
            Edit(
                CONTRASTIVE,
                "        audio, text = audio.float(), text.float()\n        every_audio, every_text = ",
                "        temperature = temperature.to(audio)\n        every_audio, every_text = ",
            ),
        ),
        (f"{LOSSES}::test_nothing_overflows_at_the_highest_temperature",),
    ),
    Defect(
        "A-60",
        "the temperature grows without end",
        (
            Edit(
                CONTRASTIVE,
                "        return at_most(self.log_temperature.float()[0], math.log(HIGHEST_TEMPERATURE)).exp()\n",
                "        return self.log_temperature.float()[0].exp()\n",
            ),
        ),
        (f"{LOSSES}::test_temperature_ends_at_a_hundred_and_can_come_back",),
    ),
    Defect(
        "A-61",
        "whether there are other processes is asked when the loss is built, before there are any: negatives are local",
        (
            Edit(
                CONTRASTIVE,
                "        self.decoupled = decoupled\n",
                "        self.decoupled, self.is_distributed = decoupled, num_ranks() > 1\n",
            ),
            Edit(
                CONTRASTIVE,
                "        if self.bias is None:\n"
                "            return softmax_loss(audio, text, self.temperature, self.decoupled, self.training, captions)\n"
                "        return sigmoid_loss(audio, text, self.temperature, self.bias.float()[0], self.training, captions)\n",
                "        across = self.training and self.is_distributed\n"
                "        if self.bias is None:\n"
                "            return softmax_loss(audio, text, self.temperature, self.decoupled, across, captions)\n"
                "        return sigmoid_loss(audio, text, self.temperature, self.bias.float()[0], across, captions)\n",
            ),
        ),
        (f"{LOSSES}::test_two_processes_descend_the_loss_of_one",),
    ),
    Defect(
        "A-61",
        "where latents are gathered, the pairs that belong together are looked for among those of the first process",
        (
            Edit(
                CONTRASTIVE,
                "    first = dist.get_rank() * rows if across_ranks and num_ranks() > 1 else 0\n",
                "    first = 0\n",
            ),
        ),
        (f"{LOSSES}::test_two_processes_descend_the_loss_of_one",),
    ),
    Defect(
        "A-61",
        "what is gathered has no gradient: a process does not learn from what others compare with its latents",
        (Edit(CONTRASTIVE, "        dist.all_reduce(total)\n", ""),),
        (f"{LOSSES}::test_two_processes_descend_the_loss_of_one",),
    ),
    Defect(
        "A-62",
        "what is held out for validation is never looked at",
        (
            Edit(
                TRAINERS,
                "        with self.task.keeping() as kept:\n            result = super().validate()\n",
                "        return {}\n        with self.task.keeping() as kept:\n            result = super().validate()\n",
            ),
        ),
        (f"{TRAINING}::test_recall_is_over_all_held_out_pairs_and_chance_stands_beside_it",),
    ),
    Defect(
        "A-62",
        "where no number of steps is given, one epoch is as many as there are samples, whatever the batch",
        (
            Edit(
                TRAINERS,
                "            num_train_steps = steps_of_epochs(1, found, is_split, chosen)\n",
                "            num_train_steps = len(found)\n",
            ),
        ),
        (f"{TRAINING}::test_without_a_number_of_steps_it_is_one_epoch",),
    ),
    Defect(
        "A-62",
        "folder is accepted and ignored",
        (Edit(TRAINERS, "source = folder if folder is not None else dataset", "source = dataset"),),
        (f"{TRAINING}::test_a_folder_is_really_learned_from",),
    ),
    Defect(
        "A-63",
        "captions are cut to the shortest of the batch",
        (
            Edit(
                TOWERS,
                "        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)\n",
                "        rows = [row[: min(map(len, rows))] for row in rows]\n"
                "        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)\n",
            ),
        ),
        (
            f"{OF_TOWERS}::test_captions_in_a_batch_mean_what_they_mean_alone",
            f"{OF_TOWERS}::test_texts_are_read_once_as_the_tensors_forward_takes",
            f"{NETWORK}::test_pairs_in_a_padded_batch_lie_where_they_lie_alone",
        ),
    ),
    Defect(
        "A-63",
        "every clip begins where its file does",
        (Edit(AUDIO, "        return int(torch.randint(last + 1, (), generator=generator))\n", "        return 0\n"),),
        (f"{DATA}::test_a_crop_is_another_one_in_every_epoch",),
    ),
    Defect(
        "A-64",
        "the embeddings of what a stage is conditioned on are not its own: they are neither trained nor saved",
        (
            Edit(
                TRANSFORMERS,
                "        self.code_table = table.to(self.device)\n",
                '        self.__dict__["code_table"] = table.to(self.device)\n',
            ),
        ),
        (TRAINED_AND_SAVED, f"{CODES}::test_a_stage_learns_embeddings_of_its_own"),
    ),
    Defect(
        "A-64",
        "codebooks follow the sounds and texts that they meet, in each stage others",
        (
            Edit(
                CONDITIONING,
                "                left = left - codebook[ids]\n",
                "                codebook[ids] = torch.lerp(codebook[ids], left, 0.1)\n"
                "                left = left - codebook[ids]\n",
            ),
        ),
        (f"{CODES}::test_codebooks_and_codes_stay_whatever_is_asked_in_whatever_mode", TRAINED_AND_SAVED),
    ),
    Defect(
        "A-65",
        "who says no namespace gets the embeddings of the first",
        (
            Edit(
                CONDITIONING,
                "tuple(namespaces), namespaces[0] if len(namespaces) == 1 else None\n",
                "tuple(namespaces), namespaces[0]\n",
            ),
        ),
        (f"{CODES}::test_each_namespace_has_embeddings_of_its_own",),
    ),
    Defect(
        "A-65",
        "all stages are told the embeddings of the first",
        (
            Edit(
                STAGE,
                "            initial = coder.initial_embeddings(self.condition_name)\n",
                '            initial = coder.initial_embeddings("semantic")\n',
            ),
        ),
        (
            f"{STAGES}::test_a_text_is_the_same_codes_in_every_stage_each_through_its_own_table",
            f"{CODES}::test_a_stage_learns_embeddings_of_its_own",
        ),
    ),
    Defect(
        "A-65",
        "candidates are made one after another",
        (
            Edit(
                GENERATE,
                "        waves = [*self._made(texts, rows, batch_size or len(rows), seed, options)]\n",
                "        waves = [*self._made(texts, rows, 1, seed, options)]\n",
            ),
        ),
        (AT_ONCE,),
    ),
    Defect(
        "A-65",
        "candidates that end at different times cannot be ranked",
        (Edit(GENERATE, "pad_sequence(mono, batch_first=True)", "torch.stack(mono)"),),
        (AT_ONCE,),
    ),
    Defect(
        "A-65",
        "MuLaN hears candidates at the rate of the codec, slower or faster than they are",
        (
            Edit(
                GENERATE,
                "self.quantizer.latents(padded, lengths=lengths, input_sample_hz=self.sample_hz)",
                "self.quantizer.latents(padded, lengths=lengths)",
            ),
        ),
        (f"{MAKING}::test_mulan_hears_candidates_at_its_own_rate",),
    ),
    Defect(
        "A-66",
        "towers of one layer crash: of no layers there is no stack",
        (
            Edit(
                TOWERS,
                "        return out, torch.stack(layers[:-1]) if layers[1:] else out.new_empty(0, *out.shape)\n",
                "        return out, torch.stack(layers[:-1])\n",
            ),
        ),
        (f"{OF_TOWERS}::test_layers_are_those_below_the_last_and_only_when_asked",),
    ),
    Defect(
        "A-66",
        "all layers are pooled and stacked at every forward, asked for or not",
        (
            Edit(
                TOWERS,
                "        if not return_all_layers:\n            return pool(self.transformer(x, mask, **options))\n",
                "",
            ),
            Edit(
                TOWERS,
                "        return out, torch.stack(layers[:-1]) if layers[1:] else out.new_empty(0, *out.shape)\n",
                "        stacked = torch.stack(layers[:-1]) if layers[1:] else out.new_empty(0, *out.shape)\n"
                "        return (out, stacked) if return_all_layers else out\n",
            ),
        ),
        (f"{OF_TOWERS}::test_layers_are_those_below_the_last_and_only_when_asked",),
    ),
]
