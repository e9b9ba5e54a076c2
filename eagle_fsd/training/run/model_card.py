"""Publish a trained head on the Hub: write a model card from the records of its runs, and push both.

The records hold whole command lines; the card shows them without directories and secrets.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from eagle_fsd.acceptance.calibration import FILE as CALIBRATION
from eagle_fsd.acceptance.calibration import write_calibrations
from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import name_full_disk
from eagle_fsd.files.provenance import public_command
from eagle_fsd.files.tensor_files import read_tensors
from eagle_fsd.hub.download import TRANSPORT_ERROR
from eagle_fsd.hub.head_checkpoint import (
    BIN_NAME,
    CONFIG_NAME,
    EAGLE3,
    FC_BIAS_KEY,
    QKV_BIAS_KEY,
    SAFETENSORS_NAME,
    VOCABULARY_NAME,
    find_head_file,
    kind_by_config,
    read_config,
)
from eagle_fsd.training.run.card_calibrations import OwnCalibration, described
from eagle_fsd.training.run.custom_generate import FILE, FOLDER, REQUIREMENTS, write_folder

CARD = "README.md"
SPECULATORS_FIELD = "speculators_model_type"
LIBRARY = "eagle-fsd"
# All files that a repository may have, beside those of custom_generate.
NAMES = {CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, VOCABULARY_NAME, CALIBRATION, CARD}


@dataclass(frozen=True)
class Card:
    """The contents of a model card.

    base_model: the target's Hub id. data: a sentence on the text and its licences. training: the record of
    the run. taus, table: the rows of `eagle-fsd eval tau`, and their table. config: of the head.
    custom_generate: whether Hugging Face's `generate` may decode with the repository; see write_repository.
    calibrations: those of the head that are published with it.
    """

    base_model: str
    licence: str
    data: str
    training: Mapping[str, Any]
    taus: Sequence[Mapping[str, Any]]
    table: str
    config: Mapping[str, Any]
    custom_generate: bool = False
    calibrations: Sequence[OwnCalibration] = ()

    def text(self, repo_id: str) -> str:
        """Write the README.md of the repository, with its YAML header."""
        header = ModelCardData(
            license=self.licence,
            base_model=self.base_model,
            base_model_relation="adapter",
            library_name=LIBRARY,
            tags=[
                *("eagle", *(["eagle3"] if self._eagle3 else []), "speculative-decoding", "draft-head"),
                *([FOLDER] if self.custom_generate else []),
            ],
        )
        name = self.base_model.rsplit("/", 1)[-1]
        generate = f"python -m eagle_fsd.generate --base-model {self.base_model} --ea-model {repo_id}"
        parts = [
            f"---\n{header.to_yaml()}\n---",
            f"# EAGLE draft head for {name}",
            self._described(),
            "## Use",
            f'```bash\npip install eagle-fsd\n{generate} "Why is the sky blue?"\n```',
            *([self._through_generate(repo_id)] if self.custom_generate else []),
            *([described(self.calibrations, generate)] if self.calibrations else []),
            "## Measured",
            self._measured(),
            "## Trained",
            self._trained(),
        ]
        return "\n\n".join(parts) + "\n"

    def _through_generate(self, repo_id: str) -> str:
        """Say how Hugging Face's own generate decodes with the head."""
        return (
            "Or inside `transformers`, where `generate` runs the code of this repository's `custom_generate` "
            f'folder:\n\n```python\nmodel.generate(\n    **inputs, custom_generate="{repo_id}", '
            "trust_remote_code=True, max_new_tokens=128, threshold=0.3\n)\n```"
        )

    @property
    def _eagle3(self) -> bool:
        return kind_by_config(self.config) == EAGLE3

    def _described(self) -> str:
        """Say what kind of head it is and what it needs of the target."""
        kind, own = "EAGLE-1/2", "embedding and lm_head are the target's"
        layout, engines = "EAGLE's own layout", ""
        if self._eagle3:
            kind, own = "EAGLE-3", "it reads states between the target's layers, and has its own lm_head"
            engines = " vLLM and SGLang read this layout."
            if SPECULATORS_FIELD in self.config:
                layout, engines = "the layout of the speculators library", " vLLM reads this layout."
        dtype = self.config.get("torch_dtype", "float32")
        return (
            f"An {kind} draft head (one decoder layer behind `fc`, {dtype}, {layout}) for "
            f"[{self.base_model}](https://huggingface.co/{self.base_model}). It drafts tokens that the "
            f"target verifies; {own}. Other targets need other heads.{engines}"
        )

    def commands(self) -> list[str]:
        """Return the command lines that the card shows: of the measurements, then of the training."""
        measured = (public_command(row["command"]) for row in self.taus)
        made = (one.command for one in self.calibrations if one.command)
        return list(dict.fromkeys([*measured, *made, public_command(self.training["command"])]))

    def _measured(self) -> str:
        first = self.taus[0]
        commands = "\n".join(dict.fromkeys(public_command(row["command"]) for row in self.taus))
        made = first.get("dtype", "float32")
        made += f", weights {first['weight_format']}" if "weight_format" in first else ""
        return (
            "tau, tokens emitted per step of the target, its own token included, on "
            f"{self._prompts()}, {first['max_new_tokens']} new tokens, {made}; a "
            f"tree is total_tokens / depth / top_k:\n\n{self.table}\n\n```bash\n{commands}\n```"
        )

    def _prompts(self) -> str:
        """Say which prompts were measured, and how many, for each set if the numbers differ."""
        skipped = sorted({row.get("skipped", 0) for row in self.taus})
        which, behind = "the first ", ""
        if skipped != [0]:
            which, behind = "", f", behind the first {' or '.join(map(str, skipped))}"
        counts: dict[str, list[int]] = {}
        for row in self.taus:
            counts.setdefault(row["prompts"], []).append(row["prompt_count"])
        texts = {name: " or ".join(map(str, sorted(set(found)))) for name, found in counts.items()}
        if len(set(texts.values())) == 1:
            return f"{which}{next(iter(texts.values()))} prompts of each set{behind}"
        return which + ", ".join(f"{text} prompts of {name}" for name, text in texts.items()) + behind

    def _trained(self) -> str:
        run = self.training
        commit = f", commit {run['commit']}" if run.get("commit") else ""  # an installed package has none
        held_out = run["held_out"]
        steps = " / ".join(f"{100 * share:.1f}" for share in held_out["top1"])
        return (
            f"{self.data}\n\n{run['steps']:,} steps in {run['training_seconds'] / 60:.0f} minutes on "
            f"{run['device']}, {run['sequences']:,} sequences, {run['tokens']:,} tokens, "
            f"{run['learned_tokens']:,} of which carry loss. Held out, the target's greedy token is the "
            f"head's best in {steps} % of {held_out['positions']:,} positions at drafting steps 1 to "
            f"{len(held_out['top1'])}.\n\n```bash\n{public_command(run['command'])}\n```\n\n"
            f"eagle_fsd {run['eagle_fsd']}{commit}, torch {run['torch']}, transformers {run['transformers']}."
        )


