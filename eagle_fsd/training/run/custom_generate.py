"""The folder of a repository that lets Hugging Face's `generate` decode through this package.

`model.generate(custom_generate=REPOSITORY, trust_remote_code=True)` runs the function in it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER, FILE, REQUIREMENTS = "custom_generate", "generate.py", "requirements.txt"


def write_folder(repository: Path, ea_model: str) -> None:
    """Write the folder `custom_generate` of a repository. ea_model: the head's name."""
    folder = repository / FOLDER
    folder.mkdir()
    (folder / FILE).write_text(
        f'''"""Decodes through eagle_fsd, with the draft head of this repository.

The arguments are those of `generate`, and threshold, divergence, rule, tree, seed and ea_model.
"""

from eagle_fsd.integrations.custom_generate import generate_with_head

EA_MODEL = {ea_model!r}


def generate(model, inputs=None, ea_model=EA_MODEL, **arguments):
    return generate_with_head(model, ea_model, inputs, **arguments)
''',
        encoding="utf-8",
    )
    (folder / REQUIREMENTS).write_text("eagle-fsd\n", encoding="utf-8")
