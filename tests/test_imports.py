"""Imports stay light: a name costs its own family, and the package itself nothing."""

import subprocess
import sys


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_package_loads_no_torch_and_no_family() -> None:
    assert not loaded_after("import helicon") & {"torch", "transformers", "accelerate", "numpy"}


def test_a_trainer_loads_no_transformers_until_it_needs_one() -> None:
    assert not loaded_after("from helicon import VQGanVAETrainer") & {
        "transformers",
        "datasets",
        "tensorboard",
        "soundfile",
        "trimesh",
    }


def test_codecs_and_tokenizers_load_no_model_library_until_they_need_one() -> None:
    names = "SoundStreamTrainer, EncodecWrapper, HubertWithKmeans"
    assert not loaded_after(f"from helicon import {names}") & {"transformers", "datasets", "wandb", "tensorboard"}


def test_importing_leaves_warnings_and_logging_alone() -> None:
    look = "(warnings.warn, warnings.showwarning, logging.root.level, list(logging.root.handlers))"
    script = (
        f"import logging, warnings; before = {look}\n"
        "import helicon.models.soundstream.trainers, helicon.models.soundstream.codecs, helicon.models.semantic.tokenizer\n"
        f"assert before == {look}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    import helicon

    for name in helicon.__all__:
        assert getattr(helicon, name) is not None
