"""``specdecode serve`` as a process of its own, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

#: The command, whichever environment's ``specdecode`` is first on the path.
CODE = "from specdecode.cli import main; main()"

#: Lines of its log that are kept.
KEPT = 20_000


class ServerProcess:
    """A running server; as a context manager it is killed at the end, if it has not ended by then."""

    def __init__(self, model: str | Path, *options: str, patience: float = 300.0) -> None:
        """
        Args:
            options: of ``specdecode serve``, but for the port and the format of logs.
            patience: seconds until it listens.

        Raises:
            RuntimeError: it ended, or does not listen; says what it logged.
        """
        command = [sys.executable, "-c", CODE, "serve", str(model), "--port", "0", "--log-format", "json"]
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._url: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + patience
        while self._url is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                told = "\n".join(str(line["message"]).rstrip() for line in self.lines)
                raise RuntimeError(f"the server does not listen:\n{told}")
            time.sleep(0.02)
        self.url: str = self._url

    def _read(self) -> None:
        for line in self.process.stderr or ():
            entry = json.loads(line) if line.startswith("{") else {"message": line}
            self.lines.append(entry)
            message = str(entry["message"])
            if self._url is None and "running on http" in message:
                self._url = next(word for word in message.split() if word.startswith("http"))

    def end(self, number: int = signal.SIGTERM, patience: float = 60.0) -> int:
        """Send it a signal; its exit status. ``lines`` are complete then."""
        self.process.send_signal(number)
        status = self.process.wait(patience)
        self._reader.join(10)
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def resident_mib(self) -> float:
        """Its memory that is in RAM; Linux only."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
