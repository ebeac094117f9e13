"""Files of GGUF: what the package gguf reads, and what damage or malice leaves of them."""

import struct
import tempfile
import tracemalloc

import numpy as np
import pytest

from fakequant.delivery.gguf.blocks import GgufContent, GgufFile, GgufTensor, is_gguf, pack
from fakequant.errors import CheckpointError
from tests.support import llama_cpp_files

pytest.importorskip("gguf")

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
CODES = np.arange(512, dtype=np.int64).reshape(2, 256) % 16
BLOCKS = pack("Q4_0", {"codes": (CODES - 8).astype(np.int8).reshape(-1, 32), "d": np.ones(16, np.float16)})
TENSORS = {
    "a.weight": GgufTensor("F32", (2, 3), lambda: VALUES),
    "b.weight": GgufTensor("Q4_0", (2, 256), lambda: BLOCKS.reshape(2, -1)),
    "c.weight": GgufTensor("F16", (5,), lambda: np.ones(5, np.float16)),
}


def say(writer):
    writer.add_name("a model")
    writer.add_uint32("number", 7)
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("texts", ["", "ä", "b" * 100])


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "x.gguf"
    found.write_bytes(b"".join(bytes(part) for part in GgufContent("llama", say, TENSORS)))
    return found


def test_the_package_gguf_reads_what_is_written_and_the_reader_here_the_same(path):
    import gguf

    theirs, ours = gguf.GGUFReader(path), GgufFile(path)
    assert is_gguf(path)
    assert [one.name for one in theirs.tensors] == list(ours.tensors) == list(TENSORS)
    for one in theirs.tensors:
        found = ours.tensors[one.name]
        assert (found.kind, found.shape) == (one.tensor_type.name, tuple(map(int, one.shape))[::-1])
        assert np.array_equal(found.make(), one.data)
        assert np.array_equal(found.make(), TENSORS[one.name].make())
    assert ours.metadata["texts"] == theirs.get_field("texts").contents() == ["", "ä", "b" * 100]
    assert ours.metadata["numbers"].tolist() == [1.5, 2.5]
    assert {key: ours.metadata[key] for key in ("general.architecture", "general.name", "number")} == {
        "general.architecture": "llama",
        "general.name": "a model",
        "number": 7,
    }


def test_a_tensor_is_made_when_its_part_is_asked_for(path):
    made = []
    tensors = {name: one._replace(make=lambda name=name: made.append(name)) for name, one in TENSORS.items()}
    parts = iter(GgufContent("llama", say, tensors))
    next(parts)
    assert made == []


def test_content_of_another_size_is_refused():
    tensors = {"a": GgufTensor("F32", (2, 3), lambda: VALUES[:1])}
    with pytest.raises(CheckpointError, match="a has 12 bytes, but 24 were stated"):
        list(GgufContent("llama", say, tensors))


def test_a_file_that_ends_anywhere_is_refused(path):
    whole = path.read_bytes()
    assert whole.endswith(bytes(22))  # behind the 10 bytes of the last tensor
    for size in range(0, len(whole) - 22, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"x\.gguf (is|ends|has) "):
            GgufFile(path)


