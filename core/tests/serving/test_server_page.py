"""The page at ``/`` in headless Chromium: a prompt, its coloured answer, and the figures beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

#: Where screenshots are left, for people; None: nowhere.
SHOTS = os.environ.get("SPECDECODE_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page whose script raises nothing."""
    page = browser.new_page(viewport={"width": 1150, "height": 900})
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    page.close()
    assert not faults


def generate(page, prompt, **fields):
    page.fill("#prompt", prompt)
    for name, value in ({"tokens": "120"} | fields).items():
        page.fill(f"#{name}", value)
    page.click("#run")
    page.wait_for_function("!document.getElementById('run').disabled", timeout=60_000)


def shot(page, name):
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


def test_an_answer_with_its_sources(page, served, client):
    page.goto(served.url)
    page.wait_for_function("document.getElementById('about').textContent.includes('ngram')")
    page.select_option("#kind", "text")
    generate(page, "one two one two one two ")
    wanted = client.completions.create(
        model="tiny", prompt="one two one two one two ", max_tokens=120, temperature=0, seed=0
    )
    assert page.text_content("#answer") == wanted.choices[0].text
    assert page.locator("#answer .draft").count() > 0 and page.locator("#answer .target").count() > 0
    assert "the plain answer is the same" in page.text_content("#note")
    assert "times the plain rate" in page.text_content("#speedup")
    rates = [float(text) for text in page.locator("#speed b").all_text_contents()]
    assert len(rates) == 2 and min(rates) > 0 and max(rates) < 20_000  # no piece came in no time
    shares = [int(text.rstrip("%")) for text in page.locator("#positions b").all_text_contents()]
    assert len(shares) == 4 and shares == sorted(shares, reverse=True) and shares[0] > 0
    told = wanted.usage.speculation
    assert f"{told['accepted_tokens']} of {told['drafted_tokens']} drafts" in page.text_content("#lengths")
    assert "KV cache" in page.text_content("#memory") and "target's weights" in page.text_content("#memory")
    shot(page, "page")


def test_without_drafts_and_in_chat(page, served):
    page.goto(served.url)
    page.uncheck("#compare")
    generate(page, "hi hi hi", drafts="0")
    assert page.locator("#answer .draft").count() == 0 and page.locator("#answer .target").count() > 0
    assert page.text_content("#lengths") == "nothing was drafted"
    assert page.text_content("#speedup") == ""


def test_what_a_model_writes_is_no_markup(page, served, llm, monkeypatch):
    text, real = "<img src=x onerror=alert(1)>", llm.engine.add_request
    ids = llm.get_tokenizer()(text)["input_ids"]

    def force(output_ids, logits):
        logits[:] = -float("inf")
        logits[ids[len(output_ids) % len(ids)]] = 0.0
        return logits

    monkeypatch.setattr(
        llm.engine,
        "add_request",
        lambda name, prompt, params, **more: real(
            name, prompt, params.clone(logits_processors=[force]), **more
        ),
    )
    page.goto(served.url)
    generate(page, "hi", tokens=str(len(ids)))
    assert page.text_content("#answer") == text and page.locator("#answer img").count() == 0


def test_errors_and_keys(page, llm, serve):
    from specdecode.serve.settings import read_keys

    served = serve(llm, api_keys=read_keys(["a-key"], None))
    page.goto(served.url)
    page.wait_for_function("document.getElementById('about').textContent.includes('API key is wanted')")
    page.fill("#key", "a-key")
    page.dispatch_event("#key", "change")
    page.wait_for_function("document.getElementById('about').textContent.includes('ngram')")
    page.fill("#key", "another-key")
    generate(page, "hi")
    assert "API key is wanted" in page.text_content("#note")
    assert page.get_attribute("#note", "class") == "bad"
