"""Read the admin token from a file or the environment, and compare it in constant time; it is written nowhere."""

import hashlib
import os
import secrets
from pathlib import Path

TOKEN_FILE, TOKEN = "QERL_ADMIN_TOKEN_FILE", "QERL_ADMIN_TOKEN"
HEADER = "X-QeRL-Admin-Token"
SHORTEST = 16


def read_token() -> bytes | None:
    """Return the SHA-256 of the token, None if none is configured; raise ValueError as ``configured_token`` does."""
    token = configured_token()
    return None if token is None else _hash(token)


def configured_token() -> str | None:
    """Return the token that a server requires and a client in the same environment sends; None if none is configured.

    Raises ValueError for a file that cannot be read, and for a token that is too short or that no header can carry.
    Raises ValueError also if both variables are set.
    """
    file, token = os.environ.get(TOKEN_FILE), os.environ.get(TOKEN)
    if file is None and token is None:
        return None
    if file is not None and token is not None:
        raise ValueError(f"both {TOKEN_FILE} and {TOKEN} are set; set one")
    if file is not None:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{TOKEN_FILE}: {file} cannot be read ({type(error).__name__})") from None
    if token is None or len(token) < SHORTEST:
        raise ValueError(
            f"the token of {TOKEN_FILE if file else TOKEN} is too short; use {SHORTEST} characters or more"
        )
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"the token of {TOKEN_FILE if file else TOKEN} has characters that no header can carry; use letters, "
            "digits and signs of ASCII, and no space"
        )
    return token


def matches(token: str | None, expected: bytes) -> bool:
    """Return True if the SHA-256 of a request's token is ``expected``, comparing in constant time."""
    return secrets.compare_digest(_hash(token or ""), expected)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