HUGE = struct.pack("<Q", 2**63 - 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGUX", "does not begin with GGUF"),
        (struct.pack("<I", 3), struct.pack("<I", 1), "of version 1; versions 2 and 3"),
        (struct.pack("<I", 3), struct.pack(">I", 3), r"of version 50331648 \(or its bytes are in the other order\)"),
        (struct.pack("<Q", 3), HUGE, "too short for 9223372036854775807 tensors"),
        (struct.pack("<Q", 3), struct.pack("<Q", 999), "too short for 999 tensors"),
        (struct.pack("<Q", 5), HUGE, "too short for 3 tensors and 9223372036854775807 pairs"),
        (struct.pack("<Q", 6) + b"number", HUGE + b"number", "ends early: 9223372036854775807 bytes"),
        (b"number" + struct.pack("<I", 4), b"number" + struct.pack("<I", 99), "metadata of type 99"),
        (struct.pack("<IQ", 8, 3), struct.pack("<I", 8) + HUGE, "too short for 9223372036854775807 texts"),
        (struct.pack("<IQ", 6, 2), struct.pack("<I", 6) + HUGE, "ends early"),
        (struct.pack("<IQ", 8, 3), struct.pack("<IQ", 9, 3), "array of type 9"),
        ("ä".encode(), b"\xff\xff", "not UTF-8"),
        (struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 3, 2, 77), "of type 77"),
        (struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 2**62, 2**62, 0), "ends within a.weight"),
        (struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 0, 2, 0), r"of shape \[2, 0\]"),
        (struct.pack("<IQQI", 2, 256, 2, 2), struct.pack("<IQQI", 2, 255, 2, 2), r"\[2, 255\], which Q4_0 cannot have"),
        (struct.pack("<IQQI", 2, 256, 2, 2), struct.pack("<IQQI", 2**31, 256, 2, 2), "ends early"),
        (b"b.weight", b"a.weight", "several tensors of one name"),
    ],
)
def test_damage_is_named_and_takes_no_memory(path, old, new, message):
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("align", [0, 3, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path, align):
    path = tmp_path / "x.gguf"
    parts = GgufContent("llama", lambda writer: writer.add_uint32("general.alignment", align), TENSORS)
    path.write_bytes(b"".join(map(bytes, parts)))
    with pytest.raises(CheckpointError, match=f"alignment of {align}"):
        GgufFile(path)


def test_random_damage_raises_nothing_else(path):
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    read = 0
    for _ in range(300):
        damaged = whole.copy()
        places = rng.integers(0, len(whole) if rng.random() < 0.5 else 400, rng.integers(1, 4))
        damaged[places] = rng.integers(0, 256, len(places))
        path.write_bytes(damaged.tobytes())
        try:
            file = GgufFile(path)
            assert all(one.make().size for one in file.tensors.values())
            read += 1
        except CheckpointError:
            pass
    assert 0 < read < 300


@pytest.fixture
def first(path):
    return llama_cpp_files.split(path, 1)


def test_several_files_are_one(path, first):
    whole, found = GgufFile(path), GgufFile(first)
    assert (first.name, found.count) == ("x-00001-of-00003.gguf", 3)
    assert list(found.tensors) == list(whole.tensors)
    assert all(np.array_equal(one.make(), whole.tensors[name].make()) for name, one in found.tensors.items())
    assert found.metadata["texts"] == whole.metadata["texts"]


def test_other_files_than_the_first_are_refused(first):
    with pytest.raises(CheckpointError, match="is not file 1 of a model; give the first file"):
        GgufFile(first.with_name("x-00002-of-00003.gguf"))


def test_a_missing_or_misnamed_file_is_named(first):
    other = first.with_name("x-00003-of-00003.gguf")
    raw = other.read_bytes()
    other.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*x-00003-of-00003\.gguf"):
        GgufFile(first)
    other.write_bytes(first.with_name("x-00002-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"x-00003-of-00003\.gguf is not file 3 of a model"):
        GgufFile(first)
    other.write_bytes(raw)
    GgufFile(first)
    with pytest.raises(CheckpointError, match=r"first of 3 files, and is not named \.\.\.-00001-of-00003\.gguf"):
        GgufFile(first.rename(first.with_name("y.gguf")))


def test_a_tensor_in_two_files_and_one_too_few(path, first, tmp_path):
    other = first.with_name("x-00002-of-00003.gguf")
    raw = other.read_bytes()
    assert raw.count(b"b.weight") == 1
    other.write_bytes(raw.replace(b"b.weight", b"a.weight"))
    with pytest.raises(CheckpointError, match=r"x-00002-of-00003\.gguf .* has a\.weight, which an earlier"):
        GgufFile(first)
    other.write_bytes(raw)
    many = first.read_bytes().replace(struct.pack("<Ii", 5, 3), struct.pack("<Ii", 5, 4))
    first.write_bytes(many)
    with pytest.raises(CheckpointError, match="its files have 4 tensors in all, but they have 3"):
        GgufFile(first)


def test_no_temporary_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    assert next(iter(GgufContent("llama", lambda _: None, TENSORS)))[:4] == b"GGUF"
