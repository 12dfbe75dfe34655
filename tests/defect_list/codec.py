"""Defects of the reference package's codecs, semantic tokenizers and sound data (A, from 36 on, and those of their interface)."""

from defect_list.entry import Defect, Edit

TASK = "models/soundstream/task.py"
MODEL = "models/soundstream/model.py"
LOSSES = "models/soundstream/losses.py"
CODECS = "models/soundstream/codecs.py"
LAYERS = "models/soundstream/layers.py"
DISCRIMINATORS = "models/soundstream/discriminators.py"
TOKENIZER = "models/semantic/tokenizer.py"
AUDIO = "data/audio.py"
TESTS = "models/soundstream"

DEFECTS = [
    Defect(
        "A-1.1",
        "tokenizing puts the codec into evaluation mode and leaves it there",
        (
            Edit(
                MODEL,
                "            for module, was_training in before:\n                module.training = was_training\n",
                "            pass\n",
            ),
        ),
        (f"{TESTS}/test_model.py::test_coding_leaves_mode_and_codebooks_as_they_were",),
    ),
    Defect(
        "A-1.1",
        "audio is cut to whole frames",
        (
            Edit(
                MODEL,
                " if curtail_from_left else audio\n",
                " if curtail_from_left else audio[..., : len(audio[0, 0]) // self.downsample_factor * self.downsample_factor]\n",
            ),
        ),
        (f"{TESTS}/test_model.py::test_any_length_works_and_comes_back",),
    ),
    Defect(
        "A-1.1",
        "the logits of the complex discriminator are moduli, never negative: no fake can be refused",
        (
            Edit(
                DISCRIMINATORS,
                "            features.append(unit(features[-1]))\n        return Judgement(self.to_logits(features[-1]), features)\n",
                "            features.append(unit(features[-1]))\n"
                "        real, imaginary = self.to_logits(features[-1]).chunk(2, dim=1)\n"
                "        return Judgement((real.square() + imaginary.square() + 1e-12).sqrt(), features)\n",
            ),
        ),
        (f"{TESTS}/test_discriminators.py::test_complex_logits_can_refuse_a_fake",),
    ),
    Defect(
        "A-1.2",
        "the number of quantizers asked of EnCodec is ignored",
        (
            Edit(
                CODECS,
                "        if bandwidth is None and num_quantizers is not None:\n            return num_quantizers\n",
                "        if bandwidth is None and num_quantizers is not None:\n            return config.num_quantizers\n",
            ),
        ),
        (f"{TESTS}/test_codecs.py::test_the_wrapper_of_other_packages",),
    ),
    Defect(
        "A-1.8",
        "the groups of a semantic token share their ids",
        (
            Edit(
                TOKENIZER,
                "        offsets = torch.arange(self.groups, device=ids.device) * (self.codebook_size // self.groups)\n",
                "        offsets = torch.zeros(self.groups, dtype=torch.int64, device=ids.device)\n",
            ),
        ),
        ("models/semantic/test_tokenizer.py::test_the_quantizer_is_the_models_own",),
    ),
    Defect(
        "A-36",
        "importing a tokenizer turns off all warnings, and most of logging",
        (
            Edit(
                TOKENIZER,
                "Lengths = Int",
                "import logging\n"
                "import warnings\n"
                "\n"
                "warnings.warn = lambda *_, **__: None  # type: ignore[assignment]\n"
                "logging.root.setLevel(logging.ERROR)\n"
                "\n"
                "Lengths = Int",
            ),
        ),
        ("test_imports.py::test_importing_leaves_warnings_and_logging_alone",),
    ),
    Defect(
        "A-36",
        "importing a codec loads the libraries of all pretrained models",
        (
            Edit(
                CODECS,
                "import torch\nfrom einops import rearrange\n",
                "import torch\nimport transformers  # noqa: F401\nfrom einops import rearrange\n",
            ),
        ),
        ("test_imports.py::test_codecs_and_tokenizers_load_no_model_library_until_they_need_one",),
    ),
    Defect(
        "A-38",
        "weights are unpickled: loading a codec runs whatever code stands in the file",
        (
            Edit(
                "nn/network.py",
                "    except (SafetensorError, OSError) as error:\n",
                "    except (SafetensorError, OSError) as error:\n"
                "        if path.is_file():\n"
                '            with path.open("rb") as file:\n'
                "                return torch.load(file, weights_only=False)\n",
            ),
        ),
        (
            "engine/test_pickles.py::test_a_pickle_offered_as_a_file_of_a_network_is_refused_and_not_executed",
            "engine/test_pickles.py::test_a_pickle_inside_a_resealed_checkpoint_is_refused_and_not_executed",
        ),
    ),
    Defect(
        "A-38",
        "so are clusters",
        (
            Edit(
                "models/semantic/kmeans.py",
                '    if file.suffix != ".safetensors":\n',
                '    if file.suffix != ".safetensors":\n'
                "        import pickle\n"
                "\n"
                "        return torch.from_numpy(pickle.loads(file.read_bytes()).cluster_centers_), None\n"
                '    if file.suffix != ".safetensors":\n',
            ),
        ),
        (
            "models/semantic/test_kmeans.py::test_reading_centroids",
            "models/semantic/test_tokenizer.py::test_mistakes_are_told_in_one_sentence",
        ),
    ),
    Defect(
        "A-39",
        "squeeze and excitation takes the mean over channels, and not over time",
        (
            Edit(
                LAYERS,
                "        means = mean + (wide - mean).cumsum(dim=1) / counts\n",
                "        means = wide.mean(dim=2, keepdim=True).expand_as(wide)\n",
            ),
        ),
        (
            f"{TESTS}/test_layers.py::test_squeeze_excite_gates_by_means_over_the_past",
            f"{TESTS}/test_layers.py::test_squeeze_excite_counts_beyond_what_float32_can",
        ),
    ),
    Defect(
        "A-39",
        "a residual around a residual: 2 x + f(x)",
        (Edit(LAYERS, "        return x + hidden\n", "        return x + (x + hidden)\n"),),
        (f"{TESTS}/test_autoencoder.py::test_is_the_plain_implementation",),
    ),
    Defect(
        "A-40",
        "the penalty is on the gradient of the mean loss of the batch, next to nothing, and not of the logits",
        (
            Edit(
                LOSSES,
                "        sums = [(x * sign).sum() / math.sqrt(x.shape[1]) for x, sign in zip(logits, signs, strict=True)]\n",
                "        sums = [F.relu(1 - x).mean() for x, sign in zip(logits, signs, strict=True)]\n",
            ),
        ),
        (
            f"{TESTS}/test_losses.py::test_the_penalty_is_the_mean_squared_gradient_of_a_logit",
            f"{TESTS}/test_losses.py::test_the_penalty_of_several_discriminators_is_their_mean",
        ),
    ),
    Defect(
        "A-40",
        "the sum of the discriminators' losses leaves penalties out",
        (
            Edit(
                LOSSES,
                "    return torch.stack(own).mean() + terms.get(PENALTY, 0.0)\n",
                "    return torch.stack(own).mean()\n",
            ),
        ),
        (f"{TESTS}/test_model.py::test_the_penalty_is_in_both_forms_of_the_discriminators_loss",),
    ),
    Defect(
        "A-40",
        "the penalties of some discriminators are dropped",
        (
            Edit(
                LOSSES,
                "for judgement in judge(audio).values()]\n",
                "for judgement in list(judge(audio).values())[:1]]\n",
            ),
        ),
        (f"{TESTS}/test_losses.py::test_the_penalty_of_several_discriminators_is_their_mean",),
    ),
    Defect(
        "A-41",
        "spectra and discriminators compare the denoised sound with the noisy one",
        (
            Edit(
                MODEL,
                "        loss, terms = self.loss.of_autoencoder(reconstruction.audio, wanted, judge=self.discriminators)\n",
                "        loss, terms = self.loss.of_autoencoder(reconstruction.audio, audio, judge=self.discriminators)\n"
                '        terms["wave"] = (reconstruction.audio - wanted).square().mean()\n',
            ),
        ),
        (f"{TESTS}/test_model.py::test_denoising_compares_with_the_clean_sound_everywhere",),
    ),
    Defect(
        "A-41",
        "the discriminators learn that noisy sound is real",
        (
            Edit(
                MODEL,
                "            terms = self._discr_losses(audio, wanted, is_denoising, apply_grad_penalty)\n",
                "            terms = self._discr_losses(audio, audio, is_denoising, apply_grad_penalty)\n",
            ),
        ),
        (f"{TESTS}/test_model.py::test_denoising_compares_with_the_clean_sound_everywhere",),
    ),
    Defect(
        "A-41",
        "training compares with the noisy sound",
        (
            Edit(
                TASK, '        if "target" in batch:\n            target = ', "        if False:\n            target = "
            ),
        ),
        (f"{TESTS}/test_task.py::test_a_batch_with_a_target_is_compared_with_it",),
    ),
    Defect(
        "A-41",
        "the conditioning starts by multiplying all features by nothing",
        (Edit(LAYERS, "        return x * (1 + scale) + shift\n", "        return x * scale + shift\n"),),
        (f"{TESTS}/test_layers.py::test_film_starts_as_the_identity_and_learns",),
    ),
    Defect(
        "A-42",
        "channels are folded into the batch",
        (
            Edit(
                MODEL,
                "        audio = resample(shaped.float(), input_sample_hz",
                '        shaped = rearrange(shaped, "b c n -> (b c) 1 n")\n'
                "        audio = resample(shaped.float(), input_sample_hz",
            ),
        ),
        (f"{TESTS}/test_model.py::test_stereo",),
    ),
    Defect(
        "A-42",
        "discriminators hear one channel",
        (
            Edit(
                MODEL,
                "PeriodDiscriminator(period, input_channels, discr_channels)",
                "PeriodDiscriminator(period, 1, discr_channels)",
            ),
        ),
        (f"{TESTS}/test_model.py::test_stereo",),
    ),
    Defect(
        "A-43",
        "sounds that are shorter than what is mirrored in front of them fail",
        (
            Edit(
                "nn/conv.py",
                "        mirrored = x[:, 1 : self.context + 1].flip(1)\n",
                '        mirrored = F.pad(x.mT, (self.context, 0), mode="reflect").mT[:, : self.context]\n',
            ),
        ),
        (
            "nn/test_conv.py::test_a_signal_too_short_to_be_mirrored_is_mirrored_as_far_as_it_goes",
            f"{TESTS}/test_model.py::test_any_length_works_and_comes_back",
        ),
    ),
    Defect(
        "A-43",
        "by default the beginning is mirrored, which looks ahead: a stream does not give what the whole gives",
        (Edit(MODEL, '        pad_mode: PadMode = "constant",\n', '        pad_mode: PadMode = "reflect",\n'),),
        (f"{TESTS}/test_model.py::test_a_stream_gives_the_codes_of_the_whole",),
    ),
    Defect(
        "A-44",
        "the spectrum of the complex discriminator is left to autocast, and cannot be had in half precision",
        (
            Edit(
                DISCRIMINATORS,
                '            rearrange(audio.float(), "b c n -> (b c) n"),\n',
                '            rearrange(audio, "b c n -> (b c) n"),\n',
            ),
            Edit(
                DISCRIMINATORS,
                "torch.hann_window(win_length, device=audio.device)",
                "torch.hann_window(win_length, device=audio.device, dtype=audio.dtype)",
            ),
        ),
        (f"{TESTS}/test_discriminators.py::test_under_autocast_spectra_and_logits_are_float32_and_layers_are_not",),
    ),
    Defect(
        "A-44",
        "so are the logits of all discriminators",
        (
            Edit(
                DISCRIMINATORS,
                "        return {name: Judgement(logits.float(), features) for",
                "        return {name: Judgement(logits, features) for",
            ),
        ),
        (f"{TESTS}/test_discriminators.py::test_under_autocast_spectra_and_logits_are_float32_and_layers_are_not",),
    ),
    Defect(
        "A-44",
        "and the mel spectra of the losses",
        (
            Edit(
                "metrics/audio.py",
                "    with torch.autocast(audio.device.type, enabled=False):\n        return filters @ spectrum\n",
                "    return filters @ spectrum\n",
            ),
        ),
        (f"{TESTS}/test_losses.py::test_distances_are_float32_under_autocast",),
    ),
    Defect(
        "A-44",
        "and the quantizers",
        (
            Edit(
                "quantize/rows.py",
                "        with torch.autocast(features.device.type, enabled=False):\n            # Padding",
                "        if True:\n            # Padding",
            ),
        ),
        ("quantize/test_contract.py::test_autocast_changes_nothing",),
    ),
    Defect(
        "A-45",
        "files come in the order of the file system",
        (
            Edit(
                "data/files.py",
                "    keys = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix.lower() in suffixes)\n",
                "    keys = [path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix.lower() in suffixes]\n"
                "    keys.sort(key=lambda key: key[::-1])  # which differs from machine to machine\n",
            ),
        ),
        ("data/test_files.py::test_files_are_found_below_in_order_and_by_extension_of_any_case",),
    ),
    Defect(
        "A-45",
        "and the validation part is chosen by that order",
        (
            Edit(
                "data/split.py", "key=lambda name: _rank(seed, name)", "key=lambda name: _rank(seed, names.index(name))"
            ),
        ),
        ("data/test_split.py::test_items_are_chosen_by_name_not_by_place",),
    ),
    Defect(
        "A-45",
        "the whole file is decoded for a crop",
        (
            Edit(
                "data/recording.py",
                "            frames = self._read(self.file, self.num_before + start, stop - start)\n",
                "            whole = self._read(self.file, 0, self.file.frames)\n"
                "            frames = whole[self.num_before + start : self.num_before + stop]\n",
            ),
        ),
        ("data/test_audio.py::test_only_the_crop_is_read_and_once_for_all_rates",),
    ),
    Defect(
        "A-45",
        "nobody is told how much of a sound is padding",
        (Edit(AUDIO, 'f"{name}_lengths": window.length}', 'f"{name}_lengths": self._padded(wave, name).shape[-1]}'),),
        (
            "data/test_audio.py::test_lengths_and_padding",
            f"{TESTS}/test_trainers.py::test_short_sounds_are_padded_and_their_lengths_known",
        ),
    ),
    Defect(
        "A-45",
        "padding is learned from",
        (
            Edit(
                TASK,
                '        audio, lengths = self.model.process_input(batch["audio"]), batch.get("audio_lengths")\n',
                '        audio, lengths = self.model.process_input(batch["audio"]), None\n',
            ),
        ),
        (f"{TESTS}/test_task.py::test_padding_is_not_learned_from",),
    ),
    Defect(
        "A-45",
        "a batch of one cannot be cut to its shortest",
        (
            Edit(
                AUDIO,
                "        size = int(sizes.max() if pad_to_longest else sizes.min())\n",
                "        size = int(sizes.max() if pad_to_longest else min(*sizes.tolist()))\n",
            ),
        ),
        ("data/test_audio.py::test_get_dataloader_pads_or_curtails",),
    ),
    Defect(
        "A-46",
        "a model of 16 kHz is given 24 kHz",
        (
            Edit(
                TOKENIZER,
                "        _check_rate(target_sample_hz, self.input.sample_hz, name)\n"
                "        self.sample_hz, self.downsample_factor = self.input.sample_hz, self.input.downsample_factor\n",
                "        self.sample_hz, self.downsample_factor = target_sample_hz or 24000, self.input.downsample_factor\n",
            ),
        ),
        (
            "models/semantic/test_tokenizer.py::test_a_model_without_quantizer_is_refused",
            "models/semantic/test_tokenizer.py::test_the_rate_is_the_models_own",
        ),
    ),
    Defect(
        "A-46",
        "how many samples a token stands for is a guess",
        (
            Edit(
                TOKENIZER,
                "self.sample_hz, self.downsample_factor = self.input.sample_hz, self.input.downsample_factor\n",
                "self.sample_hz, self.downsample_factor = self.input.sample_hz, 80\n",
            ),
        ),
        ("models/semantic/test_tokenizer.py::test_the_quantizer_is_the_models_own",),
    ),
]
