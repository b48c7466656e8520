"""Redaction of passwords, tokens and signatures in URLs, and in texts about them.

Must be used for every message, log line, page or ``repr`` that contains a URL, and for the text of a library's error
that may quote one. Users write passwords unescaped, with ``/``, ``@``, ``?`` and ``#`` in them, so it is not always
clear where one ends; in doubt, less is shown.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from typing import TypeVar
from urllib.parse import quote, unquote, unquote_plus

Error = TypeVar("Error", bound=BaseException)

HIDDEN = "***"

# "c:" is a drive. No slash or a single one: a mistyped URL.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*:/{0,2})(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://\S+")
# Names of a query's parameters or a driver's options that may be secret.
_NAME = re.compile(r"key|secret|token|pass|pwd|cred|sas|sig|auth|cookie|connect(?!_?timeout)|user|dsn", re.IGNORECASE)
_MARKS = re.compile(r"[/@?#:&;=,]")
# Shorter secrets are matched as whole words only: "a" occurs in every text.
_SHORT = 3


def shown(url: str) -> str:
    """Return the part of a URL that may be shown: scheme, host and path. Omitted are the query, the fragment, and
    everything before an ``@``, which may be a token without a user. Text that is not a URL is returned unchanged."""
    match = _URL.fullmatch(url)
    if match is None:
        return url
    start, rest = match.groups()
    before, at, after = rest.rpartition("@")
    if not start.endswith("://"):
        return f"{start}{HIDDEN}" if at else url
    if re.search("[?#]", before):
        return f"{start}{HIDDEN}"  # the password contains such a character, or the query an "@"
    return start + re.split("[?#]", after, maxsplit=1)[0]


def redacted(text: str, *urls: str, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` without ``secrets`` and the secrets of ``urls``, wherever they occur, and of any URL in it."""
    for url in sorted(urls, key=len, reverse=True):
        text = text.replace(url, shown(url)).replace(repr(url)[1:-1], shown(url))
    found = {form for secret in (*secrets, *(s for url in urls for s in secrets_of(url))) for form in _forms(secret)}
    for secret in sorted(found, key=len, reverse=True):
        pattern = re.escape(secret)
        text = re.sub(pattern if len(secret) > _SHORT else rf"(?<!\w){pattern}(?!\w)", HIDDEN, text)
    return _IN_TEXT.sub(lambda found: shown(found[0]), text)


def shown_cause(error: Error, *urls: str, secrets: Iterable[str] = ()) -> Error | None:
    """Return the error, to be shown as the cause of another, unless its text or that of its causes must be redacted."""
    text = "".join(traceback.format_exception(error))
    return error if redacted(text, *urls, secrets=secrets) == text else None


def is_secret(name: str) -> bool:
    """Whether a parameter or option of this name may be secret."""
    return _NAME.search(name) is not None


def secrets_of(url: str) -> set[str]:
    """Return the parts of a URL that may be secrets, in every way in which it can be parsed."""
    match = _URL.fullmatch(url)
    rest = "" if match is None else match[2]
    found = set()
    for at in re.finditer("@", rest):
        user, colon, password = rest[: at.start()].partition(":")
        found.add(password if colon else user)
    for parameter in re.finditer(r"[?#&;]([^?#&;=]*)=", rest):
        if is_secret(parameter[1]):
            value = rest[parameter.end() :]
            found |= {value, *(value[: mark.start()] for mark in re.finditer("[?#&;]", value))}
    return {secret for secret in found if secret}


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms in which a library may write a secret, or a part of it taken for a host, a port or a path."""
    for form in {secret, unquote(secret), unquote_plus(secret)}:
        for each in (form, quote(form), quote(form, safe=""), repr(form)[1:-1], *re.split(_MARKS, form)):
            if re.search(r"\w", each):
                yield each
