"""Take the user and password out of a server's URL, send them to that server, and hide them wherever it is shown."""

import base64
import re
import urllib.parse

HIDDEN = "***"
Login = tuple[str, str]  # user and password
_WITH_A_LOGIN = re.compile(r"\bhttps?://(?!\*\*\*@)\S*@\S*")  # skips URLs whose login is hidden already


def parted(url: str) -> tuple[str, Login | None]:
    """Return a URL without its login, and the login, percent-decoded, or None; raise ValueError for what is no URL."""
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
    """Return the value of the Authorization header for HTTP Basic authentication. Source: RFC 7617, in UTF-8."""
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()


def shown(url: object) -> str:
    """Return a URL, or a text that was meant to be one, with its login, query and fragment hidden.

    A query may carry a token. If a /, ? or # comes before the last @, the login's extent is unclear: then everything
    after the scheme is hidden.
    """
    text = str(url)
    scheme, separator, rest = text.partition("://") if "://" in text else ("", "", text)
    named, at, host = rest.rpartition("@")
    if at and re.search("[/?#]", named):
        return f"{scheme}{separator}{HIDDEN}"
    place, sign, _ = re.split("([?#])", host, maxsplit=1) if re.search("[?#]", host) else (host, "", "")
    return f"{scheme}{separator}{HIDDEN + at if at else ''}{place}{sign}{HIDDEN if sign else ''}"


def hidden(text: str) -> str:
    """Return ``text`` with each http(s) URL that contains a login replaced by its ``shown`` form."""
    return _WITH_A_LOGIN.sub(lambda found: shown(found[0]), text)
