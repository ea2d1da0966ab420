"""Pages in a browser: they show what they should, follow choices, load nothing, and take no text for a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="`make` installs selenium")

from browser import DESK, PHONE, Browser, missing
from inspections import HOSTILE, broken, hostile, inspection, sublayer

from mhckit.inspect.comparison import write_comparison
from mhckit.inspect.page import write_page
from mhckit.report import Choice, Page, Paragraph, Section

INSTALL = "apt-get install chromium chromium-driver"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    lacking = missing()
    if lacking and os.environ.get("MHCKIT_BROWSER") == "required":
        pytest.fail(f"MHCKIT_BROWSER=required, and there is no {' and no '.join(lacking)}: {INSTALL}")
    if lacking:
        pytest.skip(f"no {' and no '.join(lacking)} here: {INSTALL}")
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    few, one_broken = inspection(), inspection(sublayers=[sublayer(0), broken(1), sublayer(2)])
    return {
        "model": write_page(few, folder / "model.html"),
        "deep": write_page(inspection(layers=122), folder / "deep.html"),
        "broken": write_page(one_broken, folder / "broken.html"),
        "hostile": write_page(hostile(), folder / "hostile.html"),
        "two": write_comparison(few, inspection(layers=5, streams=2, name="runs/other"), folder / "two.html"),
        "hostile two": write_comparison(hostile(), hostile(), folder / "hostile two.html"),
    }


ALL = ("model", "deep", "broken", "hostile", "two", "hostile two")


@pytest.mark.parametrize("name", ALL)
def test_it_loads_itself_alone_and_has_nothing_to_complain_of(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name])
    assert browser.requests() in ([pages[name].as_uri()], [pages[name].as_uri(), "data:,"])
    assert browser.complaints() == []


@pytest.mark.parametrize("name", ALL)
def test_figures_have_a_size_and_a_description(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    figures = browser.ask(
        "[...document.querySelectorAll('figure svg[role=img]')].map(svg => [svg.getBoundingClientRect().width,"
        " svg.getBoundingClientRect().height, svg.getAttribute('aria-label')])"
    )
    assert len(figures) >= 9
    assert all(width > 100 and height > 50 and len(label) > 10 for width, height, label in figures)


def test_the_choice_of_a_sublayer_changes_what_is_shown(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    shown = "document.querySelector('.panels text').textContent"
    pressed = "document.querySelector('.overview [aria-pressed=true]').textContent"
    assert (browser.ask(shown), browser.ask(pressed)) == ("0.94", "1")
    browser.do("const s = document.querySelector('.which'); s.value = '2'; s.dispatchEvent(new Event('change'))")
    label = browser.ask("document.querySelector('.panels svg').getAttribute('aria-label')")
    assert "0.93 0.022 0.022 0.022" in label and browser.ask(pressed) == "3"
    browser.do("document.querySelector('.overview button:nth-child(2)').click()")
    assert browser.ask("document.querySelector('.which').selectedIndex") == 1
    browser.do("document.querySelector('.after').click()")
    assert browser.ask("document.querySelector('.which').selectedIndex") == 2
    assert browser.ask("document.querySelector('.after').disabled")


def test_a_finding_leads_to_its_sublayer(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    assert browser.ask("document.querySelector('.findings li').className") == "wrong"
    browser.do("document.querySelector('a[data-select]').click()")
    assert browser.ask("document.querySelector('.which').selectedIndex") == 2


def test_rows_are_written_to_and_columns_read_from(browser: Browser, tmp_path: Path) -> None:
    matrix = [[0.1, 0.9], [0.7, 0.3]]
    page = write_page(inspection(1, 2, sublayers=[sublayer(0, 2, mean=matrix)], findings=[]), tmp_path / "page.html")
    browser.open(page)
    tips = browser.ask("[...document.querySelector('.panels').querySelectorAll('[data-tip]')].map(e => e.dataset.tip)")
    assert "from stream 1, to stream 0: 0.9" in tips and "from stream 0, to stream 1: 0.7" in tips


def test_a_deep_model_has_all_its_matrices_at_once(browser: Browser, pages: dict[str, Path]) -> None:
    assert pages["deep"].stat().st_size < 1_000_000
    browser.open(pages["deep"])
    assert browser.ask("document.querySelectorAll('.overview svg').length") == 122
    assert browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd") < 5000


@pytest.mark.parametrize("name", ALL)
def test_a_phone_does_not_scroll_sideways(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], size=PHONE)
    assert browser.ask("innerWidth") == PHONE[0]
    assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]
    browser.do("document.querySelectorAll('details').forEach(details => { details.open = true })")
    assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]


def test_dark_pages_are_dark_and_so_are_their_figures(browser: Browser, pages: dict[str, Path]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(pages["model"], scheme=scheme)
        for what, element, kind in (
            ("page", "body", "backgroundColor"),
            ("card", "figure", "backgroundColor"),
            ("text", "body", "color"),
            ("axis", "svg .label", "fill"),
            ("line", "svg .line", "stroke"),
        ):
            color = browser.ask(f"getComputedStyle(document.querySelector({element!r})).{kind}")
            seen[scheme, what] = _brightness(color)
    for what in ("page", "card"):
        assert seen["light", what] > 0.9 and seen["dark", what] < 0.15
    for what in ("text", "axis", "line"):
        assert seen["light", "card"] - seen["light", what] > 0.4, what
        assert seen["dark", what] - seen["dark", "card"] > 0.3, what


def _brightness(color: str) -> float:
    red, green, blue = (float(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.mark.parametrize("name", ["hostile", "hostile two"])
def test_hostile_text_is_shown_and_runs_nothing(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    assert browser.ask("document.querySelectorAll('img, b, [onerror]').length") == 0
    assert browser.ask("document.querySelectorAll('script:not([type])').length") == 1
    assert HOSTILE in browser.ask("document.title")
    for place in ("h1", "dd", "option", ".said", "td", ".matrices script"):
        texts = browser.ask(f"[...document.querySelectorAll({place!r})].map(e => e.textContent)")
        wanted = "onerror=alert(1)\\u003e" if place.endswith("script") else HOSTILE
        assert any(wanted in text for text in texts), place
    tips = browser.ask("[...document.querySelectorAll('[data-tip]')].map(e => e.dataset.tip)")
    assert any(HOSTILE in tip for tip in tips)
    browser.do("document.querySelector('.overview button').focus()")
    assert HOSTILE in browser.ask("document.querySelector('.tip').textContent")
    assert browser.complaints() == []


def test_the_policy_stops_a_script_that_gets_in(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """Should escaping ever fail, the browser still runs only the one script it knows."""
    page = tmp_path / "broken in.html"
    bad = "<script>window.ran = 1</script><img src='data:,' onerror='window.ran = 2'><img src='http://127.0.0.1:9/x'>"
    page.write_text(pages["model"].read_text().replace("<main>", f"<main>{bad}"))
    browser.open(page)
    assert browser.ask("window.ran === undefined")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
    assert browser.ask("document.querySelectorAll('.overview svg').length") == 3


def test_what_is_not_finite_is_a_gap_and_said(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["broken"])
    assert browser.ask("document.querySelectorAll('.cross').length") >= 3
    said = browser.ask("[...document.querySelectorAll('figure .remark')].map(e => e.textContent).join(' ')")
    assert "not drawn" in said and "NaN" in said and "infinite" in said and "shares are not finite" in said
    assert browser.ask("document.querySelectorAll('.overview button:nth-child(2) .none').length") == 16
    assert not browser.ask("[...document.querySelectorAll('svg *')].some(e => /NaN|inf/i.test(e.getAttribute('d')))")


def test_a_choice_shows_one_of_its_parts(browser: Browser, tmp_path: Path) -> None:
    choice = Choice("which", [("one", Paragraph("first")), ("two", Paragraph("second"))])
    browser.open(Page("choices", [Section("section", [choice])]).write(tmp_path / "page.html"), size=DESK)
    text = "document.querySelector('main').innerText"
    assert "first" in browser.ask(text) and "second" not in browser.ask(text)
    browser.do("const s = document.querySelector('select'); s.selectedIndex = 1; s.dispatchEvent(new Event('change'))")
    assert "first" not in browser.ask(text) and "second" in browser.ask(text)
    assert browser.complaints() == []
