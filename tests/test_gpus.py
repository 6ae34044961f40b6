"""The GPU catalogue: what every entry promises, how names are found, what a user may add."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.app.device import find_gpu
from tuner.core.errors import InputError, UnavailableError
from tuner.core.units import GIB, MIB
from tuner.space import gpus
from tuner.space.gpus import NATIVE_PRECISIONS, get_gpu, load_catalogue, match_device

OWN = """\
gpus:
  own:
    name: My card
    device_names: [NVIDIA Graphics Device]
    memory: 20 GiB
    tflops: {fp32: 20, tf32: 40, fp16: 80, bf16: 80, int8: 160}
    bandwidth_gb_per_s: 500
    compute_capability: 8.6
    sm_count: 48
    context: 300 MiB
"""


def every_gpu():
    shipped = load_catalogue()
    return pytest.mark.parametrize("gpu", shipped.values(), ids=shipped.keys())


@pytest.fixture
def own_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        return path

    return write


# --- what every shipped entry promises


@every_gpu()
def test_numbers_have_the_units_they_claim(gpu):
    """A factor of 1000 or a sparse rate in the wrong place leaves these ranges."""
    assert 7 * GIB < gpu.memory_bytes < 300 * GIB
    assert 4e12 <= gpu.flops["fp32"] <= 130e12
    assert 190e9 < gpu.bandwidth_bytes_per_s < 9e12
    assert 10 <= gpu.sm_count <= 200
    assert gpu.l2_bytes is None or 2 * MIB <= gpu.l2_bytes <= 128 * MIB
    assert gpu.power_w is None or 50 <= gpu.power_w <= 1500
    assert 100 * MIB < gpu.context_bytes < 1000 * MIB
    assert gpu.price_usd_per_hour is None or 0.1 < gpu.price_usd_per_hour < 15
    # Dense tensor rates per SM and clock: no generation is beyond B200's, none below half of T4's.
    assert 0.75e12 < gpu.flops["fp16"] / gpu.sm_count < 17e12


@every_gpu()
def test_rates_rise_with_narrower_formats(gpu):
    # NVIDIA gave the room of B300's int8 units to fp4.
    narrower = (
        ("fp32", "tf32", "fp16")
        if gpu.id in ("b300", "gb300")
        else ("fp32", "tf32", "fp16", "int8")
    )
    rates = [gpu.flops[p] for p in narrower if p in gpu.flops]
    assert rates == sorted(rates)
    assert gpu.flops.get("bf16", gpu.flops["fp16"]) == gpu.flops["fp16"]


@every_gpu()
def test_every_precision_has_a_rate_or_a_reason(gpu):
    assert set(gpu.flops) | set(gpu.unsupported) == set(NATIVE_PRECISIONS)
    assert not set(gpu.flops) & set(gpu.unsupported)
    assert all(len(reason) > 20 for reason in gpu.unsupported.values())


@every_gpu()
def test_support_follows_the_generation(gpu):
    ampere_or_newer = gpu.compute_capability >= (8, 0)
    assert ("bf16" in gpu.flops) == ("tf32" in gpu.flops) == ampere_or_newer
    assert ("int8" in gpu.flops) == (gpu.compute_capability >= (7, 5))
    assert not gpu.architecture.startswith("compute capability")


@every_gpu()
def test_every_number_says_where_it_comes_from(gpu):
    groups = {"device", "memory", "tflops", "bandwidth", "context"}
    if gpu.link_bytes_per_s is not None:
        groups.add("link")
    priced = gpu.price_usd_per_hour is not None
    groups |= {"price"} if priced else set()
    groups |= {"network"} if gpu.network_bytes_per_s is not None else set()
    groups |= {"power"} if gpu.power_w is not None else set()
    groups |= {"l2"} if gpu.l2_bytes is not None else set()
    groups |= {"nccl"} if gpu.nccl_channels is not None else set()
    assert set(gpu.sources) == groups
    assert all(len(text) > 10 for text in gpu.sources.values())
    assert (gpu.price_date is not None) == ("price" in gpu.sources) == priced


@every_gpu()
def test_every_entry_can_be_found_under_its_names(gpu):
    for name in (gpu.id, *gpu.aliases, *gpu.device_names, gpu.name):
        assert get_gpu(name) is gpu


# Published figures, written down a second time from another page than the catalogue's source.
@pytest.mark.parametrize(
    ("gpu_id", "fp16_tflops", "bandwidth_gb_per_s"),
    [
        ("t4", 65, 320),
        ("rtx2080ti", 53.8, 616),
        ("rtx3090", 71, 936),
        ("rtx4090", 165.2, 1008),
        ("a6000", 309.7 / 2, 768),
        ("l40", 181.05, 864),
        ("l40s", 362.05, 864),
        ("a100_80gb", 312, 2039),
        ("h100_sxm", 1979 / 2, 3350),
        ("h200", 1979 / 2, 4800),
        ("rtx3080ti", 68.2, 912),
        ("rtx4080_super", 104.4, 736),
        ("rtx5070ti", 87.9, 896),
        ("a4000", 153.4 / 2, 448),
        ("a40", 149.7, 696),
        ("rtx2000_ada", 95.95 / 2, 224),
        ("a30", 165, 933),
        ("gh200", 1979 / 2, 4000),
        ("gb200", 5000 / 2, 8000),
    ],
)
def test_figures_are_dense_and_accumulate_in_fp32(gpu_id, fp16_tflops, bandwidth_gb_per_s):
    gpu = get_gpu(gpu_id)
    assert gpu.flops["fp16"] == pytest.approx(fp16_tflops * 1e12, rel=0.001)
    assert gpu.bandwidth_bytes_per_s == bandwidth_gb_per_s * 1e9


# --- precision


def test_nf4_needs_only_fp16():
    assert get_gpu("t4").unsupported_reason("nf4") is None
    assert "7.5" in get_gpu("v100_16gb").unsupported_reason("int8")


# --- names

ALL_NAMES = [(name, gpu.id) for gpu in load_catalogue().values() for name in (gpu.id, *gpu.aliases)]


@given(st.sampled_from(ALL_NAMES), st.data())
def test_case_and_separators_do_not_matter(name_and_id, data):
    name, gpu_id = name_and_id
    separators = st.sampled_from(["", " ", "-", "_", "  "])
    spelled = "".join(
        data.draw(separators) + (c.upper() if data.draw(st.booleans()) else c)
        for c in name.replace("_", "")
    )
    assert get_gpu(spelled + data.draw(separators)).id == gpu_id


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("a100", ["a100_40gb", "a100_80gb", "a100_80gb_pcie"]),
        ("A100-PCIe", ["a100_40gb", "a100_80gb_pcie"]),
        ("H100", ["h100_sxm", "h100_pcie"]),
        ("v100", ["v100_16gb", "v100_32gb"]),
        ("6000", ["rtx6000", "a6000", "rtx6000_ada", "rtx_pro_6000", "rtx_pro_6000_server"]),
    ],
)
def test_ambiguous_names_are_refused_with_the_choices(text, choices):
    with pytest.raises(InputError, match="ambiguous") as caught:
        get_gpu(text)
    assert all(choice in str(caught.value) for choice in choices)
    assert str(caught.value).count(" GiB)") >= len(choices)  # what tells them apart


@pytest.mark.parametrize(
    ("machine", "gpu_id", "count"),
    [
        ("p4de.24xlarge", "a100_80gb", 8),
        ("P5.48xlarge", "h100_sxm", 8),
        ("g5.xlarge", "a10g", 1),
        ("a2-ultragpu-1g", "a100_80gb", 1),
        ("Standard_NC24ads_A100_v4", "a100_80gb_pcie", 1),
    ],
)
def test_a_machine_of_a_cloud_is_its_gpu_and_says_how_many_it_has(machine, gpu_id, count):
    gpu = get_gpu(machine)
    assert gpu.id == gpu_id
    assert (f"one of {count} in a {machine}" in gpu.name) == (count > 1)


def test_every_machine_of_a_cloud_has_a_gpu_of_the_catalogue():
    catalogue = gpus._load(None)
    assert len(catalogue.instances) > 80
    assert {gpu_id for gpu_id, _ in catalogue.instances.values()} <= catalogue.gpus.keys()


@pytest.mark.parametrize(
    "name", ["mi300x", "m3 max", "arc a770", "p100", "Tesla P100-PCIE-16GB", "GTX 1080 Ti", "k80"]
)
def test_what_is_not_supported_is_said_by_name_and_never_priced(name):
    with pytest.raises(UnavailableError, match="supported") as caught:
        get_gpu(name)
    assert repr(name) in caught.value.message
    assert "`tuner gpus` lists" in str(caught.value.hint)


def test_a_misspelled_gpu_gets_the_nearest_and_the_way_out():
    with pytest.raises(InputError) as caught:
        get_gpu("a600")
    for part in ("unknown GPU 'a600'", "did you mean 'a6000'?", "tuner gpus", "gpus.yaml"):
        assert part in str(caught.value)


def test_several_gpus_or_none_are_no_name_of_one():
    for asked in (["a6000", "l4"], None):
        with pytest.raises(InputError, match="the name of one GPU type"):
            find_gpu(asked)
        with pytest.raises(InputError, match="call once for each"):
            get_gpu(asked)


# --- devices


@pytest.mark.parametrize(
    ("name", "memory_gib", "gpu_id"),
    [
        ("NVIDIA L40", 44.4, "l40"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A10G", 22.1, "a10g"),
        ("Quadro RTX 6000", 23.64, "rtx6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "rtx6000_ada"),
        ("Tesla T4", 14.75, "t4"),
        # no type of this name
        ("NVIDIA L40G", 23.6, None),
        ("NVIDIA A40-48Q", 44.4, None),
        ("RTX 6000", 23.6, None),
        ("nvidia l4", 22.0, None),
        ("NVIDIA GeForce RTX 4090 D", 23.6, None),
        ("NVIDIA GeForce RTX 3090 Ti Laptop GPU", 23.6, None),
        ("", 22.0, None),
        # the name of a type with the memory of another: a slice, or a card modified by hand
        ("NVIDIA A100-SXM4-80GB", 39.4, None),
        ("NVIDIA GeForce RTX 2080 Ti", 22.0, None),
    ],
)
def test_devices_match_by_whole_name_and_memory(name, memory_gib, gpu_id):
    found = match_device(name, int(memory_gib * GIB))
    assert (found.id if found else None) == gpu_id


def test_a_card_with_ecc_on_is_the_same_type_with_less_memory():
    found = match_device("NVIDIA RTX 6000 Ada Generation", int(44.43 * GIB))
    assert found.id == "rtx6000_ada"
    assert found.memory_bytes == found.ecc_memory_bytes < get_gpu("rtx6000_ada").memory_bytes


# --- what the user gives


def test_memory_and_price_can_be_given():
    gpu = get_gpu("a6000", memory_bytes=80 * GIB, price_usd_per_hour=0.4)
    assert (gpu.memory_bytes, gpu.price_usd_per_hour, gpu.price_date) == (80 * GIB, 0.4, None)
    assert gpu.sources["memory"] == gpu.sources["price"] == "given by the user"
    assert get_gpu("a6000").memory_bytes != gpu.memory_bytes, "the catalogue stays as it is"


def test_a_gpu_of_the_users_own(own_file):
    path = own_file(OWN)
    gpu = get_gpu("OWN", extra=path)
    assert (gpu.memory_bytes, gpu.flops["fp16"], gpu.sm_count) == (20 * GIB, 80e12, 48)
    assert (gpu.compute_capability, gpu.price_usd_per_hour) == ((8, 6), None)
    assert gpu.sources["memory"] == "own.yaml:5"
    assert match_device("NVIDIA Graphics Device", 20 * GIB, path) == gpu
    assert "own" not in load_catalogue()
    assert load_catalogue().keys() < load_catalogue(path).keys()


def test_the_users_file_is_found_by_variable_and_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home_file = tmp_path / "home" / ".config" / "tuner" / "gpus.yaml"
    home_file.parent.mkdir(parents=True)
    home_file.write_text(OWN)
    assert get_gpu("own").name == "My card"
    other = tmp_path / "other.yaml"
    other.write_text(OWN.replace("My card", "My other card"))
    monkeypatch.setenv(gpus.USER_FILE_VARIABLE, str(other))
    assert get_gpu("own").name == "My other card"


def test_a_named_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"no GPU catalogue .*none\.yaml"):
        load_catalogue(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="no GPU catalogue"):
        load_catalogue(tmp_path)


def test_an_entry_of_the_user_replaces_a_shipped_one(own_file):
    text = "gpus: {a6000: {like: a6000, price_usd_per_hour: 0.33, price_date: 2026-11-01}}"
    gpu = get_gpu("RTX A6000", extra=own_file(text))
    assert gpu.price_usd_per_hour == 0.33
    assert gpu.sources["price"] == "own.yaml:1"
    assert (gpu.memory_bytes, gpu.sources["memory"]) == (
        get_gpu("a6000").memory_bytes,
        get_gpu("a6000").sources["memory"],
    )


def test_a_variant_takes_over_figures_but_no_names(own_file):
    text = (
        "gpus: {modded: {like: rtx2080ti, memory: 22 GiB, "
        "device_names: [NVIDIA GeForce RTX 2080 Ti]}}"
    )
    path = own_file(text)
    assert match_device("NVIDIA GeForce RTX 2080 Ti", 22 * GIB, path).id == "modded"
    assert match_device("NVIDIA GeForce RTX 2080 Ti", 11009 * MIB, path).id == "rtx2080ti"
    assert get_gpu("modded", extra=path).aliases == ()
    with pytest.raises(InputError, match="ambiguous"):
        get_gpu("GeForce RTX 2080 Ti".replace("GeForce", "NVIDIA GeForce"), extra=path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("memory: 20 GiB", "memory: 20", "own.yaml:5 gpus.own.memory: memory '20' is not a size"),
        ("    memory: 20 GiB\n", "", "'memory' is missing; `like: rtx4090` takes"),
        ("memory:", "memry:", "unknown key 'memry' (did you mean 'memory'?)"),
        ("fp16: 80, ", "", "fp16 has neither a rate in `tflops` nor a reason"),
        ("fp16: 80", "fp16: nan", "'nan' is not a number"),
        ("500", "[500]", "bandwidth_gb_per_s: expected a value, found a list"),
        ("8.6", "sm_86", "'sm_86' is not a compute capability like 8.6"),
        ("8.6", "9.4", "own.yaml:8 gpus.own.compute_capability: no GPU of NVIDIA has 9.4; known:"),
        ("sm_count", "vendor: amd\n    sm_count", "gpus.own.vendor: no GPU of AMD is supported"),
        ("sm_count", "vendor: Cerebras\n    sm_count", "no GPU of Cerebras is supported"),
        ("My card", "AMD Instinct MI300X", "gpus.own.name: no GPU of AMD is supported"),
        ("[NVIDIA Graph", "[AMD Graph", "gpus.own.device_names: no GPU of AMD is supported"),
        ("48", "48.5", "48.5 is not a whole number"),
        ("300 MiB", "300 GiB", "is not between"),
        ("  own:", "  Own GPU:", "an id has lower-case letters"),
        ("device_names: [", "aliases: [a6000]\n    device_names: [", "'a6000' also names 'a6000'"),
        ("name: My card", "name: A\n    name: B", "'name' is set twice"),
        ("name: My card", "like: a600", "unknown GPU 'a600' (did you mean 'a6000'?"),
        ("sm_count", "price_usd_per_hour: 2\n    sm_count", "a price needs its `price_date`"),
        ("sm_count", "price_date: soon\n    sm_count", "'soon' is not a date"),
        ("sm_count", "unsupported: {int8: no}\n    sm_count", "int8 is in both"),
        ("sm_count", "ecc_memory: 21 GiB\n    sm_count", "`ecc_memory` is not smaller"),
        ("My card", "[", "broken YAML"),
        (OWN, "", "is empty"),
        (OWN, "gpus:", "expected a mapping (key: value), found nothing"),
        (OWN, "gpus: {}", "has no GPU"),
        (OWN, "[1, 2]", "a GPU catalogue is a mapping"),
        (
            OWN,
            "gpus: {own: [1]}",
            "own.yaml:1 gpus.own: expected a mapping (key: value), found a list",
        ),
        (OWN, OWN + "ambiguous: {big: [own, nothing]}", "'nothing' is not the id of a GPU"),
    ],
)
def test_each_mistake_gets_its_line_and_what_is_allowed(own_file, old, new, expected):
    assert old in OWN
    with pytest.raises(InputError) as caught:
        load_catalogue(own_file(OWN.replace(old, new, 1)))
    assert expected in str(caught.value)
    assert "own.yaml" in str(caught.value)


def test_all_problems_come_at_once(own_file):
    text = OWN.replace("20 GiB", "20").replace("500", "fast").replace("8.6", "new")
    with pytest.raises(InputError) as caught:
        load_catalogue(own_file(text))
    assert [p.where for p in caught.value.problems] == [
        "own.yaml:5 gpus.own.memory",
        "own.yaml:7 gpus.own.bandwidth_gb_per_s",
        "own.yaml:8 gpus.own.compute_capability",
    ]
