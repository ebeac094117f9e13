"""What `advise` knows of engines is what their pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakequant.model.presets import find_preset
from fakequant.model.sites.targets import targets
from fakequant.ptq.next_step import ENGINES, places

PAGES = Path(__file__).parents[2] / "docs" / "engines"


@pytest.mark.parametrize("name", ENGINES)
def test_its_presets_are_there_once_and_its_page_is_there(name: str) -> None:
    engine = ENGINES[name]
    presets = [preset for kind in engine.kinds for preset in kind]
    assert len(set(presets)) == len(presets)
    assert [find_preset(preset).name for preset in presets] == presets
    assert not engine.page or (PAGES / f"{engine.page}.md").is_file()


def test_engines_that_place_quantizers_are_known() -> None:
    assert {name for name in ENGINES if places(name)} == set(targets())
