"""Images that a conversation names by URL: read if the operator allows it, else refused."""

from __future__ import annotations

import base64
import binascii
import io
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs

from ..contract import ConfigError

#: Seconds that fetching an image may take.
FETCH_TIMEOUT = 10.0
#: Most bytes of an image's file.
MOST_BYTES = 64 << 20
#: What is decoded; Pillow knows more, some of it by running other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Most pixels of an image: a small file can hold very many.
MOST_PIXELS = 64 << 20


@attrs.frozen(kw_only=True)
class MediaPolicy:
    """Which images conversations may hold, and from where; ``data:`` URLs are always read."""

    image_token: str  #: what stands for an image in a prompt
    local_path: str | None = None  #: directory whose files ``file:`` URLs may name; None: none are read
    domains: tuple[str, ...] = ()  #: hosts that http and https URLs may name

    def read(self, url: str, where: str) -> Any:
        """The ``PIL.Image.Image`` of a URL.

        Raises:
            ConfigError: it may not be read, cannot be, or is no image.
        """
        parts = _split(url, where)
        if parts.scheme == "data":
            content = _inline(url, where)
        elif parts.scheme == "file":
            content = self._local(unquote(parts.path), parts.netloc, where)
        elif parts.scheme in ("http", "https"):
            content = self._fetched(url, parts.hostname, where)
        else:
            raise ConfigError(
                f"{where} must be a data: URL (data:image/png;base64,...), got one of scheme {parts.scheme!r}"
            )
        return _decoded(content, where)

    def _local(self, path: str, host: str, where: str) -> bytes:
        if self.local_path is None:
            raise ConfigError(
                f"{where} is a file: URL, and local files are not read: send a data: URL, or set "
                "allowed_local_media_path where the engine is started"
            )
        root = Path(self.local_path).resolve()
        file = Path(path).resolve()
        if host not in ("", "localhost") or not file.is_relative_to(root):
            raise ConfigError(f"{where} is not in the directory that allowed_local_media_path names")
        try:
            with file.open("rb") as stream:
                return _limited(stream.read(MOST_BYTES + 1), where)
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error

    def _fetched(self, url: str, host: str | None, where: str) -> bytes:
        if host not in self.domains:
            raise ConfigError(
                f"{where} names the host {host!r}, and nothing is fetched from there: send a data: URL, or "
                "name the host in allowed_media_domains where the engine is started"
            )
        try:
            deadline, content = time.monotonic() + FETCH_TIMEOUT, bytearray()
            with _OPENER.open(url, timeout=FETCH_TIMEOUT) as answer:
                while piece := answer.read1(1 << 20):
                    content += _limited(piece, where, so_far=len(content))
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it takes more than {FETCH_TIMEOUT:.0f} seconds")
            return bytes(content)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be fetched: {error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect may lead anywhere, so none is followed: it is an error as any other status."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _split(url: str, where: str) -> Any:
    try:
        return urlsplit(url if not url.startswith("data:") else "data:")
    except ValueError as error:
        raise ConfigError(f"{where} is no URL: {error}") from error


def _inline(url: str, where: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ConfigError(f"{where} must be data:image/...;base64,... as a data: URL")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"{where} is not base64: {error}") from error


def _limited(content: bytes, where: str, so_far: int = 0) -> bytes:
    if so_far + len(content) > MOST_BYTES:
        raise ConfigError(f"{where} has more than {MOST_BYTES >> 20} MiB: make it smaller")
    return content


def _decoded(content: bytes, where: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            f"{where} is an image, for which Pillow is not installed: pip install 'specdec-core[images]'"
        ) from None
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise ConfigError(
                f"{where} has {image.width} x {image.height} pixels, more than {MOST_PIXELS >> 20} million: "
                "make it smaller"
            )
        image.load()
    except ConfigError:
        raise
    except Exception as error:  # Pillow's decoders document no set of errors
        raise ConfigError(f"{where} is no image of {', '.join(FORMATS)} that can be read: {error}") from error
    return image
