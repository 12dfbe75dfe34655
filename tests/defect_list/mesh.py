"""Defects of the reference package's mesh trainers, where the loop alone does not tell (D-T), of its mesh networks (D-M), of what they
stand on (D-dep), and of its mesh data (D-D)."""

from defect_list.entry import Defect, Edit

AUTOENCODER, TRANSFORMER = "models/meshgpt/autoencoder.py", "models/meshgpt/transformer.py"
LAYERS, GENERATE = "models/meshgpt/layers.py", "models/meshgpt/generate.py"
FEATURES, GRAPH = "models/meshgpt/features.py", "models/meshgpt/graph.py"
MESH, MESH_DATA, FILES = "data/mesh.py", "data/mesh_data.py", "data/files.py"
BINS, RESIDUAL, LOOKUP_FREE = "nn/bins.py", "quantize/residual.py", "quantize/lookup_free.py"

OF_AUTOENCODER, OF_TRANSFORMER = "models/meshgpt/test_autoencoder.py", "models/meshgpt/test_transformer.py"
OF_GENERATE, OF_FEATURES = "models/meshgpt/test_generate.py", "models/meshgpt/test_features.py"
OF_TRAINERS = "models/meshgpt/test_trainers.py"
OF_MESH, OF_MESH_DATA = "data/test_mesh.py", "data/test_mesh_data.py"

HOLD = '        self.__dict__["autoencoder"] = autoencoder\n'

