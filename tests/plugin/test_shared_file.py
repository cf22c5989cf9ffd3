"""The file in shared memory that carries tensors to workers."""

import hashlib
import os

from qerl_vllm_plugin import shared_file


def test_more_than_there_is_does_not_fit():
    assert shared_file.fits(1) and not shared_file.fits(1 << 60)


def test_a_file_proves_its_owner(monkeypatch):
    with shared_file.proof(b"content") as path:
        assert shared_file.is_proof(path, b"content")
        assert not shared_file.is_proof(path, b"contents") and not shared_file.is_proof(path, b"conten")
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # a server of another user
        assert not shared_file.is_proof(path, b"content")
    assert not shared_file.is_proof(path, b"content")


def test_a_digest_is_of_every_segment_and_of_their_order(monkeypatch):
    monkeypatch.setattr(shared_file, "SEGMENT", 8)
    monkeypatch.setattr(shared_file, "READ", 3)

    def of(content, *grown):
        with shared_file.unnamed() as (file, _):
            digest = shared_file.Digest(file)
            try:
                for size in grown:
                    shared_file.append(file, content[os.fstat(file.fileno()).st_size : size])
                    digest.grow(size)
                shared_file.append(file, content[os.fstat(file.fileno()).st_size :])
                return digest.finish(len(content))
            finally:
                digest.close()

    halves = hashlib.sha256(b"12345678").digest() + hashlib.sha256(b"9").digest()
    for grown in ([], [3, 7], [8], [1, 8], [9], range(10)):
        assert of(b"123456789", *grown) == hashlib.sha256(halves).hexdigest(), "however it arrives"
    contents = [b"", b"1" * 8, b"1" * 16, b"1" * 8 + b"2" * 8, b"2" * 8 + b"1" * 8, b"1" * 15 + b"2"]
    assert len({of(content) for content in contents}) == len(contents)
