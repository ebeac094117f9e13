"""Folders that releases wrote are read with the bits that they had."""

import pytest
import torch
from safetensors.torch import load_file

import fakequant as fq
from tests.vectors.record_release import IN_FLOATS, PRESETS, RELEASES, Network


@pytest.mark.parametrize("folder", [*IN_FLOATS, *(f"{preset}-packed" for preset in PRESETS)])
@pytest.mark.parametrize("release", sorted(path.name for path in RELEASES.iterdir()))
def test_a_folder_of_a_release_has_its_bits(release, folder):
    results, net = load_file(RELEASES / release / "results.safetensors"), Network().eval()
    net.load_state_dict(load_file(RELEASES / release / "float.safetensors"))
    fq.load(net, RELEASES / release / folder)
    with torch.no_grad():
        assert torch.equal(net(results["batch"]), results[folder.removesuffix("-packed")])
