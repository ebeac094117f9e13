"""Folders that releases wrote are read with the bits that they had."""

import json

import pytest
from safetensors.torch import load_file

import fakequant as fq
from tests.vectors.record_release import IN_FLOATS, PRESETS, RELEASES, Network, digests


@pytest.mark.parametrize("folder", [*IN_FLOATS, *(f"{preset}-packed" for preset in PRESETS)])
@pytest.mark.parametrize("release", sorted(path.name for path in RELEASES.iterdir()))
def test_a_folder_of_a_release_has_its_bits(release, folder):
    net, results = Network().eval(), json.loads((RELEASES / release / "results.json").read_text())
    net.load_state_dict(load_file(RELEASES / release / "float.safetensors"))
    fq.load(net, RELEASES / release / folder)
    inputs = load_file(RELEASES / release / "inputs.safetensors")
    assert digests(net, inputs) == results[folder.removesuffix("-packed")]
