"""Test the file in shared memory that carries tensors to workers."""

import builtins
import hashlib
import os
import secrets
import tempfile

import pytest

from qerl_vllm_plugin.wire import shared_file


def test_more_than_there_is_does_not_fit():
    assert shared_file.fits(1) and not shared_file.fits(1 << 60)


def test_a_file_is_opened_for_its_user_alone_and_while_it_is_open(monkeypatch):
    file, path = shared_file.create()
    with file:
        file.write(b"content")
        ticket = shared_file.ticket(path)
        with shared_file.open_ticket(ticket) as opened:
            assert opened.read() == b"content"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as a server of another user
        assert shared_file.open_ticket(ticket) is None
    assert shared_file.open_ticket(ticket) is None


NAME = f"qerl-{secrets.token_hex(16)}"


def of(file):
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def without_a_name(folder):
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def named(folder):
    """Create a file with a name that looks as if the kernel had marked it as deleted."""
    return of(tempfile.NamedTemporaryFile(prefix=f"{NAME}-", suffix=" (deleted)", dir=folder))


def exactly_named(folder):
    path = folder / f"{NAME} (deleted)"
    path.unlink(missing_ok=True)
    return of(open(path, "w+b"))


def removed(folder):
    path = folder / NAME
    file = open(path, "w+b")  # noqa: SIM115
    path.unlink()
    return of(file)


def of_another_name(folder):
    return shared_file.create()


def a_pipe(folder):
    reading, _ = os.pipe()
    return of(open(reading, "rb", buffering=0))


@pytest.mark.parametrize("make", [without_a_name, named, exactly_named, of_another_name, a_pipe])
def test_only_a_file_of_the_told_name_is_opened(make, monkeypatch):
    file, path = make(shared_file.SHARED_MEMORY)
    made, real = removed(shared_file.SHARED_MEMORY), open
    link = os.path.basename(os.readlink(path))
    told = [path, f"{path}/", f"{path}/{NAME}", f"{path}/{link}", f"{path}/{link.removesuffix(' (deleted)')}"]
    told += [f"{path}/../{NAME}", f"{made[1]}/qerl-{secrets.token_hex(16)}", made[1], f"{made[1]}/{NAME} (deleted)"]
    if make is of_another_name:
        told.remove(shared_file.ticket(path))
    try:
        monkeypatch.setattr(builtins, "open", lambda name, *_, **__: pytest.fail(f"{name} was opened"))
        assert [shared_file.open_ticket(ticket) for ticket in told] == [None] * len(told)
        monkeypatch.setattr(builtins, "open", real)
        with shared_file.open_ticket(f"{made[1]}/{NAME}") as good:
            assert os.path.samestat(os.fstat(good.fileno()), os.fstat(made[0].fileno()))
    finally:
        monkeypatch.undo()
        if make is exactly_named:
            (shared_file.SHARED_MEMORY / f"{NAME} (deleted)").unlink()
        for opened in (file, made[0]):
            opened.close()


def test_a_file_elsewhere_or_with_a_reused_number_is_not_opened(tmp_path):
    file, path = removed(tmp_path)
    with file:
        assert shared_file.open_ticket(f"{path}/{NAME}") is None
    file, path = shared_file.create()
    ticket = shared_file.ticket(path)
    with shared_file.open_ticket(ticket), shared_file.create()[0] as other:
        os.dup2(other.fileno(), file.fileno())
        assert shared_file.open_ticket(ticket) is None
    file.close()
    assert shared_file.open_ticket(ticket) is None
    assert not [name for name in os.listdir(shared_file.SHARED_MEMORY) if name == ticket.rpartition("/")[2]]


def test_a_digest_is_of_every_segment_and_of_their_order(monkeypatch):
    monkeypatch.setattr(shared_file, "SEGMENT", 8)
    monkeypatch.setattr(shared_file, "READ", 3)

    def of(content, *grown):
        file, _ = shared_file.create()
        with file:
            digest = shared_file.Digest(file)
            try:
                for size in grown:
                    file.write(content[os.fstat(file.fileno()).st_size : size])
                    digest.grow(size)
                file.write(content[os.fstat(file.fileno()).st_size :])
                return digest.finish(len(content))
            finally:
                digest.close()

    halves = hashlib.sha256(b"12345678").digest() + hashlib.sha256(b"9").digest()
    for grown in ([], [3, 7], [8], [1, 8], [9], range(10)):
        assert of(b"123456789", *grown) == hashlib.sha256(halves).hexdigest(), "however it arrives"
    contents = [b"", b"1" * 8, b"1" * 16, b"1" * 8 + b"2" * 8, b"2" * 8 + b"1" * 8, b"1" * 15 + b"2"]
    assert len({of(content) for content in contents}) == len(contents)
