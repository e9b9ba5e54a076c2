"""A trained head as a repository of the Hub: a model card made of what the runs recorded, and the push."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from eagle_fsd.checkpoint import CONFIG_NAME, VOCABULARY_NAME, find_head_file, one_line

CARD = "README.md"


@dataclass(frozen=True)
class Card:
    """What a card says.

    base_model: the target's Hub id. data: a sentence on the text and its licences. training: the record of
    train_head.py. taus, table: the rows of eval/measure_tau.py, and their table. config: of the head.
    """

    base_model: str
    licence: str
    data: str
    training: Mapping[str, Any]
    taus: Sequence[Mapping[str, Any]]
    table: str
    config: Mapping[str, Any]

    def text(self, repo_id: str) -> str:
        """The README.md of the repository, its YAML header included."""
        header = ModelCardData(
            license=self.licence,
            base_model=self.base_model,
            base_model_relation="adapter",
            library_name="eagle-fsd",
            tags=["eagle", "speculative-decoding", "draft-head"],
        )
        name = self.base_model.rsplit("/", 1)[-1]
        dtype = self.config.get("torch_dtype", "float32")
        parts = [
            f"---\n{header.to_yaml()}\n---",
            f"# EAGLE draft head for {name}",
            f"An EAGLE-1/2 draft head (one decoder layer behind `fc`, {dtype}, EAGLE's "
            f"own layout) for [{self.base_model}](https://huggingface.co/{self.base_model}). It drafts "
            "tokens that the target verifies; embedding and lm_head are the target's. Other targets need "
            "other heads.",
            "## Use",
            f"```bash\npip install eagle-fsd\npython -m eagle_fsd.generate --base-model {self.base_model} "
            f'--ea-model {repo_id} "Why is the sky blue?"\n```',
            "## Measured",
            self._measured(),
            "## Trained",
            self._trained(),
        ]
        return "\n\n".join(parts) + "\n"

    def _measured(self) -> str:
        first = self.taus[0]
        return (
            "tau, tokens emitted per step of the target, its own token included, on the first "
            f"{first['prompt_count']} prompts of each set, {first['max_new_tokens']} new tokens, tree "
            f"{'/'.join(str(size) for size in first['tree'].values())} (total_tokens / depth / top_k), "
            f"{first.get('dtype', 'float32')}:\n\n{self.table}\n\n```bash\n{first['command']}\n```"
        )

    def _trained(self) -> str:
        run = self.training
        held_out = run["held_out"]
        steps = " / ".join(f"{100 * share:.1f}" for share in held_out["top1"])
        return (
            f"{self.data}\n\n{run['steps']:,} steps in {run['training_seconds'] / 60:.0f} minutes on "
            f"{run['device']}, {run['sequences']:,} sequences, {run['tokens']:,} tokens, "
            f"{run['learned_tokens']:,} of which carry loss. Held out, the target's greedy token is the "
            f"head's best in {steps} % of {held_out['positions']:,} positions at drafting steps 1 to "
            f"{len(held_out['top1'])}.\n\n```bash\n{run['command']}\n```\n\n"
            f"eagle_fsd {run['eagle_fsd']}, commit {run['commit']}, torch {run['torch']}, transformers "
            f"{run['transformers']}."
        )


def read_training(run: Path) -> dict[str, Any]:
    """The record of a run of train_head.py that has ended."""
    record = run / "provenance.json"
    try:
        training = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"training record {str(record)!r} cannot be read ({one_line(error, 80)}): it must be what "
            "train_head.py writes; name its --output"
        ) from error
    needed = ("command", "steps", "training_seconds", "sequences", "tokens", "learned_tokens", "held_out")
    lost = [name for name in needed if training.get(name) in (None, {})]
    if lost:
        raise ValueError(f"{record} has no {', '.join(lost)}: the run must have ended; resume it")
    return training


def write_repository(head: Path, card: Card, repo_id: str, folder: Path) -> Path:
    """Lay the repository out in a new or empty folder: the head's files and the card."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder {str(folder)!r} is not empty: a repository is laid out anew; name another")
    folder.mkdir(parents=True, exist_ok=True)
    files = [head / CONFIG_NAME, find_head_file(head, str(head)), head / VOCABULARY_NAME]
    for file in filter(Path.is_file, files):
        shutil.copyfile(file, folder / file.name)
    (folder / CARD).write_text(card.text(repo_id), encoding="utf-8")
    return folder


def push(folder: Path, repo_id: str, private: bool = False) -> str:
    """Create the repository where it is not there and upload the folder; returns its address."""
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload draft head")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"repository {repo_id!r} cannot be written ({one_line(error, 120)}): it must be OWNER/NAME that "
            "your token may write; log in with `hf auth login`, or use --dry-run"
        ) from error
    return str(address)
