"""The address of a server: whom it names is told to the server, and shown nowhere."""

import base64
import re
import urllib.parse

HIDDEN = "***"
Login = tuple[str, str]  # user and password
_WITH_A_LOGIN = re.compile(r"\bhttps?://(?!\*\*\*@)\S*@\S*")  # what is hidden already stays as it is


def parted(url: str) -> tuple[str, Login | None]:
    """A url without the user and the password that it names, and these as they are meant, percent-decoded.

    Raises ValueError for a url that cannot be taken apart; what it says shows none of it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise ValueError(f"{shown(url)!r} is no url") from None
    named, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = named.partition(":")
    plain = urllib.parse.urlunsplit(parts._replace(netloc=host))
    return plain, (urllib.parse.unquote(user), urllib.parse.unquote(password))


def authorization(login: Login) -> str:
    """The header Authorization that says who asks. Source: RFC 7617, in UTF-8."""
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()


def shown(url: object) -> str:
    """A url, or what was meant to be one, for people to read: without user and password, and without its query, in
    which others hand over a token. Where it cannot be told what stands before the @, nothing of it is shown."""
    text = str(url)
    scheme, separator, rest = text.partition("://") if "://" in text else ("", "", text)
    named, at, host = rest.rpartition("@")
    if at and re.search("[/?#]", named):
        return f"{scheme}{separator}{HIDDEN}"
    place, sign, _ = re.split("([?#])", host, maxsplit=1) if re.search("[?#]", host) else (host, "", "")
    return f"{scheme}{separator}{HIDDEN + at if at else ''}{place}{sign}{HIDDEN if sign else ''}"


def hidden(text: str) -> str:
    """A text for people to read, in which each url that names somebody is as ``shown``."""
    return _WITH_A_LOGIN.sub(lambda found: shown(found[0]), text)