DEFECTS = [
    Defect(
        "D-T2",
        "after a validation the mesh transformer stays in evaluation mode: no text is dropped any more, and guidance learns nothing",
        (
            Edit(
                "engine/trainer.py",
                "                module.training = was_training\n",
                "                module.training = False\n",
            ),
        ),
        (f"{OF_TRAINERS}::test_training_goes_on_as_before_after_a_validation_and_after_tokenizing",),
    ),
    Defect(
        "D-T6",
        "the mesh trainers ignore ema_kwargs",
        (Edit("models/meshgpt/trainers.py", "            **_ema_options(ema_kwargs or {}),\n", ""),),
        (f"{OF_TRAINERS}::test_the_keywords_of_the_reference_in_its_order",),
    ),
    Defect(
        "D-M1",
        "the default max_seq_len, 8192, is no multiple of the 6 tokens of a triangle, and the default network cannot be built",
        (
            Edit(
                TRANSFORMER,
                "        self.max_faces = max_seq_len // self.tokens_per_face\n",
                "        assert max_seq_len % self.tokens_per_face == 0\n"
                "        self.max_faces = max_seq_len // self.tokens_per_face\n",
            ),
        ),
        (f"{OF_TRANSFORMER}::test_the_defaults_are_valid_and_as_large_as_said",),
    ),
    Defect(
        "D-M2",
        "a keyword asks for layers that have no effect: coarse_post_gateloop_depth",
        (Edit(TRANSFORMER, "(coarse_post_gateloop_depth, (0,), NO_GATELOOP)", "(0, (0,), NO_GATELOOP)"),),
        (f"{OF_TRANSFORMER}::test_senseless_keywords_are_refused",),
    ),
    Defect(
        "D-M2",
        "what a layer makes of the faces is thrown away: no effect, and no gradients",
        (
            Edit(
                TRANSFORMER,
                "        faces = filmed(faces, self.film_of(condition))\n",
                "        filmed(faces, self.film_of(condition))\n",
            ),
        ),
        (
            f"{OF_TRANSFORMER}::test_every_weight_learns_whatever_the_options",
            f"{OF_TRANSFORMER}::test_each_way_to_read_a_text_reads_it",
        ),
    ),
    Defect(
        "D-M3",
        "fine_attn_heads and fine_attn_dim_head are ignored: the fine transformer has those of the coarse one",
        (
            Edit(TRANSFORMER, "heads=fine_attn_heads,\n", "heads=attn_heads,\n"),
            Edit(TRANSFORMER, "dim_head=fine_attn_dim_head,\n", "dim_head=attn_dim_head,\n"),
        ),
        (f"{OF_TRANSFORMER}::test_keywords_reach_the_layers",),
    ),
    Defect(
        "D-M4",
        "faces and tokens of different sizes, dim=(coarse, fine), always crash: one is not projected to the other",
        (
            Edit(
                LAYERS,
                "torch.cat((self.to_fine(hidden)[:, :, None].to(tokens.dtype), tokens), dim=2)",
                "torch.cat((hidden[:, :, None].to(tokens.dtype), tokens), dim=2)",
            ),
        ),
        (
            f"{OF_TRANSFORMER}::test_the_loss_of_a_padded_batch_is_that_of_its_rows_alone",
            f"{OF_TRANSFORMER}::test_every_weight_learns_whatever_the_options",
        ),
    ),
    Defect(
        "D-M4",
        "with a cache they would be projected twice",
        (
            Edit(
                GENERATE,
                "return self.tokens.to_fine(hidden) if before is None",
                "return self.tokens.to_fine(self.tokens.to_fine(hidden)) if before is None",
            ),
        ),
        (f"{OF_GENERATE}::test_drawing_is_recomputing",),
    ),
    Defect(
        "D-M5",
        "the angles of a face are those between its corners as seen from the origin, and change when it is moved",
        (
            Edit(
                FEATURES,
                "to_next = coordinates.roll(-1, dims=2) - coordinates\n",
                "to_next = coordinates.roll(-1, dims=2)\n",
            ),
            Edit(FEATURES, "to_last = coordinates.roll(1, dims=2) - coordinates\n", "to_last = coordinates\n"),
        ),
        (
            f"{OF_FEATURES}::test_angles_are_between_edges_wherever_the_face_is",
            f"{OF_FEATURES}::test_only_the_coordinates_change_when_a_face_is_moved",
        ),
    ),
    Defect(
        "D-M6",
        "areas are put into equal bins from 0 to 4, where all but the largest faces are in the first",
        (Edit(FEATURES, "areas.clamp(min=1e-30).log(), self.log_area_range", "areas, (0.0, 4.0)"),),
        (f"{OF_FEATURES}::test_areas_spread_over_the_bins",),
    ),
    Defect(
        "D-M7",
        "labels are padded with 0, a real token, which is then learned to follow the end of every shorter row",
        (Edit(TRANSFORMER, "(0, 0, 0, 1), value=PAD)\n", "(0, 0, 0, 1), value=0)\n"),),
        (
            f"{OF_TRANSFORMER}::test_labels_are_codes_the_end_and_nothing_else",
            f"{OF_TRANSFORMER}::test_the_loss_of_a_padded_batch_is_that_of_its_rows_alone",
        ),
    ),
    Defect(
        "D-M8",
        "tokenize leaves the autoencoder in evaluation mode",
        (
            Edit(
                AUTOENCODER,
                "        with evaluating(self):\n            return self(vertices, faces, face_edges, return_codes=True)\n",
                "        return self.eval()(vertices, faces, face_edges, return_codes=True)\n",
            ),
        ),
        (f"{OF_AUTOENCODER}::test_tokenize_leaves_the_mode_as_it_was",),
    ),
    Defect(
        "D-M9",
        "vertices that no face has, and those of the padding, are quantized: they enter the losses and the codebooks",
        (
            Edit(
                AUTOENCODER,
                "self.quantizer(means, corners.is_used)",
                "self.quantizer(means, torch.ones_like(corners.is_used))",
            ),
        ),
        (f"{OF_AUTOENCODER}::test_vertices_without_faces_and_padding_have_no_part_in_the_quantizer",),
    ),
    Defect(
        "D-M10",
        "without a blur (sigma 0) the loss is not a number",
        (Edit(AUTOENCODER, "(2 * max(sigma, 1e-6) ** 2)", "(2 * sigma**2)"),),
        (f"{OF_AUTOENCODER}::test_without_a_blur_it_is_cross_entropy",),
    ),
    Defect(
        "D-M10",
        "the target of the first and the last bin loses what the blur puts beyond them",
        (
            Edit(
                AUTOENCODER,
                "torch.where(is_bin, exponents, -torch.inf).softmax(dim=-1)",
                "exponents.softmax(dim=-1) * is_bin",
            ),
        ),
        (f"{OF_AUTOENCODER}::test_the_blurred_loss_is_the_plain_one_with_blurred_targets",),
    ),
    Defect(
        "D-M11",
        "the loss of the coordinates is computed in half precision",
        (
            Edit(
                AUTOENCODER,
                "    logits, num_bins = logits.float(), logits.shape[-1]\n",
                "    num_bins = logits.shape[-1]\n",
            ),
        ),
        (f"{OF_AUTOENCODER}::test_the_loss_is_in_full_precision",),
    ),
    Defect(
        "D-M12",
        "corners in half precision cannot be summed up at their vertices: no mixed precision on a CPU",
        (
            Edit(GRAPH, "self._sums(x.flatten(0, 2).float())", "self._sums(x.flatten(0, 2))"),
            Edit(
                GRAPH,
                "values.new_zeros(batch * num_vertices + 1, values.shape[1])",
                "torch.zeros(batch * num_vertices + 1, values.shape[1])",
            ),
        ),
        (
            f"{OF_AUTOENCODER}::test_mixed_precision_trains_on_a_cpu",
            "models/meshgpt/test_graph.py::test_means_of_half_precision_are_in_full",
        ),
    ),
    Defect(
        "D-M13",
        "the decoder's attention is made for three corners: quads crash",
        (
            Edit(
                AUTOENCODER,
                "attention(corners_dim, attn_decoder_depth)",
                "attention(3 * dim_codebook, attn_decoder_depth)",
            ),
        ),
        (
            f"{OF_AUTOENCODER}::test_everything_is_trained",
            f"{OF_AUTOENCODER}::test_codes_alone_give_the_reconstructed_faces",
        ),
    ),
    Defect(
        "D-M14",
        "a prompt that fills max_seq_len raises UnboundLocalError",
        (Edit(GENERATE, "        return known[:, :max_faces]\n", "        return made\n"),),
        (f"{OF_GENERATE}::test_the_limit_is_in_tokens_and_whole_faces",),
    ),
    Defect(
        "D-M14",
        "max_seq_len is rounded to vertices, not to faces",
        (
            Edit(
                GENERATE,
                "    return max_seq_len // network.tokens_per_face\n",
                "    return max_seq_len // network.num_vertices_per_face\n",
            ),
        ),
        (f"{OF_GENERATE}::test_the_limit_is_in_tokens_and_whole_faces",),
    ),
    Defect(
        "D-M15",
        "generate hands remove_parallel_component on to a function that does not take it",
        (
            Edit(
                TRANSFORMER,
                'guidance: dict[str, Any] = {"remove_parallel_component": remove',
                'guidance: dict[str, Any] = {"parallel_component": remove',
            ),
        ),
        (f"{OF_GENERATE}::test_drawing_is_recomputing",),
    ),
    Defect(
        "D-M16",
        "vertices and faces are needed even where codes are given: nothing can be learned from a cache of them",
        (
            Edit(
                TRANSFORMER,
                "        if codes is None:\n            if vertices is None or faces is None:\n",
                "        if codes is None or vertices is None:\n            if vertices is None or faces is None:\n",
            ),
        ),
        (
            f"{OF_TRANSFORMER}::test_codes_alone_give_the_loss_of_the_meshes",
            f"{OF_TRAINERS}::test_codes_alone_are_learned_from",
        ),
    ),
    Defect(
        "D-M17",
        "quantize_dropout that can drop nothing (two quantizers, cutoff 1) still draws a number for each batch",
        (
            Edit(
                RESIDUAL,
                "self.quantize_dropout = quantize_dropout and quantize_dropout_cutoff_index < num_quantizers - 1",
                "self.quantize_dropout = quantize_dropout",
            ),
        ),
        ("quantize/test_residual.py::test_dropout_that_leaves_every_level_is_none",),
    ),
    Defect(
        "D-M18",
        "the autoencoder cannot be saved and loaded as others can: its class lacks the mixin",
        (Edit(AUTOENCODER, "class MeshAutoencoder(Network):\n", "class MeshAutoencoder(nn.Module):\n"),),
        (f"{OF_AUTOENCODER}::test_saved_and_loaded_it_is_the_same",),
    ),
    Defect(
        "D-M18",
        "the autoencoder is saved a second time, inside of the transformer",
        (Edit(TRANSFORMER, HOLD, "        self.autoencoder = autoencoder\n"),),
        (f"{OF_TRANSFORMER}::test_the_tokenizer_is_used_and_left_as_it_is",),
    ),
    Defect(
        "D-M19",
        "the transformer freezes the caller's autoencoder",
        (
            Edit(
                TRANSFORMER,
                "autoencoder = copy.deepcopy(autoencoder).requires_grad_(False)",
                "autoencoder = autoencoder.requires_grad_(False)",
            ),
        ),
        (f"{OF_TRANSFORMER}::test_the_tokenizer_is_used_and_left_as_it_is",),
    ),
    Defect(
        "D-M19",
        "and overwrites what it pads with",
        (
            Edit(
                TRANSFORMER,
                HOLD,
                f"{HOLD}        if autoencoder is not None:\n            autoencoder.pad_id = pad_id\n",
            ),
        ),
        (f"{OF_TRANSFORMER}::test_a_tokenizer_keeps_its_own_padding",),
    ),
    Defect(
        "D-M19",
        "a type stands where a default does: forgotten arguments are a type",
        (
            Edit(
                BINS,
                'values: Float[Tensor, "*shape"], num_discrete: int, continuous_range: tuple[float, float], nudge',
                'values: Float[Tensor, "*shape"], num_discrete: int, continuous_range=tuple[float, float], nudge',
            ),
        ),
        ("nn/test_bins.py::test_the_range_must_be_said",),
    ),
    Defect(
        "D-M20",
        "the host waits for the device at every token",
        (Edit(GENERATE, "poll_every=16 if on_face is None else 1", "poll_every=1"),),
        (f"{OF_GENERATE}::test_the_host_looks_seldom",),
    ),
    Defect(
        "D-dep1",
        "with a mask the entropy of the codebook is that of single rows: nothing keeps the codes diverse",
        (
            Edit(
                LOOKUP_FREE,
                "        return per_sample, entropy(mean_distribution.flatten(1)).mean()\n",
                "        return per_sample, per_sample\n",
            ),
        ),
        (f"{OF_AUTOENCODER}::test_the_codebook_entropy_is_not_that_of_single_rows",),
    ),
    Defect(
        "D-D1",
        "pairs of faces come back from their cache as floats",
        (Edit(MESH, '"face_edges": face_edges(plain.faces)}', '"face_edges": face_edges(plain.faces).float()}'),),
        (f"{OF_MESH_DATA}::test_a_mesh_is_the_same_each_time_and_that_of_its_own_dataset",),
    ),
    Defect(
        "D-D2",
        "what was made of a mesh is kept by its index, for all datasets at once: validation is given the training's",
        (
            Edit(
                MESH_DATA,
                "class MeshFiles(",
                "KEPT: dict[int, Path] = {}\n\n\nclass MeshFiles(",
            ),
            Edit(
                MESH_DATA,
                "        path = self.files.paths[index]\n        mesh = read_mesh(",
                "        path = KEPT.setdefault(index, self.files.paths[index])\n        mesh = read_mesh(",
            ),
        ),
        (f"{OF_MESH_DATA}::test_a_mesh_is_the_same_each_time_and_that_of_its_own_dataset",),
    ),
    Defect(
        "D-D2",
        "tokens are kept by the index of their item, and given to whatever has that index later",
        (
            Edit(
                "data/tokenize.py",
                "fingerprint = short_hash(context.hex(), content.hex())",
                "fingerprint = short_hash(index)",
            ),
        ),
        (
            "data/test_tokens.py::test_only_what_is_new_or_changed_is_encoded",
            "data/test_tokens.py::test_a_changed_file_is_refused_and_then_encoded_alone",
            f"{OF_TRAINERS}::test_edges_codes_and_texts_of_one_item_are_never_those_of_another",
        ),
    ),
    Defect(
        "D-D3",
        "without data_kwargs, which is the default, nothing can be read",
        (Edit(MESH_DATA, 'tuple(data_kwargs or ("vertices", "faces"))', "tuple(data_kwargs)"),),
        (f"{OF_MESH_DATA}::test_a_dataset_from_transforms",),
    ),
    Defect(
        "D-D4",
        "every face is compared with every other: time and memory grow with the square of the faces",
        (
            Edit(
                MESH,
                "    first, second = _pairs_with_equal(shared[is_proper], owners[is_proper])\n",
                "    values = shared[is_proper]\n"
                "    rows, columns = (values[:, None] == values).nonzero(as_tuple=True)\n"
                "    first, second = owners[is_proper][rows], owners[is_proper][columns]\n",
            ),
        ),
        (f"{OF_MESH}::test_neighbours_are_found_in_memory_that_grows_with_the_faces",),
    ),
    Defect(
        "D-D4",
        "a quad is its own neighbour where none shall be",
        (Edit(MESH, "pairs[first != second]", "pairs[(first != second) | (num_corners == 4)]"),),
        (f"{OF_MESH}::test_neighbours_equal_those_of_the_definition",),
    ),
    Defect(
        "D-D5",
        "faces, which are indices, are typed as floats: with checks of types no mesh can be read",
        (
            Edit(
                MESH,
                '    faces: Int[Tensor, "f n"]\n\n\ndef quantize',
                '    faces: Float[Tensor, "f n"]\n\n\ndef quantize',
            ),
        ),
        (f"{OF_MESH}::test_the_order_of_the_file_does_not_matter",),
    ),
    Defect(
        "D-D5",
        "whether the folder exists is never asked",
        (Edit(FILES, "    if not folder.is_dir():\n", "    if not folder.is_dir:\n"),),
        (f"{OF_MESH_DATA}::test_a_dataset_from_transforms",),
    ),
    Defect(
        "D-D5",
        "files come in the order the disk has them, so that an index means another mesh from run to run",
        (
            Edit(
                FILES,
                "    keys = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix.lower() in suffixes)\n",
                "    keys = [path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix.lower() in suffixes][::-1]\n",
            ),
        ),
        (
            f"{OF_MESH_DATA}::test_a_dataset_from_transforms",
            f"{OF_MESH_DATA}::test_captions_beside_files_in_folder_names_and_in_a_manifest",
        ),
    ),
    Defect(
        "D-D5",
        "samples that are dicts are put together by the order of their entries",
        (
            Edit(
                MESH_DATA,
                "_padded([sample[name] for sample in samples], pad_id) for name in names}",
                "_padded([[*sample.values()][place] for sample in samples], pad_id) for place, name in enumerate(names)}",
            ),
        ),
        (f"{OF_MESH_DATA}::test_batches_are_padded",),
    ),
]
