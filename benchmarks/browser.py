"""Open a page in headless Chromium and take a screenshot; for finetune.py and the tests of the report."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TALLEST = 12_000
"""Window height of a screenshot in pixels; the empty rest is cropped."""


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """Return standard output and the messages of the page's console."""
    browser = find_browser()
    if browser is None:
        raise ValueError(f"no browser found: install one of {', '.join(NAMES)}")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    # Works in a container: no display server, no browser sandbox, no network.
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--hide-scrollbars", *flags]
    done = subprocess.run([*command, page.absolute().as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def picture(page: Path, path: Path, *, width: int = 1120, without: tuple[str, ...] = ()) -> tuple[int, int]:
    """Write a screenshot of a whole page in light colors to a PNG and return its width and height.

    Sections whose heading id is in `without` are left out.
    """
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
    # The last row is background unless the page is taller than the window.
    inked = np.flatnonzero(np.abs(pixels - pixels[-1, 0]).max(axis=(1, 2)) > 0.02)
    if inked.size == 0 or inked[-1] == len(pixels) - 1:
        what = "empty" if inked.size == 0 else f"taller than {TALLEST:,} pixels"
        raise ValueError(f"cannot take a screenshot of {page}: it is {what}")
    kept = pixels[: inked[-1] + 25]
    path.parent.mkdir(parents=True, exist_ok=True)
    image.imsave(path, kept)
    return kept.shape[1], kept.shape[0]
