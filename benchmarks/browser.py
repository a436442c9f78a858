"""A page in headless Chromium: what the browser says of it, and a picture of it. For tests of the report and docs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TALLEST = 12_000
"""Pixels of the window that a page is photographed in; what it leaves empty is cut off."""


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """(standard output, messages of the page's console)."""
    browser = find_browser()
    if browser is None:
        raise ValueError(f"no browser: none of {', '.join(NAMES)} is on PATH")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    # Without a display server, a sandbox of its own or a network: as in a container.
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--hide-scrollbars", *flags]
    done = subprocess.run([*command, page.absolute().as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def picture(page: Path, path: Path, *, width: int = 1120, without: tuple[str, ...] = ()) -> tuple[int, int]:
    """Draws a page into a PNG, in light colours, as tall as it is; returns its width and height. Sections whose heading
    has one of the ids in `without` are left out."""
    import numpy as np
    from matplotlib import image

    text = page.read_text()
    for heading in without:
        text, found = re.subn(
            rf'<section aria-labelledby="{re.escape(heading)}">.*?</section>', "", text, count=1, flags=re.DOTALL
        )
        if not found:
            raise ValueError(f"{page} has no section {heading!r}")
    with tempfile.TemporaryDirectory() as folder:
        copy, shot = Path(folder, "page.html"), Path(folder, "page.png")
        copy.write_text(text)
        flags = (f"--screenshot={shot}", f"--window-size={width},{TALLEST}", "--blink-settings=preferredColorScheme=1")
        browse(copy, Path(folder, "profile"), *flags)
        pixels = image.imread(shot)
    # The last row is paper, unless the page is taller than the window.
    inked = np.flatnonzero(np.abs(pixels - pixels[-1, 0]).max(axis=(1, 2)) > 0.02)
    if inked.size == 0 or inked[-1] == len(pixels) - 1:
        what = "empty" if inked.size == 0 else f"taller than {TALLEST:,} pixels"
        raise ValueError(f"{page} is {what}, so there is no picture of it")
    kept = pixels[: inked[-1] + 25]
    path.parent.mkdir(parents=True, exist_ok=True)
    image.imsave(path, kept)
    return kept.shape[1], kept.shape[0]
