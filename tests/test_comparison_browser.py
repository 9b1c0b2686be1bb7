"""The comparison page in a real browser, opened from disk."""

import json
from shutil import which

import pytest

from tests.comparisons import gpu, rehearsal
from toolkit.report.comparison.merge import merge
from toolkit.report.comparison.page import write_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

BROWSER, DRIVER = which("chromium"), which("chromedriver")
if not (BROWSER and DRIVER):
    pytest.skip("chromium and chromedriver are not installed (apt-get)", allow_module_level=True)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHASES = ("data", "forward", "backward", "communication", "optimizer", "unattributed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("gpu", "rehearsal", "both")}
    comparisons = {"gpu": gpu(), "rehearsal": rehearsal(), "both": merge([gpu(), rehearsal()])}
    return {name: write_page(comparisons[name], folder).as_uri() for name, folder in folders.items()}


def narrow(browser, width):
    """A window cannot be made narrower than some 500 pixels; a phone can be emulated."""
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefers(browser, theme):
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def requests(browser):
    """(document, what it asked for) of all requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [(one["documentURL"], one["request"]["url"]) for one in sent]


def values(browser, selector):
    """The full numbers behind elements."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => Number(e.dataset.value))"
    return browser.execute_script(script, selector)


def tab_to(browser, wanted):
    """Press the tabulator until `wanted` has the focus."""
    for _ in range(60):
        focused = browser.switch_to.active_element
        if focused == wanted:
            return focused
        focused.send_keys(Keys.TAB)
    raise AssertionError("the tabulator does not come there")


def column(browser, number):
    rows = browser.find_elements(By.CSS_SELECTOR, "table.sortable tbody tr")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[number].text for row in rows]


def brightness(browser, element, part):
    colour = element.value_of_css_property(part)
    red, green, blue = map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def test_it_asks_nobody_and_complains_about_nothing(browser, pages):
    for page in pages.values():
        browser.get(page)
        found = requests(browser)
        # The browser's own start page may still be busy: it too stays at home.
        assert [url for document, url in found if document == page] == [page]
        assert [url for _, url in found if url.startswith(("http:", "https:", "ws:", "wss:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_charts_and_table_have_the_numbers(browser, pages):
    comparison = gpu()
    ran = [config for config in comparison["configs"] if not config["failure"]]
    speeds = [config["throughput"]["samples_per_second"]["median"] for config in ran]
    peaks = [one["peak_reserved"] for config in ran for one in config["memory"]]
    browser.get(pages["gpu"])
    assert values(browser, "[aria-labelledby=throughput] rect") == speeds
    assert values(browser, "[aria-labelledby=memory-of-each-device] .value[data-value]") == peaks
    assert values(browser, "[aria-labelledby=where-the-time-of-a-step-goes] .bars rect") == [
        config["phases"][phase] for config in ran for phase in PHASES
    ]
    assert values(browser, ".sortable tbody td:nth-child(4)")[:-1] == speeds
    # A bar's length on the screen is in proportion.
    bars = browser.find_elements(By.CSS_SELECTOR, "[aria-labelledby=throughput] rect")
    widths = [browser.execute_script("return arguments[0].getBoundingClientRect().width", bar) for bar in bars]
    assert [width / widths[2] for width in widths] == pytest.approx([speed / speeds[2] for speed in speeds], rel=1e-3)
    # What the charts say in words is what the table says.
    shown = [e.text for e in browser.find_elements(By.CSS_SELECTOR, "[aria-labelledby=throughput] .value")]
    assert [text.replace(" (", "\n").rstrip(")") for text in shown] == column(browser, 3)[:-1]
    body = browser.find_element(By.TAG_NAME, "body").text
    assert "failed: out of memory in step 2: 140 GB of 139 GB" in body
    assert "cuda:0 holds 1.42 x the mean, and runs out first" in body  # 2 / (1 + 0.41)
    assert "multi_gpu (DDP) is the fastest" in body


def test_a_rehearsal_says_so(browser, pages):
    label = "Rehearsal on CPU: parity and mechanics are real, speed and memory are of the rehearsal"
    for name, shown in (("gpu", False), ("rehearsal", True), ("both", True)):
        browser.get(pages[name])
        assert (label in browser.find_element(By.TAG_NAME, "main").text) is shown
    assert "The runs differ in:" in browser.find_element(By.CLASS_NAME, "differences").text


def test_the_keyboard_is_enough(browser, pages):
    browser.get(pages["gpu"])
    toggle = browser.find_element(By.ID, "theme")
    before = toggle.get_attribute("aria-pressed")
    tab_to(browser, toggle).send_keys(Keys.ENTER)
    assert toggle.get_attribute("aria-pressed") != before
    heading = browser.find_elements(By.CSS_SELECTOR, ".sortable thead th")[3]
    names = column(browser, 0)
    button = tab_to(browser, heading.find_element(By.TAG_NAME, "button"))
    assert button.value_of_css_property("outline-style") == "solid"  # the focus is seen
    button.send_keys(Keys.ENTER)
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(browser, 3)[0].startswith("1,530")
    assert column(browser, 0)[-1] == names[-1]  # a failed config has no speed, and stays last
    button.send_keys(Keys.SPACE)
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(browser, 3)[0].startswith("640")
    assert column(browser, 0)[-1] == names[-1]


def test_nothing_sticks_out_of_a_narrow_screen(browser, pages):
    narrow(browser, 360)
    try:
        for page in pages.values():
            browser.get(page)
            inside, whole = browser.execute_script(
                "document.querySelectorAll('details').forEach(one => one.open = true);"
                "return [document.documentElement.clientWidth, document.documentElement.scrollWidth]"
            )
            assert (inside, whole) == (360, 360)
            out = browser.execute_script(
                "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll')"
                " && e.getBoundingClientRect().right > 360.5).map(e => e.outerHTML.slice(0, 80))"
            )
            assert out == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_readable(browser, pages, theme):
    prefers(browser, theme)
    browser.get(pages["rehearsal"])
    body = browser.find_element(By.TAG_NAME, "body")
    assert (brightness(browser, body, "background-color") < 0.1) is (theme == "dark")
    assert browser.find_element(By.ID, "theme").get_attribute("aria-pressed") == str(theme == "dark").lower()
    pairs = [(body, body)] + [
        (browser.find_element(By.CSS_SELECTOR, inner), browser.find_element(By.CSS_SELECTOR, outer) if outer else body)
        for inner, outer in (
            (".notice", ".notice"),
            ("header p", None),
            (".failed", None),
            ("figcaption", None),
            (".cards span", ".cards li"),
            ("thead button", "thead th"),
        )
    ]
    for inner, outer in pairs:
        one, other = brightness(browser, inner, "color"), brightness(browser, outer, "background-color")
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5  # WCAG 2.1, AA
    for bar in browser.find_elements(By.CSS_SELECTOR, ".swatch rect"):
        one, other = brightness(browser, bar, "fill"), brightness(browser, body, "background-color")
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 3


def test_it_works_without_scripts(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(pages["gpu"])
        assert not browser.find_element(By.ID, "theme").is_displayed()
        assert browser.find_elements(By.CSS_SELECTOR, ".sortable button") == []
        assert "multi_gpu (DDP) is the fastest" in browser.find_element(By.TAG_NAME, "body").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