def write_repository(head: Path, card: Card, repo_id: str, folder: Path) -> Path:
    """Write the repository: the head's files and the card, into a new folder or over an earlier repository.

    With card.custom_generate also a folder of that name, with code that decodes through this package.
    An earlier card that differs is kept beside the folder, as FOLDER.README.md.old.
    """
    earlier = refuse_other_folder(folder, head)
    weights = find_head_file(head, str(head))
    files = [weights, head / VOCABULARY_NAME]
    config = dict(card.config)
    if kind_by_config(config) != EAGLE3:
        config |= bias_flags(weights)
    text = card.text(repo_id)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()  # follows links, so that files are moved within one disk
    with (
        name_full_disk(folder),
        tempfile.TemporaryDirectory(dir=place.parent, prefix=".publish-") as parts,
    ):
        for file in filter(Path.is_file, files):
            shutil.copyfile(file, Path(parts) / file.name)
        (Path(parts) / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (Path(parts) / CARD).write_bytes(text.encode())
        if card.calibrations:
            own = [one.published(card.base_model) for one in card.calibrations]
            write_calibrations(Path(parts) / CALIBRATION, own)
        if card.custom_generate:
            write_folder(Path(parts), repo_id)
        made = {file.name for file in Path(parts).iterdir()}
        if CARD in earlier and (place / CARD).read_bytes() != text.encode():
            shutil.copyfile(place / CARD, place.with_name(f"{place.name}.{CARD}.old"))
        for name in sorted(made, key=CARD.__ne__):  # the card first: by it the folder is known as ours
            if (place / name).is_dir():
                shutil.rmtree(place / name)
            (Path(parts) / name).replace(place / name)
    for name in earlier - made:
        shutil.rmtree(place / name) if name == FOLDER else (place / name).unlink()
    return folder


def bias_flags(weights: Path) -> dict[str, bool]:
    """Return the flags of biases for config.json: every engine then makes those in the file and no others.

    Older versions of this package, and other trainers, write flags that do not match.
    """
    tensors = read_tensors(weights)
    qkv = any(QKV_BIAS_KEY.fullmatch(key) for key in tensors)
    return {"bias": FC_BIAS_KEY in tensors, "attention_bias": False, "qkv_bias": qkv}


def bias_warning(folder: Path) -> str:
    """Return a warning about a published head whose `fc` has a bias; empty if it has none."""
    config = read_config(folder, "draft head")
    if kind_by_config(config) == EAGLE3 or not config["bias"]:
        return ""
    return (
        "fc.bias is in the weights: vLLM makes none for fc, and for bias: true an uninitialised one in its "
        "attention, so that none of its drafts is accepted; fold the bias into fc.weight with "
        "`eagle-fsd train fold-bias` and publish that head"
    )


def refuse_other_folder(folder: Path, head: Path) -> set[str]:
    """List the files of an earlier repository in the folder. Raises ValueError if it holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder {str(folder)!r} is a file: it must be a folder; name another with --output")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    card = folder / CARD
    ours = card.is_file() and f"library_name: {LIBRARY}".encode() in card.read_bytes()
    plain = found <= {*NAMES, FOLDER} and all((folder / name).is_file() for name in found - {FOLDER})
    if FOLDER in found:
        plain &= {path.name for path in (folder / FOLDER).iterdir()} <= {FILE, REQUIREMENTS}
    if found and not (ours and plain and folder.resolve() != head.resolve()):
        raise ValueError(
            f"folder {str(folder)!r} is not empty: it may hold an earlier repository, with its {CARD}, and "
            "nothing else; name another with --output"
        )
    return found


def push(folder: Path, repo_id: str, private: bool = False) -> str:
    """Create the repository if it does not exist, upload the folder, and return the address."""
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        # A file of an earlier head, such as its list of tokens, would make this one unreadable.
        old = [*sorted(NAMES - {CARD}), f"{FOLDER}/*"]
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload draft head", delete_patterns=old
        )
    except (HfHubHTTPError, HFValidationError, TRANSPORT_ERROR, OSError) as error:
        raise ValueError(
            f"repository {repo_id!r} cannot be written ({one_line(error, 120)}): it must be OWNER/NAME that "
            "your token may write; log in with `hf auth login`, or use --dry-run"
        ) from error
    return str(address)
