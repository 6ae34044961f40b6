"""Every model of the catalogue builds and has its published size; names find it or say why not."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from started import run_python

from tuner.core.errors import EXIT_BAD_INPUT, InputError, UnavailableError
from tuner.space.models import catalogue
from tuner.space.models.catalogue import (
    architecture,
    auto_class,
    config_digest,
    get_entry,
    load_catalogue,
    resolve_config,
)
from tuner.space.models.config_fields import problem_in

IDS = list(load_catalogue())
ONE_OF_A_KIND = {entry.config["architectures"][0]: entry.id for entry in load_catalogue().values()}


def build_on_meta(config):
    import torch

    with torch.device("meta"):
        return auto_class(config).from_config(config)


def count(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A hub that refuses the connection at once, and no cache to fall back on."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("no_proxy", "NO_PROXY"):  # a proxy would answer in its place
        monkeypatch.setenv(name, "127.0.0.1")


# --- the architectures -------------------------------------------------------------------


OTHERS = sorted(set(IDS) - set(ONE_OF_A_KIND.values()))


@pytest.mark.parametrize(
    "model_id",
    [*ONE_OF_A_KIND.values(), *(pytest.param(n, marks=pytest.mark.proof) for n in OTHERS)],
)
def test_the_model_builds_and_has_its_published_size(model_id):
    entry = load_catalogue()[model_id]
    config = resolve_config(model_id)
    model = build_on_meta(config)
    built_as = {
        "causal-lm": config.architectures[0],
        "image-text": config.architectures[0],
        "encoder": config.architectures[0].replace("ForMaskedLM", "Model"),
    }
    assert type(model).__name__ == built_as[entry.task]
    assert count(model.parameters()) == entry.params
    if known := architecture(model_id).linears:
        head, modules = model.get_output_embeddings(), dict(model.named_modules())
        linears = {n for n, m in modules.items() if type(m).__name__ == "Linear" and m is not head}
        assert linears == {name for name in modules if name.rpartition(".")[2] in known}


def test_no_model_is_two_percent_off_its_published_size():
    entries = load_catalogue().values()
    assert len(entries) >= 150
    off = [e.id for e in entries if e.published and abs(e.params / e.published - 1) > 0.02]
    assert not off


# --- names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "model_id"),
    [
        ("medgemma-27b-text", "medgemma-27b-text"),
        ("google/medgemma-27b-text-it", "medgemma-27b-text"),
        ("MedGemma_27B_text", "medgemma-27b-text"),
        ("qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("gemma2-2b", "gemma-2-2b"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b"),
        ("unsloth/Qwen3-VL-4B-Instruct-unsloth-bnb-4bit", "qwen3-vl-4b"),
        ("NousResearch/Llama-3.2-1B", "llama-3.2-1b"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
    ],
)
def test_models_are_found_as_people_type_them(typed, model_id):
    entry = get_entry(typed)
    assert entry.id == model_id


@pytest.mark.parametrize(
    "typed",
    ["mistral-7b", "llama-3-8b-bnb-4bit-tuned", "gemma-22b", "qwen2.57b", "", "./roberta-base"],
)
def test_a_name_that_could_mean_something_else_finds_nothing(typed):
    assert get_entry(typed) is None


def test_every_exact_name_belongs_to_one_model():
    owners: dict[str, str] = {}
    for entry in load_catalogue().values():
        for name in entry.names:
            assert owners.setdefault(name.lower(), entry.id) == entry.id, name
            assert get_entry(name) == entry


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("medgema-27b-text", "medgemma-27b-text"), ("Qwen2.5-7B-Instrct", "Qwen2.5-7B-Instruct")],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant):
    with pytest.raises(InputError, match="unknown model") as caught:
        resolve_config(typed)
    assert repr(typed) in caught.value.message
    assert f"did you mean '{meant}'" in str(caught.value.hint)


# --- folders -----------------------------------------------------------------------------


def test_a_local_folder_with_a_config_is_a_model(tmp_path):
    resolve_config("qwen2.5-0.5b").save_pretrained(tmp_path)
    loaded = resolve_config(str(tmp_path))
    assert config_digest(loaded) == config_digest(resolve_config("qwen2.5-0.5b"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has no config.json"),
        ("{not json", "cannot be read as JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "no_such_model"}', "cannot be used"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be used"),
        ('{"model_type": "llama", "architectures": {"": ["Llama"]}}', "must be a list of names"),
        ('{"model_type": "bert", "architectures": [null]}', "cannot be used"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "from 1 to 2048"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads is 0"),
        ('{"model_type": "llama", "vocab_size": 0}', "vocab_size is 0"),
        ('{"model_type": "bert", "num_labels": 10000000}', "num_labels is 10000000"),
        (
            '{"model_type": "gemma3", "text_config": {"num_hidden_layers": 99999}}',
            "text_config.num",
        ),
        ('{"model_type": "mixtral", "num_local_experts": 8000}', "8000 experts in 32"),
        (
            '{"model_type": "llama"' + ', "text_config": {"model_type": "llama"' * 900 + "}" * 901,
            "recursion",
        ),
        ('{"model_type": "llama", "x": ' + "[" * 50 + "]" * 50 + "}", "nested more than 20"),
        ('{"model_type": "llama", "x": 1' + "0" * 60 + "}", "a number of 61 digits"),
        (
            '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}',
            "its own code, which is never run",
        ),
    ],
)
def test_a_folder_that_holds_no_usable_config_is_one_message(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=problem) as caught:
        resolve_config(str(tmp_path))
    assert str(tmp_path) in caught.value.message
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_a_model_whose_library_is_missing_is_an_answer(tmp_path, monkeypatch):
    import transformers

    def from_pretrained(*_, **__):
        raise ImportError("TimmWrapperConfig requires the timm library: `pip install timm`")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    (tmp_path / "config.json").write_text('{"model_type": "timm_wrapper"}')
    with pytest.raises(UnavailableError, match=r"needs a library: .*timm"):
        resolve_config(str(tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "endless", "large"])
def test_what_is_no_file_or_too_large_is_not_read(tmp_path, kind):
    config = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "endless":
        config.symlink_to("/dev/zero")
    else:
        config.touch()
        os.truncate(config, 10 << 30)
    with pytest.raises(InputError, match=r"config\.json"):
        resolve_config(str(tmp_path))


@pytest.mark.parametrize("model_id", IDS)
def test_every_known_model_is_within_the_bounds(model_id):
    assert problem_in(load_catalogue()[model_id].config) is None


# --- the hub -----------------------------------------------------------------------------


def test_a_hub_model_without_a_network_is_one_message_and_no_retry(no_network, monkeypatch):
    import transformers

    # The hub's own library would try again and again, for about 25 s.
    real, only_local = transformers.PreTrainedConfig.get_config_dict, []

    def get_config_dict(*arguments, **options):
        only_local.append(options.get("local_files_only", False))
        return real(*arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", get_config_dict)
    with pytest.raises(InputError, match="needs the network") as caught:
        resolve_config("somebody/some-model")
    assert only_local
    assert all(only_local)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert "tuner models" in str(caught.value.hint)


def test_a_hub_config_in_the_cache_needs_no_network(no_network, tmp_path):
    snapshot = tmp_path / "models--somebody--some-model" / "snapshots" / "abc"
    resolve_config("smollm2-135m").save_pretrained(snapshot)
    reference = tmp_path / "models--somebody--some-model" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    assert resolve_config("somebody/some-model").hidden_size == 576


@pytest.mark.parametrize(
    ("error_name", "message"),
    [("GatedRepoError", "is gated"), ("RepositoryNotFoundError", "unknown model")],
)
def test_what_the_hub_refuses_is_said_plainly(monkeypatch, error_name, message):
    import transformers
    from huggingface_hub import errors

    # The hub's exceptions read only these of the response that caused them.
    response = SimpleNamespace(headers={}, status_code=401, request=None)
    refusal = getattr(errors, error_name)("refused", response=response)

    def get_config_dict(*_, **__):
        raise OSError("transformers' own words") from refusal

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", get_config_dict)
    monkeypatch.setattr(catalogue, "_require_hub", lambda name: None)
    with pytest.raises(InputError, match=message) as caught:
        resolve_config("somebody/some-model")
    assert "somebody/some-model" in caught.value.message


# --- keys and imports ----------------------------------------------------------------------


def test_the_digest_tells_architectures_apart_and_nothing_else():
    digests = {model_id: config_digest(resolve_config(model_id)) for model_id in IDS}
    # Llama-3.3-70B is Llama-3.1-70B trained further.
    assert digests.pop("llama-3.3-70b") == digests["llama-3.1-70b"]
    assert len(set(digests.values())) == len(digests)
    config = resolve_config("qwen2.5-7b")
    config._name_or_path = "elsewhere"
    assert config_digest(config) == digests["qwen2.5-7b"]
    config.num_hidden_layers = 2
    assert config_digest(config) != digests["qwen2.5-7b"]


@pytest.mark.parametrize(
    "code",
    [
        "import threading, time; from tuner.space.models.catalogue import resolve_config\n"
        "threading.Thread(target=__import__, args=('transformers',)).start()\n"
        "while 'transformers' not in sys.modules: time.sleep(0.0001)\n"
        "assert resolve_config('tiny-llama-3m').model_type == 'llama'",
        "from tuner.space.models.catalogue import get_entry\n"
        "entry = get_entry('google/medgemma-27b-text-it')\n"
        "assert (entry.hidden_size, entry.layers, entry.vocab_size) == (5376, 62, 262144)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy",
    ],
    ids=["while another thread imports transformers", "without torch and transformers"],
)
def test_a_model_is_found_in_a_process_that_has_imported_nothing(code):
    root = Path(catalogue.__file__).parents[3]
    run_python("-c", f"import sys; {code}", check=True, cwd=root, timeout=120)
