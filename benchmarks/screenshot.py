"""A picture of a page in both themes, by a headless Chromium.

    python benchmarks/screenshot.py COMPARE_HTML OUT

Writes OUT_light.png and OUT_dark.png, 1,200 pixels wide, from the top of the page.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZE = (1200, 1900)
# The attribute that the page's own button sets.
THEMES = {theme: f'<html data-theme="{theme}" ' for theme in ("light", "dark")}


def picture(page: Path, png: Path, theme: str, size: tuple[int, int] = SIZE) -> None:
    """Open a page in a theme and save what is seen."""
    browser = which("chromium") or which("chromium-browser") or which("google-chrome")
    if browser is None:
        sys.exit("screenshot: there is no chromium on the PATH (Debian: apt-get install chromium).")
    with tempfile.TemporaryDirectory() as folder:
        themed = Path(folder) / "page.html"
        themed.write_text(page.read_text(encoding="utf-8").replace("<html ", THEMES[theme], 1), encoding="utf-8")
        window = f"--window-size={size[0]},{size[1]}"
        command = [browser, *FLAGS, f"--user-data-dir={folder}/profile", window]
        subprocess.run(
            [*command, f"--screenshot={png.resolve()}", themed.as_uri()], check=True, capture_output=True, timeout=120
        )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    page, out = map(Path, sys.argv[1:])
    for theme in THEMES:
        picture(page, out.with_name(f"{out.name}_{theme}.png"), theme)


if __name__ == "__main__":
    main()
