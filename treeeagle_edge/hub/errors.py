"""Errors of the hub, the network or the disk as one sentence and a hint. Bytes that have come are kept."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from treeeagle_edge.errors import CannotRunError, InputError, TreeEagleError, reason_of
from treeeagle_edge.planning.known_models import KNOWN_MODELS, known_heads

_AGAIN = "what has come is kept: run the same command again to go on"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(repository: str, what: str, *, begun: bool = False) -> Iterator[None]:
    """Turn whatever the hub's client raises into our own errors. `what` is "model" or "head"; `begun`: bytes have come.

    Raises InputError for what the person can mend (a name, a licence, a token), CannotRunError for the network, the hub
    itself and the disk. Our own errors pass through.
    """
    try:
        yield
    except TreeEagleError:
        raise
    except Exception as error:  # the hub's client passes on errors of whichever HTTP library it uses
        raise hub_error(error, repository, what, begun=begun) from error


def hub_error(error: Exception, repository: str, what: str, *, begun: bool = False) -> TreeEagleError:
    """The error to show for one of the hub's client, of the HTTP library below it, or of the system."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return _gated(repository)
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return _unknown(repository, what)
    if isinstance(error, OfflineModeIsEnabled):
        return CannotRunError(
            f"{repository} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it",
            f"unset HF_HUB_OFFLINE, or give a folder or file that holds the {what}",
        )
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return _refused(error.response.status_code, repository)
    if isinstance(error, OSError) and error.errno in _FULL:
        return CannotRunError(
            f"{repository} cannot be stored: the disk of the hub's cache is full",
            f"free some space, or set HF_HOME to a folder on another disk; {_AGAIN}",
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return CannotRunError(
            f"{repository} cannot be stored: {reason_of(error)} ({error.filename})",
            "make the hub's cache writable, or set HF_HOME to another folder",
        )
    if begun:
        return CannotRunError(f"the connection broke while {repository} was being fetched", _AGAIN)
    return CannotRunError(
        f"{repository} is not on this machine, and the hub cannot be reached",
        f"check the network{_proxies()} and HF_ENDPOINT, or give a folder or file that holds the {what}",
    )


def _proxies() -> str:
    """The variables that send requests through a proxy, by name alone: its address may hold a password."""
    return "".join(f", {name}" for name in _PROXIES if os.environ.get(name))


def _gated(repository: str) -> InputError:
    from huggingface_hub import constants, get_token

    page = f"{constants.ENDPOINT}/{repository}"
    then = "with the account of your token, which must be allowed to read gated repositories"
    return InputError(
        f"{repository} is gated: its owner asks you to accept a licence first",
        f"accept it on {page} {then}" if get_token() else f"accept it on {page}, then {_LOG_IN}",
    )


def _unknown(repository: str, what: str) -> InputError:
    names = {name.lower(): name for name in (*KNOWN_MODELS, *known_heads())}
    close = difflib.get_close_matches(repository.lower(), names, n=1, cutoff=0.8)
    near = f"did you mean {names[close[0]]}? " if close and names[close[0]] != repository else ""
    return InputError(
        f"the hub has no {what} {repository}, or it is private",
        f"{near}check the spelling; for a private one {_LOG_IN}",
    )


def _refused(status: int, repository: str) -> TreeEagleError:
    if status == 401:
        return InputError(
            f"the hub does not accept your token, and does not give {repository} away without one",
            "log in again with `hf auth login`, or correct HF_TOKEN",
        )
    if status == 403:
        return InputError(
            f"your token may not read {repository} (403)",
            "accept its licence on its page, and allow the token to read it; or log in with `hf auth login`",
        )
    if status == 429:
        return CannotRunError(
            "the hub has had too many requests from here (429)",
            f"wait a few minutes, or {_LOG_IN}, which raises the limit; {_AGAIN}",
        )
    return CannotRunError(
        f"the hub answered {status} when asked for {repository}", f"try again in a while; {_AGAIN}"
    )
