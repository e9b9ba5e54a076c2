"""The page in a real browser: asked, stopped and steered by keyboard, and what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "selenium"):
    pytest.importorskip(needed, reason=f"this test of the page needs {needed}")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support.browser import browser, missing
from support.serving import running, settings, until
from support.tiny_engine import chat_ids, text_alone

from eagle_fsd import Fuzzy

if reason := missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver: Any) -> Iterator[Any]:
    with running(settings()) as (url, _):
        driver.get(url)
        until(lambda: "tree" in driver.find_element(By.ID, "model").text)
        yield driver
        wrong = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not wrong


def set_number(page: Any, name: str, value: str) -> None:
    page.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def wait(page: Any) -> None:
    """Wait until no answer is being made."""
    until(lambda: page.find_element(By.ID, "send").is_enabled())


def answers(page: Any) -> list[str]:
    return [
        box.get_property("textContent") for box in page.find_elements(By.CSS_SELECTOR, ".assistant .text")
    ]


def test_a_question_is_answered_and_coloured(page: Any) -> None:
    set_number(page, "limit", "30")
    page.find_element(By.ID, "message").send_keys("Hi", Keys.ENTER)
    wait(page)
    assert answers(page) == [text_alone(chat_ids(), max_new_tokens=30)]
    kinds = {span.get_attribute("class") for span in page.find_elements(By.CSS_SELECTOR, ".text span")}
    assert kinds == {"drafted", "target"}
    figures = page.find_element(By.CSS_SELECTOR, ".figures").text
    assert re.fullmatch(r"tau \d\.\d\d, [\d.]+ tokens/s, 30 tokens: \d+ drafted, 0 fuzzy", figures)
    colours = {
        kind: page.find_element(By.CSS_SELECTOR, f".text .{kind}").value_of_css_property("color")
        for kind in kinds
    }
    assert len(set(colours.values())) == 2


def test_exact_and_fuzzy_stand_side_by_side_by_keyboard_alone(page: Any) -> None:
    """Tab leads from the slider to the message; arrows move the slider, and it says what it means."""
    set_number(page, "limit", "30")
    slider = page.find_element(By.ID, "threshold")
    page.execute_script("arguments[0].focus()", slider)
    slider.send_keys(Keys.END)
    assert slider.get_attribute("aria-valuetext") == "0.6, larger is faster"
    keys = [Keys.TAB, Keys.TAB, Keys.TAB, Keys.SPACE, Keys.TAB, Keys.TAB]
    for key in keys:
        page.switch_to.active_element.send_keys(key)
    assert page.switch_to.active_element.get_attribute("id") == "message"
    page.switch_to.active_element.send_keys("Hi", Keys.ENTER)
    wait(page)
    rule = Fuzzy(0.6, "js")
    assert answers(page) == [
        text_alone(chat_ids(), max_new_tokens=30),
        text_alone(chat_ids(), max_new_tokens=30, rule=rule),
    ]
    titles = [title.text for title in page.find_elements(By.CSS_SELECTOR, ".assistant h2")]
    assert [title.lower() for title in titles] == ["exact", "threshold 0.6"]
    left, right = (box.rect for box in page.find_elements(By.CSS_SELECTOR, ".assistant"))
    assert left["y"] == right["y"] and left["x"] < right["x"]
    assert page.find_elements(By.CSS_SELECTOR, ".text .fuzzy")


def test_escape_stops_an_answer_and_the_chat_goes_on(page: Any) -> None:
    set_number(page, "limit", "190")
    page.find_element(By.ID, "message").send_keys("Hi", Keys.ENTER)
    until(lambda: any(answers(page)))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page)
    whole = text_alone(chat_ids(), max_new_tokens=190)
    (begun,) = answers(page)
    assert whole.startswith(begun) and len(begun) < len(whole)
    assert page.find_element(By.CSS_SELECTOR, ".figures").text.endswith(", stopped")
    page.find_element(By.ID, "reset").click()
    assert answers(page) == []


def test_nothing_is_cut_off_on_a_narrow_screen(page: Any) -> None:
    page.set_window_size(360, 700)
    wide = page.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    page.set_window_size(1000, 900)
    assert wide <= 0


def test_an_error_is_said_in_words(page: Any) -> None:
    set_number(page, "temperature", "-1")
    page.find_element(By.ID, "message").send_keys("Hi", Keys.ENTER)
    until(lambda: page.find_element(By.ID, "status").text)
    assert "temperature is -1" in page.find_element(By.ID, "status").text
    assert page.find_element(By.ID, "message").get_property("value") == "Hi"
    page.get_log("browser")  # the refused request is among them
